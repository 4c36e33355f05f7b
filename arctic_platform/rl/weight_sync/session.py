"""One weight sync between two processes, from the first word to the last.

    receiver                                        sender
    offer: address, one-time token   -- backend -->
                                     <------------  hello: token
                                     <------------  manifest, weight version
    agreed: manifest, mechanism      ------------>  (both log the names)
                                     <------------  ready
                                     <------------  buckets; each is acknowledged
                                     <------------  digests
    equal                            ------------>
                                     <------------  commit
    swap the new weights in, done    ------------>

Until `commit` the receiver's weights are the old ones, whole. With `low_memory` they are written bucket by bucket, and
a receiver that fails on the way must not be used until a sync has succeeded. No wait is longer than `timeout_seconds`
of silence, and whoever fails tells the other why.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from arctic_platform.errors import WeightSyncError
from arctic_platform.rl.config import WeightSyncConfig
from arctic_platform.rl.weight_sync.base import Manifest, SyncReport, log_agreed, manifest_of, weights_of
from arctic_platform.rl.weight_sync.buckets import Outbox, arrival_of, compare_digests, receive_buckets
from arctic_platform.rl.weight_sync.lanes import RingHolder, open_receiver_lane, open_sender_lane
from arctic_platform.rl.weight_sync.names import match
from arctic_platform.rl.weight_sync.peer import Peer, conversation
from arctic_platform.rl.weight_sync.terms import Terms

PROTOCOL = 1
HELLO_SECONDS = 5.0
"""How long a connection may take to show its token, while others wait."""

logger = logging.getLogger("arctic_platform.rl.weight_sync")


@dataclass(frozen=True)
class SyncOffer:
    """What a sender needs to know of a receiver that waits for it: good for one sync.

    `mechanism`: None for shared memory where both sides can reach it, else the stream.
    """

    host: str
    port: int
    token: str = field(repr=False)
    mechanism: str | None
    bucket_bytes: int
    low_memory: bool
    timeout_seconds: float
    delta: bool = False

    def to_json(self) -> dict[str, Any]:
        """Its fields; `from_json` is the inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> SyncOffer:
        """Raises WeightSyncError for other fields than `to_json` writes."""
        names = {one.name for one in fields(cls)}
        if values.keys() != names:
            raise WeightSyncError(f"an offer has the fields {sorted(names)}; given {sorted(values)}")
        return cls(**values)


class WeightSink(Protocol):
    """The tensors that a receiver fills."""

    def manifest(self) -> Manifest:
        """Names, shapes and dtypes; raises if there can be no sync now, and the sender gets that reason."""

    def begin_overwrite(self) -> None:
        """The weights are about to change; until the sync has succeeded they must not be used."""

    def targets(self) -> dict[str, Tensor]:
        """The tensors by the manifest's names."""


class ModelSink:
    """A model's parameters and saved buffers."""

    def __init__(self, model: nn.Module, on_overwrite: Any = lambda: None) -> None:
        self._model = model
        self._on_overwrite = on_overwrite

    def manifest(self) -> Manifest:
        """Of the model."""
        return manifest_of(self._model)

    def begin_overwrite(self) -> None:
        """Tell the owner."""
        self._on_overwrite()

    def targets(self) -> dict[str, Tensor]:
        """Each distinct tensor."""
        return weights_of(self._model)


def open_receiver(
    settings: WeightSyncConfig, sink: WeightSink, *, low_memory: bool = False, host: str = "127.0.0.1"
) -> Receiver:
    """A receiver for any number of syncs, one after the other; nothing listens until an offer is asked for.

    host: where senders reach this machine; an address of its own.
    """
    return Receiver(settings, sink, low_memory=low_memory, host=host)


def send_weights(
    offer: SyncOffer | None, manifest: Manifest, weights: Iterator[tuple[str, Tensor]], *, version: int
) -> SyncReport:
    """Give a receiver the weights, as `version`. Blocks while its side runs `Receiver.run`.

    weights: every tensor of the manifest. Iterated to the end whatever happens, because the other ranks of a trainer
    take part in making them.

    Raises:
        WeightSyncError: no receiver, or either side failed, with its reason. The receiver keeps its weights, unless
            low_memory wrote over them.
    """
    try:
        if offer is None:
            raise WeightSyncError("there is no receiver to send weights to; open one with open_receiver() first")
        return _Sending(offer, manifest, version).run(weights)
    finally:
        for _ in weights:
            pass


def follow(weights: Iterator[tuple[str, Tensor]]) -> None:
    """What a rank other than the first does while the first one sends: take part in making the weights."""
    for _ in weights:
        pass


def refuse(offer: SyncOffer, reason: str) -> None:
    """Tell a receiver that nobody will come, so that it does not wait. Raises WeightSyncError if it is gone."""
    peer = _connect(offer)
    peer.send("hello", protocol=PROTOCOL, token=offer.token)
    peer.abort(reason)


