"""What a receiver makes of buckets that a faulty sender, or a faulty way, gets wrong. The sender is written out."""

import socket
from typing import Any

import pytest
import torch
import xxhash

from arctic_platform.errors import WeightSyncError
from arctic_platform.rl.weight_sync.base import (
    BLOCK_BYTES,
    RunningDigest,
    bytes_of,
    digest,
)
from arctic_platform.rl.weight_sync.offer import PROTOCOL, SyncOffer, told
from arctic_platform.rl.weight_sync.peer import Peer
from tests.rl.weight_sync.pairs import DictSink, Run, equal, manifest, receiver

SHAPES = {"gate": (4, 6), "up": (4, 6), "tail": (5,)}
"""A pair that a receiver may hold as one matrix, and what follows it."""


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def greet(offer: SyncOffer, sent: dict[str, torch.Tensor], **changes: Any) -> Peer:
    """A sender that has agreed with the receiver on everything."""
    peer = Peer(socket.create_connection((offer.host, offer.port)), name="receiver", timeout_seconds=2)
    peer.trust()
    peer.send("hello", protocol=PROTOCOL, token=offer.token)
    peer.send("manifest", **told(manifest(sent)) | {"version": 1, "device": "cpu"} | changes)
    peer.receive("agreed")
    peer.send("ready", mechanism="stream", note="")
    return peer


def bucket(peer: Peer, pieces: list[list[int]], data: bytes, slot: int = 0) -> None:
    peer.send("bucket", slot=slot, num_bytes=len(data), pieces=pieces)
    peer.send_bytes(memoryview(data))
    peer.receive("taken")


def one_each(sent: dict[str, torch.Tensor]) -> list[tuple[list[list[int]], bytes]]:
    """A bucket for every tensor."""
    raw = [bytes_of(one).numpy().tobytes() for one in sent.values()]
    return [([[index, 0, 0, len(data)]], data) for index, data in enumerate(raw)]


def stale(buckets: list, old: list) -> list:
    """The second of a pair is what it was before."""
    return [buckets[0], old[1], buckets[2]]


DAMAGES = {
    "a bucket is dropped": (lambda new, old: [new[0], new[2]], "0 of 96 bytes of 'up' arrived: a bucket was lost"),
    "a bucket comes twice": (lambda new, old: [new[0], new[1], new[1]], "byte 96 of 96 was next: .* came twice"),
    "half of a pair is stale": (lambda new, old: [new[0], old[1], new[2]], "digests differ for 'up' .1 of 3 tensors"),
    "a pair is exchanged": (
        lambda new, old: [(new[0][0], new[1][1]), (new[1][0], new[0][1]), new[2]],
        "digests differ for 'gate' .2 of 3 tensors",
    ),
    "a piece ends beyond its tensor": (lambda new, old: [([[0, 0, 0, 100]], bytes(100))], "bytes 0 to 100 of 'gate'"),
    "a piece begins before its bucket": (lambda new, old: [([[0, 0, -4, 96]], bytes(96))], "from -4 to 92"),
    "a piece is of no tensor": (lambda new, old: [([[7, 0, 0, 4]], bytes(4))], "piece of tensor 7"),
    "a bucket is larger than was agreed": (lambda new, old: [([], bytes(1 << 20))], "a bucket of 1048576 bytes in"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_bucket_that_is_not_as_it_should_be_fails_the_sync(damage: str) -> None:
    spoil, message = DAMAGES[damage]
    new, old = weights(1), weights(0)
    sink = DictSink(old)
    before = {name: one.clone() for name, one in old.items()}
    side = receiver(sink)
    offer = side.offer
    receiving = Run(side.run)
    peer = greet(offer, new)
    with pytest.raises(WeightSyncError, match=message):
        for pieces, data in spoil(one_each(new), one_each(before)):
            bucket(peer, pieces, data)
        peer.send("digests", digests={name: digest(one) for name, one in new.items()})
        peer.receive("equal")
    peer.close()
    with pytest.raises(WeightSyncError, match=message):
        raise receiving.outcome
    assert equal(sink.held, before)
    assert sink.num_begun == 0
    side.close()


def test_written_out_sender_is_understood() -> None:
    new, sink = weights(1), DictSink(weights(0))
    side = receiver(sink)
    offer = side.offer
    receiving = Run(side.run)
    peer = greet(offer, new)
    for pieces, data in one_each(new):
        bucket(peer, pieces, data)
    peer.send("digests", digests={name: digest(one) for name, one in new.items()})
    peer.receive("equal")
    peer.send("commit")
    peer.receive("done")
    assert receiving.outcome.version == 1
    assert equal(sink.held, new)
    peer.close()
    side.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"digest": 1}, "the manifest was damaged on its way"),
        ({"manifest": '{"specs": {"gate": 3}, "aliases": {}}'}, "the other side's manifest cannot be read"),
        ({"manifest": {"specs": {}, "aliases": {}}}, "the other side's manifest cannot be read"),
    ],
)
def test_manifest_that_cannot_be_what_was_sent_is_refused(changes: dict, message: str) -> None:
    side = receiver(DictSink(weights(0)))
    offer = side.offer
    receiving = Run(side.run)
    with pytest.raises(WeightSyncError, match=message):
        greet(offer, weights(1), **changes)
    with pytest.raises(WeightSyncError, match=message):
        raise receiving.outcome
    side.close()


