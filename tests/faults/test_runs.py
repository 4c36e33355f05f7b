"""Runs of the reference loop: whatever is killed in whichever phase, the losses are those of an undisturbed run."""

import signal
from functools import partial
from pathlib import Path

import pytest

from arctic_platform.errors import CheckpointError, TransportError
from arctic_platform.rl.fetch import fetch_model
from arctic_platform.rl.run_folder import RunFolder
from tests.faults.record import Witness, fault
from tests.faults.runs import Strikes, kept_serving, make_recipe, numbers, run
from tests.faults.servers import serving

PHASES = {"generate": 3, "reference": 3, "fwd_bwd": 3, "step": 3, "sync": 3, "checkpoint": 1}
"""The phases of an iteration, and in which of their kind something is done to the run."""

SERVED = "client.server_url={}"
SINCE = "the steps since the last checkpoint, which are done again"
QUICK = "client.retry_timeout=20"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fetch_model("tiny-llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def served_run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run on a server that nothing befalls."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with serving(folder / "server") as server:
        return run(make_recipe(model, folder, SERVED.format(server.url))).run


@fault(
    "the server is killed in any phase of an iteration, and is started again",
    transport="run",
    saw="step <n> was lost: there is no job <id> here; it was closed, or is another server's",
    lost=SINCE,
)
@pytest.mark.parametrize("phase", [pytest.param(p, marks=[pytest.mark.slow] * (p != "fwd_bwd")) for p in PHASES])
def test_a_run_outlives_its_server(
    phase: str, model: Path, served_run: RunFolder, tmp_path: Path, witness: Witness
) -> None:
    with kept_serving(tmp_path / "server") as kept:
        view = Strikes(phase, PHASES[phase], lambda: partial(kept.server.send, signal.SIGKILL))
        outcome = run(make_recipe(model, tmp_path, SERVED.format(kept.url), QUICK), view)
        view.end_strike()
    assert numbers(outcome.run) == numbers(served_run)
    view.tell(witness)
    assert [one.from_step for one in outcome.run.restarts()] == [0 if phase == "checkpoint" else 2]


@fault(
    "the server is killed and stays away for longer than it is sought by a call (1 s)",
    transport="run",
    saw="step <n> was lost: <call>: no answer from http://<host> (<reason>); is the server running there?",
    lost=SINCE,
)
def test_a_run_waits_for_its_server(model: Path, served_run: RunFolder, tmp_path: Path, witness: Witness) -> None:
    with kept_serving(tmp_path / "server", pause_seconds=1.5) as kept:
        view = Strikes("fwd_bwd", 3, lambda: partial(kept.server.send, signal.SIGKILL))
        outcome = run(make_recipe(model, tmp_path, SERVED.format(kept.url), "client.retry_timeout=1"), view)
        view.end_strike()
    assert numbers(outcome.run) == numbers(served_run)
    view.tell(witness)


def test_a_run_whose_server_stays_away_ends_with_the_first_error_and_goes_on_later(
    model: Path, served_run: RunFolder, tmp_path: Path
) -> None:
    with serving(tmp_path / "one") as server:
        view = Strikes("fwd_bwd", 3, lambda: partial(server.send, signal.SIGKILL))
        with pytest.raises(TransportError, match="is the server running there"):
            run(make_recipe(model, tmp_path, SERVED.format(server.url), "client.retry_timeout=0.5"), view)
        view.end_strike()
    with serving(tmp_path / "two") as again:
        outcome = run(make_recipe(model, tmp_path, SERVED.format(again.url)))
    assert numbers(outcome.run) == numbers(served_run)


@fault(
    "the disk is full while a run saves a checkpoint",
    transport="run",
    saw="CheckpointError: cannot write <folder>: <reason>; free space or choose another folder",
    lost="the steps since the last checkpoint: the same command goes on once there is space",
)
def test_a_run_ends_on_a_full_disk_and_goes_on_later(
    model: Path, served_run: RunFolder, tmp_path: Path, witness: Witness
) -> None:
    with serving(tmp_path / "one", max_file_bytes=100_000) as full, witness.sees(CheckpointError):
        run(make_recipe(model, tmp_path, SERVED.format(full.url)))
    with serving(tmp_path / "two") as again:
        outcome = run(make_recipe(model, tmp_path, SERVED.format(again.url)))
    assert numbers(outcome.run) == numbers(served_run)
