"""Runs on two ranks and a sampler of its own: whichever process is lost in whichever phase, the losses are the same."""

import signal
from functools import partial
from pathlib import Path

import pytest

from arctic_platform.rl.fetch import fetch_model
from arctic_platform.rl.run_folder import RunFolder
from tests.faults.record import Witness, fault
from tests.faults.runs import Harm, Strikes, kept_serving, make_recipe, numbers, run, sends, workers_of
from tests.rl.workers.processes import all_end

PROCESSES = [
    "client.colocate=false",
    "client.ranks.num_ranks=2",
    "client.ranks.num_threads=1",
    "client.ranks.heartbeat_seconds=3",
    "client.weight_sync.timeout_seconds=20",
]
PHASES = {"generate": 3, "reference": 3, "fwd_bwd": 3, "step": 3, "sync": 3, "checkpoint": 1}
SINCE = "the steps since the last checkpoint, which are done again"
RANK_LOST = "step <n> was lost: rank 1 (pid <n> on <host>) was lost <when>: killed by SIGKILL; <what it does>"
SAMPLER_LOST = "step <n> was lost: sampler (pid <n> on <host>) was lost <when>: killed by SIGKILL; <what it does>"
STOPPED = "step <n> was lost: {} (pid <n> on <host>) was lost <when>: it said nothing for 3 s; <what it does>"

pytestmark = pytest.mark.slow  # examples/survive_faults.py is the default run's part of this


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fetch_model("tiny-llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run on two ranks and a sampler that nothing befalls."""
    return run(make_recipe(model, tmp_path_factory.mktemp("whole"), *PROCESSES)).run


@fault("a rank is killed in any phase of an iteration", transport="run", saw=RANK_LOST, lost=SINCE)
@pytest.mark.parametrize("phase", PHASES)
def test_a_run_outlives_a_rank(phase: str, model: Path, whole: RunFolder, tmp_path: Path, witness: Witness) -> None:
    view = Strikes(phase, PHASES[phase], sends(signal.SIGKILL, "rank 1"))
    outcome = run(make_recipe(model, tmp_path, *PROCESSES), view)
    view.end_strike()
    assert numbers(outcome.run) == numbers(whole)
    view.tell(witness)


@fault("the sampler's process is killed while it samples", transport="run", saw=SAMPLER_LOST, lost=SINCE)
def test_a_run_outlives_its_sampler(model: Path, whole: RunFolder, tmp_path: Path, witness: Witness) -> None:
    view = Strikes("generate", 3, sends(signal.SIGKILL, "sampler"))
    outcome = run(make_recipe(model, tmp_path, *PROCESSES), view)
    view.end_strike()
    assert numbers(outcome.run) == numbers(whole)
    view.tell(witness)


@pytest.mark.parametrize("phase", ["reference", "fwd_bwd", "step", "sync", "checkpoint"])
def test_a_sampler_may_be_killed_in_any_phase(phase: str, model: Path, whole: RunFolder, tmp_path: Path) -> None:
    view = Strikes(phase, PHASES[phase], sends(signal.SIGKILL, "sampler"))
    outcome = run(make_recipe(model, tmp_path, *PROCESSES), view)
    view.end_strike()
    assert numbers(outcome.run) == numbers(whole)


@fault("a rank is stopped (SIGSTOP), or hangs", transport="run", saw=STOPPED.format("rank 1"), lost=SINCE)
@pytest.mark.parametrize("phase", ["fwd_bwd", "sync"])
def test_a_run_outlives_a_stopped_rank(
    phase: str, model: Path, whole: RunFolder, tmp_path: Path, witness: Witness
) -> None:
    view = Strikes(phase, 3, sends(signal.SIGSTOP, "rank 1"))
    outcome = run(make_recipe(model, tmp_path, *PROCESSES), view)
    view.end_strike()
    assert numbers(outcome.run) == numbers(whole)
    view.tell(witness)


@fault("the sampler's process is stopped (SIGSTOP)", transport="run", saw=STOPPED.format("sampler"), lost=SINCE)
@pytest.mark.parametrize("phase", ["generate", "sync"])
def test_a_run_outlives_a_stopped_sampler(
    phase: str, model: Path, whole: RunFolder, tmp_path: Path, witness: Witness
) -> None:
    view = Strikes(phase, 3, sends(signal.SIGSTOP, "sampler"))
    outcome = run(make_recipe(model, tmp_path, *PROCESSES), view)
    view.end_strike()
    assert numbers(outcome.run) == numbers(whole)
    view.tell(witness)


@fault(
    "the server of two ranks and a sampler is killed, and is started again",
    transport="run",
    saw="step <n> was lost: there is no job <id> here; it was closed, or is another server's",
    lost=SINCE,
)
def test_a_killed_server_takes_its_processes_along(
    model: Path, whole: RunFolder, tmp_path: Path, witness: Witness
) -> None:
    found: dict[str, int] = {}
    with kept_serving(tmp_path / "server") as kept:

        def prepare() -> Harm:
            found.update(workers_of(kept.server.pid))
            return partial(kept.server.send, signal.SIGKILL)

        view = Strikes("fwd_bwd", 3, prepare)
        served = [f"client.server_url={kept.url}", "client.retry_timeout=20"]
        outcome = run(make_recipe(model, tmp_path, *PROCESSES, *served), view)
        view.end_strike()
    assert sorted(found) == ["rank 0", "rank 1", "sampler"]
    assert all_end(list(found.values()))
    assert numbers(outcome.run) == numbers(whole)
    view.tell(witness)
