"""Jobs whose trainer and sampler are processes of their own, over HTTP: unchanged calls, and every way to lose one."""

import contextlib
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from arctic_platform.errors import CheckpointError, ConfigError, InputError, WorkerLostError
from arctic_platform.rl import create_arctic_rl_client
from arctic_platform.rl.client import BlockingArcticRLClient
from arctic_platform.rl.protocol import Processing, RolloutBatch, SamplingParams
from arctic_platform.rl.server.backend import Backend, create_backend
from arctic_platform.rl.workers.launch import LocalProcess
from tests.rl import asleep
from tests.rl.engines.builders import config, grouped_batch
from tests.rl.workers.processes import alive_of, all_end
from tests.transports.serving import running_server

PROMPTS = [[5, 6, 7, 8], [5, 6, 9]]
PARAMS = SamplingParams(n=3, max_tokens=6, seed=1, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "colocate": False,
    "ranks": {"num_ranks": 2, "heartbeat_seconds": 3.0, "num_threads": 1},
    "weight_sync": {"timeout_seconds": 20.0},
}


@pytest.fixture(scope="module")
def server():
    with running_server() as running:
        yield running


@pytest.fixture(scope="module")
def client(server, tmp_path_factory, forked_workers):
    """Two ranks and a sampler, each a process; a checkpoint of the first weights is in the folder."""
    folder = tmp_path_factory.mktemp("checkpoints")
    made = create_arctic_rl_client(server.config(**SETTINGS, checkpoint_path=str(folder)))
    with BlockingArcticRLClient(made) as client:
        client.save_checkpoint(str(folder / "first"))
        yield client
        pids = pids_of(backend_of(server, client))
    assert all_end(pids)


def backend_of(server, client: BlockingArcticRLClient) -> Backend:
    """What executes the client's calls."""
    return server.service.backend(client._client._transport.server_id)


def pids_of(backend: Backend) -> list[int]:
    return [*backend.train.pids, backend.sample.pid]  # type: ignore[attr-defined]


@pytest.fixture
def fresh(client, server):
    """The job at its first weights, whatever the test before did to it."""
    first = os.path.join(client.config.checkpoint_path, "first")  # noqa: PTH118
    client.load_checkpoint(first)
    assert client.status().lost is None
    return client


def iterate(client: Any, seed: int) -> list[float]:
    """One iteration of a loop; what it saw."""
    batch = grouped_batch(seed)
    scored = client.log_probs(batch)
    trained = client.fwd_bwd(batch.model_copy(update={"old_logprobs": scored.logprobs}))
    stepped = client.step()
    synced = client.sync_weights()
    drawn = client.generate(PROMPTS, PARAMS)
    assert drawn.weight_version == synced.weight_version
    seen = [trained.metrics["loss"], stepped.metrics["grad_norm"], client.weight_norm()]
    return seen + [value for rollout in drawn.rollouts for value in (*rollout.token_ids, *rollout.logprobs)]


@pytest.fixture(scope="module")
def undisturbed() -> list[list[float]]:
    """Four iterations in one process."""
    with BlockingArcticRLClient(create_arctic_rl_client(config())) as plain:
        return [iterate(plain, seed) for seed in range(4)]


def test_the_loop_computes_what_one_process_computes(fresh, undisturbed):
    for seed in range(3):
        assert iterate(fresh, seed) == pytest.approx(undisturbed[seed], abs=2e-5)
    status = fresh.status()
    assert (status.training_engine, status.sampling_engine) == ("FsdpTrainEngine", "TorchSampleEngine")
    assert status.is_sampler_current


def test_a_sync_says_how_it_was_done_and_low_memory_is_chosen_per_call(fresh, caplog):
    with caplog.at_level("INFO", "arctic_platform"):
        assert fresh.sync_weights().mechanism == "shared_memory"
        assert fresh.sync_weights(low_memory=True).mechanism == "shared_memory-low-memory"
    assert "[weight-sync names validated] context=shared_memory sender=20 expected=20" in caplog.text
    with pytest.raises(ConfigError, match="CUDA"):
        fresh.sync_weights(cuda_ipc=True)


