"""A sync between two sides in one process: bits, reasons, retries. Their own processes: test_sync_processes.py."""

import gc
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from arctic_platform.errors import WeightSyncError
from arctic_platform.rl.engines.models import tiny_model
from arctic_platform.rl.weight_sync.base import manifest_of, weights_of
from arctic_platform.rl.weight_sync.session import (
    ModelSink,
    Receiver,
    SyncOffer,
    follow,
    open_receiver,
    refuse,
    send_weights,
)
from tests.rl.weight_sync.pairs import (
    MECHANISMS,
    SECONDS,
    DictSink,
    Run,
    equal,
    manifest,
    outcomes,
    receiver,
    settings,
    sync,
    tensors,
)

MODES = [False, True]


@pytest.mark.parametrize("low_memory", MODES)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_bit_arrives_time_after_time_and_both_sides_log_the_names(
    mechanism: str, low_memory: bool, caplog: pytest.LogCaptureFixture
) -> None:
    sink = DictSink()
    side = receiver(sink, mechanism, low_memory=low_memory)
    for version in (1, 2, 3):
        weights = tensors(version)
        with caplog.at_level(logging.INFO, "arctic_platform.rl.weight_sync"):
            sent, received = sync(side, weights, version)
        assert equal(sink.held, weights)
        assert sink.num_begun == version
        assert sent == received
        assert (sent.version, side.version) == (version, version)
        assert sent.num_tensors == len(weights)
        assert sent.num_bytes == sum(one.numel() * one.element_size() for one in weights.values())
        assert sent.mechanism == (f"{mechanism}-low-memory" if low_memory else mechanism)
    line = f"[weight-sync names validated] context={mechanism} sender={len(weights)} expected={len(weights)}"
    assert caplog.messages.count(line) == 6
    side.close()


def test_model_that_changed_since_the_last_sync_is_noticed_on_either_side() -> None:
    sink, weights = DictSink(), tensors(1)
    side = receiver(sink)
    wider, other = (torch.randn(shape) for shape in ((9,), (5,)))
    for version in (1, 2):
        sync(side, weights, version)
        for outcome in outcomes(side, weights | {"tiny": wider}):
            assert "'tiny' is float32[9] on the sender and float32[5] on the receiver" in str(outcome)
        for outcome in outcomes(side, {("other" if name == "tiny" else name): one for name, one in weights.items()}):
            assert "exists on the receiver only" in str(outcome)
        assert equal(sink.held, weights)
    sink.held["tiny"] = torch.zeros(9)
    for outcome in outcomes(side, weights):
        assert "'tiny' is float32[5] on the sender and float32[9] on the receiver" in str(outcome)
    sync(side, weights | {"tiny": wider}, 3)
    assert torch.equal(sink.held["tiny"], wider)
    sink.held = {("other" if name == "tiny" else name): one for name, one in tensors(0).items()}
    renamed = {name: other if name == "other" else weights[name] for name in sink.held}
    sync(side, renamed, 4)
    assert equal(sink.held, renamed)
    side.close()


