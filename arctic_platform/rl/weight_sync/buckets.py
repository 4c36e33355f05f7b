"""Tensors in buckets: several small ones share one, a large one is cut.

    tensors   |aaaaaaaa|b|c|dddddddddddddd|
    buckets   |aaaaaa|  |aa b c dd|  |dddddd| ...

A header says which bytes of which tensors a bucket holds; the lane moves the bucket. The receiver takes the bytes of
each tensor only in their order, so that a bucket which is lost, or comes twice, is noticed when it happens, and digests
what it stored, where it stored it.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from arctic_platform.errors import WeightSyncError
from arctic_platform.rl.weight_sync.base import (
    BLOCK_BYTES,
    Manifest,
    RunningDigest,
    TensorSpec,
    bytes_of,
    copy_bytes,
    digest,
)
from arctic_platform.rl.weight_sync.delta import DeltaBase
from arctic_platform.rl.weight_sync.names import Mapping
from arctic_platform.rl.weight_sync.peer import Peer

ALIGNMENT = 64
SLOTS_PER_BUCKET = 2
SHARE_OF_NAMES = 8
"""This part of a bucket is left for what a side holds beside its slots: names, places, digests, messages."""


class Lane(Protocol):
    """How full slots get from one process to the other. Each side holds one end."""

    @property
    def slots(self) -> Sequence[Tensor]:
        """[N] uint8 each, of one size, on any device."""

    def put(self, slot: int, num_bytes: int) -> None:
        """The sender has filled the slot and sent its header."""

    def take(self, slot: int, num_bytes: int) -> None:
        """The receiver has read the header: afterwards the bytes are in its slot."""

    def release(self, slot: int) -> None:
        """The receiver has copied everything out of its slot."""

    def close(self) -> None:
        """On every path; not twice."""


def slot_bytes(bucket_bytes: int) -> int:
    """Of each slot, so that a side needs no more extra memory than `bucket_bytes`."""
    return max((bucket_bytes - bucket_bytes // SHARE_OF_NAMES) // SLOTS_PER_BUCKET // ALIGNMENT, 1) * ALIGNMENT


def host_slots(bucket_bytes: int) -> list[Tensor]:
    """Memory of this process alone, which the system gets back with the last of them."""
    size = slot_bytes(bucket_bytes)
    mapped = mmap.mmap(-1, size * SLOTS_PER_BUCKET, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return list(torch.frombuffer(mapped, dtype=torch.uint8).split(size))


class Outbox:
    """The sender's side: `add` every tensor of the manifest in any order, then `finish`."""

    def __init__(self, peer: Peer, lane: Lane, manifest: Manifest) -> None:
        self.num_bytes = 0
        self._peer, self._lane = peer, lane
        self._specs = manifest.specs
        self._index = {name: number for number, name in enumerate(manifest.specs)}
        self._digests: dict[str, int] = {}
        self._free = list(range(len(lane.slots)))
        self._slot: int | None = None
        self._used = 0
        self._pieces: list[tuple[int, int, int, int]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Its bytes, as soon as they fill a slot. The tensor may change afterwards."""
        self._check(name, tensor)
        flat, done = bytes_of(tensor), 0
        digest = RunningDigest(flat)
        while True:
            slot = self._open_slot()
            num = min(flat.numel() - done, slot.numel() - self._used)
            self._pieces.append((self._index[name], done, self._used, num))
            for start in range(0, num, BLOCK_BYTES):
                step = min(BLOCK_BYTES, num - start)
                digest.advance(done + start + step)  # First: it reads memory faster than a copy does.
                copy_bytes(slot, self._used + start, flat, done + start, step)
            done += num
            self._used += -(-num // ALIGNMENT) * ALIGNMENT
            if done == flat.numel():
                break
            self._flush()
        self.num_bytes += done
        self._digests[name] = digest.finish()

    def finish(self) -> dict[str, int]:
        """Digests by name, after the receiver has taken the last bucket."""
        if missing := [name for name in self._specs if name not in self._digests]:
            raise WeightSyncError(
                f"{missing[0]!r} is in the manifest and was never sent ({len(missing)} of {len(self._specs)} tensors)"
            )
        self._flush()
        while len(self._free) < len(self._lane.slots):
            self._wait_for_a_slot()
        return self._digests

    def _check(self, name: str, tensor: Tensor) -> None:
        found = TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if name in self._digests:
            raise WeightSyncError(f"{name!r} came twice; each tensor is sent once")
        if self._specs.get(name) != found:
            raise WeightSyncError(f"{name!r} is {found}, which is not what the manifest says: {self._specs.get(name)}")

    def _open_slot(self) -> Tensor:
        if self._slot is not None and self._used >= self._lane.slots[self._slot].numel():
            self._flush()
        if self._slot is None:
            if not self._free:
                self._wait_for_a_slot()
            self._slot = self._free.pop(0)
        return self._lane.slots[self._slot]

    def _flush(self) -> None:
        if self._slot is None:
            return
        self._peer.send("bucket", slot=self._slot, num_bytes=self._used, pieces=self._pieces)
        self._lane.put(self._slot, self._used)
        self._slot, self._used, self._pieces = None, 0, []

    def _wait_for_a_slot(self) -> None:
        self._free.append(int(self._peer.receive("taken")["slot"]))


class Arrival:
    """One tensor of the sender, filled from its first byte to its last, in the receiver's tensors that it is for.

    A tensor that lies there in one piece is filled by bytes and digested on the way. One that is cut or turned is
    written element by element, and digested as a whole from a copy.
    """

    def __init__(self, name: str, mapping: Mapping, held: dict[str, Tensor]) -> None:
        """held: the receiver's tensors, or its second copy of them, by its names."""
        spec = mapping.sender.specs[name]
        self.name = name
        self._mapping, self._held = mapping, held
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        self._num_bytes = spec.num_bytes
        self._places = mapping.places(held, name)
        self._flat = bytes_of(self._places[0]) if self._places and self._places[0].is_contiguous() else None
        self._digest = RunningDigest(self._flat) if self._flat is not None else None
        self._done = 0
        self._is_started = False

    def add(self, offset: int, data: Tensor) -> None:
        """data: [N] uint8. Raises WeightSyncError for bytes that do not follow the last ones."""
        num = data.numel()
        if offset != self._done or offset + num > self._num_bytes or (self._is_started and not num):
            raise WeightSyncError(
                f"bytes {offset} to {offset + num} of {self.name!r} arrived where byte {self._done} of "
                f"{self._num_bytes} was next: a bucket was lost, or came twice"
            )
        self._is_started = True
        if self._flat is None or self._digest is None:
            size = self._dtype.itemsize
            if offset % size or num % size:
                raise WeightSyncError(f"{self.name!r} was cut within an element of {self._dtype}")
            self._mapping.write(self._held, self.name, data.view(self._dtype), offset // size)
        else:
            for start in range(0, num, BLOCK_BYTES):
                step = min(BLOCK_BYTES, num - start)
                copy_bytes(self._flat, offset + start, data, start, step)
                self._digest.advance(offset + start + step)
        self._done += num

    def finish(self) -> list[int]:
        """Digests of what is held, one for each place. Raises WeightSyncError if bytes are missing."""
        if self._done < self._num_bytes or not self._is_started:
            raise WeightSyncError(
                f"{self._done} of {self._num_bytes} bytes of {self.name!r} arrived: a bucket was lost"
            )
        if self._digest is None:
            return [digest(self._mapping.read_back(self._held, self.name))]
        first, *rest = self._places
        for place in rest:
            place.detach().copy_(first.detach())
        return [self._digest.finish(), *map(digest, rest)]


def receive_buckets(peer: Peer, lane: Lane, arrivals: Sequence[Arrival]) -> tuple[dict[str, int], int]:
    """Fill the arrivals until the sender's digests come; return those, and how many bytes came."""
    num_received = 0
    while True:
        message = peer.receive("bucket", "digests")
        if message["kind"] == "digests":
            return message["digests"], num_received
        slot, num_bytes = int(message["slot"]), int(message["num_bytes"])
        if not 0 <= slot < len(lane.slots) or not 0 <= num_bytes <= lane.slots[slot].numel():
            raise WeightSyncError(f"a bucket of {num_bytes} bytes in slot {slot} is not what was agreed on")
        lane.take(slot, num_bytes)
        for index, offset, start, num in message["pieces"]:
            if not 0 <= start <= start + num <= num_bytes or not 0 <= index < len(arrivals):
                raise WeightSyncError(
                    f"a bucket of {num_bytes} bytes has a piece of tensor {index} from {start} to {start + num}"
                )
            arrivals[index].add(offset, lane.slots[slot][start : start + num])
            num_received += num
        lane.release(slot)
        peer.send("taken", slot=slot)


def receive_changes(peer: Peer, base: DeltaBase, arrivals: Sequence[Arrival]) -> tuple[dict[str, int], int]:
    """The same for tensors that come as changes against `base`."""
    by_name, num_received = {one.name: one for one in arrivals}, 0
    while True:
        message = peer.receive("change", "digests")
        if message["kind"] == "digests":
            return message["digests"], num_received
        name, payload = str(message["name"]), bytearray(int(message["num_bytes"]))
        if name not in by_name:
            raise WeightSyncError(f"{name!r} was sent, and is not among the names that were agreed on")
        peer.receive_into(memoryview(payload))
        by_name[name].add(0, bytes_of(base.apply(name, memoryview(payload))))
        num_received += len(payload)


def compare_digests(arrivals: Sequence[Arrival], sent: dict[str, int]) -> None:
    """Raises WeightSyncError unless every tensor holds what was sent."""
    wrong = [one.name for one in arrivals if any(found != sent.get(one.name) for found in one.finish())]
    if wrong:
        raise WeightSyncError(
            f"digests differ for {wrong[0]!r} ({len(wrong)} of {len(arrivals)} tensors): what was stored is not what "
            "was sent, or the weights changed meanwhile; call sync_weights() again while no step is running"
        )
