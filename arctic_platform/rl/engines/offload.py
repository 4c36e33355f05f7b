"""A trainer that sleeps: its tensors leave the device's memory, for CPU memory or a file, and come back bit for bit.

What moves are storages, not tensors: every parameter, shard, view and tied weight keeps its identity, and only the
memory behind it goes. So whatever holds one, an optimizer, a wrapper of FSDP2 or a compiled graph, holds it still.

    asleep on cpu    storages of the device are empty, their bytes are in CPU memory
    asleep on disk   the bytes are in one safetensors file of this rank, deleted when the trainer wakes; one that a dead
                     process left is deleted by the next that sleeps there
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from arctic_platform.errors import CheckpointError, InputError
from arctic_platform.rl.engines.folders import Draft
from arctic_platform.rl.engines.world import World

Target = Literal["cpu", "disk"]

PIECE_BYTES = 1 << 24
"""Of a file that is written or read; the memory that it takes beside the tensors."""

logger = logging.getLogger("arctic_platform.rl.offload")


class Sleeper(Protocol):
    """An engine that knows whether it sleeps."""

    @property
    def is_asleep(self) -> bool:
        """Whether `sleep` was called and `wake` was not."""


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=Sleeper)


def needs_awake(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A call that an engine refuses while it sleeps."""
    name = getattr(method, "__name__", "it")

    @functools.wraps(method)
    def call(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.is_asleep:
            raise InputError(f"the trainer is asleep; call wake_training() before {name}()")
        return method(self, *args, **kwargs)

    return call


class Offload:
    """The memory of some tensors, while it is somewhere else.

    Args:
        tensors: what moves; those that share memory move once. world: nothing moves on any rank unless all can.
        folder: of the file, for disk; none: where this machine has its temporary files.
    """

    def __init__(self, tensors: Iterable[Tensor], target: Target, world: World, folder: Path | None) -> None:
        self.target = target
        self._memories = _memories_of(tensors)
        self._world = world
        place = folder if folder is not None else Path(tempfile.gettempdir())
        self._store = _InMemory() if target == "cpu" else _OnDisk(place / f"asleep-{world.rank}")

    @property
    def num_bytes(self) -> int:
        """What this rank holds of it all."""
        return sum(memory.num_bytes for memory in self._memories)

    def leave(self) -> None:
        """Copy everything away, then free it. Raises CheckpointError where the disk is full; nothing was freed then."""
        try:
            with self._world.together():
                self._store.keep(self._memories)
        except BaseException:
            self._store.forget()
            raise
        for memory in self._memories:
            memory.free()
        _give_back()

    def come_back(self) -> None:
        """Take memory again and fill it. Where there is not enough of it everything stays away, and a retry works."""
        try:
            with self._world.together():
                for memory in self._memories:
                    memory.take()
                self._store.fill(self._memories)
        except BaseException:
            for memory in self._memories:
                memory.free()
            raise
        for memory in self._memories:
            memory.settle()
        self._store.forget()
        _give_back()


class _InMemory:
    """Copies in CPU memory."""

    def __init__(self) -> None:
        self._copies: list[Tensor] = []

    def keep(self, memories: list[_Memory]) -> None:
        if all(memory.device.type == "cpu" for memory in memories):
            logger.warning("sleep_training(target='cpu') frees nothing: the trainer is in CPU memory; use 'disk'")
        self._copies = [memory.bytes().to("cpu", copy=True) for memory in memories]

    def fill(self, memories: list[_Memory]) -> None:
        for memory, copy in zip(memories, self._copies, strict=True):
            memory.bytes().copy_(copy)

    def forget(self) -> None:
        self._copies = []


class _OnDisk:
    """A safetensors file of one array of bytes per storage, written and read a piece at a time.

    It can be read even if somebody deletes it meanwhile: it stays open. NumPy sees the pieces only, since memory that
    it has once looked at can never be emptied again.
    """

    def __init__(self, path: Path) -> None:
        self._draft = Draft(path)
        self._file: io.BufferedRandom | None = None
        self._start = 0

    def keep(self, memories: list[_Memory]) -> None:
        self._draft.begin()
        self._draft.attempt(self._write, memories)
        self._draft.check()

    def fill(self, memories: list[_Memory]) -> None:
        assert self._file is not None
        self._file.seek(self._start)
        piece = torch.empty(PIECE_BYTES, dtype=torch.uint8)
        for memory in memories:
            for part in memory.bytes().split(PIECE_BYTES):
                if self._file.readinto(memoryview(piece[: len(part)].numpy())) != len(part):
                    raise CheckpointError(
                        f"{self._file.name} was cut while the trainer slept; load_checkpoint() in a new job"
                    )
                part.copy_(piece[: len(part)])

    def forget(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # what could not be written is not wanted any more
                self._file.close()
        self._file = None
        self._draft.close()

    def _write(self, memories: list[_Memory]) -> None:
        header, at = {}, 0
        for number, memory in enumerate(memories):
            size = memory.num_bytes
            header[str(number)] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header).encode()
        self._start = 8 + len(text)
        self._file = out = (self._draft.part / "tensors.safetensors").open("w+b")
        out.write(len(text).to_bytes(8, "little") + text)
        piece = torch.empty(PIECE_BYTES, dtype=torch.uint8)
        for memory in memories:
            for part in memory.bytes().split(PIECE_BYTES):
                out.write(memoryview(piece[: len(part)].copy_(part).numpy()))
        out.flush()


class _Memory:
    """One storage, or tensors over one that cannot be emptied (a mapped file): these get memory of their own."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._storage = tensors[0].untyped_storage()
        self.num_bytes = self._storage.nbytes()
        self.device = tensors[0].device
        self._layouts: list[tuple[Tensor, torch.Size, tuple[int, ...], Any]] = []
        if not self._storage.resizable():
            self._layouts = [(x, x.size(), x.stride(), x.storage_offset()) for x in tensors]

    def bytes(self) -> Tensor:
        """`[num_bytes] uint8`, in the same memory."""
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self._storage)

    def free(self) -> None:
        for tensor, size, *_ in self._layouts:
            tensor.data = tensor.new_empty(()).expand(size)
        if self._layouts:
            self._storage = UntypedStorage(0, device=self.device)
        else:
            self._storage.resize_(0)

    def take(self) -> None:
        """Have memory again, with anything in it."""
        self._storage.resize_(self.num_bytes)

    def settle(self) -> None:
        """Give tensors whose storage was another one this one."""
        for tensor, size, stride, offset in self._layouts:
            tensor.data = tensor.new_empty(0).set_(self._storage, offset, size, stride)


@torch.no_grad()
def _memories_of(tensors: Iterable[Tensor]) -> list[_Memory]:
    """Grouped by storage, so that tied weights, and views into one buffer, move together.

    Shards whose storage cannot be emptied stay: their wrapper holds views of it that are not known here.
    """
    groups: dict[int, list[Tensor]] = {}
    num_staying = 0
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if local is not tensor and not storage.resizable():
            num_staying += 1
        elif storage.nbytes():
            groups.setdefault(storage._cdata, []).append(local)
    if num_staying:
        logger.warning(
            "%d shards stay in memory while the trainer sleeps: their storage cannot be emptied", num_staying
        )
    return [_Memory(group) for group in groups.values()]


def _give_back() -> None:
    """Let the allocators return what is free to the device and to the machine."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def module_tensors(modules: Iterable[torch.nn.Module]) -> Iterator[Tensor]:
    """Parameters and buffers."""
    for module in modules:
        yield from module.parameters()
        yield from module.buffers()