def test_a_models_weights_stay_tied_and_its_parameters_the_same_objects() -> None:
    sender, model = tiny_model(1), tiny_model(0)
    parameters = dict(model.named_parameters())
    side = open_receiver(settings("shared_memory"), ModelSink(model))
    offer = side.offer
    receiving = Run(side.run)
    send_weights(offer, manifest_of(sender), iter(weights_of(sender).items()), version=1)
    assert receiving.outcome.num_tensors == len(weights_of(sender))
    assert equal(weights_of(model), weights_of(sender))
    assert all(parameters[name] is param for name, param in model.named_parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    side.close()


@pytest.mark.parametrize("low_memory", MODES)
def test_views_and_transposed_tensors_are_filled_where_they_are(low_memory: bool) -> None:
    whole = torch.zeros(20, 8)
    sink = DictSink({"view": whole[:4], "turned": torch.zeros(3, 5).T, "own": torch.zeros(2, 2)})
    weights = {"view": torch.randn(4, 8), "turned": torch.randn(5, 3), "own": torch.randn(2, 2).T}
    side = receiver(sink, low_memory=low_memory)
    sync(side, weights)
    assert equal(sink.held, weights)
    assert torch.equal(whole[:4], weights["view"])
    assert not whole[4:].any()
    side.close()


def test_low_memory_fills_the_tensors_where_they_are_and_default_keeps_one_second_copy() -> None:
    low, default = DictSink(), DictSink()
    places = {name: one.data_ptr() for name, one in low.held.items()}
    side = receiver(low, low_memory=True)
    sync(side, tensors(1))
    assert {name: one.data_ptr() for name, one in low.held.items()} == places
    other, seen = receiver(default), set()
    for version in range(1, 7):
        sync(other, tensors(version))
        seen.add(default.held["large"].data_ptr())
    assert len(seen) == 2
    side.close()
    other.close()


def half_way(weights: dict[str, torch.Tensor], error: Exception) -> Iterator[tuple[str, torch.Tensor]]:
    yield from list(weights.items())[:4]
    raise error


@pytest.mark.parametrize("low_memory", MODES)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_senders_failure_reaches_both_sides_and_a_retry_works_at_once(mechanism: str, low_memory: bool) -> None:
    sink, weights = DictSink(), tensors(1)
    side = receiver(sink, mechanism, low_memory=low_memory)
    started = time.monotonic()
    sent, received = outcomes(side, weights, half_way(weights, RuntimeError("CUDA error: out of memory")))
    assert "CUDA error: out of memory" in str(sent)
    assert "the sender gave up: RuntimeError: CUDA error: out of memory" in str(received)
    assert isinstance(sent, WeightSyncError) and isinstance(received, WeightSyncError)
    assert time.monotonic() - started < SECONDS
    assert sink.num_begun == low_memory
    if not low_memory:
        assert equal(sink.held, tensors(0))
    sync(side, weights)
    assert equal(sink.held, weights)
    side.close()


@pytest.mark.parametrize("low_memory", MODES)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_receivers_failure_reaches_a_sender_that_is_in_the_middle_of_its_weights(
    mechanism: str, low_memory: bool
) -> None:
    sink, weights = DictSink(fail=ValueError("no space left in the sampler")), tensors(1)
    side = receiver(sink, mechanism, low_memory=low_memory)
    sent, received = outcomes(side, weights)
    assert "the receiver gave up: ValueError: no space left in the sampler" in str(sent)
    assert "no space left in the sampler" in str(received)
    assert equal(sink.held, tensors(0))
    sink.fail = None
    sync(side, weights)
    assert equal(sink.held, weights)
    side.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tiny": None}, "'tiny' exists on the receiver only"),
        ({"more": torch.zeros(2)}, "'more' exists on the sender only"),
        ({"tiny": torch.zeros(6)}, r"'tiny' is float32\[6\] on the sender"),
        ({"half": torch.zeros(513, 129)}, r"bfloat16\[513, 129\] on\s+the receiver"),
    ],
)
def test_models_that_differ_are_refused_on_both_sides_before_anything_moves(change: dict, message: str) -> None:
    weights = {name: one for name, one in (tensors(1) | change).items() if one is not None}
    sink = DictSink()
    side = receiver(sink, low_memory=True)
    for outcome in outcomes(side, weights):
        with pytest.raises(WeightSyncError, match=message):
            raise outcome
    assert sink.num_begun == 0
    assert equal(sink.held, tensors(0))
    side.close()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda items: items[:3] + items[4:], "'row' is in the manifest and was never sent"),
        (lambda items: items[:3] + items[2:], "'tiny' came twice"),
        (lambda items: [*items[:-1], ("last", torch.zeros(3))], "'last' is .* not what the manifest says"),
        (lambda items: [*items, ("other", torch.zeros(3))], "'other' is .* not what the manifest says"),
    ],
)
def test_weights_that_are_not_those_of_the_manifest_fail_the_sync(damage: Any, message: str) -> None:
    sink, weights = DictSink(), tensors(1)
    side = receiver(sink)
    for outcome in outcomes(side, weights, iter(damage(list(weights.items())))):
        with pytest.raises(WeightSyncError, match=message):
            raise outcome
    assert equal(sink.held, tensors(0))
    side.close()


