"""`vf-eval` as a command against a server, with both of its clients: chats, and token ids."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.rl.server.served import MODEL_NAME
from tests.zorro_inference.models import teacher_forced

ENVIRONMENTS = Path(__file__).parent / "environments"
TASKS, ROLLOUTS = 2, 2
TEMPERATURE = 0.9


def vf_eval(server, output: Path, *options: str) -> list[dict]:
    """Run the command; the traces that it wrote."""
    command = [
        *(Path(sys.executable).with_name("vf-eval"), "tiny_sums", "-m", MODEL_NAME, "-n", str(TASKS)),
        *("--num-rollouts", str(ROLLOUTS), "--no-push", "--no-rich", "-o", output, "--run.name", "run"),
        *("--client.base-url", server.base_url, "--env.agent.runtime.type", "subprocess"),
        *("--sampling.max-tokens", "8", "--sampling.temperature", str(TEMPERATURE), *options),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ENVIRONMENTS), "HOME": str(output), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=output, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    episodes = [json.loads(line) for line in (output / "run" / "traces.jsonl").read_text("utf-8").splitlines()]
    return [trace for episode in episodes for trace in episode.get("traces", [episode])]


def expect_two_turns_each(traces: list[dict]) -> None:
    assert len(traces) == TASKS * ROLLOUTS
    for trace in traces:
        assert (trace["ok"], trace["errors"]) == (True, [])
        assert [call["finish_reason"] in ("stop", "length") for call in trace["calls"]] == [True, True]
        assert all(1 <= call["usage"]["completion_tokens"] <= 8 for call in trace["calls"])
        assert trace["rewards"]["is_right"]["score"] in (0.0, 1.0)


def row_of(nodes: list[dict], place: int) -> list[int]:
    """Token ids from the root down to a node."""
    parent = nodes[place].get("parent")
    return ([] if parent is None else row_of(nodes, parent)) + nodes[place]["token_ids"]


def test_vf_eval_runs_chats(server, tmp_path):
    expect_two_turns_each(vf_eval(server, tmp_path, "--client.type", "eval"))


def test_vf_eval_trains_on_token_ids_whose_logprobs_are_the_models_own(server, chat_model_folder, tmp_path):
    options = ("--client.type", "train", "--client.renderer-model-name", str(chat_model_folder))
    traces = vf_eval(server, tmp_path, *options)
    expect_two_turns_each(traces)
    for nodes in (trace["nodes"] for trace in traces):
        sampled = [place for place, node in enumerate(nodes) if node["sampled"]]
        assert len(sampled) == 2
        for place in sampled:
            row, num_new = row_of(nodes, place), sum(nodes[place]["mask"])
            expected = teacher_forced(server.sampler.model, row[:-num_new], row[-num_new:], TEMPERATURE)
            assert np.abs(np.array(nodes[place]["logprobs"]) - expected).max() < 1e-3
