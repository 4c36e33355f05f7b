"""Each side of a sync in a process of its own, killed or stopped in each phase: the other hears of it in seconds."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from arctic_platform.errors import WeightSyncError
from arctic_platform.rl.weight_sync.session import SyncOffer, send_weights
from tests.rl.weight_sync.pairs import MECHANISMS, DictSink, Run, equal, manifest, receiver, tensors

PHASES = [("shared_memory", "handshake"), *((mechanism, "buckets") for mechanism in MECHANISMS), ("stream", "digests")]
SIGNALS = [signal.SIGKILL, signal.SIGSTOP]
SECONDS = 2.0
BOUND = 2 * SECONDS + 4
"""A silent side is noticed after SECONDS; what is said to it last may take a second more."""

context = mp.get_context("forkserver")
context.set_forkserver_preload(["tests.rl.weight_sync.pairs"])


def hurt_itself(phase: str | None, now: str, number: signal.Signals | None) -> None:
    if phase == now and number is not None:
        os.kill(os.getpid(), number)


def yielding(
    weights: dict[str, torch.Tensor], phase: str | None, number: signal.Signals | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Before the first tensor the sides have not agreed; after the last one only digests are left."""
    hurt_itself(phase, "handshake", number)
    for index, item in enumerate(weights.items()):
        if index == 3:
            hurt_itself(phase, "buckets", number)
        yield item
    hurt_itself(phase, "digests", number)


def be_sender(pipe: Connection, phase: str | None, number: signal.Signals | None) -> None:
    """To the receiver whose offer comes through the pipe."""
    weights = tensors(1)
    pipe.send("up")
    offer = pipe.recv()
    try:
        items = yielding(weights, phase, number)
        report = send_weights(SyncOffer.from_json(offer), manifest(weights), items, version=7)
        pipe.send(report.version)
    except WeightSyncError as error:
        pipe.send(str(error))


class HurtSink(DictSink):
    """Hurts its own process when it is asked for its contents, or about to be overwritten."""

    phase: str | None = None
    number: signal.Signals | None = None

    def contents(self) -> Any:
        hurt_itself(self.phase, "handshake", self.number)
        return super().contents()

    def begin_overwrite(self) -> None:
        super().begin_overwrite()
        hurt_itself(self.phase, "begin", self.number)


def be_receiver(
    pipe: Connection, mechanism: str, low_memory: bool, phase: str | None, number: signal.Signals | None
) -> None:
    sink = HurtSink()
    sink.phase, sink.number = phase, number
    side = receiver(sink, mechanism, low_memory=low_memory, timeout_seconds=SECONDS)
    pipe.send(side.offer.to_json())
    try:
        version: Any = side.run().version
    except WeightSyncError as error:
        version = str(error)
    pipe.send((version, equal(sink.held, tensors(1)), equal(sink.held, tensors(0))))


@pytest.fixture
def children() -> Iterator[list[Any]]:
    """Processes to end after the test, whatever state they are in."""
    started: list[Any] = []
    yield started
    for process in started:
        process.kill()
        process.join(10)


def started(children: list[Any], target: Any, *arguments: Any) -> tuple[Any, Connection]:
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments))
    process.start()
    theirs.close()
    children.append(process)
    return process, ours


def received(pipe: Connection) -> Any:
    assert pipe.poll(30), "the other process says nothing"
    return pipe.recv()


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_two_processes_hold_the_same_bits(mechanism: str, low_memory: bool, children: list[Any]) -> None:
    _, pipe = started(children, be_receiver, mechanism, low_memory, None, None)
    weights = tensors(1)
    send_weights(SyncOffer.from_json(received(pipe)), manifest(weights), iter(weights.items()), version=7)
    assert received(pipe) == (7, True, False)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(("mechanism", "phase"), PHASES)
def test_sender_that_dies_or_stops_leaves_the_old_weights_and_a_receiver_that_can_be_synced_again(
    mechanism: str, phase: str, number: signal.Signals, children: list[Any]
) -> None:
    sink = DictSink()
    side = receiver(sink, mechanism, timeout_seconds=SECONDS)
    _, hurt = started(children, be_sender, phase, number)
    _, well = started(children, be_sender, None, None)
    assert (received(hurt), received(well)) == ("up", "up")
    before = time.monotonic()
    hurt.send(side.offer.to_json())
    receiving = Run(side.run)
    with pytest.raises(WeightSyncError, match=r"the sender|process group"):
        raise receiving.outcome
    assert time.monotonic() - before < BOUND
    assert equal(sink.held, tensors(0))
    assert sink.num_begun == 0
    well.send(side.offer.to_json())
    receiving = Run(side.run)
    assert receiving.outcome.version == 7
    assert received(well) == 7
    assert equal(sink.held, tensors(1))
    side.close()


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(("mechanism", "phase"), PHASES)
def test_receiver_that_dies_or_stops_frees_the_sender(
    mechanism: str, phase: str, number: signal.Signals, children: list[Any]
) -> None:
    own = phase if phase == "handshake" else None
    process, pipe = started(children, be_receiver, mechanism, False, own, number)
    offer = SyncOffer.from_json(received(pipe))
    weights, made = tensors(1), []

    def hurting() -> Iterator[tuple[str, torch.Tensor]]:
        for index, item in enumerate(weights.items()):
            if phase == "buckets" and index == 3:
                os.kill(process.pid, number)
            made.append(item[0])
            yield item
        if phase == "digests":
            os.kill(process.pid, number)

    before = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"the receiver|process group"):
        send_weights(offer, manifest(weights), hurting(), version=7)
    assert time.monotonic() - before < BOUND
    assert made == list(weights)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_receiver_that_goes_on_after_a_stop_keeps_its_old_weights(mechanism: str, children: list[Any]) -> None:
    process, pipe = started(children, be_receiver, mechanism, False, None, None)
    offer = SyncOffer.from_json(received(pipe))
    weights = tensors(1)

    def stopping() -> Iterator[tuple[str, torch.Tensor]]:
        for index, item in enumerate(weights.items()):
            if index == 3:
                os.kill(process.pid, signal.SIGSTOP)
            yield item

    with pytest.raises(WeightSyncError):
        send_weights(offer, manifest(weights), stopping(), version=7)
    os.kill(process.pid, signal.SIGCONT)
    outcome, is_new, is_old = received(pipe)
    assert isinstance(outcome, str)
    assert (is_new, is_old) == (False, True)