def test_two_clients_that_sync_at_once_wait_for_each_other(fresh):
    second = BlockingArcticRLClient(create_arctic_rl_client(fresh._client.reconnect_config()))
    fresh.fwd_bwd(grouped_batch(0))
    fresh.step()
    with ThreadPoolExecutor(2) as threads:
        done = [threads.submit(lambda one=one: [one.sync_weights() for _ in range(3)]) for one in (fresh, second)]
        assert [synced.weight_version for each in done for synced in each.result(60)] == [1] * 6


def test_the_sampler_sleeps_and_wakes_in_its_process(fresh):
    fresh.sleep_sampling(level=2)
    assert fresh.status().is_sampler_asleep
    with pytest.raises(InputError, match="asleep"):
        fresh.generate(PROMPTS, PARAMS)
    with pytest.raises(InputError, match="wake_sampling"):
        fresh.sync_weights()
    fresh.wake_sampling()
    fresh.sync_weights()
    fresh.reset_prefix_cache()
    assert len(fresh.generate(PROMPTS, PARAMS).rollouts) == 6


def test_ranks_that_sleep_refuse_what_needs_them_and_come_back_awake_after_a_loss(fresh, server):
    backend, norm = backend_of(server, fresh), fresh.weight_norm()
    fresh.sleep_training("disk")
    for name, call in asleep.CALLS.items():
        with pytest.raises(InputError, match=asleep.refusal(name)):
            call(fresh)
    assert len(fresh.generate(PROMPTS, PARAMS).rollouts) == 6
    fresh.wake_training()
    assert fresh.weight_norm() == norm
    fresh.sleep_training("disk")
    os.kill(backend.train.pids[1], signal.SIGKILL)
    assert "rank 1" in await_lost(server)
    with pytest.raises(WorkerLostError, match="load_checkpoint"):
        fresh.wake_training()
    fresh.load_checkpoint(os.path.join(fresh.config.checkpoint_path, "first"))  # noqa: PTH118
    assert (fresh.status().is_trainer_asleep, fresh.weight_norm()) == (False, norm)


def test_sampling_that_is_cancelled_stops_in_its_process(server, fresh):
    backend = backend_of(server, fresh)
    seen: list[int] = []

    class Enough(Exception):
        pass

    def progress(num_finished: int, num_total: int) -> None:
        seen.append(num_total)
        raise Enough

    long = SamplingParams(n=8, max_tokens=3000, ignore_eos=True)
    with pytest.raises(Enough):
        backend.sample.generate(PROMPTS, long, share=None, progress=progress)
    assert seen == [16]
    assert len(fresh.generate(PROMPTS, PARAMS).rollouts) == 6


def slow_batch() -> RolloutBatch:
    """Seconds of work for the tiny model."""
    return RolloutBatch(
        prompts=[[1 + row % 200] * 1000 for row in range(24)], responses=[[2] * 1000] * 24, advantages=[1.0] * 24
    )


def in_call(backend: Backend, name: str) -> None:
    """Wait until the ranks run the call."""
    deadline = time.monotonic() + 30.0
    while backend.train._crew._watch.phase != f"in {name}":  # type: ignore[attr-defined]
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextlib.contextmanager
def during(backend: Backend, name: str, action: Any):
    """Do something while a call runs."""

    def act() -> None:
        in_call(backend, name)
        time.sleep(0.3)
        action()

    thread = threading.Thread(target=act)
    thread.start()
    yield
    thread.join()


def test_a_rank_that_is_killed_in_a_call_ends_the_group_and_the_run_goes_on(fresh, server, undisturbed):
    backend = backend_of(server, fresh)
    assert iterate(fresh, 0) == pytest.approx(undisturbed[0], abs=2e-5)
    saved = fresh.save_checkpoint()
    before, sampler = backend.train.pids, backend.sample.pid
    with (
        during(backend, "fwd_bwd", lambda: os.kill(before[1], signal.SIGKILL)),
        pytest.raises(
            WorkerLostError, match=rf"rank 1 \(pid {before[1]} on .*\) was lost in fwd_bwd: killed by SIGKILL"
        ),
    ):
        fresh.fwd_bwd(slow_batch(), Processing(zorro=False))
    assert all_end(before)
    assert "rank 1" in fresh.status().lost
    with pytest.raises(WorkerLostError, match="load_checkpoint"):
        fresh.step()
    assert len(fresh.generate(PROMPTS, PARAMS).rollouts) == 6, "the sampler is another process"
    with pytest.raises(CheckpointError):
        fresh.load_checkpoint("/nowhere/at/all")
    with pytest.raises(WorkerLostError, match="rank 1"):
        fresh.weight_norm()
    assert fresh.load_checkpoint(saved.path).step == 1
    assert fresh.status().lost is None
    assert backend.sample.pid == sampler
    for seed in (1, 2):
        assert iterate(fresh, seed) == pytest.approx(undisturbed[seed], abs=2e-5)