def test_commit_that_the_sender_has_taken_back_meanwhile_changes_nothing() -> None:
    """As a receiver finds it that was stopped while the sender waited for its last word."""
    new, sink = weights(1), DictSink(weights(0))
    side = receiver(sink)
    offer = side.offer
    receiving = Run(side.run)
    peer = greet(offer, new)
    for pieces, data in one_each(new):
        bucket(peer, pieces, data)
    peer.send("digests", digests={name: digest(one) for name, one in new.items()})
    peer.receive("equal")
    peer.send_bytes(memoryview(b'{"kind": "commit"}\n{"kind": "abort", "reason": "you were silent"}\n'))
    with pytest.raises(WeightSyncError, match="the sender gave up: you were silent"):
        raise receiving.outcome
    assert equal(sink.held, weights(0))
    peer.close()
    side.close()


@pytest.mark.parametrize("num_bytes", [0, 1, 1000, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 17])
def test_digest_is_the_same_in_whatever_pieces_the_bytes_come(num_bytes: int) -> None:
    flat = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    running = RunningDigest(flat)
    for end in (num_bytes // 7, num_bytes // 2, num_bytes // 2, num_bytes):
        running.advance(end)
    assert running.finish() == digest(flat) == xxhash.xxh3_64_intdigest(flat.numpy().tobytes())


def test_digest_sees_bits_rows_columns_and_blocks_of_a_large_tensor() -> None:
    rows = torch.randint(-(2**62), 2**62, (256, 1024))
    last = torch.arange(256)
    changes = [rows, rows[last.roll(1)], rows[:, torch.arange(1024).roll(1)], rows[last.roll(64)]]
    swapped = rows.clone()
    swapped[3, 5], swapped[9, 2] = rows[9, 2], rows[3, 5]
    bits = []
    for bit in (0, 31, 63):
        flipped = rows.clone()
        flipped[100, 7] ^= torch.tensor(1).bitwise_left_shift(bit)
        bits.append(flipped)
    all_of_them = [*changes, swapped, *bits]
    assert len({digest(one) for one in all_of_them}) == len(all_of_them)


def test_digest_does_not_depend_on_where_the_bytes_lie() -> None:
    flat = torch.randint(0, 256, (BLOCK_BYTES + 9,), dtype=torch.uint8)
    shifted = torch.cat([flat[:3], flat])[3:]
    assert shifted.data_ptr() % 8
    assert digest(shifted) == digest(flat)
