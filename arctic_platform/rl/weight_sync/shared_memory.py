"""Weights through memory that both processes have mapped.

The receiver makes a ring of slots once and keeps it, so that its pages are paid for once. It has no name in /dev/shm:
the sender gets its file descriptor over a Unix socket, so that nothing is left behind however either side ends, and
the 64 MB that containers often have there do not matter. All pages are there before the first byte is written: memory
that runs out is an error when the ring is made, and never a signal in the middle of a copy.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from arctic_platform.errors import WeightSyncError
from arctic_platform.rl.weight_sync.buckets import SLOTS_PER_BUCKET, slot_bytes

CREDENTIALS = struct.Struct("iII")


class Ring:
    """Memory of its own, `slots` within it, and its descriptor."""

    def __init__(self, bucket_bytes: int) -> None:
        """Raises WeightSyncError where there is no such memory."""
        self.bucket_bytes = bucket_bytes
        self.num_bytes = slot_bytes(bucket_bytes) * SLOTS_PER_BUCKET
        try:
            self.fd = os.memfd_create("weight-sync", os.MFD_CLOEXEC)
        except (OSError, AttributeError) as error:
            raise WeightSyncError(f"this system has no anonymous shared memory ({error})") from error
        try:
            os.posix_fallocate(self.fd, 0, self.num_bytes)
            self.slots = map_slots(self.fd, self.num_bytes)
        except (OSError, ValueError) as error:
            os.close(self.fd)
            raise WeightSyncError(f"{self.num_bytes} bytes of shared memory cannot be had ({error})") from error

    def close(self) -> None:
        """Give the memory back; twice is as good as once."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd, self.slots = -1, []


class SharedLane:
    """Either end: what the sender writes into a slot is what the receiver reads there."""

    def __init__(self, slots: Sequence[Tensor]) -> None:
        self.slots: Sequence[Tensor] = slots

    def put(self, slot: int, num_bytes: int) -> None:
        """It is there already."""

    def take(self, slot: int, num_bytes: int) -> None:
        """It is there already."""

    def release(self, slot: int) -> None:
        """Nothing to be waited for."""

    def close(self) -> None:
        """Unmap, unless the ring keeps it."""
        self.slots = []


class SharedReceiverEnd:
    """Waits for the sender at a Unix socket in the abstract namespace, for one visit."""

    def __init__(self, ring: Ring, timeout_seconds: float) -> None:
        self._ring = ring
        self._timeout_seconds = timeout_seconds
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        name = f"arctic-weight-sync-{secrets.token_hex(16)}"
        self._listener.bind("\0" + name)
        self._listener.listen(1)
        self.fields: dict[str, Any] = {"name": name, "num_bytes": ring.num_bytes}

    def open(self, ready: dict[str, Any]) -> SharedLane:
        """Hand the descriptor to the sender, which has connected."""
        self._listener.settimeout(self._timeout_seconds)
        connection, _ = self._listener.accept()
        with connection:
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
            _, user, _ = CREDENTIALS.unpack(credentials)
            if user != os.getuid():
                raise WeightSyncError(f"user {user} asked for the weights of user {os.getuid()}")
            connection.settimeout(self._timeout_seconds)
            socket.send_fds(connection, [b"ring"], [self._ring.fd])
        return SharedLane(self._ring.slots)

    def close(self) -> None:
        """Nothing listens any more."""
        self._listener.close()


class SharedSenderEnd:
    """Fetches the ring from the receiver."""

    def __init__(self, name: str, num_bytes: int, timeout_seconds: float) -> None:
        """Raises WeightSyncError where the receiver is out of reach: on another machine, or in another container."""
        self.fields: dict[str, Any] = {}
        self._num_bytes = num_bytes
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.settimeout(timeout_seconds)
        try:
            self._connection.connect("\0" + name)
        except OSError as error:
            self._connection.close()
            raise WeightSyncError(f"the sender cannot reach the receiver's shared memory ({error})") from error

    def open(self) -> SharedLane:
        """The ring's slots as this process sees them."""
        _, fds, _, _ = socket.recv_fds(self._connection, 16, 1)
        if not fds:
            raise WeightSyncError("the receiver closed the connection instead of handing out its shared memory")
        try:
            if os.fstat(fds[0]).st_size < self._num_bytes:
                raise WeightSyncError("the receiver's shared memory is smaller than it said")
            return SharedLane(map_slots(fds[0], self._num_bytes))
        finally:
            os.close(fds[0])

    def close(self) -> None:
        """The descriptor has been fetched, or never will be."""
        self._connection.close()


def map_slots(fd: int, num_bytes: int) -> list[Tensor]:
    """Views of the whole; the mapping goes when they do."""
    mapped = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return list(torch.frombuffer(mapped, dtype=torch.uint8).split(num_bytes // SLOTS_PER_BUCKET))
