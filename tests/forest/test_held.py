"""A tail that reads held keys and values against the same tokens in one pass over the whole forest."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arctic_platform.errors import ConfigError, UnsupportedModelError
from arctic_platform.forest import ForestPlan, build_forest, forest_mask
from arctic_platform.forest.held import HeldPath, HeldPlan, HeldRun, common_prefix_len, tail_of
from tests.forest.strategies import batches

TRUNK = np.arange(10, 17)
ROWS = [np.concatenate([TRUNK, np.array(tail, np.int64)]) for tail in ([1, 2, 3, 4, 5], [1, 2, 6], [7], [], [1, 2, 3])]


def qkv(num_tokens: int, num_heads: int = 4, num_kv: int = 2, d: int = 8) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(num_tokens)
    heads = (num_heads, num_kv, num_kv)
    return [torch.randn(1, h, num_tokens, d, generator=draw, dtype=torch.float64).requires_grad_() for h in heads]


@given(rows=batches(), data=st.data())
@settings(max_examples=60)
def test_tail_sees_of_itself_what_the_whole_forest_shows_it(rows, data):
    prefix = data.draw(st.lists(st.integers(4, 6), max_size=5))
    forest = build_forest([np.concatenate([np.array(prefix, np.int64), row]) for row in rows])
    num_held = data.draw(st.integers(0, common_prefix_len(forest)))
    tail = tail_of(forest, num_held)
    assert torch.equal(forest_mask(tail), forest_mask(forest)[num_held:, num_held:])
    assert (tail.position_ids == forest.position_ids[num_held:]).all()
    for b in range(forest.num_rows):
        assert (tail.row(b) + num_held == forest.row(b)[num_held:]).all()
    parents = forest.parent[num_held:]
    assert (tail.parent == np.where(parents < num_held, -1, parents - num_held)).all()
    above = np.where(tail.segment_parent < 0, -1, tail.end[tail.segment_parent] - 1)
    assert (above == np.where(tail.parent[tail.start] < 0, -1, tail.parent[tail.start])).all()


def test_prefix_is_common_only_where_every_row_begins_with_it():
    assert common_prefix_len(build_forest([[1, 2, 3], [1, 2]])) == 2
    assert common_prefix_len(build_forest([[1, 2, 3]])) == 3
    assert common_prefix_len(build_forest([[1, 2], [3]])) == 0
    assert common_prefix_len(build_forest([[1, 2], []])) == 0
    assert common_prefix_len(build_forest([])) == 0


@pytest.mark.parametrize("ends", [[1], [7], [3, 7], [1, 2, 6]])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 3},
        {"sliding_window": 6},
        {"softcap": 2.0},
        {"softcap": 2.0, "sliding_window": 4},
        {"sinks": True},
    ],
    ids=str,
)
def test_stages_attend_as_one_pass_forward_and_backward(ends, options):
    forest = build_forest(ROWS)
    whole, parts = qkv(forest.num_tokens), qkv(forest.num_tokens)
    sinks = torch.linspace(-1, 1, 4, dtype=torch.float64)
    both = [{**options, "scale": 0.3}, {**options, "scale": 0.3}]
    leaves = [sinks.clone().requires_grad_(), sinks.clone().requires_grad_()]
    if options.get("sinks"):
        both = [{**one, "sinks": leaf} for one, leaf in zip(both, leaves, strict=True)]
    expected = ForestPlan(forest).attend(0, *whole, **both[0])
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (expected * weights).sum().backward()

    path = HeldPath()
    outs: list[torch.Tensor] = []
    for end in ends:
        cut = slice(path.num_tokens, end)
        chain = tail_of(build_forest([TRUNK[:end]]), path.num_tokens)
        above = tuple(path.runs)
        with path.holding(end) as run:
            outs.append(HeldPlan(chain, above=above, keeps=run).attend(0, *(x[:, :, cut] for x in parts), **both[1]))
            run.seal(outs[-1].transpose(1, 2).flatten(2)[0])
    tail = slice(path.num_tokens, None)
    last = HeldPlan(tail_of(forest, path.num_tokens), above=tuple(path.runs))
    out = last.attend(0, *(x[:, :, tail] for x in parts), **both[1])
    torch.testing.assert_close(torch.cat([*outs, out], 2), expected, rtol=1e-12, atol=1e-12)

    (out * weights[:, :, tail]).sum().backward()
    for run in path.runs:
        (run.hidden * weights[:, :, run.start : run.end].transpose(1, 2).flatten(2)[0]).sum().backward()
    while path.runs:
        path.release()
    for ours, theirs in zip([*parts, leaves[1]], [*whole, leaves[0]], strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-12)


def test_half_gradients_of_many_passes_are_summed_in_fp32():
    source = torch.ones(1, 1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    run = HeldRun(0, 1)
    run.keep(0, source * 1.0, source * 1.0)
    run.seal(source[0, 0] * 1.0)
    for _ in range(1000):
        run.layer(0)[0].sum().backward()
    run.backward()
    assert source.grad.item() == 1000, "bf16 alone would stop at 256"


def test_run_that_nothing_reads_has_no_backward():
    source = torch.ones(1, 1, 2, 4, requires_grad=True)
    run = HeldRun(0, 2)
    run.keep(0, source * 1.0, source * 1.0)
    run.seal(source[0, 0] * 1.0)
    run.backward()
    assert source.grad is None


def test_recomputation_does_not_hold_a_second_time():
    run = HeldRun(0, 2)
    k = torch.ones(1, 1, 2, 4, requires_grad=True)
    run.keep(0, k, k)
    run.seal(k[0, 0])
    run.keep(0, torch.zeros_like(k), torch.zeros_like(k))
    assert torch.equal(run.layer(0)[0], k)


def test_what_cannot_be_held_is_refused():
    k = torch.ones(1, 1, 2, 4, requires_grad=True)
    run = HeldRun(0, 2)
    with torch.no_grad(), pytest.raises(ConfigError, match="use_reentrant"):
        run.keep(0, k, k)
    run.keep(0, k, k)
    with pytest.raises(UnsupportedModelError, match="attends twice"):
        run.keep(0, k, k)
    with pytest.raises(UnsupportedModelError, match="layer 1 did not attend"):
        run.layer(1)
