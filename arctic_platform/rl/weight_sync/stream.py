"""Weights as raw bytes over the control connection: works between machines, needs nothing else."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from arctic_platform.rl.weight_sync.buckets import host_slots
from arctic_platform.rl.weight_sync.peer import Peer


class StreamLane:
    """Either end; the slots are memory of this process."""

    def __init__(self, peer: Peer, bucket_bytes: int) -> None:
        self.slots = host_slots(bucket_bytes)
        self._peer = peer

    def put(self, slot: int, num_bytes: int) -> None:
        """Write the bytes after their header."""
        self._peer.send_bytes(_view(self.slots[slot], num_bytes))

    def take(self, slot: int, num_bytes: int) -> None:
        """Read the bytes after their header."""
        self._peer.receive_into(_view(self.slots[slot], num_bytes))

    def release(self, slot: int) -> None:
        """Nothing to be waited for."""

    def close(self) -> None:
        """Give the memory back."""
        self.slots = []


class StreamEnd:
    """Of either side: there is nothing to agree on."""

    def __init__(self, peer: Peer, bucket_bytes: int) -> None:
        self.fields: dict[str, Any] = {}
        self._peer, self._bucket_bytes = peer, bucket_bytes

    def open(self, ready: dict[str, Any] | None = None) -> StreamLane:
        """The connection is there already."""
        return StreamLane(self._peer, self._bucket_bytes)

    def close(self) -> None:
        """Nothing is held."""


def _view(slot: Tensor, num_bytes: int) -> memoryview:
    return slot[:num_bytes].numpy().data
