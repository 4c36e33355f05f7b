"""Changes of tensors: every bit arrives, nothing is written by a payload that does not fit, both sides can go back."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from arctic_platform.errors import WeightSyncError
from arctic_platform.rl.engines.models import tiny_model
from arctic_platform.rl.weight_sync import delta
from arctic_platform.rl.weight_sync.base import manifest_of, weights_of
from arctic_platform.rl.weight_sync.delta import DeltaBase, apply_delta, encode

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool]


def of_bytes(data: bytes, dtype: torch.dtype) -> Tensor:
    """Any bits at all as a tensor: infinities, every NaN, -0.0, denormal numbers."""
    num = len(data) // dtype.itemsize
    return torch.frombuffer(bytearray(data), dtype=dtype, count=num) if num else torch.empty(0, dtype=dtype)


def bits(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def noise(num: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed)).to(dtype)


def nudged(tensor: Tensor, every: int = 7) -> Tensor:
    """Each so manieth element, one step of its last bit away."""
    other = tensor.clone()
    other.view(torch.int16)[::every] ^= 1
    return other


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Two tensors of one kind with any bits; the second often nearly the first."""
    dtype = draw(st.sampled_from(DTYPES))
    base = draw(arrays.arrays(np.uint8, st.integers(0, 600)))
    new = base.copy()
    for at in draw(st.lists(st.integers(0, max(len(base) - 1, 0)), max_size=5)) if len(base) else []:
        new[at] ^= draw(st.integers(1, 255))
    if draw(st.booleans()):
        new = draw(arrays.arrays(np.uint8, len(base)))
    if dtype is torch.bool:
        base, new = base & 1, new & 1
    return of_bytes(base.tobytes(), dtype), of_bytes(new.tobytes(), dtype)


@given(pair=pairs(), piece_bytes=st.sampled_from([8, 24, 64, 4 << 20]))
def test_every_bit_arrives_whatever_it_means(pair: tuple[Tensor, Tensor], piece_bytes: int) -> None:
    base, new = pair
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "PIECE_BYTES", piece_bytes)
        payload = encode(base, new)
        out = torch.zeros_like(base)
        apply_delta(base, payload, out=out)
        assert bits(out) == bits(new)
        apply_delta(base, payload)
        assert bits(base) == bits(new)


@settings(max_examples=300)
@given(data=st.data())
def test_a_damaged_payload_writes_nothing(data: st.DataObject) -> None:
    base = noise(500)
    payload = bytearray(encode(base, nudged(base)))
    before = bits(base)
    if data.draw(st.booleans(), "cut or flipped"):
        payload = payload[: data.draw(st.integers(0, len(payload) - 1), "cut at")]
    else:
        payload[data.draw(st.integers(0, len(payload) - 1), "at")] ^= data.draw(st.integers(1, 255), "by")
    with pytest.raises(WeightSyncError):
        apply_delta(base, bytes(payload))
    assert bits(base) == before


@given(garbage=st.binary(max_size=200))
def test_garbage_is_no_payload(garbage: bytes) -> None:
    with pytest.raises(WeightSyncError, match=r"damaged on its way .*; call sync_weights\(\) again"):
        apply_delta(noise(10), garbage)


@pytest.mark.parametrize("every", [1, 499])
def test_another_base_is_noticed_before_anything_is_written(every: int) -> None:
    base = noise(500)
    payload = encode(base, nudged(base))
    other = nudged(base, every)
    before = bits(other)
    with pytest.raises(WeightSyncError, match="started from different versions; sync all weights"):
        apply_delta(other, payload)
    assert bits(other) == before


