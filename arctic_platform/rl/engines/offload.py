"""A trainer that sleeps: its tensors leave the device's memory, for CPU memory or a file, and come back bit for bit.

What moves are storages, not tensors: every parameter, shard, view and tied weight keeps its identity, and only the
memory behind it goes. So whatever holds one, an optimizer, a wrapper of FSDP2 or a compiled graph, holds it still.

    asleep on cpu    storages of the device are empty, their bytes are in CPU memory
    asleep on disk   the bytes are in one safetensors file of this rank, deleted when the trainer wakes; one that a dead
                     process left is deleted by the next that sleeps there
"""

from __future__ import annotations

import ctypes
import functools
import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from arctic_platform.errors import InputError
from arctic_platform.rl.engines.folders import Draft
from arctic_platform.rl.engines.world import World

Target = Literal["cpu", "disk"]

PIECE_BYTES = 1 << 24

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
        self._draft: Draft | None = None
        self._copies: Sequence[Tensor] = ()
        if target == "disk":
            place = folder if folder is not None else Path(tempfile.gettempdir())
            self._draft = Draft(place / f"asleep-{world.rank}")

    @property
    def num_bytes(self) -> int:
        """What this rank holds of it all."""
        return sum(memory.num_bytes for memory in self._memories)

    def leave(self) -> None:
        """Copy everything away, then free it. Raises CheckpointError where the disk is full; nothing was freed then."""
        try:
            with self._world.together():
                self._copies = self._written() if self._draft is not None else _copied(self._memories)
        except BaseException:
            self._forget()
            raise
        for memory in self._memories:
            memory.free()
        _give_back()

    def come_back(self) -> None:
        """Take memory again and fill it. Where there is not enough of it everything stays away, and a retry works."""
        try:
            with self._world.together():
                for memory, copy in zip(self._memories, self._copies, strict=True):
                    memory.fill(copy)
        except BaseException:
            for memory in self._memories:
                memory.free()
            raise
        self._forget()

    def _written(self) -> Sequence[Tensor]:
        assert self._draft is not None
        self._draft.begin()
        file = self._draft.part / "tensors.safetensors"
        self._draft.attempt(_write, file, self._memories)
        self._draft.check()
        return _Mapped(file, len(self._memories))

    def _forget(self) -> None:
        self._copies = ()
        if self._draft is not None:
            self._draft.close()


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

    def fill(self, copy: Tensor) -> None:
        self._storage.resize_(self.num_bytes)
        self.bytes().copy_(copy)
        for tensor, size, stride, offset in self._layouts:
            tensor.data = tensor.new_empty(0).set_(self._storage, offset, size, stride)


class _Mapped(Sequence[Tensor]):
    """The tensors of a file, read when asked for; they can be read even if somebody deletes the file."""

    def __init__(self, file: Path, count: int) -> None:
        self._file = safe_open(file, framework="pt", device="cpu")
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: Any) -> Any:
        if not 0 <= at < self._count:
            raise IndexError(at)
        return self._file.get_tensor(str(at))


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


def _copied(memories: list[_Memory]) -> Sequence[Tensor]:
    if all(memory.device.type == "cpu" for memory in memories):
        logger.warning("sleep_training(target='cpu') frees nothing: the trainer is in CPU memory; use target='disk'")
    return [memory.bytes().to("cpu", copy=True) for memory in memories]


def _write(file: Path, memories: list[_Memory]) -> None:
    """A safetensors file of one array of bytes per storage, copied out a piece at a time.

    NumPy sees the pieces only: memory that it has once looked at can never be emptied again.
    """
    header, at = {}, 0
    for number, memory in enumerate(memories):
        header[str(number)] = {"dtype": "U8", "shape": [memory.num_bytes], "data_offsets": [at, at + memory.num_bytes]}
        at += memory.num_bytes
    text = json.dumps(header).encode()
    piece = torch.empty(PIECE_BYTES, dtype=torch.uint8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for memory in memories:
            for part in memory.bytes().split(PIECE_BYTES):
                out.write(memoryview(piece[: len(part)].copy_(part).numpy()))


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
