"""Runs of the reference loop that something befalls, and what must not depend on it."""

import asyncio
import io
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console

from arctic_platform.rl.loop import Outcome, train
from arctic_platform.rl.progress import PlainView
from arctic_platform.rl.recipe import Recipe, load_recipe
from arctic_platform.rl.records import StepRecord
from arctic_platform.rl.run_folder import RunFolder
from tests.faults.record import Witness
from tests.faults.servers import ServerProcess

SMALL = ["prompts_per_step=2", "rollouts_per_prompt=4", "num_steps=4", "checkpoint_every=2", "side_by_side_repeats=0"]
SMALL += ["eval.every=0", "eval.num_questions=2", "client.zorro_train.receipt_every=0"]
SMALL += ["loss.entropy_coef=0.1"]  # so that a step changes the weights whatever its rewards are
MIDDLE_SECONDS = 0.004
WORKER = "arctic_platform.rl.workers.main"

Harm = Callable[[], object]


def make_recipe(model: Path, folder: Path, *overrides: str) -> Recipe:
    """Four small steps, with a checkpoint after the second."""
    replace = {"model": str(model), "output_dir": str(folder)}
    return load_recipe("recipes/tiny.yaml", overrides=[*SMALL, *overrides], replace=replace)


class Strikes(PlainView):
    """A view that does harm, once, in the middle of a phase, and notes what the loop says of it.

    phase, times: of the `times`-th phase of this name. prepare: called as it begins, makes what is done in its middle.
    sign: what the loop says of such harm. mend: called when it says so.
    """

    def __init__(
        self,
        phase: str,
        times: int,
        prepare: Callable[[], Harm],
        *,
        sign: str = " was lost: ",
        mend: Harm = lambda: None,
    ) -> None:
        super().__init__(Console(file=io.StringIO()))
        self.lines: list[str] = []
        self.struck_at = self.noticed_at = self.resumed_at = 0.0
        self._phase, self._left, self._prepare = phase, times, prepare
        self._sign, self._mend = sign, mend
        self._thread: threading.Thread | None = None

    def tell(self, witness: Witness) -> None:
        """What was said of the loss, and when."""
        line = next((line for line in self.lines if self._sign in line), "nothing")
        witness.heard(line, noticed=self.noticed_at - self.struck_at, resumed=self.resumed_at - self.struck_at)

    def phase(self, name: str) -> None:
        """See View."""
        self._left -= name == self._phase
        if self._left == 0 and name == self._phase:
            self._thread = threading.Thread(target=self._strike, args=(self._prepare(),))
            self._thread.start()
        elif self.noticed_at and not self.resumed_at:
            self.resumed_at = time.perf_counter()

    def say(self, text: str) -> None:
        """See View."""
        self.lines.append(text)
        if self._sign in text and not self.noticed_at:
            self.noticed_at = time.perf_counter()
            self._mend()

    def end_strike(self) -> None:
        """Until the harm is done. It must have been."""
        assert self._thread is not None, f"there was no such phase: {self._phase}"
        self._thread.join(60)

    def _strike(self, harm: Harm) -> None:
        time.sleep(MIDDLE_SECONDS)
        self.struck_at = time.perf_counter()
        harm()


def run(recipe: Recipe, view: PlainView | None = None) -> Outcome:
    """To its end."""
    return asyncio.run(train(recipe, view or PlainView(Console(file=io.StringIO()))))


def numbers(folder: RunFolder) -> list[list[float | None]]:
    """Of every step, what must not depend on what befell the run; bit for bit."""
    return [_numbers(record) for record in folder.steps()]


def _numbers(one: StepRecord) -> list[float | None]:
    return [one.step, one.reward, one.loss, one.kl, one.grad_norm, one.sampler_diff_max, one.clip_fraction]


class KeptServer:
    """A server that a supervisor starts anew at the same address whenever it dies."""

    def __init__(self, folder: Path, pause_seconds: float) -> None:
        self._folder = folder
        self._pause_seconds = pause_seconds
        self.server = ServerProcess(folder / "0")
        self.url = self.server.url
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._keep)
        self._thread.start()

    def end(self) -> None:
        """For good."""
        self._is_over.set()
        self._thread.join(60)
        self.server.end()

    def _keep(self) -> None:
        port, count = self.server.port, 0
        while not self._is_over.wait(0.1):
            if not self.server.is_alive:
                time.sleep(self._pause_seconds)
                count += 1
                self.server = ServerProcess(self._folder / str(count), port=port)


@contextmanager
def kept_serving(folder: Path, *, pause_seconds: float = 0.0) -> Generator[KeptServer]:
    """A server that comes back after a while, while open."""
    kept = KeptServer(folder, pause_seconds)
    try:
        yield kept
    finally:
        kept.end()


def children_of(pid: int) -> list[int]:
    """All processes that a process started, and those that they started."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # It has just ended.
    found, grown = {pid}, True
    while grown:
        more = {child for child, parent in parents.items() if parent in found} - found
        found, grown = found | more, bool(more)
    return sorted(found - {pid})


def workers_of(pid: int) -> dict[str, int]:
    """The processes of trainer and sampler below a server's, by their names: "rank 0", "sampler"."""
    found = {}
    for child in children_of(pid):
        try:
            arguments = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue  # It has just ended.
        if WORKER in arguments:
            found[arguments[arguments.index("--name") + 1]] = child
    return found


def sends(number: signal.Signals, name: str, server: Callable[[], int] = os.getpid) -> Callable[[], Harm]:
    """For `Strikes`: a signal to one of the processes below `server`; the embedded transport's is this one."""
    return lambda: partial(os.kill, workers_of(server())[name], number)
