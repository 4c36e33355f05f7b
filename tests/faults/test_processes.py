"""What happens to processes: a server killed, stopped and drained, a client killed, disks that refuse."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from arctic_platform.errors import (
    AccessError,
    ArcticError,
    CallCancelledError,
    CheckpointError,
    InputError,
    TransportError,
)
from arctic_platform.rl import ArcticRLClientConfig, create_arctic_rl_client
from arctic_platform.rl.client import BlockingArcticRLClient
from arctic_platform.rl.engines.checkpoints import check_content, read_state, step_folders
from tests.faults.record import Witness, fault
from tests.faults.servers import ServerProcess, serving
from tests.rl.engines import builders
from tests.rl.engines.builders import grouped_batch

ROOT = Path(__file__).parents[2]
TIME_OF_DAY = re.compile(r"\d\d:\d\d:\d\d,\d+")
LONG = {"n": 16, "max_tokens": 1500, "ignore_eos": True}
SHORT = {"n": 2, "max_tokens": 100, "ignore_eos": True}
CANNOT_WRITE = "CheckpointError: cannot write <folder>: <reason>; free space or choose another folder"
SERVER_GONE = "TransportError: <call>: no answer from http://<host> (<reason>); is the server running there?"


def config_of(server: ServerProcess, **settings: Any) -> ArcticRLClientConfig:
    return builders.config(transport="http", server_url=server.url, **{"retry_timeout": 1.0} | settings)


def connect(server: ServerProcess, **settings: Any) -> BlockingArcticRLClient:
    return create_arctic_rl_client(config_of(server, **settings), blocking_calls=True)


def train(client: BlockingArcticRLClient, seed: int) -> float:
    """One update; the norm of the weights tells every bit of it."""
    client.fwd_bwd(grouped_batch(seed))
    client.step()
    return client.weight_norm()


@contextlib.contextmanager
def in_thread(work: Any) -> Any:
    """Run it beside the test; yields where its outcome (a value or an error) will stand."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except ArcticError as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield outcome
    thread.join(240)
    assert outcome


def await_running(server: ServerProcess) -> None:
    """Until a call runs there."""
    deadline = time.monotonic() + 60
    while not any(job["running"] for job in httpx.get(f"{server.url}/status").json()["jobs"]):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@fault("the server is killed between two calls", saw=SERVER_GONE, lost="what came after the last checkpoint")
def test_a_server_killed_between_calls_goes_on_from_its_checkpoint(tmp_path: Path, witness: Witness) -> None:
    with serving(tmp_path / "one") as server:
        client = connect(server, checkpoint_path=str(tmp_path / "checkpoints"))
        train(client, 0)
        client.save_checkpoint()
        expected = train(client, 1)
        server.send(signal.SIGKILL)
        server.wait()
        with witness.sees(TransportError):
            client.step()
    with serving(tmp_path / "two") as again:
        second = connect(again, checkpoint_path=str(tmp_path / "checkpoints"))
        assert second.load_checkpoint().step == 1
        assert train(second, 1) == expected


@fault("the server is killed while it runs a call", saw=SERVER_GONE, lost="what came after the last checkpoint")
def test_a_server_killed_in_a_call_is_said_within_the_retry_time(tmp_path: Path, witness: Witness) -> None:
    with serving(tmp_path) as server:
        client = connect(server)

        def kill() -> None:
            await_running(server)
            server.send(signal.SIGKILL)

        with in_thread(lambda: kill() or True), witness.sees(TransportError):
            client.generate([[1, 2, 3]], LONG)


@fault(
    "the server is killed while it writes a checkpoint", saw=SERVER_GONE, lost="the checkpoint that was being written"
)
def test_a_checkpoint_is_whole_or_absent_whenever_the_server_is_killed(tmp_path: Path, witness: Witness) -> None:
    folder = tmp_path / "checkpoints"
    with serving(tmp_path / "server") as server:
        client = connect(server, checkpoint_path=str(folder))

        def kill() -> None:
            while not list(folder.glob(".step-000003*")):
                time.sleep(0.0005)
            server.send(signal.SIGKILL)

        with in_thread(lambda: kill() or True), witness.sees(TransportError):
            for seed in range(100):
                train(client, seed)
                client.save_checkpoint()
    found = step_folders(folder)
    assert [read_state(one).step for one in found] in ([1, 2], [1, 2, 3])


@fault("the server freezes and comes back", saw="the call's answer, late")
def test_a_server_that_freezes_for_a_while_goes_on(tmp_path: Path, witness: Witness) -> None:
    with serving(tmp_path) as server:
        client = connect(server, retry_timeout=30.0)
        client.fwd_bwd(grouped_batch())
        server.send(signal.SIGSTOP)
        threading.Timer(1.0, server.send, [signal.SIGCONT]).start()
        with witness.sees():
            assert client.step().metrics["step"] == 1.0


