"""Examples do what they say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="it finds its processes in Linux's /proc")
def test_a_run_that_is_killed_twice_ends_with_the_losses_of_an_undisturbed_one() -> None:
    command = [sys.executable, str(ROOT / "examples" / "survive_faults.py")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--- kill -9 of rank 1, in fwd_bwd\n" in done.stdout
    assert "step 3 was lost: rank 1 (pid " in done.stdout
    assert "--- kill -9 of sampler, in generate\n" in done.stdout
    assert "step 5 was lost: sampler (pid " in done.stdout
    assert done.stdout.splitlines()[-1] == "losses, rewards and gradient norms are equal, bit for bit"
