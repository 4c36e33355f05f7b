"""What a person sees while a run goes."""

import io
import re
import signal
import subprocess
import sys

import pytest
from rich.console import Console

from arctic_platform.rl.progress import LiveView, PlainView, StopRequest, Stopwatch, make_view
from arctic_platform.rl.recipe import load_recipe
from arctic_platform.rl.records import Answer, Evaluation, StepRecord

RECIPE = load_recipe("recipes/tiny.yaml")


def make_record(step: int = 3) -> StepRecord:
    return StepRecord(
        step=step,
        reward=0.625,
        reward_std=0.4,
        num_flat_groups=1,
        response_len=3.0,
        loss=-0.0123,
        kl=0.00456,
        clip_fraction=0.0,
        grad_norm=1.5,
        lr=1e-3,
        sampler_diff_max=1e-6,
        sampler_diff_mean=1e-7,
        tokens_computed=330,
        tokens_naive=14480,
        weight_version=2,
        seconds={"generate": 2.0, "fwd_bwd": 1.5},
    )


EVALUATION = Evaluation(0, 1.0, [Answer("q", "1", "1", True), Answer("q", "1", "2", False)])


def show(view_class: type[PlainView] | type[LiveView], terminal: bool) -> str:
    console = Console(file=io.StringIO(), width=110, force_terminal=terminal)
    view = view_class(console)
    view.begin(RECIPE, 0)
    view.evaluation(EVALUATION)
    Stopwatch(view).phase("generate").__enter__()
    view.step(make_record())
    view.say("a line to keep")
    view.end()
    return console.file.getvalue()


def test_plain_lines_hold_every_number_of_a_step():
    lines = show(PlainView, terminal=False).splitlines()
    assert lines == [
        "tiny: tiny-llama on gcd",
        "step 0/30  accuracy 0.500",
        "step 3/30  reward 0.625  loss -0.0123  kl 0.00456  tokens 330/14480"
        "  seconds 3.50 (generate 2.00 fwd_bwd 1.50)",
        "a line to keep",
    ]


@pytest.mark.parametrize(
    "piece",
    ["step 3/30", "0.625", "-0.0123", "0.00456", "50%", "330 computed of 14,480", "43.9x", "1:34 left", "1.50"],
)
def test_the_panel_holds_every_number_of_a_step(piece):
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", show(LiveView, terminal=True))
    assert piece in text


def test_the_panel_says_what_a_long_call_waits_for_until_the_phase_is_over():
    console = Console(file=io.StringIO(), width=110, force_terminal=True)
    view = LiveView(console)
    view.waiting("the server loads the model since 3 s")
    view.begin(RECIPE, 0)
    view.phase("generate")
    view.waiting("generate: it waits behind 1: fwd_bwd runs since 2.0 s")
    assert "it waits behind 1" in _drawn(view)
    view.phase("score")
    assert "it waits behind 1" not in _drawn(view)
    view.end()
    assert "the server loads the model since 3 s" in console.file.getvalue()


def test_a_panel_that_begins_again_forgets_the_steps_that_are_done_again():
    view = LiveView(Console(file=io.StringIO(), width=110, force_terminal=True))
    view.begin(RECIPE, 0)
    view.step(make_record(step=3))
    assert "0.625" in _drawn(view)
    view.end()
    view.begin(RECIPE, 2)
    assert "0.625" not in _drawn(view)
    assert "step 2/30" in _drawn(view)
    view.end()


def _drawn(view: LiveView) -> str:
    console = Console(file=io.StringIO(), width=110)
    console.print(view._render())
    return console.file.getvalue()


def test_plain_lines_say_rarely_what_a_long_call_waits_for(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), width=110)
    view = PlainView(console)
    view.phase("generate")
    for _ in range(60):
        now[0] += 1.0
        view.waiting(f"generate: it runs since {now[0]:.0f} s")
    assert [int(line.split()[-2]) for line in console.file.getvalue().splitlines()] == [10, 20, 40]


def test_the_view_follows_the_terminal():
    assert isinstance(make_view(Console(file=io.StringIO())), PlainView)
    assert isinstance(make_view(Console(file=io.StringIO(), force_terminal=True)), LiveView)


def test_the_stopwatch_adds_up_phases_of_one_name():
    clock = Stopwatch(PlainView(Console(file=io.StringIO())))
    for _ in range(2):
        with clock.phase("step"):
            pass
    assert list(clock.seconds) == ["step"]
    assert clock.seconds["step"] >= 0.0


def test_the_first_interrupt_asks_and_says_so():
    console = Console(file=io.StringIO())
    before = signal.getsignal(signal.SIGINT)
    with StopRequest(PlainView(console)).on_interrupt() as stop:
        signal.raise_signal(signal.SIGINT)
    assert stop.is_set
    assert "Ctrl-C again stops at once" in console.file.getvalue()
    assert signal.getsignal(signal.SIGINT) == before


def test_the_second_interrupt_ends_the_process():
    code = (
        "import signal\nfrom rich.console import Console\n"
        "from arctic_platform.rl.progress import PlainView, StopRequest\n"
        "with StopRequest(PlainView(Console())).on_interrupt():\n"
        "    signal.raise_signal(signal.SIGINT)\n    signal.raise_signal(signal.SIGINT)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 130
