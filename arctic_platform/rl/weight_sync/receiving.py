"""The receiver's side of a sync."""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from arctic_platform.errors import WeightSyncError
from arctic_platform.rl.config import WeightSyncConfig
from arctic_platform.rl.weight_sync.base import Manifest, SyncReport, log_agreed, manifest_and_weights
from arctic_platform.rl.weight_sync.buckets import Arrival, compare_digests, receive_buckets, receive_changes
from arctic_platform.rl.weight_sync.delta import DeltaBase
from arctic_platform.rl.weight_sync.lanes import RingHolder, open_receiver_lane
from arctic_platform.rl.weight_sync.names import Mapping, match
from arctic_platform.rl.weight_sync.offer import PROTOCOL, SyncOffer, read_manifest, told
from arctic_platform.rl.weight_sync.peer import GaveUpError, Peer, conversation

HELLO_SECONDS = 5.0
"""How long a connection may take to show its token, while others wait."""

logger = logging.getLogger("arctic_platform.rl.weight_sync")


class WeightSink(Protocol):
    """The tensors that a receiver fills."""

    def contents(self) -> tuple[Manifest, dict[str, Tensor]]:
        """Names, shapes and dtypes, and the tensors by those names. The sender gets the reason of what is raised."""

    def begin_overwrite(self) -> None:
        """The weights are about to change; until the sync has succeeded they must not be used."""


class ModelSink:
    """A model's parameters and saved buffers."""

    def __init__(self, model: nn.Module, on_overwrite: Callable[[], None] = lambda: None) -> None:
        self._model = model
        self._on_overwrite = on_overwrite

    def contents(self) -> tuple[Manifest, dict[str, Tensor]]:
        """Each distinct tensor of the model."""
        return manifest_and_weights(self._model)

    def begin_overwrite(self) -> None:
        """Tell the owner."""
        self._on_overwrite()


class Kept:
    """What a receiver keeps from sync to sync, because it was paid for: ring, second copy, base of changes."""

    def __init__(self) -> None:
        self.ring = RingHolder()
        self.staging: dict[str, Tensor] = {}
        self.base = DeltaBase()

    def clear(self) -> None:
        """Give the memory back."""
        self.ring.close()
        self.staging = {}
        self.base.clear()


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
        self._kept = Kept()
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
            mechanism="stream" if self._settings.delta else self._settings.mechanism,
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
            report = _Receiving(offer, peer, self._sink, self._kept).run()
            self.version = report.version
            return report
        finally:
            self._withdraw()
            self._running.release()

    def free_memory(self) -> None:
        """Give back what is kept from sync to sync; the next one makes it anew."""
        self._kept.clear()

    def close(self) -> None:
        """Nothing listens and nothing is held any more. A `run` that waits for its sender, in another thread, ends."""
        self._withdraw()
        self.free_memory()

    def _accept(self, offer: SyncOffer, listener: socket.socket) -> Peer:
        """The first who knows the token; afterwards nobody can connect."""
        ends, strangers = time.monotonic() + offer.timeout_seconds, []
        while (left := ends - time.monotonic()) > 0:
            try:
                listener.settimeout(left)
                connection, _ = listener.accept()
            except TimeoutError:
                break
            except OSError as error:
                raise WeightSyncError("the offer was taken back while its sender was waited for") from error
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
        listener, self._offer, self._listener = self._listener, None, None  # a `run` may end in another thread
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # Closing alone would not wake a `run` that waits.
            listener.close()


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


class _Receiving:
    """One sync, after the hello."""

    def __init__(self, offer: SyncOffer, peer: Peer, sink: WeightSink, kept: Kept) -> None:
        self._offer = offer
        self._peer = peer
        self._sink = sink
        self._kept = kept

    def run(self) -> SyncReport:
        with ExitStack() as stack, conversation(self._peer):
            stack.callback(self._kept.base.rollback)  # Does nothing after a commit.
            return self._run(stack)

    def _run(self, stack: ExitStack) -> SyncReport:
        peer, offer = self._peer, self._offer
        ours, targets = self._sink.contents()
        opening = peer.receive("manifest")
        theirs = read_manifest(opening)
        mapping = match(theirs, ours)
        mapping.check(targets)
        delta = self._delta(opening)
        lane, mechanism, note = open_receiver_lane(
            peer,
            offer.terms(next((target.device for target in targets.values()), torch.device("cpu"))),
            asked=offer.mechanism,
            sender_device=str(opening["device"]),
            ring=self._kept.ring,
            agreed=told(ours) | delta,
        )
        stack.callback(lane.close)
        log_agreed(theirs, ours, context=mechanism)
        held = self._begin(targets)
        arrivals = [Arrival(name, mapping, held) for name in theirs.specs]
        if delta["delta"]:
            digests, num_sent = receive_changes(peer, self._kept.base, arrivals)
            mechanism = f"{mechanism}-delta"
        else:
            digests, num_sent = receive_buckets(peer, lane, arrivals)
        compare_digests(arrivals, digests)
        version = int(opening["version"])
        self._commit(mapping, targets, held, version, is_whole=not delta["delta"])
        self._say_done()
        return SyncReport(
            num_tensors=len(ours.specs),
            num_bytes=mapping.receiver.num_bytes,
            mechanism=f"{mechanism}-low-memory" if offer.low_memory else mechanism,
            num_sent_bytes=num_sent,
            version=version,
            note=note or str(delta["delta_note"]),
        )

    def _delta(self, opening: dict[str, Any]) -> dict[str, Any]:
        """Whether changes suffice, and why not."""
        base, theirs = self._kept.base.identity, opening.get("base")
        if not self._offer.delta or (base is not None and base == theirs):
            return {"delta": self._offer.delta, "delta_note": ""}
        self._kept.base.clear()
        note = f"all weights travelled: the receiver holds version {base}, the sender {theirs}"
        logger.info("[weight-sync] %s", note)
        return {"delta": False, "delta_note": note}

    def _begin(self, targets: dict[str, Tensor]) -> dict[str, Tensor]:
        """Where to write: the weights, or a second copy, that of the last sync as far as it fits."""
        if self._offer.low_memory:
            self._sink.begin_overwrite()
            return targets
        kept = self._kept.staging
        return {
            name: kept[name] if name in kept and _is_alike(kept[name], target) else _like(target)
            for name, target in targets.items()
        }

    def _commit(
        self, mapping: Mapping, targets: dict[str, Tensor], held: dict[str, Tensor], version: int, *, is_whole: bool
    ) -> None:
        """Make what arrived the weights, once the sender has said that it is its last word too."""
        base = self._kept.base if self._offer.delta else None
        if base is not None and is_whole:
            for name in mapping.sender.specs:
                base.replace(name, mapping.read_back(held, name))
        self._peer.send("equal")
        self._peer.receive("commit")
        if (reason := self._peer.abort_reason()) is not None:
            # This side was stopped, and the sender has told its caller that the sync failed.
            raise GaveUpError(self._peer.name, reason)
        if not self._offer.low_memory:
            self._sink.begin_overwrite()
            _swap_in(targets, held)
            # CPU memory was paid for once; a GPU's is given back.
            self._kept.staging = {name: one for name, one in held.items() if one.device.type == "cpu"}
        if base is not None:
            base.commit(version)

    def _say_done(self) -> None:
        try:
            self._peer.send("done")
        except WeightSyncError as error:
            logger.warning("[weight-sync] the weights were taken, but the sender does not know: %s", error)


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