def test_a_sampler_that_is_lost_leaves_training_alone_and_a_sync_starts_it_anew(fresh, server, undisturbed):
    backend = backend_of(server, fresh)
    ranks, sampler = backend.train.pids, backend.sample.pid
    os.kill(sampler, signal.SIGKILL)
    with pytest.raises(WorkerLostError, match=r"sampler \(pid .*sync_weights\(\) or load_checkpoint\(\) starts it"):
        fresh.generate(PROMPTS, PARAMS)
    assert not fresh.status().is_sampler_current
    assert iterate(fresh, 0) == pytest.approx(undisturbed[0], abs=2e-5)
    assert backend.train.pids == ranks
    assert backend.sample.pid != sampler


@pytest.mark.parametrize("side", ["sampler", "rank"])
def test_a_side_that_is_lost_in_a_sync_is_told_and_the_next_sync_works(fresh, server, undisturbed, side):
    backend = backend_of(server, fresh)
    pid = backend.sample.pid if side == "sampler" else backend.train.pids[0]
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(WorkerLostError, match="said nothing for 3 s"):
        fresh.sync_weights()
    if side == "rank":
        fresh.load_checkpoint(os.path.join(fresh.config.checkpoint_path, "first"))  # noqa: PTH118
    assert iterate(fresh, 0) == pytest.approx(undisturbed[0], abs=2e-5)


def test_a_job_that_cannot_load_its_model_leaves_no_process(forked_workers):
    settings = {**SETTINGS, "training_engine": "fsdp", "ranks": {**SETTINGS["ranks"], "num_ranks": 1}}
    with pytest.raises(ConfigError, match="there is no such folder"):
        create_backend(config(**{**settings, "model": "./no/such/model"}))


def test_ranks_sync_into_a_sampler_of_the_servers_own_and_a_death_is_in_the_status_before_anybody_calls(
    server, forked_workers
):
    ranks = {**SETTINGS["ranks"], "num_ranks": 1}
    made = create_arctic_rl_client(server.config(training_engine="fsdp", ranks=ranks))
    with BlockingArcticRLClient(made) as client:
        pids = backend_of(server, client).train.pids  # type: ignore[attr-defined]
        status = client.status()
        assert (status.training_engine, status.num_ranks, list(status.rank_pids)) == ("FsdpTrainEngine", 1, pids)
        assert status.sampler_pid is None
        iterate(client, 0)
        assert client.sync_weights().mechanism == "shared_memory"
        assert alive_of(pids) == pids
        os.kill(pids[0], signal.SIGKILL)
        assert all_end(pids)
        assert "rank 0" in await_lost(server)


def test_a_client_hears_which_processes_its_job_waits_for(server, monkeypatch):
    monkeypatch.setattr("arctic_platform.rl.transports.http.PROGRESS_WAIT", 0.01)
    monkeypatch.setattr("arctic_platform.rl.workers.launch.LocalProcess", LocalProcess)  # a fork is there too soon
    heard: list[str] = []
    settings = {"colocate": False, "ranks": {"num_threads": 1}}
    with BlockingArcticRLClient(
        create_arctic_rl_client(server.config(**settings), on_progress=lambda call: heard.append(call.line))
    ) as client:
        status = client.status()
        assert (status.num_ranks, status.rank_pids) == (1, ())
        assert alive_of([status.sampler_pid]) == [status.sampler_pid]
    assert any(
        "the server loads tiny-random since" in line and "waiting for sampler to start" in line for line in heard
    )


def await_lost(server) -> str:
    """What the server's own status says, which no call brought there."""
    deadline = time.monotonic() + 10.0
    while not (lost := [job.backend.lost for job in server.service.status().jobs if job.backend and job.backend.lost]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return lost[0]
