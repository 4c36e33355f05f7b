"""Checkpoints on disk: what is in one, which there are, and which may go.

step-000040/
  config.json, model.safetensors, ...   a Hugging Face folder; or adapter_config.json, adapter_model.safetensors (PEFT)
  optimizer.safetensors                 exp_avg.NAME, exp_avg_sq.NAME, and master.NAME in half precision
  random.safetensors                    the random state of every rank
  trainer.json                          step, version, run, the caller's state, and size and SHA-256 of each file

No file names an engine's classes or a rank's share of a tensor, so any engine on any number of ranks reads it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any, ClassVar

from arctic_platform.errors import ArcticError, CheckpointError
from arctic_platform.rl.config import StrictModel
from arctic_platform.rl.engines import folders

STATE_FILE = "trainer.json"
FORMAT = 2
_ADVICE = "remove it to go on from the one before, or give another"

logger = logging.getLogger("arctic_platform.rl.checkpoints")


class FileRecord(StrictModel):
    """What a file must be to be whole."""

    error_class: ClassVar[type[ArcticError]] = CheckpointError
    size: int
    sha256: str


class TrainerState(StrictModel):
    """The content of `trainer.json`.

    Attributes:
        optimizer_step: updates that AdamW counted. settings: what the reading job must have alike, by its name.
        engine, num_ranks: who wrote it; the number of ranks decides whose random state is restored.
    """

    error_class: ClassVar[type[ArcticError]] = CheckpointError
    step: int
    version: int
    run_id: str
    optimizer_step: int
    client_state: dict[str, Any]
    settings: dict[str, Any]
    engine: str
    num_ranks: int
    files: dict[str, FileRecord] = {}


def write_state(folder: Path, state: TrainerState) -> None:
    """Add `trainer.json` to a folder that holds everything else."""
    files = {file.name: _record_of(file).model_dump() for file in sorted(folder.iterdir())}
    text = json.dumps({"format": FORMAT, **state.model_dump(), "files": files}, indent=1)
    (folder / STATE_FILE).write_text(text, encoding="utf-8")


def read_state(folder: Path) -> TrainerState:
    """The content of `trainer.json`, after checking that every file is there in its full size.

    Raises:
        CheckpointError: the folder is no checkpoint, or an incomplete one.
    """
    state = _parse(folder)
    for name, record in state.files.items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found != record.size:
            what = "is missing" if found is None else f"has {found} bytes of {record.size}"
            raise CheckpointError(f"{folder} is incomplete: {name} {what}; {_ADVICE}")
    return state


def check_content(folder: Path, state: TrainerState) -> None:
    """Read every file once. Raises CheckpointError for one whose bytes are not those that were written."""
    for name, record in state.files.items():
        try:
            found = _record_of(folder / name)
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be read: {folders.reason(error)}; {_ADVICE}") from error
        if found != record:
            raise CheckpointError(f"{folder} is damaged: the bytes of {name} are not those written; {_ADVICE}")


def find_checkpoint(path: Path) -> Path:
    """`path` itself if it is a checkpoint, else the newest one in it. Raises CheckpointError if there is none.

    Where a crash came while a checkpoint took the place of another, the other one is found beside `path`.
    """
    path = path.expanduser()
    if (path / STATE_FILE).is_file():
        return path
    if path.is_file():
        raise CheckpointError(f"{path} is a file; give the folder that save_checkpoint wrote")
    here = {_step_of(folder): folder for folder in step_folders(path)}
    before = {_step_of(Path(name)): folder for name, folder in folders.displaced(path).items()}
    found = {step: folder for step, folder in (before | here).items() if step is not None}
    if found:
        return found[max(found)]
    displaced = folders.displaced(path.absolute().parent).get(path.name)
    if displaced is not None and (displaced / STATE_FILE).is_file():
        return displaced
    raise CheckpointError(f"there is no checkpoint in {path}; give the folder that save_checkpoint wrote")


def step_folder(parent: Path, step: int) -> Path:
    """Where the checkpoint of a step goes."""
    return parent / f"step-{step:06d}"


def step_folders(parent: Path) -> list[Path]:
    """Checkpoints in `parent`, oldest step first."""
    found = [(_step_of(file.parent), file.parent) for file in parent.glob(f"step-*/{STATE_FILE}")]
    return [folder for step, folder in sorted(item for item in found if item[0] is not None)]


def keep_newest(parent: Path, count: int, run_id: str) -> None:
    """Delete the oldest checkpoints of one run beyond `count`.

    Those of other runs are left alone, and so is one that holds a file which was not written with it.
    """
    mine = [(folder, state) for folder in step_folders(parent) if (state := _state_of_run(folder, run_id))]
    for folder, state in mine[: max(len(mine) - count, 0)]:
        foreign = sorted({file.name for file in folder.iterdir()} - state.files.keys() - {STATE_FILE})
        if foreign:
            logger.warning("%s is kept: it holds %r, which was not written with it", folder, foreign[0])
            continue
        try:
            folders.remove(folder)
        except OSError as error:
            logger.warning("%s cannot be deleted: %s", folder, folders.reason(error))


def _parse(folder: Path) -> TrainerState:
    try:
        data = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        version = data.pop("format")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder} is no checkpoint: {STATE_FILE} is missing or damaged; {_ADVICE}") from error
    if version != FORMAT:
        raise CheckpointError(f"{folder} has checkpoint format {version}, this version reads {FORMAT}; {_ADVICE}")
    try:
        return TrainerState.model_validate(data)
    except CheckpointError as error:
        raise CheckpointError(f"{folder} is no checkpoint: {STATE_FILE} is damaged ({error}); {_ADVICE}") from error


def _record_of(file: Path) -> FileRecord:
    with file.open("rb") as handle:
        return FileRecord(size=file.stat().st_size, sha256=hashlib.file_digest(handle, "sha256").hexdigest())


def _step_of(folder: Path) -> int | None:
    digits = folder.name.removeprefix("step-")
    return int(digits) if folder.name.startswith("step-") and digits.isdecimal() else None


def _state_of_run(folder: Path, run_id: str) -> TrainerState | None:
    """Of a checkpoint that this run wrote here, as far as can be told from `trainer.json` alone."""
    if folder.is_symlink():
        return None
    try:
        state = _parse(folder)
    except CheckpointError:
        return None
    return state if state.run_id == run_id else None
