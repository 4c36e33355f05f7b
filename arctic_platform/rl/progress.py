"""What a person sees while a run goes: a live panel on a terminal, one line per step anywhere else."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from arctic_platform.rl.recipe import Recipe
from arctic_platform.rl.records import Evaluation, StepRecord

SPARKS = "▁▂▃▄▅▆▇█"
ETA_STEPS = 8
FIRST_NOTICE = 10.0
EXIT_INTERRUPTED = 130


class View(Protocol):
    """Hears what the loop does."""

    def begin(self, recipe: Recipe, steps_done: int) -> None:
        """The run starts, or goes on after `steps_done` steps."""

    def phase(self, name: str) -> None:
        """The loop is now busy with `name`."""

    def waiting(self, text: str) -> None:
        """What the phase is waiting for; told about once a second while a call goes on."""

    def step(self, record: StepRecord) -> None:
        """A step is done."""

    def evaluation(self, evaluation: Evaluation) -> None:
        """The held-out questions were answered."""

    def say(self, text: str) -> None:
        """One line to be kept."""

    def end(self) -> None:
        """The run is over, one way or another."""


class Stopwatch:
    """Seconds per phase of one step, told to the view as they begin."""

    def __init__(self, view: View) -> None:
        self.seconds: dict[str, float] = {}
        self._view = view

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Time what is done inside; the same name adds up."""
        self._view.phase(name)
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


class StopRequest:
    """Whether the run was asked to stop; the loop looks at it between two phases."""

    def __init__(self, view: View) -> None:
        self.is_set = False
        self._view = view

    @contextmanager
    def on_interrupt(self) -> Generator[StopRequest]:
        """While open, the first Ctrl-C asks for the stop and the second one ends the process at once."""
        is_main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, self._ask) if is_main else None
        try:
            yield self
        finally:
            if is_main:
                signal.signal(signal.SIGINT, before)

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        if self.is_set:
            self._view.end()
            os._exit(EXIT_INTERRUPTED)  # a long call may run in another thread, which no exception can reach
        self.is_set = True
        self._view.say("Stopping when this phase is done, with a checkpoint. Ctrl-C again stops at once, without one.")


def make_view(console: Console) -> View:
    """The live panel when `console` is a terminal, plain lines otherwise."""
    return LiveView(console) if console.is_terminal and not console.is_dumb_terminal else PlainView(console)