class Receiver:
    """The side that holds the sampler's weights. Keeps its second copy and its ring from sync to sync.

    `offer` is for the next sync: hand it to the sender, then call `run`. A second sender with the same offer, or a
    second `run` at the same time, is refused at once.
    """

    def __init__(self, settings: WeightSyncConfig, sink: WeightSink, *, low_memory: bool, host: str) -> None:
        self.version: int | None = None
        self._settings = settings
        self._sink = sink
        self._low_memory = low_memory
        self._host = host
        self._offer: SyncOffer | None = None
        self._listener: socket.socket | None = None
        self._ring = RingHolder()
        self._staging: dict[str, Tensor] = {}
        self._running = threading.Lock()

    @property
    def offer(self) -> SyncOffer:
        """The one that `run` will serve; made when there is none."""
        return self._offer if self._offer is not None else self.new_offer()

    def new_offer(self, *, low_memory: bool | None = None) -> SyncOffer:
        """One that takes the place of any before. low_memory: for this sync only."""
        self._withdraw()
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._listener = socket.create_server((self._host, 0), family=family)
        self._offer = SyncOffer(
            host=self._host,
            port=self._listener.getsockname()[1],
            token=secrets.token_hex(16),
            mechanism=self._settings.mechanism,
            bucket_bytes=self._settings.bucket_mib << 20,
            low_memory=self._low_memory if low_memory is None else low_memory,
            timeout_seconds=self._settings.timeout_seconds,
            delta=self._settings.delta,
        )
        return self._offer

    def run(self) -> SyncReport:
        """Wait for the sender of the offer and take its weights.

        Raises:
            WeightSyncError: no offer is out, another sync runs, nobody came, or either side failed. The weights are
                the old ones, unless `begin_overwrite` was called and low_memory is on.
        """
        if not self._running.acquire(blocking=False):
            raise WeightSyncError("this receiver is in the middle of a weight sync; wait for its end")
        try:
            offer, listener = self._offer, self._listener
            if offer is None or listener is None:
                raise WeightSyncError("no offer is out; hand `receiver.offer` to the sender before `run()`")
            peer = self._accept(offer, listener)
            report = _Receiving(offer, peer, self._sink, self._staging).run(self._ring)
            self.version = report.version
            return report
        finally:
            self._withdraw()
            self._running.release()

    def free_memory(self) -> None:
        """Give the second copy and the ring back; the next sync makes them anew."""
        self._staging.clear()
        self._ring.close()

    def close(self) -> None:
        """Nothing listens and nothing is held any more."""
        self._withdraw()
        self.free_memory()

    def _accept(self, offer: SyncOffer, listener: socket.socket) -> Peer:
        """The first who knows the token; afterwards nobody can connect."""
        ends, strangers = time.monotonic() + offer.timeout_seconds, []
        while (left := ends - time.monotonic()) > 0:
            listener.settimeout(left)
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                break
            peer = Peer(connection, name="sender", timeout_seconds=min(left, HELLO_SECONDS))
            if (reason := _strange(peer, offer)) is None:
                self._withdraw()
                peer.timeout_seconds = offer.timeout_seconds
                peer.trust()
                return peer
            peer.abort(reason)
            strangers.append(reason)
        raise WeightSyncError(
            f"no sender came within {offer.timeout_seconds:g} s"
            + (f"; {len(strangers)} were turned away, the last because {strangers[-1]}" if strangers else "")
        )

    def _withdraw(self) -> None:
        self._offer = None
        if self._listener is not None:
            self._listener.close()
        self._listener = None


def _strange(peer: Peer, offer: SyncOffer) -> str | None:
    """Why this is not the sender that the offer is for."""
    try:
        hello = peer.receive("hello")
    except WeightSyncError as error:
        return str(error)
    if not hmac.compare_digest(str(hello.get("token")).encode(), offer.token.encode()):
        return "its token is not the offer's: an offer is good for one sync, ask for a new one"
    if hello.get("protocol") != PROTOCOL:
        return f"it speaks version {hello.get('protocol')} of the sync protocol, and this side {PROTOCOL}"
    return None


def _connect(offer: SyncOffer) -> Peer:
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
    """The sender's side of one sync."""

    def __init__(self, offer: SyncOffer, manifest: Manifest, version: int) -> None:
        self._offer = offer
        self._manifest = manifest
        self._version = version

    def run(self, weights: Iterator[tuple[str, Tensor]]) -> SyncReport:
        offer, manifest, peer = self._offer, self._manifest, _connect(self._offer)
        with ExitStack() as stack, conversation(peer):
            peer.send("hello", protocol=PROTOCOL, token=offer.token)
            first = next(weights, None)
            device = first[1].device if first is not None else torch.device("cpu")
            peer.send("manifest", **_told(manifest), version=self._version, device=device.type)
            agreed = peer.receive("agreed")
            theirs = _read_manifest(agreed)
            match(manifest, theirs)
            terms = _terms(offer, device)
            lane, mechanism, note = open_sender_lane(peer, terms, asked=offer.mechanism, agreed=agreed)
            stack.callback(lane.close)
            log_agreed(manifest, theirs, context=mechanism)
            outbox = Outbox(peer, lane, manifest)
            for name, tensor in chain([first] if first is not None else [], weights):
                outbox.add(name, tensor)
            peer.send("digests", digests=outbox.finish())
            peer.receive("equal")
            self._commit(peer)
        return _report(offer, mechanism, len(manifest.specs), outbox.num_bytes, self._version, note)

    def _commit(self, peer: Peer) -> None:
        peer.send("commit")
        try:
            peer.receive("done")
        except WeightSyncError as error:
            raise WeightSyncError(
                f"{error}. It had been told to use version {self._version}; its next samples say which version they "
                "are of: call sync_weights() again"
            ) from error


