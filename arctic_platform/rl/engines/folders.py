"""Folders that are there whole or not at all: filled under a temporary name, flushed, then renamed.

    .NAME.arctic-TOKEN.part    being filled
    .NAME.arctic-TOKEN.old     what NAME was, while a new one takes its place
    .NAME.arctic-TOKEN.gone    being deleted

The process at work on one holds a lock on it (flock), which ends with the process. So what a dead one left is told from
what a living one works on, and the next writer in the same parent tidies up: an `old` whose NAME is missing gets its
name back, everything else is deleted. Names of any other form are never touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from arctic_platform.errors import ArcticError, CheckpointError

WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.arctic-[0-9a-f]{8}\.(?P<state>part|old|gone)")
_SHARD = re.compile(r".+-\d{5}-of-\d{5}\.safetensors")


class Draft:
    """A folder in the making. An error while it is filled is kept and raised when the folder is to take its place.

    So ranks that fill one folder in collective calls all come to the end of them, whatever the disk of one says.

    Args:
        path: where it goes. is_writer: false on the ranks that take part without writing; nothing is done there then.
        sign: a file without which what is at `path` may not be replaced.
    """

    def __init__(self, path: Path, *, is_writer: bool = True, sign: str | None = None) -> None:
        self.path = path.expanduser().resolve()
        self.is_writer = is_writer
        self.sign = sign
        self.error: Exception | None = None
        self._part: Path | None = None
        self._lock: int | None = None

    @property
    def part(self) -> Path:
        """The folder that is being filled."""
        assert self._part is not None
        return self._part

    def begin(self) -> None:
        """Make the folder, once it is clear that the one in its place, if any, may be replaced.

        Raises CheckpointError.
        """
        if not self.is_writer:
            return
        try:
            self._check_replaceable(None)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            sweep(self.path.parent)
            self._part, self._lock = _make_locked(self.path)
        except CheckpointError:
            raise
        except WRITE_ERRORS as error:
            raise self._failed(error) from error

    def attempt(self, function: Callable[..., object], *args: Any) -> None:
        """Call it, if this process writes and nothing failed yet; what it raises is kept for `put_in_place`.

        Whatever that is: other ranks are in collectives that this one must come to as well.
        """
        if not self.is_writer or self.error is not None:
            return
        try:
            function(*args)
        except Exception as error:
            self.error = error

    def check(self) -> None:
        """Raise what failed so far, CheckpointError for a fault of the disk."""
        if isinstance(self.error, WRITE_ERRORS) and not isinstance(self.error, ArcticError):
            raise self._failed(self.error) from self.error
        if self.error is not None:
            raise self.error

    def put_in_place(self) -> None:
        """Flush the folder and give it its name. Raises CheckpointError, and what was there before stays."""
        if not self.is_writer:
            return
        self.check()
        try:
            _flush(self.part)
            self._check_replaceable({file.name for file in self.part.iterdir()})
            _replace(self.path, self.part)
        except CheckpointError:
            raise
        except WRITE_ERRORS as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Delete what did not come to its place. Closing twice is fine."""
        if self._part is not None and self._part.is_dir():
            shutil.rmtree(self._part, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
        self._part = self._lock = None

    def _check_replaceable(self, written: set[str] | None) -> None:
        """written: the names that take the place of the old ones, where they are known."""
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError(f"{self.path} is a file; choose another folder")
        found = {file.name for file in self.path.iterdir()} if self.path.is_dir() else set()
        expected = found if written is None else written
        if self.sign is not None and self.sign not in found:
            expected = set()
        foreign = sorted(name for name in found - expected if not _SHARD.fullmatch(name))
        if foreign:
            raise CheckpointError(
                f"{self.path} already holds {foreign[0]!r}, which this call would not write; choose another folder"
            )

    def _failed(self, error: Exception) -> CheckpointError:
        return CheckpointError(f"cannot write {self.path}: {reason(error)}; free space or choose another folder")


@contextlib.contextmanager
def writing(path: Path) -> Generator[Draft]:
    """A folder that one process fills by itself. Raises CheckpointError; what was there before stays then."""
    draft = Draft(path)
    draft.begin()
    try:
        yield draft
        draft.put_in_place()
    finally:
        draft.close()


def remove(folder: Path) -> None:
    """Delete a folder so that it is never seen half deleted. Raises OSError when it has to stay."""
    gone = _named(folder, "gone")
    with _holding(folder):
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def displaced(parent: Path) -> dict[str, Path]:
    """By name, what stood there before a crash came between taking it away and putting the new folder there."""
    found = [(_LEFTOVER.fullmatch(folder.name), folder) for folder in _leftovers(parent)]
    olds = {match["name"]: folder for match, folder in found if match is not None and match["state"] == "old"}
    return {name: folder for name, folder in olds.items() if not (parent / name).exists()}


def sweep(parent: Path) -> None:
    """Tidy up behind processes that died in the middle; what cannot be tidied stays."""
    lost = {folder: parent / name for name, folder in displaced(parent).items()}
    for folder in _leftovers(parent):
        with contextlib.suppress(OSError), _holding(folder) as is_held:
            if not is_held:
                continue
            if folder in lost:
                folder.rename(lost[folder])
            else:
                shutil.rmtree(folder, ignore_errors=True)


def reason(error: Exception) -> str:
    """An error in one line."""
    text = getattr(error, "strerror", None) or str(error)
    return text.strip().splitlines()[0] if text.strip() else type(error).__name__


def _leftovers(parent: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        found = sorted(file for file in parent.iterdir() if _LEFTOVER.fullmatch(file.name))
        return [file for file in found if file.is_dir() and not file.is_symlink()]
    return []


def _named(path: Path, state: str) -> Path:
    found = _LEFTOVER.fullmatch(path.name)
    name = found["name"] if found else path.name
    return path.parent / f".{name}.arctic-{uuid.uuid4().hex[:8]}.{state}"


def _make_locked(path: Path) -> tuple[Path, int | None]:
    """A new empty folder and the lock on it. Between the two a sweep may take the folder away; then another is made."""
    while True:
        part = _named(path, "part")
        part.mkdir()
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            lock = _lock(part)
            if part.is_dir():
                return part, lock


@contextlib.contextmanager
def _holding(folder: Path) -> Generator[bool]:
    """Whether this process could lock the folder; it is let go afterwards."""
    try:
        lock = _lock(folder)
    except BlockingIOError:
        lock = None
    try:
        yield lock is not None
    finally:
        if lock is not None:
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """A handle that holds the folder; none where the file system has no locks. BlockingIOError: another holds it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return handle


def _flush(folder: Path) -> None:
    """Make the content durable before the rename makes it visible."""
    for file in [*folder.rglob("*"), folder]:
        _sync(file)


def _replace(path: Path, part: Path) -> None:
    if path.exists():
        spare = _named(path, "old")
        with _holding(path):
            path.rename(spare)
            try:
                part.rename(path)
            except OSError:
                spare.rename(path)
                raise
            _sync(path.parent)
            gone = spare.with_suffix(".gone")
            spare.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
    else:
        part.rename(path)
    _sync(path.parent)


def _sync(file: Path) -> None:
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
