"""Which mechanism a sync uses, and its two ends.

A mechanism that was asked for by name is used, or the sync fails. Without a name it is shared memory, and the
connection itself where that cannot be had: on either side, with a line in both logs.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

from arctic_platform.errors import WeightSyncError
from arctic_platform.rl.weight_sync.buckets import Lane
from arctic_platform.rl.weight_sync.collective import CollectiveReceiverEnd, CollectiveSenderEnd, backend_of
from arctic_platform.rl.weight_sync.cuda_ipc import CudaReceiverEnd, CudaSenderEnd
from arctic_platform.rl.weight_sync.peer import Peer
from arctic_platform.rl.weight_sync.shared_memory import Ring, SharedReceiverEnd, SharedSenderEnd
from arctic_platform.rl.weight_sync.stream import StreamEnd
from arctic_platform.rl.weight_sync.terms import Terms

logger = logging.getLogger("arctic_platform.rl.weight_sync")


class ReceiverEnd(Protocol):
    """`fields` travel to the sender, whose own come back in `ready`."""

    fields: dict[str, Any]

    def open(self, ready: dict[str, Any]) -> Lane:
        """After the sender has said that it is ready."""

    def close(self) -> None:
        """What was only needed to open the lane."""


class SenderEnd(Protocol):
    """`fields` travel to the receiver."""

    fields: dict[str, Any]

    def open(self) -> Lane:
        """After `ready` has been said."""

    def close(self) -> None:
        """What was only needed to open the lane."""


def open_receiver_lane(
    peer: Peer, terms: Terms, *, asked: str | None, sender_device: str, ring: RingHolder, agreed: dict[str, Any]
) -> tuple[Lane, str, str]:
    """The lane, its mechanism, and why it is no other.

    agreed: what else the sender is told. ring: made when it is needed.
    """
    mechanism, note = asked or "shared_memory", ""
    try:
        end = _receiver_end(mechanism, peer, terms, sender_device, ring)
    except WeightSyncError as error:
        if asked is not None:
            raise
        mechanism, note, end = "stream", str(error), StreamEnd(peer, terms.bucket_bytes)
    try:
        peer.send("agreed", mechanism=mechanism, note=note, lane=end.fields, **agreed)
        ready = peer.receive("ready")
        if ready["mechanism"] == mechanism:
            lane = end.open(ready)
        else:
            mechanism, note = "stream", str(ready["note"])
            lane = StreamEnd(peer, terms.bucket_bytes).open()
    finally:
        end.close()
    _tell(note)
    return lane, mechanism, note


def open_sender_lane(peer: Peer, terms: Terms, *, asked: str | None, agreed: dict[str, Any]) -> tuple[Lane, str, str]:
    """The same from the other side. agreed: the receiver's message."""
    mechanism, note = str(agreed["mechanism"]), str(agreed["note"])
    try:
        end = _sender_end(mechanism, peer, terms, agreed["lane"])
    except WeightSyncError as error:
        if asked is not None:
            raise
        mechanism, note, end = "stream", str(error), StreamEnd(peer, terms.bucket_bytes)
    try:
        peer.send("ready", mechanism=mechanism, note=note, **end.fields)
        lane = end.open()
    finally:
        end.close()
    _tell(note)
    return lane, mechanism, note


class RingHolder:
    """The receiver's ring, which outlives a sync."""

    def __init__(self) -> None:
        self._ring: Ring | None = None

    def get(self, bucket_bytes: int) -> Ring:
        """The same one as long as it fits. Raises WeightSyncError where there is no such memory."""
        if self._ring is None or self._ring.bucket_bytes != bucket_bytes:
            self.close()
            self._ring = Ring(bucket_bytes)
        return self._ring

    def close(self) -> None:
        """Give its memory back."""
        if self._ring is not None:
            self._ring.close()
        self._ring = None


def _receiver_end(mechanism: str, peer: Peer, terms: Terms, sender_device: str, ring: RingHolder) -> ReceiverEnd:
    match mechanism:
        case "shared_memory":
            return SharedReceiverEnd(ring.get(terms.bucket_bytes), terms.timeout_seconds)
        case "collective":
            return CollectiveReceiverEnd(peer, terms, backend_of(sender_device, terms.device.type))
        case "cuda_ipc":
            return CudaReceiverEnd(sender_device, terms.device.type)
        case "stream":
            return StreamEnd(peer, terms.bucket_bytes)
    raise WeightSyncError(f"there is no mechanism {mechanism!r}; choose shared_memory, collective, cuda_ipc or stream")


def _sender_end(mechanism: str, peer: Peer, terms: Terms, fields: dict[str, Any]) -> SenderEnd:
    match mechanism:
        case "shared_memory":
            return SharedSenderEnd(str(fields["name"]), int(fields["num_bytes"]), terms.timeout_seconds)
        case "collective":
            return CollectiveSenderEnd(peer, terms, int(fields["port"]), str(fields["backend"]))
        case "cuda_ipc":
            return CudaSenderEnd(terms.device, terms.bucket_bytes)
        case "stream":
            return StreamEnd(peer, terms.bucket_bytes)
    raise WeightSyncError(f"the receiver wants {mechanism!r}, which this sender does not know")


def _tell(note: str) -> None:
    if note:
        logger.warning("[weight-sync] %s; the weights go over the connection instead", note)
