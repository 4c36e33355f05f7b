"""The process group of a sync: nobody waits for an absent side, and groups that exist are left alone."""

import socket
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from arctic_platform.errors import WeightSyncError
from arctic_platform.rl.weight_sync.collective import CollectiveReceiverEnd, CollectiveSenderEnd, backend_of, within
from arctic_platform.rl.weight_sync.peer import Peer
from arctic_platform.rl.weight_sync.terms import Terms
from tests.rl.weight_sync.pairs import DictSink, equal, receiver, sync, tensors

TERMS = Terms("127.0.0.1", 1 << 20, 0.5, torch.device("cpu"))


@pytest.fixture
def peers() -> Iterator[tuple[Peer, Peer]]:
    """Both ends of a control connection."""
    pair = [
        Peer(end, name=name, timeout_seconds=TERMS.timeout_seconds)
        for end, name in zip(socket.socketpair(), ("receiver", "sender"), strict=True)
    ]
    yield pair[0], pair[1]
    for one in pair:
        one.close()


def test_sender_of_a_store_that_is_not_there_gives_up_in_time(peers: tuple[Peer, Peer]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match="the process group of the weight sync broke"):
        CollectiveSenderEnd(peers[0], TERMS, port, "nccl").open()
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("what", ["silent", "gone", "failed", "gone after its address"])
def test_side_whose_other_never_joins_gives_up_in_time_and_says_why(what: str, peers: tuple[Peer, Peer]) -> None:
    ours, theirs = peers
    message = {
        "silent": "the receiver was silent for 0.5 s",
        "gone": "the receiver closed the connection",
        "failed": "the receiver gave up: out of memory",
        "gone after its address": "the process group of the weight sync broke",
    }[what]
    if what == "failed":
        theirs.send("abort", reason="out of memory")
    elif what == "gone":
        theirs.close()
    elif what == "gone after its address":
        with pytest.raises(WeightSyncError, match="the sender was silent"):
            CollectiveReceiverEnd(theirs, TERMS, "gloo").open({})
    before = time.monotonic()
    with pytest.raises(WeightSyncError, match=message):
        CollectiveSenderEnd(ours, TERMS, 0, "gloo").open()
    assert time.monotonic() - before < 5


def test_what_cannot_be_interrupted_is_left_and_undone() -> None:
    undone = []
    with pytest.raises(WeightSyncError, match=r"it did not connect within 0\.1 s"):
        within(0.1, lambda: time.sleep(0.5), lambda: undone.append(True), what="it did not connect")
    assert undone
    with pytest.raises(ValueError, match="of its own"):
        within(5, lambda: int("of its own"), lambda: None, what="")


def test_gpus_on_both_sides_take_nccl() -> None:
    assert [backend_of(*pair) for pair in (("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cpu"))] == [
        "nccl",
        "gloo",
        "gloo",
    ]


def test_default_group_is_neither_needed_nor_touched() -> None:
    before = dist.group.WORLD
    sink = DictSink()
    side = receiver(sink, "collective")
    sync(side, tensors(1))
    side.close()
    assert equal(sink.held, tensors(1))
    assert dist.group.WORLD is before
