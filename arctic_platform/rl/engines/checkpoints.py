"""Folders that are there whole or not at all: written under a temporary name, flushed, then renamed.

A checkpoint is a Hugging Face folder (it loads with plain `from_pretrained`) with two files more:
`trainer.pt` (optimizer and random state) and `trainer.json` (step, versions, the caller's own state, file sizes).
"""

import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from arctic_platform.errors import CheckpointError

STATE_FILE = "trainer.json"
TENSOR_FILE = "trainer.pt"
FORMAT = 1
_ADVICE = "remove it to go on from the one before, or give another"


def write_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a new folder, then put it in the place of `path`.

    A folder that is already there is replaced only if it holds nothing but files that the new one has as well.

    Raises:
        CheckpointError: the folder cannot be written, or holds something else; what was there stays.
    """
    path = path.expanduser().absolute()
    part = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}.part"
    try:
        part.mkdir(parents=True)
        write(part)
        _flush(part)
        _replace(path, part)
    except CheckpointError:
        raise
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {path}: {_reason(error)}; free space or choose another folder") from error
    finally:
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)


def write_state(folder: Path, tensors: dict[str, Any], state: dict[str, Any]) -> None:
    """Add the trainer's files to a folder that already holds the model."""
    torch.save(tensors, folder / TENSOR_FILE)
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    text = json.dumps({"format": FORMAT, **state, "files": sizes}, indent=1)
    (folder / STATE_FILE).write_text(text, encoding="utf-8")


def read_state(folder: Path) -> dict[str, Any]:
    """The content of `trainer.json`, after checking that every file is there in its full size.

    Raises:
        CheckpointError: the folder is no checkpoint, or an incomplete one.
    """
    try:
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        sizes, version = state["files"], state["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} is no checkpoint: {STATE_FILE} is missing or damaged; {_ADVICE}") from error
    if version != FORMAT:
        raise CheckpointError(f"{folder} has checkpoint format {version}, this version reads {FORMAT}; {_ADVICE}")
    for name, size in sizes.items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes of {size}"
            raise CheckpointError(f"{folder} is incomplete: {name} {what}; {_ADVICE}")
    return state


def read_tensors(folder: Path, device: str) -> dict[str, Any]:
    """The content of `trainer.pt`. Raises CheckpointError when it cannot be read."""
    try:
        return torch.load(folder / TENSOR_FILE, map_location=device, weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{folder / TENSOR_FILE} cannot be read: {_reason(error)}; {_ADVICE}") from error


def find_checkpoint(path: Path) -> Path:
    """`path` itself if it is a checkpoint, else the newest one in it. Raises CheckpointError if there is none."""
    path = path.expanduser()
    if (path / STATE_FILE).is_file():
        return path
    found = step_folders(path)
    if not found:
        raise CheckpointError(f"there is no checkpoint in {path}; give the folder that save_checkpoint wrote")
    return found[-1]


def step_folder(parent: Path, step: int) -> Path:
    """Where the checkpoint of a step goes."""
    return parent / f"step-{step:06d}"


def step_folders(parent: Path) -> list[Path]:
    """Checkpoints in `parent`, oldest step first."""
    found = [(_step_of(file.parent), file.parent) for file in parent.glob(f"step-*/{STATE_FILE}")]
    return [folder for step, folder in sorted(item for item in found if item[0] is not None)]


def keep_newest(parent: Path, count: int, run_id: str) -> None:
    """Delete the oldest checkpoints of one run beyond `count`; those of other runs are left alone."""
    mine = [folder for folder in step_folders(parent) if _run_of(folder) == run_id]
    for folder in mine[: max(len(mine) - count, 0)]:
        shutil.rmtree(folder, ignore_errors=True)


def _step_of(folder: Path) -> int | None:
    digits = folder.name.removeprefix("step-")
    return int(digits) if digits.isdecimal() else None


def _run_of(folder: Path) -> str | None:
    try:
        return read_state(folder).get("run_id")
    except CheckpointError:
        return None


def _flush(folder: Path) -> None:
    """Make the content durable before the rename makes it visible."""
    for file in [*folder.rglob("*"), folder]:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _replace(path: Path, part: Path) -> None:
    if path.exists():
        old = {file.name for file in path.iterdir()} if path.is_dir() else {path.name}
        foreign = sorted(old - {file.name for file in part.iterdir()})
        if foreign:
            raise CheckpointError(
                f"{path} already holds {foreign[0]!r}, which this call would not write; choose another"
            )
        spare = part.with_suffix(".old")
        path.rename(spare)
        try:
            part.rename(path)
        except OSError:
            spare.rename(path)
            raise
        shutil.rmtree(spare, ignore_errors=True)
    else:
        part.rename(path)
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _reason(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error)
    return text.strip().splitlines()[0] if text.strip() else type(error).__name__