def test_receiver_that_dies_while_it_swaps_is_reported_with_what_it_may_hold(children: list[Any]) -> None:
    _, pipe = started(children, be_receiver, "shared_memory", False, "begin", signal.SIGKILL)
    weights = tensors(1)
    with pytest.raises(WeightSyncError, match="It had been told to use version 7"):
        send_weights(SyncOffer.from_json(received(pipe)), manifest(weights), iter(weights.items()), version=7)


def be_short_of_shared_memory(pipe: Connection, mechanism: str | None) -> None:
    """A limit on file sizes holds for shared memory as well."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    sink, weights = DictSink(), tensors(1)
    side = receiver(sink, mechanism)
    offer = side.offer
    receiving = Run(side.run)
    try:
        report = send_weights(offer, manifest(weights), iter(weights.items()), version=7)
        pipe.send((report.mechanism, report.note, equal(sink.held, weights)))
    except WeightSyncError as error:
        pipe.send(("", f"{error} | {receiving.outcome}", equal(sink.held, tensors(0))))


def test_shared_memory_that_cannot_be_had_gives_way_to_the_connection_unless_it_was_asked_for(
    children: list[Any],
) -> None:
    _, pipe = started(children, be_short_of_shared_memory, None)
    mechanism, note, is_equal = received(pipe)
    assert (mechanism, is_equal) == ("stream", True)
    assert "917504 bytes of shared memory cannot be had" in note
    _, pipe = started(children, be_short_of_shared_memory, "shared_memory")
    mechanism, note, is_equal = received(pipe)
    assert (mechanism, is_equal) == ("", True)
    assert note.count("shared memory cannot be had") == 2


def be_often_synced(pipe: Connection, mechanism: str, low_memory: bool, count: int) -> None:
    torch.set_num_threads(1)
    side = receiver(DictSink(), mechanism, low_memory=low_memory)
    for _ in range(count):
        pipe.send(side.offer.to_json())
        side.run()
        pipe.send(resident())


def resident() -> int:
    """Bytes of memory that this process really has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_fifty_syncs_do_not_grow_either_process(mechanism: str, low_memory: bool, children: list[Any]) -> None:
    _, pipe = started(children, be_often_synced, mechanism, low_memory, 50)
    weights = tensors(1)
    ours, theirs = [], []
    for version in range(50):
        offer = SyncOffer.from_json(received(pipe))
        send_weights(offer, manifest(weights), iter(weights.items()), version=version)
        theirs.append(received(pipe))
        ours.append(resident())
    one_bucket = 1 << 20
    for sizes in (ours, theirs):
        assert max(sizes[10:]) - sizes[9] <= 2 * one_bucket


BUCKET_MIB = 4


def large(seed: int) -> dict[str, torch.Tensor]:
    """Five buckets."""
    generator = torch.Generator().manual_seed(seed)
    return {f"layers.{at}": torch.randn(512, 1024, generator=generator) for at in range(10)}


def peak_of(work: Any) -> int:
    """Bytes of memory that this process had at most while `work` ran, above what it had before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident()
    work()
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) - before


def be_measured_receiver(pipe: Connection, mechanism: str) -> None:
    torch.set_num_threads(1)
    sink = DictSink(large(0))
    for _ in range(2):  # What the first sync loads for good is code.
        side = receiver(sink, mechanism, low_memory=True, bucket_mib=BUCKET_MIB)
        pipe.send(side.offer.to_json())
        peak = peak_of(side.run)
        side.close()
    pipe.send((peak, equal(sink.held, large(1))))


def be_measured_sender(pipe: Connection) -> None:
    torch.set_num_threads(1)
    weights = large(1)
    for version in (1, 2):
        offer = SyncOffer.from_json(pipe.recv())
        peak = peak_of(
            lambda offer=offer, version=version: send_weights(
                offer, manifest(weights), iter(weights.items()), version=version
            )
        )
    pipe.send(peak)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_low_memory_sync_takes_one_bucket_of_either_process_at_most(mechanism: str, children: list[Any]) -> None:
    _, theirs = started(children, be_measured_receiver, mechanism)
    _, ours = started(children, be_measured_sender)
    for _ in range(2):
        ours.send(received(theirs))
    peak, is_equal = received(theirs)
    assert is_equal
    assert (BUCKET_MIB << 20) / 2 < peak <= BUCKET_MIB << 20
    assert received(ours) <= BUCKET_MIB << 20