class _Receiving:
    """The receiver's side of one sync, after the hello."""

    def __init__(self, offer: SyncOffer, peer: Peer, sink: WeightSink, staging: dict[str, Tensor]) -> None:
        """staging: the second copy of the last sync; the one of this sync takes its place."""
        self._offer = offer
        self._peer = peer
        self._sink = sink
        self._staging = staging

    def run(self, ring: RingHolder) -> SyncReport:
        with ExitStack() as stack, conversation(self._peer):
            return self._run(stack, ring)

    def _run(self, stack: ExitStack, ring: RingHolder) -> SyncReport:
        peer, offer, sink = self._peer, self._offer, self._sink
        opening = peer.receive("manifest")
        theirs, version = _read_manifest(opening), int(opening["version"])
        ours, targets = sink.manifest(), sink.targets()
        mapping = match(theirs, ours)
        lane, mechanism, note = open_receiver_lane(
            peer,
            _terms(offer, next((target.device for target in targets.values()), torch.device("cpu"))),
            asked=offer.mechanism,
            sender_device=str(opening["device"]),
            ring=ring,
            agreed=_told(ours),
        )
        stack.callback(lane.close)
        log_agreed(theirs, ours, context=mechanism)
        held = self._begin(targets)
        arrivals = [arrival_of(name, mapping, held) for name in theirs.specs]
        compare_digests(arrivals, receive_buckets(peer, lane, arrivals))
        peer.send("equal")
        peer.receive("commit")
        if not offer.low_memory:
            sink.begin_overwrite()
            _swap_in(targets, held)
            self._keep(held)
        self._say_done()
        num_bytes = sum(target.numel() * target.element_size() for target in targets.values())
        return _report(offer, mechanism, len(targets), num_bytes, version, note)

    def _begin(self, targets: dict[str, Tensor]) -> dict[str, Tensor]:
        """Where to write: the weights, or a second copy, that of the last sync as far as it fits."""
        if self._offer.low_memory:
            self._sink.begin_overwrite()
            return targets
        return {
            name: kept if (kept := self._staging.get(name)) is not None and _is_alike(kept, target) else _like(target)
            for name, target in targets.items()
        }

    def _keep(self, staged: dict[str, Tensor]) -> None:
        """CPU memory that was paid for once; a GPU's is given back."""
        self._staging.clear()
        self._staging.update({name: one for name, one in staged.items() if one.device.type == "cpu"})

    def _say_done(self) -> None:
        try:
            self._peer.send("done")
        except WeightSyncError as error:
            logger.warning("[weight-sync] the weights were taken, but the sender does not know: %s", error)


def _told(manifest: Manifest) -> dict[str, Any]:
    return {"manifest": manifest.to_json(), "digest": manifest.digest}


def _read_manifest(message: dict[str, Any]) -> Manifest:
    manifest = Manifest.from_json(message["manifest"])
    if manifest.digest != message["digest"]:
        raise WeightSyncError("the manifest was damaged on its way: its digest differs; call sync_weights() again")
    return manifest


def _terms(offer: SyncOffer, device: torch.device) -> Terms:
    return Terms(offer.host, offer.bucket_bytes, offer.timeout_seconds, device)


def _report(offer: SyncOffer, mechanism: str, num_tensors: int, num_bytes: int, version: int, note: str) -> SyncReport:
    name = f"{mechanism}-low-memory" if offer.low_memory else mechanism
    return SyncReport(num_tensors, num_bytes, name, num_bytes, version, note)


def _is_alike(kept: Tensor, target: Tensor) -> bool:
    return kept.shape == target.shape and kept.dtype == target.dtype and kept.device == target.device


def _like(target: Tensor) -> Tensor:
    return torch.empty_like(target, requires_grad=False, memory_format=torch.contiguous_format)


@torch.no_grad()
def _swap_in(targets: dict[str, Tensor], staged: dict[str, Tensor]) -> None:
    """Exchange the memory of weights and second copy; what is a view of something larger is copied.

    Nothing in here can fail half-way, and no byte moves: the old weights become the second copy of the next sync.
    """
    for name, target in targets.items():
        if _owns_its_memory(target):
            staged[name], target.data = target.data, staged[name]
        else:
            target.copy_(staged[name])


def _owns_its_memory(tensor: Tensor) -> bool:
    is_whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return is_whole and tensor.is_contiguous()