@fault("the client is killed in the middle of a call", saw="the next client: the job, with that call done once")
def test_a_killed_client_leaves_a_server_that_the_next_one_can_use(tmp_path: Path, witness: Witness) -> None:
    with serving(tmp_path) as server:
        client = connect(server)
        client.fwd_bwd(grouped_batch())
        joined = client.reconnect_config()
        code = (
            "import asyncio, sys\nfrom arctic_platform.rl import ArcticRLClientConfig, create_arctic_rl_client\n"
            "async def main():\n"
            "    client = create_arctic_rl_client(ArcticRLClientConfig.model_validate_json(sys.stdin.read()))\n"
            f"    await asyncio.gather(client.step(), client.generate([[1, 2, 3]], {LONG}))\n"
            "asyncio.run(main())\n"
        )
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        victim = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, env=environment, text=True)
        assert victim.stdin is not None
        victim.stdin.write(joined.model_dump_json(exclude_unset=True))
        victim.stdin.close()
        deadline = time.monotonic() + 60
        while httpx.get(f"{server.url}/status").json()["jobs"][0]["backend"]["step"] != 1:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        victim.kill()
        victim.wait()
        with witness.sees():
            fresh = create_arctic_rl_client(config_of(server), blocking_calls=True)
            assert fresh.weight_norm() > 0
            assert client.status().step == 1


@fault(
    "SIGTERM while a call runs, seen by its caller",
    saw="the call's answer: the server ends after it, with exit code 0",
)
def test_a_signal_lets_the_running_call_end(tmp_path: Path, witness: Witness) -> None:
    with serving(tmp_path) as server:
        client = connect(server)
        with witness.sees():
            with in_thread(lambda: client.generate([[1, 2, 3]], SHORT)) as outcome:
                await_running(server)
                server.send(signal.SIGTERM)
            assert len(outcome[0].rollouts) == 2
        assert server.wait() == 0
        assert "stopping: no new work is taken" in server.log


@fault(
    "SIGTERM while a call runs, seen by another caller",
    saw="TransportError: this server is stopping and takes no new work; <what to do>",
)
def test_a_stopping_server_refuses_new_calls_by_name(tmp_path: Path, witness: Witness) -> None:
    with serving(tmp_path) as server:
        client = connect(server)
        other = create_arctic_rl_client(client.reconnect_config(), blocking_calls=True)
        with in_thread(lambda: client.generate([[1, 2, 3]], LONG)):
            await_running(server)
            server.send(signal.SIGTERM)
            server.await_log("stopping: no new work")
            with witness.sees(TransportError):
                other.step()
            server.send(signal.SIGTERM)


@fault("Ctrl-C twice while a call runs", saw=SERVER_GONE, lost="what came after the last checkpoint")
def test_a_second_interrupt_ends_the_server_at_once(tmp_path: Path, witness: Witness) -> None:
    with serving(tmp_path) as server:
        client = connect(server)

        def interrupt() -> None:
            await_running(server)
            server.send(signal.SIGINT)
            server.await_log("stopping: no new work")
            server.send(signal.SIGINT)

        with in_thread(lambda: interrupt() or True), witness.sees(TransportError):
            client.generate([[1, 2, 3]], LONG | {"n": 64})
        assert server.wait(5) == 128 + signal.SIGINT


@fault("two servers on one machine, each on a free port", saw="its own server's answers")
def test_two_servers_on_one_host_do_not_meet(tmp_path: Path, witness: Witness) -> None:
    with serving(tmp_path / "one") as one, serving(tmp_path / "two") as two:
        assert one.port != two.port
        first, second = connect(one, seed=1), connect(two, seed=2)
        with witness.sees():
            norms = first.weight_norm(), second.weight_norm()
        assert norms[0] != norms[1]
        taken = ["serve", "--port", str(one.port)]
        done = subprocess.run(
            [sys.executable, "-m", "arctic_platform.cli", *taken], capture_output=True, text=True, check=False, cwd=ROOT
        )
        assert done.returncode == 2
        assert f"cannot listen on 127.0.0.1:{one.port} (Address already in use)" in done.stderr


FULL_DISKS: dict[str, tuple[int, Any]] = {
    "weights": (300_000, lambda client: client.save_checkpoint()),
    "optimizer": (500_000, lambda client: client.save_checkpoint()),
    "sleep": (500_000, lambda client: client.sleep_training("disk")),
}
"""The longest file that the disk takes, and the call that meets it; weights alone have 460,000 bytes."""


