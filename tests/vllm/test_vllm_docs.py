"""What the vLLM guide and its benchmark show runs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

ROOT = Path(__file__).parents[2]


def run(command, folder):
    environment = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_snippet_of_the_guide_runs(tmp_path):
    snippets = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8"), re.S)
    assert len(snippets) == 1
    shown = run([sys.executable, "-c", snippets[0]], tmp_path)
    assert "mechanism='vllm'" in shown


def test_the_benchmark_compares_equal_results(tmp_path):
    script = ROOT / "benchmarks" / "bench_vllm_fca.py"
    shown = run([sys.executable, script, "--shared-len", "256", "--num-requests", "3", "--repeats", "1"], tmp_path)
    record = json.loads(shown.splitlines()[-1])
    assert record["max_difference"] < 1e-5