class PlainView:
    """One line per step, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._num_steps = 0
        self._phase_began = time.monotonic()
        self._next_notice = FIRST_NOTICE

    def begin(self, recipe: Recipe, steps_done: int) -> None:
        """See View."""
        self._num_steps = recipe.num_steps
        self.say(_title(recipe) + (f", going on after step {steps_done}" if steps_done else ""))

    def phase(self, name: str) -> None:
        """See View; nothing to print."""
        self._phase_began, self._next_notice = time.monotonic(), FIRST_NOTICE

    def waiting(self, text: str) -> None:
        """See View; printed after 10 s of a phase, and then whenever its time has doubled."""
        if time.monotonic() - self._phase_began >= self._next_notice:
            self._next_notice *= 2
            self.say(f"waiting: {text}")

    def step(self, record: StepRecord) -> None:
        """See View."""
        kl = "" if record.kl is None else f"  kl {record.kl:.5f}"
        seconds = " ".join(f"{name} {value:.2f}" for name, value in record.seconds.items())
        self.say(
            f"step {record.step}/{self._num_steps}  reward {record.reward:.3f}  loss {record.loss:+.4f}{kl}"
            f"  tokens {record.tokens_computed}/{record.tokens_naive}"
            f"  seconds {sum(record.seconds.values()):.2f} ({seconds})"
        )

    def evaluation(self, evaluation: Evaluation) -> None:
        """See View."""
        self.say(f"step {evaluation.step}/{self._num_steps}  accuracy {evaluation.accuracy:.3f}")

    def say(self, text: str) -> None:
        """See View."""
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def end(self) -> None:
        """See View; nothing to close."""


class LiveView:
    """A panel that is redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._records: list[StepRecord] = []
        self._evaluations: list[Evaluation] = []
        self._recipe: Recipe | None = None
        self._steps_done = 0
        self._phase = "starting"
        self._waiting = ""
        self._spinner = Spinner("dots")
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=8, transient=False)

    def begin(self, recipe: Recipe, steps_done: int) -> None:
        """See View."""
        self._recipe, self._steps_done = recipe, steps_done
        self._records = [record for record in self._records if record.step <= steps_done]
        self._evaluations = [evaluation for evaluation in self._evaluations if evaluation.step <= steps_done]
        self._live.start()

    def phase(self, name: str) -> None:
        """See View."""
        self._phase, self._waiting = name, ""

    def waiting(self, text: str) -> None:
        """See View; it stands beside the phase, and is a line of its own until the panel is there."""
        self._waiting = text
        if self._recipe is None:
            self._console.print(text, end="\r", soft_wrap=True, highlight=False, markup=False, style="dim")

    def step(self, record: StepRecord) -> None:
        """See View."""
        self._records.append(record)
        self._steps_done = record.step

    def evaluation(self, evaluation: Evaluation) -> None:
        """See View."""
        self._evaluations.append(evaluation)

    def say(self, text: str) -> None:
        """See View; the line stays above the panel."""
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def end(self) -> None:
        """See View."""
        self._phase = ""
        self._live.stop()

    def _render(self) -> Panel | Text:
        if self._recipe is None:
            return Text("")
        rows: list[Table | Text] = [self._bar()]
        if self._records:
            rows += [self._numbers(), self._tokens(), self._seconds()]
        if self._waiting and self._phase:
            rows.append(Text(self._waiting, style="dim", no_wrap=True, overflow="ellipsis"))
        return Panel(Group(*rows), title=_title(self._recipe), title_align="left", border_style="blue", padding=(1, 2))

    def _bar(self) -> Table:
        assert self._recipe is not None
        table = Table.grid(padding=(0, 2), expand=True)
        for ratio in (None, 1, None, None):
            table.add_column(ratio=ratio, no_wrap=True)
        done, total = self._steps_done, self._recipe.num_steps
        self._spinner.update(text=Text(f" {self._phase}", style="dim"))
        now = self._spinner if self._phase else Text("")
        table.add_row(f"step {done}/{total}", ProgressBar(total, done), Text(self._eta(), style="bold"), now)
        return table

    def _eta(self) -> str:
        """Time left, from the newest steps."""
        assert self._recipe is not None
        recent = self._records[-ETA_STEPS:]
        left = self._recipe.num_steps - self._steps_done
        if not recent or not left:
            return ""
        per_step = sum(sum(record.seconds.values()) for record in recent) / len(recent)
        return f"{_clock(per_step * left)} left"

    def _numbers(self) -> Table:
        last = self._records[-1]
        table = Table.grid(padding=(0, 3))
        cells = [
            _labelled("reward", f"{last.reward:.3f}", _spark([record.reward for record in self._records])),
            _labelled("loss", f"{last.loss:+.4f}"),
            _labelled("KL", "-" if last.kl is None else f"{last.kl:.5f}"),
        ]
        if self._evaluations:
            first, newest = self._evaluations[0], self._evaluations[-1]
            arrow = f"{first.accuracy:.0%} -> " if len(self._evaluations) > 1 else ""
            cells.append(_labelled("accuracy", f"{arrow}{newest.accuracy:.0%}"))
        table.add_row(*cells)
        return table

    def _tokens(self) -> Text:
        last = self._records[-1]
        ratio = last.tokens_naive / max(last.tokens_computed, 1)
        value = f"{last.tokens_computed:,} computed of {last.tokens_naive:,}"
        return _labelled("tokens", value, f"{ratio:.1f}x fewer than row by row")

    def _seconds(self) -> Text:
        last = self._records[-1]
        text = _labelled("seconds", f"{sum(last.seconds.values()):.2f}")
        for name, value in last.seconds.items():
            text.append(f"   {name} ", style="dim").append(f"{value:.2f}")
        return text


def _title(recipe: Recipe) -> str:
    by = f", trained by {recipe.client.trainer}" if recipe.client.trains_in_ranks else ""
    return f"{recipe.name}: {recipe.model} on {recipe.task.name}{by}"


def _labelled(label: str, value: str, note: str = "") -> Text:
    text = Text().append(f"{label} ", style="dim").append(value, style="bold")
    return text.append(f"  {note}", style="cyan") if note else text


def _spark(values: list[float], width: int = 24) -> str:
    """Rewards in [0, 1] as a row of bars, the newest on the right."""
    return "".join(SPARKS[min(int(max(value, 0.0) * len(SPARKS)), len(SPARKS) - 1)] for value in values[-width:])


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
