"""Ranks that torchrun or Ray start, and starts that go wrong: bounded, told, nothing left behind."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from arctic_platform.errors import ConfigError, WorkerLostError
from arctic_platform.rl.engines.torch_train import TorchTrainEngine
from arctic_platform.rl.workers.engine_calls import build
from arctic_platform.rl.workers.group import RankGroup
from arctic_platform.rl.workers.job import TOKEN_VARIABLE, Job
from arctic_platform.rl.workers.launch import LocalLauncher, LocalProcess, num_cores
from arctic_platform.rl.workers.sampler import SampleWorker
from tests.rl.engines.builders import config, grouped_batch
from tests.rl.workers.processes import all_end, is_running

ROOT = Path(__file__).parents[3]
TOKEN = "a-token-of-these-tests-0123456789"


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return f"127.0.0.1:{sock.getsockname()[1]}"


def torchrun(address: str, num_ranks: int, folder: Path) -> subprocess.Popen[bytes]:
    """Ranks as a user starts them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return subprocess.Popen(
        [*command, "-m", "arctic_platform.rl.workers.main", "--join", address, "--wait-seconds", "60"],
        env={**os.environ, TOKEN_VARIABLE: TOKEN, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=(folder / "torchrun.txt").open("wb"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def test_ranks_that_torchrun_starts_train_and_end_with_the_job(monkeypatch, tmp_path):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    address = free_address()
    runner = torchrun(address, 2, tmp_path)
    try:
        group = RankGroup(config(ranks={"num_ranks": 2, "launch": "torchrun", "listen": address, "num_threads": 1}))
        alone = TorchTrainEngine(config())
        for engine in (group, alone):
            engine.fwd_bwd(grouped_batch(0))
            engine.step()
        assert group.weight_norm() == pytest.approx(alone.weight_norm(), rel=1e-6)
        pids = group.pids
        group.close()
        assert all_end(pids)
        assert runner.wait(30) == 0, (tmp_path / "torchrun.txt").read_text()
    finally:
        if runner.poll() is None:
            os.killpg(runner.pid, signal.SIGKILL)
        runner.wait(10)


def test_ranks_as_actors_of_a_ray_cluster_train_and_end_with_the_job(ray_cluster):
    group = RankGroup(config(ranks={"num_ranks": 2, "launch": "ray", "num_threads": 1}))
    group.fwd_bwd(grouped_batch(0))
    assert group.step().metrics["step"] == 1
    pids = group.pids
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerLostError, match="rank 1"):
        group.weight_norm()
    assert all_end(pids)
    group.close()


def test_more_ranks_than_the_ray_cluster_has_room_for_are_refused(ray_cluster):
    with pytest.raises(ConfigError, match="whole Ray cluster has CPU 2"):
        RankGroup(config(ranks={"num_ranks": 64, "launch": "ray"}))


def test_ranks_that_torchrun_did_not_start_are_named_with_the_command_that_starts_them(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    address = free_address()
    ranks = {"num_ranks": 2, "launch": "torchrun", "listen": address, "start_seconds": 0.5}
    heard: list[str] = []
    with pytest.raises(WorkerLostError, match=rf"rank 0, rank 1 of 2 .*{address} within 0.5 s.*torchrun --nproc"):
        RankGroup(config(ranks=ranks), on_wait=heard.append)
    command = f"torchrun --nproc-per-node 2 -m arctic_platform.rl.workers.main --join {address}"
    assert set(heard) == {f"rank 0, rank 1 of 2 to join; start them: {command}"}


def test_an_address_that_is_taken_and_a_token_that_is_missing_are_settings_to_correct(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="choose another port"):
            RankGroup(config(ranks={"num_ranks": 2, "launch": "torchrun", "listen": address}))
    for token in ("", "short"):
        monkeypatch.setenv(TOKEN_VARIABLE, token)
        with pytest.raises(ConfigError, match=TOKEN_VARIABLE):
            RankGroup(config(ranks={"num_ranks": 2, "launch": "torchrun", "listen": address}))


def test_a_rank_without_its_environment_says_what_is_missing():
    command = [sys.executable, "-m", "arctic_platform.rl.workers.main", "--join", free_address()]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    for given, said in (
        ({}, f"set {TOKEN_VARIABLE}"),
        ({TOKEN_VARIABLE: TOKEN}, "torchrun"),
        ({TOKEN_VARIABLE: TOKEN, "RANK": "0"}, "nobody listens"),
    ):
        more = ["--wait-seconds", "0.2"]
        done = subprocess.run([*command, *more], env=environment | given, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert said in done.stderr


class _Broken(LocalLauncher):
    """Starts something else than a rank."""

    code = ""

    def _start(self, name, device, address, token):
        return LocalProcess([sys.executable, "-c", self.code], dict(os.environ))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; sys.exit('a library is missing')", "died while starting: exit code 1; .*a library is missing"),
        ("import os; os.kill(os.getpid(), 11)", "died while starting: killed by SIGSEGV"),
        ("import time; time.sleep(600)", "did not join .* within 1 s"),
    ],
)
def test_a_process_that_dies_or_hangs_before_it_joins_is_told_with_its_last_lines(monkeypatch, code, said):
    monkeypatch.setattr(
        "arctic_platform.rl.workers.group.launcher_of", lambda config: _Broken(config, is_sampler=False)
    )
    monkeypatch.setattr(_Broken, "code", code)
    with pytest.raises(WorkerLostError, match=said):
        RankGroup(config(ranks={"num_ranks": 2, "start_seconds": 1.0}))


def test_an_engine_that_is_not_built_in_time_is_told():
    heard: list[str] = []
    with pytest.raises(WorkerLostError, match=r"had no engine after 0.7 s; raise ranks.start_seconds"):
        SampleWorker(config(colocate=False, ranks={"start_seconds": 0.7}), on_wait=heard.append)
    assert heard[0] == "sampler to start"


def test_the_processes_of_a_killed_server_end(tmp_path):
    script = tmp_path / "server.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys, threading, time
            from tests.rl.workers.crews import light_crew

            made = []
            thread = threading.Thread(target=lambda: made.append(light_crew(1)))
            thread.start()
            thread.join()
            time.sleep(0.2)  # the thread that asked for the process is gone, and the process is not
            made[0].call("count", [None])
            print(made[0].pids[0], flush=True)
            sys.stdin.read()
            """
        )
    )
    server = subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert server.stdout is not None
    pid = int(server.stdout.readline())
    os.kill(pid, signal.SIGSTOP)  # so that it cannot end by itself
    assert is_running(pid)
    assert os.getpgid(pid) != os.getpgid(server.pid), "Ctrl-C in a terminal reaches the server alone"
    server.kill()
    server.wait(10)
    assert all_end([pid])


def test_cores_are_shared_out_evenly_unless_a_number_is_given():
    for num_ranks, colocate in ((1, False), (2, True), (2, False)):
        launcher = LocalLauncher(config(ranks={"num_ranks": num_ranks}, colocate=colocate), is_sampler=False)
        assert launcher.num_threads == max(num_cores() // (num_ranks + (not colocate)), 1)
    given = config(colocate=False, ranks={"num_threads": 7})
    assert LocalLauncher(given, is_sampler=True).num_threads == 7


def test_a_process_computes_with_the_threads_that_it_was_given():
    before = torch.get_num_threads()
    job = Job(role="sample", rank=0, size=1, config=config(colocate=False), num_threads=before + 2)
    try:
        build(job, "127.0.0.1").close()
        assert torch.get_num_threads() == before + 2
    finally:
        torch.set_num_threads(before)
