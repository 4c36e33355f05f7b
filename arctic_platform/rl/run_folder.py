"""The folder of a run: what it holds, written as the run goes and read back to resume and to report.

runs/NAME/
  config.yaml          the recipe, every default written out
  metrics.jsonl        one StepRecord per step, flushed at once
  evaluations.jsonl    one Evaluation per evaluation, with every answer
  restarts.jsonl       one Restart per lost process or server
  rollouts_first.json  the rollouts of the first step; rollouts_last.json those of the newest
  checkpoints/step-N/  to resume from
  model/               the trained model, a Hugging Face folder
  summary.json         written when the run is complete
  report.html, reward_curve.png
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from arctic_platform.errors import ConfigError, InputError
from arctic_platform.rl.config import CLIENT_FIELDS
from arctic_platform.rl.recipe import Recipe, load_recipe
from arctic_platform.rl.records import Answer, BatchRecord, Evaluation, Restart, RolloutRecord, StepRecord, Summary

# A resumed run may differ in these: they do not change what the steps already done have computed.
MAY_CHANGE = (
    "num_steps",
    "checkpoint_every",
    "keep_checkpoints",
    "max_restarts",
    "side_by_side_repeats",
    "output_dir",
)
# Of the client: which processes compute, and how weights travel between them.
CLIENT_MAY_CHANGE = (
    *CLIENT_FIELDS,
    "training_engine",
    "ranks",
    "fsdp",
    "deepspeed",
    "colocate",
    "weight_sync",
    "cuda_ipc_weight_sync",
    "low_memory_weight_sync",
)


class RunFolder:
    """Reads and writes one run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"

    @classmethod
    def start(cls, recipe: Recipe, *, fresh: bool = False) -> RunFolder:
        """The recipe's folder, made if needed; `fresh` removes what an earlier run left in it.

        Raises ConfigError when the folder cannot be made, or holds a run with other settings or what is no run.
        """
        run = cls(recipe.folder)
        if run.path.exists():
            run._check_is_run()
            if fresh:
                shutil.rmtree(run.path)
            else:
                run._check_same_settings(recipe)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            (run.path / "config.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f'"{run.path}" cannot be written ({error.strerror}); choose another folder with --output-dir'
            ) from error
        return run

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """An existing run; raises InputError when `path` is none."""
        run = cls(Path(path))
        if not (run.path / "config.yaml").is_file():
            raise InputError(f'"{path}" is not a run: it holds no config.yaml; give a folder such as runs/tiny')
        return run

    def _check_is_run(self) -> None:
        if not self.path.is_dir() or (any(self.path.iterdir()) and not (self.path / "config.yaml").is_file()):
            raise ConfigError(f'"{self.path}" exists and is not a run; choose another with --name or --output-dir')

    def _check_same_settings(self, recipe: Recipe) -> None:
        if not self.evaluations() and not self.has_checkpoint():
            return
        before, now = _fixed_settings(self._settings_before()), _fixed_settings(recipe)
        for key in now:
            if before.get(key) != now[key]:
                was, given = _first_difference(key, before.get(key), now[key])
                raise ConfigError(
                    f'"{self.path}" holds a run with {was}, now {given}; '
                    "start anew with --fresh, or give this run a name of its own with --name"
                )

    def _settings_before(self) -> Recipe:
        try:
            return self.recipe()
        except ConfigError as error:
            raise ConfigError(
                f'"{self.path}" holds a run that cannot go on, its config.yaml is refused ({error}); '
                "start anew with --fresh"
            ) from error

    def recipe(self) -> Recipe:
        """The recipe as it ran."""
        return load_recipe(self.path / "config.yaml")

    def has_checkpoint(self) -> bool:
        """True when there is something to resume from, if only what a crash left of replacing it."""
        return any(self.checkpoints.glob("step-*")) or any(self.checkpoints.glob(".step-*.old"))

    def checkpoint_step(self) -> int:
        """The newest step that can be resumed from; 0 is the beginning."""
        return max((int(folder.name.removeprefix("step-")) for folder in self.checkpoints.glob("step-*")), default=0)

    def rewind(self, step: int) -> None:
        """Forget the records of steps after `step`, which will be done again."""
        for name in ("metrics.jsonl", "evaluations.jsonl"):
            with self._reading(name):
                kept = [line for line in self._lines(name) if line["step"] <= step]
            _write_whole(self.path / name, "".join(json.dumps(line) + "\n" for line in kept))
        (self.path / "summary.json").unlink(missing_ok=True)

    def append_step(self, record: StepRecord) -> None:
        """Add one step to metrics.jsonl."""
        self._append("metrics.jsonl", asdict(record))

    def append_evaluation(self, evaluation: Evaluation) -> None:
        """Add one evaluation to evaluations.jsonl."""
        self._append("evaluations.jsonl", asdict(evaluation) | {"accuracy": evaluation.accuracy})

    def append_restart(self, restart: Restart) -> None:
        """Add one restart to restarts.jsonl."""
        self._append("restarts.jsonl", asdict(restart))

    def write_batch(self, batch: BatchRecord) -> None:
        """Keep the rollouts of a step: of the first one for good, of every one until the next."""
        text = json.dumps(asdict(batch))
        for which in ("first", "last") if batch.step == 1 else ("last",):
            _write_whole(self.path / f"rollouts_{which}.json", text)

    def write_summary(self, summary: Summary) -> None:
        """Say that the run is complete."""
        _write_whole(self.path / "summary.json", json.dumps(asdict(summary), indent=2) + "\n")

    def steps(self) -> list[StepRecord]:
        """All steps done so far."""
        with self._reading("metrics.jsonl"):
            return [StepRecord(**line) for line in self._lines("metrics.jsonl")]

    def evaluations(self) -> list[Evaluation]:
        """All evaluations so far, in order of their step."""
        with self._reading("evaluations.jsonl"):
            return [
                Evaluation(line["step"], line["seconds"], [Answer(**answer) for answer in line["answers"]])
                for line in self._lines("evaluations.jsonl")
            ]

    def restarts(self) -> list[Restart]:
        """All restarts of the run so far."""
        with self._reading("restarts.jsonl"):
            return [Restart(**line) for line in self._lines("restarts.jsonl")]

    def batch(self, which: str) -> BatchRecord | None:
        """The rollouts of the `first` or the `last` step, when there are any."""
        file = self.path / f"rollouts_{which}.json"
        if not file.is_file():
            return None
        with self._reading(file.name):
            data = json.loads(file.read_text("utf-8"))
            return BatchRecord(**data | {"rollouts": [RolloutRecord(**rollout) for rollout in data["rollouts"]]})

    def summary(self) -> Summary | None:
        """How the run ended, when it is complete."""
        file = self.path / "summary.json"
        with self._reading(file.name):
            return Summary(**json.loads(file.read_text("utf-8"))) if file.is_file() else None

    @contextmanager
    def _reading(self, name: str) -> Generator[None]:
        """What cannot be understood inside is a fault of the file `name`: an InputError that says so."""
        try:
            yield
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f'"{self.path / name}" is damaged or of another version ({error}); start the run anew with --fresh'
            ) from error

    def _append(self, name: str, line: dict[str, Any]) -> None:
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _lines(self, name: str) -> list[dict[str, Any]]:
        """The whole lines of a file; one that a crash cut off is left out."""
        file = self.path / name
        text = file.read_text("utf-8") if file.is_file() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _write_whole(file: Path, text: str) -> None:
    """Replace a file in one step, so that a reader never sees half of it."""
    scratch = file.with_name(f".{file.name}.part")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(file)


def _fixed_settings(recipe: Recipe) -> dict[str, Any]:
    """What must not change between the parts of a run; where it is computed may.

    The number of held-out questions decides the training ones.
    """
    settings = {key: value for key, value in yaml.safe_load(recipe.to_yaml()).items() if key not in MAY_CHANGE}
    settings["client"] = {key: value for key, value in settings["client"].items() if key not in CLIENT_MAY_CHANGE}
    return settings | {"eval": {"num_questions": settings["eval"]["num_questions"]}}


def _first_difference(key: str, before: Any, now: Any) -> tuple[str, str]:
    """`a.b=1` of both sides, at the first leaf where they differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        for inner in [*now, *before]:
            if before.get(inner) != now.get(inner):
                return _first_difference(f"{key}.{inner}", before.get(inner), now.get(inner))
    return f"{key}={before}", f"{key}={now}"
