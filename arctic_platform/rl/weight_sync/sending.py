"""The sender's side of a sync."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from arctic_platform.errors import WeightSyncError
from arctic_platform.rl.weight_sync.base import Manifest, SyncReport, log_agreed
from arctic_platform.rl.weight_sync.buckets import Outbox
from arctic_platform.rl.weight_sync.delta import DeltaBase
from arctic_platform.rl.weight_sync.lanes import open_sender_lane
from arctic_platform.rl.weight_sync.names import Mapping, match
from arctic_platform.rl.weight_sync.offer import PROTOCOL, SyncOffer, read_manifest, told
from arctic_platform.rl.weight_sync.peer import Peer, conversation

Weights = Iterator[tuple[str, Tensor]]


def send_weights(
    offer: SyncOffer | None, manifest: Manifest, weights: Weights, *, version: int, base: DeltaBase | None = None
) -> SyncReport:
    """Give a receiver the weights, as `version`. Blocks while its side runs `Receiver.run`.

    weights: every tensor of the manifest. Iterated to the end whatever happens, because the other ranks of a trainer
    take part in making them. base: what this receiver got last, kept by the caller from sync to sync; with it an offer
    of `delta` gets changes only.

    Raises:
        WeightSyncError: no receiver, or either side failed, with its reason. The receiver keeps its weights, unless
            low_memory wrote over them.
    """
    try:
        if offer is None:
            raise WeightSyncError("there is no receiver to send weights to; open one with open_receiver() first")
        return _Sending(offer, manifest, version, base).run(weights)
    finally:
        follow(weights)


def follow(weights: Weights) -> None:
    """What a rank other than the first does while the first one sends: take part in making the weights."""
    for _ in weights:
        pass


def refuse(offer: SyncOffer, reason: str) -> None:
    """Tell a receiver that nobody will come, so that it does not wait. Raises WeightSyncError if it is gone."""
    peer = connect(offer)
    peer.send("hello", protocol=PROTOCOL, token=offer.token)
    peer.abort(reason)


def connect(offer: SyncOffer) -> Peer:
    """To the receiver. Raises WeightSyncError where nobody listens, or nobody is."""
    try:
        connection = socket.create_connection((offer.host, offer.port), offer.timeout_seconds)
    except OSError as error:
        raise WeightSyncError(
            f"no receiver at {offer.host}:{offer.port} ({error}): it is gone or out of reach, or the offer was used "
            "already; ask for a new one"
        ) from error
    peer = Peer(connection, name="receiver", timeout_seconds=offer.timeout_seconds)
    peer.trust()
    return peer


class _Sending:
    """One sync. `base` is none unless the offer wants changes."""

    def __init__(self, offer: SyncOffer, manifest: Manifest, version: int, base: DeltaBase | None) -> None:
        self._offer = offer
        self._manifest = manifest
        self._version = version
        self._base = base if offer.delta else None

    def run(self, weights: Weights) -> SyncReport:
        with ExitStack() as stack:
            if self._base is not None:
                stack.callback(self._base.rollback)  # Does nothing after a commit.
            peer = connect(self._offer)
            with conversation(peer):
                return self._run(peer, stack, weights)

    def _run(self, peer: Peer, stack: ExitStack, weights: Weights) -> SyncReport:
        peer.send("hello", protocol=PROTOCOL, token=self._offer.token)
        first = next(weights, None)
        device = first[1].device if first is not None else torch.device("cpu")
        agreed, mapping = self._agree(peer, device)
        asked = self._offer.mechanism
        lane, mechanism, note = open_sender_lane(peer, self._offer.terms(device), asked=asked, agreed=agreed)
        stack.callback(lane.close)
        log_agreed(mapping.sender, mapping.receiver, context=mechanism)
        every = chain([first] if first is not None else [], weights)
        if agreed["delta"]:
            assert self._base is not None
            digests, num_sent = _send_changes(peer, self._base, every)
            mechanism = f"{mechanism}-delta"
        else:
            outbox = Outbox(peer, lane, self._manifest)
            for name, tensor in every:
                outbox.add(name, tensor)
                if self._base is not None:
                    self._base.replace(name, tensor)
            digests, num_sent = outbox.finish(), outbox.num_bytes
        peer.send("digests", digests=digests)
        peer.receive("equal")
        self._commit(peer)
        if self._base is not None:
            self._base.commit(self._version)
        return SyncReport(
            num_tensors=len(self._manifest.specs),
            num_bytes=mapping.sender.num_bytes,
            mechanism=f"{mechanism}-low-memory" if self._offer.low_memory else mechanism,
            num_sent_bytes=num_sent,
            version=self._version,
            note=note or str(agreed["delta_note"]),
        )

    def _agree(self, peer: Peer, device: torch.device) -> tuple[dict[str, Any], Mapping]:
        """The receiver's answer to the manifest, and where every tensor goes; both sides have found that."""
        base = self._base
        peer.send(
            "manifest",
            **told(self._manifest),
            version=self._version,
            device=device.type,
            base=base.identity if base is not None and base.holds(self._manifest) else None,
        )
        agreed = peer.receive("agreed")
        return agreed, match(self._manifest, read_manifest(agreed))

    def _commit(self, peer: Peer) -> None:
        peer.send("commit")
        try:
            peer.receive("done")
        except WeightSyncError as error:
            raise WeightSyncError(
                f"{error}. It had been told to use version {self._version}; its next samples say which version they "
                "are of: call sync_weights() again"
            ) from error


def _send_changes(peer: Peer, base: DeltaBase, weights: Weights) -> tuple[dict[str, int], int]:
    """Digests of the whole tensors by name, and the bytes that travelled."""
    digests, num_sent = {}, 0
    for name, tensor in weights:
        payload = base.encode(name, tensor)
        peer.send("change", name=name, num_bytes=len(payload))
        peer.send_bytes(memoryview(payload))
        digests[name] = base.digest_of(name)
        num_sent += len(payload)
    return digests, num_sent
