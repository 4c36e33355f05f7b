"""The documented commands, run by path from another folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, *arguments: str, cwd: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "ZORRO_DEMO_MODEL")}
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *arguments],
        cwd=cwd,
        env=environment | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_performance_script_prints_forward_backward_overall_and_memory(tmp_path):
    shape = ["--prompt-len", "16", "--response-len", "4", "--num-rollouts", "2", "--repeats", "1"]
    lines = run("arctic_platform/rl/zorro_train/test_perf.py", *shape, cwd=tmp_path).splitlines()
    assert [line.split(":")[0] for line in lines[-4:]] == ["forward", "backward", "overall", "memory"]
    assert all(line.rstrip().endswith("x") for line in lines[-4:])


@pytest.mark.slow
def test_demo_asks_nothing_and_finds_the_results_equal(tmp_path):
    out = run("arctic_platform/rl/zorro_train/demo.py", cwd=tmp_path)
    assert "the results agree" in out
    for word in ("correctness:", "forward:", "backward:", "overall:", "memory:"):
        assert word in out


@pytest.mark.slow
def test_training_benchmark_ends_with_one_json_object(tmp_path):
    shape = ["--prompt-len", "32", "--response-len", "8", "--num-rollouts", "4", "--num-layers", "1", "--repeats", "1"]
    out = run("benchmarks/bench_train.py", *shape, "--out", "result.json", cwd=tmp_path)
    record = json.loads(out.splitlines()[-1])
    assert record == json.loads((tmp_path / "result.json").read_text())
    assert record["time_ratio"] > 0 and record["memory_ratio"] > 0
    assert record["settings"]["prompt_len"] == 32 and record["versions"].keys() == {"python", "torch", "transformers"}
