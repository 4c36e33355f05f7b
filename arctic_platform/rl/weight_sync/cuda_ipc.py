"""Weights through GPU memory that both processes have open.

The sender's slots are opened once per sync by the receiver, and are used again for every bucket: one handle for each,
however large the model is. Handles travel as the fields of torch's own reduction, as JSON; nothing is unpickled. The
GPU goes by its UUID, because an index means another device in a process that sees others.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from arctic_platform.errors import WeightSyncError
from arctic_platform.rl.weight_sync.buckets import SLOTS_PER_BUCKET, slot_bytes


@dataclass(frozen=True)
class CudaHandle:
    """A contiguous [N] uint8 tensor of another process, in the words of `torch.multiprocessing.reductions`.

    `device_uuid`: of the GPU. `num_bytes`, `offset`: within the storage. The rest is CUDA's and torch's, base64.
    """

    device_uuid: str
    num_bytes: int
    offset: int
    storage_handle: str
    storage_size_bytes: int
    storage_offset_bytes: int
    ref_counter_handle: str
    ref_counter_offset: int
    event_handle: str
    event_sync_required: bool

    def to_json(self) -> dict[str, Any]:
        """Its fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> CudaHandle:
        """Raises WeightSyncError for fields that are not exactly these, or not of their types."""
        names = dict(cls.__annotations__)
        if fields.keys() != names.keys() or any(type(fields[name]).__name__ != kind for name, kind in names.items()):
            raise WeightSyncError(f"a CUDA handle has the fields {', '.join(names)}; given {sorted(fields)}")
        return cls(**fields)

    @classmethod
    def of_reduction(cls, arguments: tuple[Any, ...], device_uuid: str) -> CudaHandle:
        """arguments: what `reduce_tensor` returns for `rebuild_cuda_tensor`."""
        _, size, _, offset, _, _, _, handle, storage_size, storage_offset, _, counter, counter_at, event, sync = (
            arguments
        )
        return cls(
            device_uuid, size[0], offset, _text(handle), storage_size, storage_offset, _text(counter), counter_at,
            _text(event), sync,
        )  # fmt: skip

    def arguments(self, device: int) -> tuple[Any, ...]:
        """For `rebuild_cuda_tensor`. device: this process's index of the GPU."""
        return (
            torch.Tensor, torch.Size([self.num_bytes]), (1,), self.offset, torch.storage.TypedStorage, torch.uint8,
            device, _bytes(self.storage_handle), self.storage_size_bytes, self.storage_offset_bytes, False,
            _bytes(self.ref_counter_handle), self.ref_counter_offset, _bytes(self.event_handle),
            self.event_sync_required,
        )  # fmt: skip


class CudaSenderLane:
    """The owner of the slots, which live until the receiver has taken the last bucket."""

    def __init__(self, device: torch.device, bucket_bytes: int) -> None:
        size = slot_bytes(bucket_bytes)
        self.slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(SLOTS_PER_BUCKET)]

    def handles(self) -> list[dict[str, Any]]:
        """What the receiver needs to open the slots."""
        uuid = device_uuid(self.slots[0].device)
        return [CudaHandle.of_reduction(reduce_tensor(slot)[1], uuid).to_json() for slot in self.slots]

    def put(self, slot: int, num_bytes: int) -> None:
        """Copies into the slot are queued until here."""
        torch.cuda.synchronize(self.slots[slot].device)

    def take(self, slot: int, num_bytes: int) -> None:
        """A sender takes nothing."""

    def release(self, slot: int) -> None:
        """A sender takes nothing."""

    def close(self) -> None:
        """Free the slots, and what torch keeps for receivers that have let go of theirs."""
        self.slots = []
        torch.cuda.ipc_collect()


class CudaReceiverLane:
    """The sender's slots, opened here."""

    def __init__(self, handles: list[dict[str, Any]]) -> None:
        opened = [CudaHandle.from_json(fields) for fields in handles]
        self._device = device_index([one.device_uuid for one in opened], device_uuids())
        self.slots: list[Tensor] = [rebuild_cuda_tensor(*one.arguments(self._device)) for one in opened]

    def put(self, slot: int, num_bytes: int) -> None:
        """A receiver puts nothing."""

    def take(self, slot: int, num_bytes: int) -> None:
        """They are there."""

    def release(self, slot: int) -> None:
        """Copies out of the slot are queued until here."""
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Let go of the sender's memory."""
        self.slots = []
        torch.cuda.ipc_collect()


class CudaReceiverEnd:
    """Waits for handles."""

    def __init__(self, sender: str, receiver: str) -> None:
        """Types of the devices. Raises WeightSyncError unless both sides are on a GPU."""
        self.fields: dict[str, Any] = {}
        if not sender == receiver == "cuda":
            raise WeightSyncError(
                f"mechanism=cuda_ipc needs both sides on one GPU; the sender's weights are on {sender}, the receiver's "
                f"on {receiver}: use mechanism=shared_memory"
            )

    def open(self, ready: dict[str, Any]) -> CudaReceiverLane:
        """Open the sender's memory."""
        return CudaReceiverLane(ready["handles"])

    def close(self) -> None:
        """Nothing is held."""


class CudaSenderEnd:
    """Hands out handles of memory on its GPU."""

    def __init__(self, device: torch.device, bucket_bytes: int) -> None:
        self._lane = CudaSenderLane(device, bucket_bytes)
        self.fields: dict[str, Any] = {"handles": self._lane.handles()}

    def open(self) -> CudaSenderLane:
        """Ready since it was made."""
        return self._lane

    def close(self) -> None:
        """The lane has its own end."""


def device_uuids() -> list[str]:
    """Of the GPUs that this process sees, in the order of their indices."""
    return [device_uuid(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]


def device_uuid(device: torch.device) -> str:
    """What the GPU is called in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def device_index(wanted: Sequence[str], seen: Sequence[str]) -> int:
    """Where the one GPU that all of `wanted` name is among those `seen`. Raises WeightSyncError if it is not."""
    if len(set(wanted)) != 1 or wanted[0] not in seen:
        raise WeightSyncError(
            f"the sender's GPU {wanted[0] if wanted else None} is not among those that the receiver sees "
            f"({', '.join(seen) or 'none'}); put both on one GPU, or use mechanism=collective"
        )
    return seen.index(wanted[0])


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