@fault("the disk is full while a checkpoint is written", case="weights", saw=CANNOT_WRITE)
@fault(
    "the disk is full while the optimizer's state is written, behind the weights", case="optimizer", saw=CANNOT_WRITE
)
@fault(
    "the disk is full while the trainer is put to sleep on it",
    case="sleep",
    saw=CANNOT_WRITE,
    lost="nothing: the trainer stays awake",
)
@pytest.mark.parametrize("case", FULL_DISKS)
def test_a_full_disk_keeps_the_checkpoint_before_and_the_job(case: str, tmp_path: Path, witness: Witness) -> None:
    folder, (num_bytes, call) = tmp_path / "checkpoints", FULL_DISKS[case]
    with serving(tmp_path / "server", max_file_bytes=num_bytes) as server:
        client = connect(server, checkpoint_path=str(folder))
        if case != "weights":
            client.save_checkpoint(client_state={"n": 0})
        before = train(client, 0)
        with witness.sees(CheckpointError):
            call(client)
        status = client.status()
        assert (client.weight_norm(), status.step, status.is_trainer_asleep) == (before, 1, False)
        assert [file.name for file in folder.iterdir()] == ([] if case == "weights" else ["step-000000"])
        if case != "weights":
            assert client.load_checkpoint().client_state == {"n": 0}
            assert train(client, 0) == before


@fault(
    "SIGTERM while a checkpoint is written",
    saw="the call's answer: the checkpoint is whole, and the server ends after it, with exit code 0",
)
def test_a_signal_lets_a_checkpoint_be_written_to_its_end(tmp_path: Path, witness: Witness) -> None:
    folder = tmp_path / "checkpoints"
    with serving(tmp_path / "server") as server:
        client = connect(server, checkpoint_path=str(folder))
        train(client, 0)
        client.save_checkpoint()
        train(client, 1)

        def terminate() -> None:
            while not list(folder.glob("*step-000002*")):
                time.sleep(0.0005)
            server.send(signal.SIGTERM)

        with in_thread(lambda: terminate() or True), witness.sees():
            assert client.save_checkpoint().step == 2
        assert server.wait() == 0
    for found in step_folders(folder):
        check_content(found, read_state(found))
    assert sorted(file.name for file in folder.iterdir()) == ["step-000001", "step-000002"]


@fault("the checkpoint folder is read-only", case="read-only", saw=CANNOT_WRITE)
@fault("the checkpoint folder cannot be written", case="below a file", saw=CANNOT_WRITE)
@pytest.mark.parametrize("case", ["read-only", "below a file"])
def test_a_folder_that_refuses_is_named(case: str, tmp_path: Path, witness: Witness) -> None:
    (tmp_path / "file").write_text("no folder")
    refusing = Path("/sys/kernel") if case == "read-only" else tmp_path / "file"  # root may not write there either
    with serving(tmp_path / "server") as server:
        client = connect(server)
        before = train(client, 0)
        with witness.sees(CheckpointError):
            client.save_checkpoint(str(refusing / "checkpoint"))
        assert client.weight_norm() == before
        assert client.save_checkpoint(str(tmp_path / "other")).step == 1


@fault("a wrong API key", saw="AccessError: no valid API key; <what to send>")
def test_a_wrong_key_is_refused_and_never_logged(tmp_path: Path, witness: Witness) -> None:
    with serving(tmp_path, environment={"ARCTIC_RL_API_KEY": "the-right-key-of-32-characters--"}) as server:
        with witness.sees(AccessError):
            connect(server, api_key="a-wrong-key-of-some-length")
        assert connect(server, api_key="the-right-key-of-32-characters--").weight_norm() > 0
        assert "right-key" not in server.log
        assert "wrong-key" not in server.log


@fault(
    "a body larger than the server takes",
    saw="InputError: the request has <n> bytes, this server takes 65536; <what to do>",
)
def test_a_body_that_is_too_large_is_refused_with_both_numbers(tmp_path: Path, witness: Witness) -> None:
    with serving(tmp_path, "--max-body", "64K") as server:
        client = connect(server)
        with witness.sees(InputError):
            client.log_probs({"prompts": [[1] * 100] * 100, "responses": [[2] * 100] * 100})
        assert client.status().step == 0
        assert train(client, 0) > 0


@fault("the job is closed while a call waits", saw="CallCancelledError: <call> was cancelled <when>")
def test_a_waiting_call_of_a_closed_job_hears_of_it(tmp_path: Path, witness: Witness) -> None:
    with serving(tmp_path) as server:

        async def main() -> None:
            client = create_arctic_rl_client(config_of(server))
            call = asyncio.create_task(client.generate([[1, 2, 3]], LONG))
            await asyncio.to_thread(await_running, server)
            other = create_arctic_rl_client(client.reconnect_config())
            await other.shutdown()
            with witness.sees(CallCancelledError):
                await call

        asyncio.run(main())


def test_logs_name_requests_and_jobs_and_hold_no_token_ids(tmp_path: Path) -> None:
    with serving(tmp_path, "--log-format", "json") as server:
        client = connect(server)
        client.generate([[123, 231, 213]], {"max_tokens": 2})
        server.await_log(r'/calls"')
        lines = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
        assert any(line.get("path", "").endswith("/calls") for line in lines)
        # An id in hexadecimal or a duration holds any three digits now and then; a token id would stand by itself.
        words = re.split(r"[^0-9a-zA-Z.]+", TIME_OF_DAY.sub("", server.log))
        assert not {"123", "231", "213"} & set(words)
