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


def outlive(number: signal.Signals, victim: str, phase: str, model: Path, whole: RunFolder, folder: Path) -> Strikes:
    """A run of which one process gets a signal in a phase; it ends with the numbers of the undisturbed one."""
    view = Strikes(phase, PHASES[phase], sends(number, victim))
    outcome = run(make_recipe(model, folder, *PROCESSES), view)
    view.end_strike()
    assert numbers(outcome.run) == numbers(whole)
    return view


KILL, STOP = signal.SIGKILL, signal.SIGSTOP
LOSSES = {"killed-rank": (KILL, "rank 1"), "killed-sampler": (KILL, "sampler"),
          "stopped-rank": (STOP, "rank 1"), "stopped-sampler": (STOP, "sampler")}  # fmt: skip


@fault("a rank is killed in any phase of an iteration", case="killed-rank", transport="run", saw=RANK_LOST, lost=SINCE)
@fault(
    "the sampler's process is killed while it samples",
    case="killed-sampler",
    transport="run",
    saw=SAMPLER_LOST,
    lost=SINCE,
)
@fault(
    "a rank is stopped (SIGSTOP), or hangs",
    case="stopped-rank",
    transport="run",
    saw=STOPPED.format("rank 1"),
    lost=SINCE,
)
@fault(
    "the sampler's process is stopped (SIGSTOP)",
    case="stopped-sampler",
    transport="run",
    saw=STOPPED.format("sampler"),
    lost=SINCE,
)
@pytest.mark.parametrize(
    ("case", "phase"),
    [
        *(("killed-rank", phase) for phase in PHASES),
        ("killed-sampler", "generate"),
        *(("stopped-rank", phase) for phase in ("fwd_bwd", "sync")),
        *(("stopped-sampler", phase) for phase in ("generate", "sync")),
    ],
)
def test_a_run_outlives_the_loss_of_a_process(
    case: str, phase: str, model: Path, whole: RunFolder, tmp_path: Path, witness: Witness
) -> None:
    outlive(*LOSSES[case], phase, model, whole, tmp_path).tell(witness)


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "generate"])
def test_a_sampler_may_be_killed_in_any_phase(phase: str, model: Path, whole: RunFolder, tmp_path: Path) -> None:
    """It is missed only when it is needed next, which may be never said."""
    outlive(KILL, "sampler", phase, model, whole, tmp_path)


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