@pytest.mark.parametrize("mechanism", [*MECHANISMS, None])
def test_no_offer_no_listener_and_a_used_offer_fail_at_once(mechanism: str | None) -> None:
    sink, weights = DictSink(), tensors(1)
    side = receiver(sink, mechanism, timeout_seconds=60)
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match="no offer is out"):
        side.run()
    with pytest.raises(WeightSyncError, match="there is no receiver"):
        send_weights(None, manifest(weights), iter(weights.items()), version=1)
    used = side.offer
    sync(side, weights)
    with pytest.raises(WeightSyncError, match="the offer was used already"):
        send_weights(used, manifest(weights), iter(weights.items()), version=2)
    taken_back = side.offer
    side.close()
    with pytest.raises(WeightSyncError, match="no receiver at"):
        send_weights(taken_back, manifest(weights), iter(weights.items()), version=2)
    assert time.monotonic() - started < 30


def test_stranger_is_turned_away_with_the_reason_and_the_right_sender_is_still_served() -> None:
    sink, weights = DictSink(), tensors(1)
    side = receiver(sink)
    offer = side.offer
    receiving = Run(side.run)
    wrong = SyncOffer.from_json(offer.to_json() | {"token": "0" * 32})
    with pytest.raises(WeightSyncError, match="its token is not the offer's"):
        send_weights(wrong, manifest(weights), iter(weights.items()), version=1)
    with socket.create_connection((offer.host, offer.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    send_weights(offer, manifest(weights), iter(weights.items()), version=1)
    assert receiving.outcome.version == 1
    assert equal(sink.held, weights)
    side.close()


def test_nobody_but_strangers_ends_the_wait_and_says_so() -> None:
    side = receiver(DictSink(), timeout_seconds=0.5)
    offer = side.offer
    receiving = Run(side.run)
    with socket.create_connection((offer.host, offer.port)) as stranger:
        stranger.sendall(b'{"kind": "hello", "token": "x"}\n')
        with pytest.raises(WeightSyncError, match=r"no sender came within 0\.5 s; 1 were turned away, .* token"):
            raise receiving.outcome
    side.close()


def test_other_version_of_the_protocol_is_named_on_both_sides() -> None:
    side = receiver(DictSink(), timeout_seconds=0.5)
    offer = side.offer
    receiving = Run(side.run)
    with socket.create_connection((offer.host, offer.port)) as other:
        other.sendall(b'{"kind": "hello", "protocol": 99, "token": "%s"}\n' % offer.token.encode())
        assert b"it speaks version 99 of the sync protocol" in other.recv(4096)
        with pytest.raises(WeightSyncError, match="version 99"):
            raise receiving.outcome
    side.close()


def test_receiver_that_never_answers_does_not_hold_the_sender() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        offer = SyncOffer("127.0.0.1", mute.getsockname()[1], "t", "stream", 1 << 20, False, 0.3)
        weights = tensors(1)
        with pytest.raises(WeightSyncError, match=r"the receiver was silent for 0\.3 s waiting for its 'agreed'"):
            send_weights(offer, manifest(weights), iter(weights.items()), version=1)


def test_second_sync_into_one_receiver_is_refused_while_the_first_runs() -> None:
    sink, weights = DictSink(), tensors(1)
    side = receiver(sink)
    offer, reached, go = side.offer, threading.Event(), threading.Event()

    def slow() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():
            yield name, tensor
            reached.set()
            go.wait(SECONDS)

    receiving = Run(side.run)
    sending = Run(lambda: send_weights(offer, manifest(weights), slow(), version=1))
    reached.wait(SECONDS)
    with pytest.raises(WeightSyncError, match="in the middle of a weight sync"):
        side.run()
    with pytest.raises(WeightSyncError, match="no receiver at"):
        send_weights(offer, manifest(weights), iter(weights.items()), version=2)
    go.set()
    assert sending.outcome.version == receiving.outcome.version == 1
    assert equal(sink.held, weights)
    side.close()


def test_receiver_can_be_told_that_nobody_comes() -> None:
    side = receiver(DictSink(), timeout_seconds=60)
    offer = side.offer
    receiving = Run(side.run)
    refuse(offer, "rank 1 of the trainer died")
    with pytest.raises(WeightSyncError, match="rank 1 of the trainer died"):
        raise receiving.outcome
    side.close()


def test_receiver_that_is_closed_while_it_waits_ends_its_wait() -> None:
    side = receiver(DictSink(), timeout_seconds=60)
    assert side.offer.port
    receiving = Run(side.run)
    time.sleep(0.1)
    side.close()
    with pytest.raises(WeightSyncError, match="the offer was taken back"):
        raise receiving.outcome


@pytest.mark.parametrize("is_reachable", MODES)
def test_weights_are_iterated_to_the_end_whatever_happens(is_reachable: bool) -> None:
    """The other ranks of a trainer take part in making each of them."""
    weights, made = tensors(1), []

    def making() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():
            made.append(name)
            yield name, tensor

    side = receiver(DictSink(fail=ValueError("broken")), low_memory=True)
    if is_reachable:
        sent, _ = outcomes(side, weights, making())
        assert "broken" in str(sent)
    else:
        with pytest.raises(WeightSyncError):
            send_weights(None, manifest(weights), making(), version=1)
    assert made == list(weights)
    follow(making())
    assert made == 2 * list(weights)
    side.close()


def wait_until(holds: Callable[[], bool]) -> None:
    """Threads of torch end shortly after what they served, which a kept error may still hold."""
    ends = time.monotonic() + 5
    while not holds():
        gc.collect()
        assert time.monotonic() < ends
        time.sleep(0.01)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_no_file_and_no_thread_is_left_over_by_syncs_that_worked_and_that_failed(mechanism: str) -> None:
    sink, weights = DictSink(), tensors(1)

    def rounds(side: Receiver, count: int) -> None:
        for _ in range(count):
            sync(side, weights)
            outcomes(side, weights, half_way(weights, RuntimeError("no")))
            sink.fail = ValueError("no")
            outcomes(side, weights)
            sink.fail = None
        side.close()

    rounds(receiver(sink, mechanism), 1)
    gc.collect()
    files, threads = open_files(), num_threads()
    rounds(receiver(sink, mechanism), 4)
    wait_until(lambda: open_files() <= files and num_threads() <= threads)


def test_shared_memory_leaves_no_name_behind() -> None:
    before = set(Path("/dev/shm").iterdir())
    side = receiver(DictSink(), "shared_memory")
    sync(side, tensors(1))
    assert set(Path("/dev/shm").iterdir()) == before
    side.close()


def test_offer_hides_its_token_and_refuses_fields_it_does_not_know() -> None:
    side = receiver(DictSink())
    assert side.offer.token not in repr(side.offer)
    with pytest.raises(WeightSyncError, match="an offer has the fields"):
        SyncOffer.from_json(side.offer.to_json() | {"pickle": ""})
    side.close()


def test_cuda_handles_need_both_sides_on_a_gpu() -> None:
    side = receiver(DictSink(), "cuda_ipc")
    for outcome in outcomes(side, tensors(1)):
        with pytest.raises(WeightSyncError, match=r"cuda_ipc needs both sides on one GPU; .* cpu"):
            raise outcome
    side.close()
