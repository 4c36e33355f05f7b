"""The process group of a sync: nobody waits for an absent side, and groups that exist are left alone."""

import socket
import time

import pytest
import torch
import torch.distributed as dist

from arctic_platform.errors import WeightSyncError
from arctic_platform.rl.weight_sync.collective import CollectiveReceiverEnd, CollectiveSenderEnd, backend_of, within
from arctic_platform.rl.weight_sync.terms import Terms
from tests.rl.weight_sync.pairs import DictSink, equal, receiver, sync, tensors

TERMS = Terms("127.0.0.1", 1 << 20, 0.5, torch.device("cpu"))


def test_sender_of_a_store_that_is_not_there_gives_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match="the process group of the weight sync broke"):
        CollectiveSenderEnd(TERMS, port, "gloo").open()
    assert time.monotonic() - started < 5


def test_receiver_of_a_sender_that_never_joins_gives_up_in_time() -> None:
    end = CollectiveReceiverEnd(TERMS, "gloo")
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match="the process group of the weight sync broke"):
        end.open({})
    end.close()
    assert time.monotonic() - started < 5


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
