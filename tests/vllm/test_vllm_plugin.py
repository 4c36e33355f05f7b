"""How forest cascade attention gets into a vLLM that knows nothing of this package."""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from arctic_platform.rl.engines.models import tiny_model

SERVE = """
import json, os, sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=256, block_size=32,
          kv_cache_memory_bytes=16 << 20)
params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
outputs = llm.generate([{"prompt_token_ids": list(range(9, 90))}] * 4, params, use_tqdm=False)
def look(worker):
    group = worker.model_runner.attn_groups[0][0]
    steps = getattr(group.metadata_builders[0], "counters", None)
    return group.backend.__name__, steps.steps if steps else 0
print("FOUND", json.dumps([llm.collective_rpc(look)[0], [list(out.outputs[0].token_ids) for out in outputs]]))
"""


def serve(folder, **environment):
    given = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        **environment,
    }
    command = [sys.executable, "-c", SERVE, str(folder)]
    return subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True, check=False)


def found_by(finished):
    assert finished.returncode == 0, finished.stderr[-2000:]
    return json.loads(finished.stdout.split("FOUND", 1)[1])


def test_the_entry_point_is_installed():
    found = {entry.name: entry.value for entry in entry_points(group="vllm.general_plugins")}
    assert found["arctic_rl_fca"] == "arctic_platform.rl.zorro_inference.vllm_plugin:register"


def test_the_environment_switches_it_on_and_off_is_the_default(tmp_path):
    tiny_model(0).save_pretrained(tmp_path)
    (off, _), plain = found_by(serve(tmp_path))
    (on, steps), forest = found_by(serve(tmp_path, ARCTIC_RL_FCA="1", ARCTIC_RL_FCA_CALL_COST="1"))
    assert (off, on) == ("CPUAttentionBackend", "ForestCPUBackend")
    assert steps > 0
    assert forest == plain


def test_a_switch_that_is_neither_on_nor_off_stops_vllm(tmp_path):
    tiny_model(0).save_pretrained(tmp_path)
    finished = serve(tmp_path, ARCTIC_RL_FCA="yes")
    assert finished.returncode != 0
    assert "ARCTIC_RL_FCA='yes' is neither 1 (on) nor 0 (off)" in finished.stderr
