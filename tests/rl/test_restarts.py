"""When a run may go on after a loss, and when it gives up."""

import asyncio
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from arctic_platform.errors import (
    AccessError,
    ArcticError,
    CallTimeoutError,
    CheckpointError,
    NotFoundError,
    ServerError,
    TransportError,
    WeightSyncError,
    WorkerLostError,
)
from arctic_platform.rl import create_arctic_rl_client
from arctic_platform.rl.client import ArcticRLClient
from arctic_platform.rl.progress import PlainView, StopRequest
from arctic_platform.rl.recipe import load_recipe
from arctic_platform.rl.records import StepRecord
from arctic_platform.rl.report import RunData, render
from arctic_platform.rl.restarts import Restarts, is_loss, with_synced_weights
from arctic_platform.rl.run_folder import RunFolder
from tests.rl.engines.builders import config

RECORD = StepRecord(1, 0.0, 0.0, 0, 1.0, 0.0, None, 0.0, 0.0, 0.0, 0.0, 0.0, 1, 1, 1, {"step": 0.1})


class Run:
    """A run's folder, with as many steps as wanted, and what restarts do about it."""

    def __init__(self, folder: Path, limit: int, *, checkpoint: int | None = 0) -> None:
        self.out = io.StringIO()
        view = PlainView(Console(file=self.out, width=200))
        recipe = load_recipe("recipes/tiny.yaml", replace={"output_dir": str(folder)})
        self.folder = RunFolder.start(recipe)
        if checkpoint is not None:
            (self.folder.checkpoints / f"step-{checkpoint:06d}").mkdir(parents=True)
        self.stop = StopRequest(view)
        self.restarts = Restarts(limit, self.folder, view, self.stop)
        self.client = create_arctic_rl_client(config(kinds=("log_prob",)))

    def lose(self, step: int, text: str, make: Callable[[str], ArcticError] = WorkerLostError) -> ArcticRLClient:
        """Be told that something was lost while `step` was done."""
        self.folder.rewind(0)
        for done in range(1, step):
            self.folder.append_step(replace(RECORD, step=done))
        return asyncio.run(self.restarts.after(make(text), self.client, self.connect))

    def connect(self) -> ArcticRLClient:
        return create_arctic_rl_client(config(kinds=("log_prob",)))


def test_losses_with_progress_between_them_count_once(tmp_path: Path) -> None:
    run = Run(tmp_path, 3)
    for step in (3, 5, 7):
        assert run.lose(step, f"lost at {step}") is run.client
    with pytest.raises(WorkerLostError, match="lost at 9"):
        run.lose(9, "lost at 9")
    assert [one.lost_step for one in run.folder.restarts()] == [3, 5, 7]
    assert "step 3 was lost: lost at 3\nrestart 1 of 3: going on after step 0\n" in run.out.getvalue()


@pytest.mark.parametrize("second", [3, 1])
def test_losses_without_progress_count_twice_and_the_first_one_is_raised(tmp_path: Path, second: int) -> None:
    run = Run(tmp_path, 3)
    run.lose(3, "out of memory")
    run.lose(second, "the same again")
    with pytest.raises(WorkerLostError, match="out of memory"):
        run.lose(3, "and again")


def test_no_restart_is_made_where_none_is_allowed_or_the_run_was_asked_to_stop(tmp_path: Path) -> None:
    run = Run(tmp_path / "none", 0)
    with pytest.raises(WorkerLostError, match="lost"):
        run.lose(1, "lost")
    stopping = Run(tmp_path / "stopping", 3)
    stopping.stop.is_set = True
    with pytest.raises(WorkerLostError, match="lost"):
        stopping.lose(1, "lost")


def test_without_a_checkpoint_a_run_begins_anew_on_a_job_of_its_own(tmp_path: Path) -> None:
    run = Run(tmp_path, 3, checkpoint=None)
    assert run.lose(1, "lost") is not run.client
    with pytest.raises(ArcticError, match="was shut down"):
        asyncio.run(run.client.status())
    assert run.folder.restarts()[0].from_step == 0


def test_a_lost_server_is_sought_until_it_is_there_or_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arctic_platform.rl.restarts.PAUSE_SECONDS", 0.01)
    run, tries = Run(tmp_path, 3), []

    def connect() -> ArcticRLClient:
        tries.append(1)
        if len(tries) < 4:
            raise TransportError("nobody listens there")
        return create_arctic_rl_client(config(kinds=("log_prob",)))

    monkeypatch.setattr(run, "connect", connect)
    assert run.lose(1, "gone", TransportError) is not run.client
    assert len(tries) == 4
    monkeypatch.setattr("arctic_platform.rl.restarts.SERVER_SECONDS", 0.05)
    monkeypatch.setattr(run, "connect", lambda: (_ for _ in ()).throw(TransportError("still nobody")))
    with pytest.raises(TransportError, match="still nobody"):
        run.lose(2, "gone", TransportError)
    monkeypatch.setattr(run, "connect", lambda: (_ for _ in ()).throw(AccessError("a wrong key")))
    with pytest.raises(AccessError):
        Run.lose(run, 3, "gone", TransportError)


def test_a_failed_sync_is_not_made_again_once_the_run_was_asked_to_stop() -> None:
    tries: list[int] = []
    view = PlainView(Console(file=io.StringIO()))
    stop = StopRequest(view)

    async def call() -> None:
        tries.append(1)
        stop.is_set = True
        raise WeightSyncError("the sampler is gone")

    with pytest.raises(WeightSyncError, match="the sampler is gone"):
        asyncio.run(with_synced_weights(call, view, stop))
    assert len(tries) == 1


@pytest.mark.parametrize(
    ("kind", "is_one"),
    [
        (WorkerLostError, True), (TransportError, True), (NotFoundError, True),
        (CallTimeoutError, False), (AccessError, False), (CheckpointError, False), (ServerError, False),
    ],
)  # fmt: skip
def test_what_counts_as_a_loss(kind: type[ArcticError], is_one: bool) -> None:
    assert is_loss(kind("text")) == is_one


def test_the_report_lists_restarts(tmp_path: Path) -> None:
    run = Run(tmp_path, 3)
    run.lose(3, "rank 1 <was> lost")
    text = render(RunData.read(run.folder))
    assert "<h3>Restarts</h3>" in text
    assert "<td>3</td><td>0</td><td>rank 1 &lt;was&gt; lost</td>" in text
    fresh = RunFolder.start(run.folder.recipe(), fresh=True)
    assert fresh.restarts() == []
