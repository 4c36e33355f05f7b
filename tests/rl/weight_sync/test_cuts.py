"""Two processes' sync where the receiver cuts the weights differently: every mechanism, whole and in low memory."""

import pytest
import torch

from arctic_platform.errors import WeightSyncError
from arctic_platform.rl.weight_sync.names import Mapping
from tests.rl.weight_sync.pairs import MECHANISMS, DictSink, equal, outcomes, receiver, sync

ROWS = 600
"""Of 512 fp32 numbers each: a matrix is larger than a bucket of 1 MiB."""


def single() -> dict[str, torch.Tensor]:
    """Projections and experts one by one."""
    draw = torch.Generator().manual_seed(5)
    shapes = {f"layers.0.self_attn.{name}_proj.weight": (ROWS if name == "q" else 40, 512) for name in "qkv"}
    shapes |= {f"layers.0.mlp.{name}_proj.weight": (ROWS, 512) for name in ("gate", "up")}
    for at in range(2):
        shapes |= {f"layers.1.mlp.experts.{at}.{name}_proj.weight": (ROWS, 512) for name in ("gate", "up")}
        shapes[f"layers.1.mlp.experts.{at}.down_proj.weight"] = (512, ROWS)
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def fused(parts: dict[str, torch.Tensor], *, is_transposed: bool) -> dict[str, torch.Tensor]:
    """The slow way."""
    attention, mlp, experts = "layers.0.self_attn", "layers.0.mlp", "layers.1.mlp.experts"
    both = [
        torch.cat([parts[f"{experts}.{at}.gate_proj.weight"], parts[f"{experts}.{at}.up_proj.weight"]])
        for at in range(2)
    ]
    down = [parts[f"{experts}.{at}.down_proj.weight"] for at in range(2)]
    stacks = [torch.stack(both), torch.stack(down)]
    if is_transposed:
        stacks = [stack.mT.contiguous() for stack in stacks]
    return {
        f"{attention}.qkv_proj.weight": torch.cat([parts[f"{attention}.{name}_proj.weight"] for name in "qkv"]),
        f"{mlp}.gate_up_proj.weight": torch.cat([parts[f"{mlp}.{name}_proj.weight"] for name in ("gate", "up")]),
        f"{experts}.gate_up_proj": stacks[0],
        f"{experts}.down_proj": stacks[1],
    }


@pytest.mark.parametrize("is_transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("low_memory", [False, True], ids=["copy", "low memory"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_receiver_of_another_cut_is_filled_in_buckets_that_hold_half_a_pair(
    mechanism: str, low_memory: bool, is_transposed: bool
) -> None:
    parts = single()
    whole = fused(parts, is_transposed=is_transposed)
    for sent, held in ((parts, whole), (whole, parts)):
        sink = DictSink({name: torch.full_like(tensor, torch.nan) for name, tensor in held.items()})
        side = receiver(sink, mechanism, low_memory=low_memory)
        reports = sync(side, sent)
        side.close()
        assert equal(sink.held, held)
        assert [report.num_tensors for report in reports] == [len(sent), len(held)]


@pytest.mark.parametrize("low_memory", [False, True], ids=["copy", "low memory"])
def test_a_part_that_was_stored_in_a_wrong_place_fails_the_sync(
    low_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = single()
    whole = fused(parts, is_transposed=True)
    before = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    sink = DictSink({name: tensor.clone() for name, tensor in before.items()})
    honest = Mapping.write

    def one_late(self, targets, name, values, start=None):
        honest(self, targets, name, values, start)
        if name == "layers.1.mlp.experts.1.up_proj.weight":
            self.pieces(name)[0].into.of(targets[self.pieces(name)[0].receiver])[3, 5] += 1.0

    monkeypatch.setattr(Mapping, "write", one_late)
    side = receiver(sink, low_memory=low_memory)
    for found in outcomes(side, parts):
        assert isinstance(found, WeightSyncError)
        assert "digests differ for 'layers.1.mlp.experts.1.up_proj.weight'" in str(found)
    side.close()
    if not low_memory:
        assert equal(sink.held, before)


def test_a_name_without_counterpart_is_refused_on_both_sides_before_a_byte_moves() -> None:
    parts = single()
    whole = fused(parts, is_transposed=False)
    del parts["layers.0.self_attn.v_proj.weight"]
    sink = DictSink({name: torch.zeros_like(tensor) for name, tensor in whole.items()})
    side = receiver(sink)
    for found in outcomes(side, parts):
        assert isinstance(found, WeightSyncError)
        assert "'layers.0.self_attn.qkv_proj.weight' exists on the receiver only (sender 10 tensors" in str(found)
    side.close()
    assert sink.num_begun == 0
