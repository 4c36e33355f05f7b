"""Syncs that carry changes only, and syncs into a model of other names and cuts."""

from collections.abc import Iterator

import pytest
import torch

from arctic_platform.rl.weight_sync.delta import DeltaBase
from tests.rl.weight_sync.pairs import DictSink, equal, outcomes, receiver, sync, tensors

MODES = [False, True]


def moved(weights: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """One element in fifty is another."""
    generator = torch.Generator().manual_seed(seed)
    changed = {}
    for name, one in weights.items():
        mask = torch.rand(one.shape, generator=generator) < 0.02
        changed[name] = torch.where(mask, one + 1, one)
    return changed


@pytest.mark.parametrize("low_memory", MODES)
def test_changes_lead_to_the_same_bits_in_fewer_bytes(low_memory: bool) -> None:
    sink, base, weights = DictSink(), DeltaBase(), tensors(1)
    side = receiver(sink, low_memory=low_memory, delta=True)
    whole, _ = sync(side, weights, 1, base)
    assert whole.mechanism.startswith("stream") and "delta" not in whole.mechanism
    assert whole.note == "all weights travelled: the receiver holds version None, the sender None"
    for version in (2, 3):
        weights = moved(weights, version)
        sent, received = sync(side, weights, version, base)
        assert sent == received
        assert sent.mechanism == ("stream-delta-low-memory" if low_memory else "stream-delta")
        assert equal(sink.held, weights)
        assert sent.num_sent_bytes < whole.num_sent_bytes / 5
        assert sent.num_bytes == whole.num_bytes
    side.close()


def test_sides_without_a_common_version_send_all_weights_and_say_so() -> None:
    sink, weights = DictSink(), tensors(1)
    side = receiver(sink, delta=True)
    sync(side, weights, 1, DeltaBase())
    weights = moved(weights, 2)
    report, _ = sync(side, weights, 2, DeltaBase())
    assert report.mechanism == "stream"
    assert "all weights travelled: the receiver holds version 1-" in report.note
    weights = moved(weights, 3)
    report, _ = sync(side, weights, 3, None)
    assert report.mechanism == "stream"
    assert equal(sink.held, weights)
    side.close()


def test_base_outlives_a_failure_of_the_sender_and_is_forgotten_where_the_sides_do_not_know_of_each_other() -> None:
    sink, base, weights = DictSink(), DeltaBase(), tensors(1)
    side = receiver(sink, delta=True)
    sync(side, weights, 1, base)
    after = moved(weights, 2)

    def breaking() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(after.items())[:3]
        raise RuntimeError("rank 1 is gone")

    for outcome in outcomes(side, after, breaking(), 2, base):
        assert "rank 1 is gone" in str(outcome)
    assert equal(sink.held, weights)
    report, _ = sync(side, after, 2, base)
    assert report.mechanism == "stream-delta"
    assert equal(sink.held, after)
    sink.fail = ValueError("no")
    last = moved(after, 3)
    outcomes(side, last, None, 3, base)
    sink.fail = None
    report, _ = sync(side, last, 3, base)
    assert equal(sink.held, last)
    side.close()


PLAIN = {
    "model.embed_tokens.weight": (40, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.k_proj.weight": (4, 8),
    "model.layers.0.self_attn.v_proj.weight": (4, 8),
    "model.layers.0.mlp.experts.0.gate_proj.weight": (6, 8),
    "model.layers.0.mlp.experts.0.up_proj.weight": (6, 8),
    "model.layers.0.mlp.experts.0.down_proj.weight": (8, 6),
    "model.layers.0.mlp.experts.1.gate_proj.weight": (6, 8),
    "model.layers.0.mlp.experts.1.up_proj.weight": (6, 8),
    "model.layers.0.mlp.experts.1.down_proj.weight": (8, 6),
}
FUSED = {
    "embed_tokens.weight": (40, 8),
    "layers.0.self_attn.qkv_proj.weight": (16, 8),
    "layers.0.mlp.experts.gate_up_proj": (2, 12, 8),
    "layers.0.mlp.experts.down_proj": (2, 8, 6),
}


def filled(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def fused(plain: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same model, written out."""
    embed, q, k, v, gate0, up0, down0, gate1, up1, down1 = plain.values()
    experts = torch.stack([torch.cat([gate0, up0]), torch.cat([gate1, up1])])
    return dict(zip(FUSED, [embed, torch.cat([q, k, v]), experts, torch.stack([down0, down1])], strict=True))


@pytest.mark.parametrize("delta", MODES)
@pytest.mark.parametrize("low_memory", MODES)
def test_fused_and_split_models_fill_each_other_through_buckets_and_changes(low_memory: bool, delta: bool) -> None:
    plain, is_fused = DictSink(filled(PLAIN, 0)), DictSink(filled(FUSED, 0))
    for sink, twin, back in ((is_fused, fused, None), (plain, None, fused)):
        side, base = receiver(sink, low_memory=low_memory, delta=delta), DeltaBase()
        for version in (1, 2):
            made = filled(PLAIN, version)
            report, _ = sync(side, made if back is None else fused(made), version, base)
            assert equal(sink.held, twin(made) if twin is not None else made)
        assert ("delta" in report.mechanism) is delta
        side.close()


def test_model_that_has_only_half_of_a_fused_pair_is_refused_by_name() -> None:
    made = filled(PLAIN, 1)
    del made["model.layers.0.self_attn.k_proj.weight"]
    sink = DictSink(filled(FUSED, 0))
    side = receiver(sink, low_memory=True)
    for outcome in outcomes(side, made):
        assert "qkv_proj" in str(outcome)
    assert sink.num_begun == 0
    assert equal(sink.held, filled(FUSED, 0))
    side.close()