def test_a_change_fits_its_own_kind_of_tensor_only() -> None:
    base = noise(500)
    payload = encode(base, nudged(base))
    for other in (noise(499), noise(250, torch.float32), torch.empty(0)):
        with pytest.raises(WeightSyncError, match="does not fit a tensor of"):
            apply_delta(other, payload)
    with pytest.raises(WeightSyncError, match="does not fit"):
        apply_delta(base, payload, out=noise(499))
    with pytest.raises(WeightSyncError, match="send this tensor whole"):
        encode(base, noise(499))
    with pytest.raises(WeightSyncError, match="send this tensor whole"):
        encode(base, base.view(torch.float16))
    with pytest.raises(WeightSyncError, match="contiguous CPU tensors"):
        apply_delta(noise(1000)[::2], payload)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_tensor_of_several_pieces_arrives_and_what_hardly_changed_is_small(dtype: torch.dtype) -> None:
    base = noise(3 * delta.PIECE_BYTES // 2 + 1, dtype)
    new = base.clone()
    new[::300] *= 1.01
    payload = encode(base, new)
    assert len(payload) < len(bits(base)) / 50
    apply_delta(base, payload)
    assert bits(base) == bits(new)


def weights(seed: int) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in weights_of(tiny_model(seed=seed).bfloat16()).items()}


def in_full(base: DeltaBase, given: dict[str, Tensor], version: int) -> None:
    for name, tensor in given.items():
        base.replace(name, tensor)
    base.commit(version)


def test_two_sides_stay_equal_over_many_syncs() -> None:
    sender, receiver = DeltaBase(), DeltaBase()
    current = weights(0)
    assert sender.identity is None
    in_full(sender, current, 1)
    in_full(receiver, current, 1)
    assert sender.holds(manifest_of(tiny_model().bfloat16()))
    assert not sender.holds(manifest_of(tiny_model()))
    for version in range(2, 6):
        current = {name: nudged(tensor, version) for name, tensor in current.items()}
        assert sender.identity == receiver.identity is not None
        for name, tensor in current.items():
            arrived = receiver.apply(name, sender.encode(name, tensor))
            assert bits(arrived) == bits(tensor)
        sender.commit(version)
        receiver.commit(version)
    assert sender.identity == receiver.identity
    assert sender.num_bytes == sum(len(bits(tensor)) for tensor in current.values())


def test_a_sync_that_broke_off_is_undone_on_both_sides() -> None:
    sender, receiver = DeltaBase(), DeltaBase()
    first = weights(0)
    in_full(sender, first, 1)
    in_full(receiver, first, 1)
    identity = sender.identity
    names = list(first)
    for name in names[:3]:
        receiver.apply(name, sender.encode(name, nudged(first[name])))
    sender.encode(names[3], nudged(first[names[3]]))
    assert sender.identity is None
    sender.rollback()
    receiver.rollback()
    assert sender.identity == receiver.identity == identity
    for name, tensor in first.items():
        assert bits(receiver.apply(name, sender.encode(name, nudged(tensor, 3)))) == bits(nudged(tensor, 3))


def test_one_side_that_committed_alone_is_told_by_its_identity() -> None:
    sender, receiver = DeltaBase(), DeltaBase()
    first = weights(0)
    in_full(sender, first, 1)
    in_full(receiver, first, 1)
    for name, tensor in first.items():
        receiver.apply(name, sender.encode(name, nudged(tensor)))
    receiver.commit(2)
    sender.rollback()
    assert sender.identity != receiver.identity
    name = next(iter(first))
    with pytest.raises(WeightSyncError, match="different versions"):
        receiver.apply(name, sender.encode(name, nudged(first[name], 3)))


def test_a_full_sync_that_broke_off_leaves_nothing_to_build_on() -> None:
    base = DeltaBase()
    in_full(base, weights(0), 1)
    base.replace("model.norm.weight", torch.ones(3))
    assert base.identity is None
    base.rollback()
    assert base.identity is None
    assert base.num_bytes == 0
    with pytest.raises(WeightSyncError, match="not held here"):
        base.apply("model.norm.weight", b"")


def test_a_tensor_changes_once_in_a_sync() -> None:
    base = DeltaBase()
    base.replace("w", noise(8))
    base.commit(1)
    base.encode("w", nudged(noise(8)))
    with pytest.raises(WeightSyncError, match="changes once"):
        base.encode("w", noise(8))


def test_what_is_held_is_no_view_of_what_was_given() -> None:
    base, given_tensor = DeltaBase(), noise(8)
    base.replace("w", given_tensor)
    base.commit(1)
    given_tensor.zero_()
    payload = encode(noise(8), nudged(noise(8)))
    assert bits(base.apply("w", payload)) == bits(nudged(noise(8)))
