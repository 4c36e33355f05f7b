"""Kill a training rank and then the sampler in the middle of a run, and compare its losses with an undisturbed run's.

    python examples/survive_faults.py

Two ranks (FSDP2) and a sampler, each a process of its own, train a two-layer model that is built on the spot. Needs
the development install and no network; the second run is killed twice and ends with the same numbers, bit for bit.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console

from arctic_platform.rl.fetch import fetch_model
from arctic_platform.rl.loop import train
from arctic_platform.rl.progress import PlainView
from arctic_platform.rl.recipe import Recipe, load_recipe
from arctic_platform.rl.records import StepRecord

ROOT = Path(__file__).resolve().parents[1]
KILLS = [("fwd_bwd", 3, "rank 1"), ("generate", 6, "sampler")]
"""What is killed in which phase, the how manieth of its kind; the fourth `generate` is the third step's, done again."""

SETTINGS = [
    "num_steps=5", "checkpoint_every=2", "prompts_per_step=2", "rollouts_per_prompt=4", "side_by_side_repeats=0",
    "eval.every=0", "eval.num_questions=2", "loss.entropy_coef=0.1",
    "client.colocate=false", "client.ranks.num_ranks=2", "client.ranks.num_threads=1",
]  # fmt: skip


class Killing(PlainView):
    """A view that kills processes as phases begin, and prints what the run says of it."""

    def __init__(self, kills: list[tuple[str, int, str]]) -> None:
        super().__init__(Console(width=200))
        self._left = {(phase, name): times for phase, times, name in kills}

    def phase(self, name: str) -> None:
        """See View."""
        for (phase, victim), left in self._left.items():
            if phase == name:
                self._left[phase, victim] = left - 1
                if left == 1:
                    self.say(f"--- kill -9 of {victim}, in {phase}")
                    os.kill(pid_of(victim), signal.SIGKILL)


def pid_of(victim: str) -> int:
    """Of a process of this run, by the name that it was started with."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue  # It has just ended.
        if victim in arguments and str(os.getpid()) in arguments:
            return int(folder.name)
    raise SystemExit(f"{victim} does not run; this example needs Linux")


def losses(recipe: Recipe, kills: list[tuple[str, int, str]]) -> list[StepRecord]:
    """Run it, and read what each step did."""
    return asyncio.run(train(recipe, Killing(kills))).run.steps()


def main() -> int:
    """Both runs and their table; 1 if they differ."""
    with tempfile.TemporaryDirectory() as folder:
        model = fetch_model("tiny-llama", Path(folder) / "tiny-llama")
        runs = []
        for name, kills in (("undisturbed", []), ("killed twice", KILLS)):
            print(f"=== {name}", flush=True)
            given = {"name": name.replace(" ", "_"), "model": str(model), "output_dir": folder}
            runs.append(losses(load_recipe(ROOT / "recipes/tiny.yaml", overrides=SETTINGS, replace=given), kills))
    print("step  loss, undisturbed     loss, killed twice")
    for whole, killed in zip(*runs, strict=True):
        print(f"{whole.step:4}  {whole.loss:<20.17g}  {killed.loss:<20.17g}")
    is_equal = all(
        (one.loss, one.reward, one.grad_norm) == (two.loss, two.reward, two.grad_norm)
        for one, two in zip(*runs, strict=True)
    )
    print("losses, rewards and gradient norms are " + ("equal, bit for bit" if is_equal else "DIFFERENT"))
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
