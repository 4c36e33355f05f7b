"""Weights through a process group of their own: gloo between CPUs, NCCL between GPUs.

The group is made for one sync and ended with it, so that a sync that failed leaves nothing that the next one could
wait for. It is used through its own methods: neither process needs `torch.distributed` to be initialised, and a
group that it has is never touched. gloo finds the other side by what the two tell each other over the control
connection, NCCL, whose threads outlive that, in a store on a port of its own.
"""

from __future__ import annotations

import base64
import datetime
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from arctic_platform.errors import WeightSyncError
from arctic_platform.rl.weight_sync.buckets import SLOTS_PER_BUCKET, host_slots, slot_bytes
from arctic_platform.rl.weight_sync.peer import LaneBrokenError, Peer
from arctic_platform.rl.weight_sync.terms import Terms

SENDER, RECEIVER = 0, 1


class CollectiveLane:
    """Either end; the slots are memory of this process, on its GPU for NCCL."""

    def __init__(self, group: Any, rank: int, device: torch.device, bucket_bytes: int, timeout_seconds: float) -> None:
        self.slots = (
            host_slots(bucket_bytes)
            if device.type == "cpu"
            else list(torch.empty(SLOTS_PER_BUCKET, slot_bytes(bucket_bytes), dtype=torch.uint8, device=device))
        )
        self._group: Any = group
        self._other = 1 - rank
        self._timeout = datetime.timedelta(seconds=timeout_seconds)

    def put(self, slot: int, num_bytes: int) -> None:
        """Send the slot's bytes."""
        with _breaking():
            self._wait(self._group.send([self.slots[slot][:num_bytes]], self._other, slot))

    def take(self, slot: int, num_bytes: int) -> None:
        """Receive them."""
        with _breaking():
            self._wait(self._group.recv([self.slots[slot][:num_bytes]], self._other, slot))

    def release(self, slot: int) -> None:
        """Nothing to be waited for."""

    def close(self) -> None:
        """End the group: its connections and threads."""
        if self._group is not None:
            self._group.abort()
        self._group = None
        self.slots = []

    def _wait(self, work: Any) -> None:
        work.wait(self._timeout)
        if self.slots[0].device.type == "cuda":
            torch.cuda.synchronize(self.slots[0].device)


class ToldStore(dist.Store):
    """What this side sets is told to the other over the control connection, and what it waits for is heard there.

    No port, no thread, and an other side that is lost is noticed at once. For the time in which the connection has
    nothing else to carry.
    """

    def __init__(self, peer: Peer) -> None:
        super().__init__()
        self._peer = peer
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Tell it."""
        self._known[key] = value.encode() if isinstance(value, str) else bytes(value)
        self._peer.send("key", key=key, value=base64.b64encode(self._known[key]).decode())

    def get(self, key: str) -> bytes:
        """Wait for it."""
        self.wait([key])
        return self._known[key]

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Hear the other side until all keys are known. Raises WeightSyncError as `Peer.receive` does."""
        while not all(key in self._known for key in keys):
            told = self._peer.receive("key")
            self._known[str(told["key"])] = base64.b64decode(told["value"])


class CollectiveReceiverEnd:
    """Meets the sender: by NCCL in a store on a free port."""

    def __init__(self, peer: Peer, terms: Terms, backend: str) -> None:
        self.fields: dict[str, Any] = {"backend": backend, "port": 0}
        self._terms, self._backend = terms, backend
        self._store: dist.Store | None = ToldStore(peer)
        if backend == "nccl":
            family = socket.AF_INET6 if ":" in terms.host else socket.AF_INET
            listener = socket.create_server((terms.host, 0), family=family)
            self.fields["port"] = port = listener.getsockname()[1]
            self._store = _tcp_store(terms, port, is_master=True, master_listen_fd=listener.detach())

    def open(self, ready: dict[str, Any]) -> CollectiveLane:
        """Meet the sender, within the timeout."""
        assert self._store is not None
        return _open_lane(self._store, RECEIVER, self._terms, self._backend)

    def close(self) -> None:
        """The store ends once the group has let go of it."""
        self._store = None


class CollectiveSenderEnd:
    """The other end of that store."""

    def __init__(self, peer: Peer, terms: Terms, port: int, backend: str) -> None:
        self.fields: dict[str, Any] = {}
        self._peer, self._terms, self._port, self._backend = peer, terms, port, backend

    def open(self) -> CollectiveLane:
        """Meet the receiver, within the timeout."""
        store: dist.Store = ToldStore(self._peer)
        if self._backend == "nccl":
            with _breaking():
                store = _tcp_store(self._terms, self._port, is_master=False)
        return _open_lane(store, SENDER, self._terms, self._backend)

    def close(self) -> None:
        """Nothing is held."""


def backend_of(sender: str, receiver: str) -> str:
    """For tensors that live on devices of these types."""
    return "nccl" if sender == receiver == "cuda" else "gloo"


def _tcp_store(terms: Terms, port: int, *, is_master: bool, **options: Any) -> dist.Store:
    timeout = datetime.timedelta(seconds=terms.timeout_seconds)
    return dist.TCPStore(terms.host, port, 2, is_master, timeout=timeout, wait_for_workers=False, **options)


def _open_lane(store: dist.Store, rank: int, terms: Terms, backend: str) -> CollectiveLane:
    seconds = terms.timeout_seconds
    make = _gloo_group if backend == "gloo" else _nccl_group
    with _breaking():
        group = make(store, rank, terms.host, datetime.timedelta(seconds=seconds))
    device = terms.device if backend == "nccl" else torch.device("cpu")
    lane = CollectiveLane(group, rank, device, terms.bucket_bytes, seconds)
    if backend == "nccl":
        # NCCL connects at the first use, without a limit of its own.
        first = lane.put if rank == SENDER else lane.take
        within(seconds, lambda: first(0, 1), lane.close, what="NCCL did not connect trainer and sampler")
    return lane


def within(seconds: float, work: Callable[[], None], undo: Callable[[], None], *, what: str) -> None:
    """Run `work`, which may block where nothing can interrupt it, at most so long; then `undo` what it waits for."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="weight-sync-bootstrap", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        undo()
        raise WeightSyncError(f"{what} within {seconds:g} s; check that the two can reach each other")
    if errors:
        raise errors[0]


@contextmanager
def _breaking() -> Generator[None]:
    """All of torch's errors here are RuntimeErrors; the first line of their texts is what is known."""
    try:
        yield
    except WeightSyncError:
        raise
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise LaneBrokenError(f"the process group of the weight sync broke: {reason}") from error


def _gloo_group(store: dist.Store, rank: int, host: str, timeout: datetime.timedelta) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=_own_address(host))]
    options._threads = 1
    return gloo(store, rank, 2, options)


def _nccl_group(store: dist.Store, rank: int, host: str, timeout: datetime.timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, 2, options)


def _own_address(host: str) -> str:
    """Of the interface over which `host` is reached; on one machine that is `host` itself."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]
