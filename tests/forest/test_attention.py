import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arctic_platform.errors import InputError
from arctic_platform.forest import (
    ForestPlan,
    RowsPlan,
    build_forest,
    forest_attention_forward,
    forest_mask,
    kernels,
    plain_attention,
)
from tests.forest.strategies import batches

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8
PLANS = {
    "flash": lambda forest: ForestPlan(forest, kernel="flash"),
    "math": lambda forest: ForestPlan(forest, kernel="math"),
    "rows": RowsPlan,
}


def qkv(forest, dtype=torch.float64, v_dim=HEAD_DIM, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(NUM_HEADS, HEAD_DIM), (NUM_KV_HEADS, HEAD_DIM), (NUM_KV_HEADS, v_dim)]
    return [
        torch.randn(1, heads, forest.num_tokens, dim, dtype=torch.float64, generator=generator)
        .to(dtype)
        .requires_grad_()
        for heads, dim in shapes
    ]


def grads_of(out, inputs, seed=1):
    weights = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.autograd.grad(out, inputs, weights.to(out.dtype))


def ancestors(forest):
    """The mask by its meaning: a token sees itself and what came before it in its row."""
    visible = np.zeros((forest.num_tokens, forest.num_tokens), bool)
    for token in range(forest.num_tokens):
        seen = token
        while seen >= 0:
            visible[token, seen] = True
            seen = forest.parent[seen]
    return visible


@given(batches())
def test_the_mask_shows_each_token_its_ancestors_and_nothing_else(rows):
    forest = build_forest(rows)
    assert (forest_mask(forest).numpy() == ancestors(forest)).all()


@given(batches(), st.sampled_from(sorted(PLANS)), st.integers(1, 3))
@settings(max_examples=150)
def test_rectangles_equal_the_dense_mask_forward_and_backward(rows, kind, min_shared):
    forest = build_forest(rows, min_shared=min_shared)
    if not forest.num_tokens:
        return
    inputs = qkv(forest)
    expected = plain_attention(*inputs, forest_mask(forest), scale=0.3)
    out = PLANS[kind](forest).attend(0, *inputs, scale=0.3)
    assert (out - expected).abs().max() < 1e-12
    for ours, plain in zip(grads_of(out, inputs), grads_of(expected, inputs), strict=True):
        assert (ours - plain).abs().max() < 1e-12


@given(batches(), st.sampled_from(sorted(PLANS)), st.integers(0, 6), st.sampled_from([None, 3.0]), st.booleans())
@settings(max_examples=150)
def test_windows_count_positions_and_soft_caps_and_sinks_are_exact(rows, kind, window, softcap, has_sinks):
    forest = build_forest(rows)
    if not forest.num_tokens:
        return
    inputs = qkv(forest)
    sinks = torch.linspace(-1, 1, NUM_HEADS, dtype=torch.float64, requires_grad=True) if has_sinks else None
    leaves = inputs + ([sinks] if sinks is not None else [])
    expected = plain_attention(*inputs, forest_mask(forest, window), scale=0.3, softcap=softcap, sinks=sinks)
    plan = PLANS[kind](forest)
    out = plan.attend(0, *inputs, scale=0.3, sliding_window=window, softcap=softcap, sinks=sinks)
    assert (out - expected).abs().max() < 1e-12
    for ours, plain in zip(grads_of(out, leaves), grads_of(expected, leaves), strict=True):
        assert (ours - plain).abs().max() < 1e-12


@given(batches(), st.integers(0, 6), st.booleans())
@settings(max_examples=100)
def test_single_precision_is_exact_with_windows_and_sinks(rows, window, has_sinks):
    forest = build_forest(rows)
    if not forest.num_tokens:
        return
    inputs = qkv(forest, torch.float32)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    sinks = torch.linspace(-1, 1, NUM_HEADS, dtype=torch.float64) if has_sinks else None
    expected = plain_attention(*wide, forest_mask(forest, window), scale=0.3, sinks=sinks)
    out = ForestPlan(forest).attend(0, *inputs, scale=0.3, sliding_window=window, sinks=sinks)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=2e-6)
    for ours, exact in zip(grads_of(out, inputs), grads_of(expected, wide), strict=True):
        torch.testing.assert_close(ours.double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["flash", "math"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_in_the_working_dtype_is_no_worse_than_plain_attention(kind, dtype):
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 50, 120)
    rows = [np.concatenate([trunk[:cut], rng.integers(0, 50, 40)]) for cut in (120, 120, 80, 80, 120, 0)]
    forest = build_forest(rows)
    exact_inputs, inputs = qkv(forest), qkv(forest, dtype)
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    mask = forest_mask(forest)
    exact = plain_attention(*exact_inputs, mask, scale=0.3)
    plain = plain_attention(*inputs, mask, scale=0.3)
    out = PLANS[kind](forest).attend(0, *inputs, scale=0.3)

    def error(a, b):
        return (a.double() - b).abs().max()

    assert out.dtype == dtype
    assert error(out, exact) <= 2 * error(plain, exact) + 1e-9
    exact_grads = grads_of(exact, exact_inputs)
    for ours, theirs, truth in zip(grads_of(out, inputs), grads_of(plain, inputs), exact_grads, strict=True):
        assert error(ours, truth) <= 3 * error(theirs, truth) + 1e-9


@pytest.mark.parametrize("v_dim", [4, 16])
def test_value_heads_of_another_size_are_padded_for_the_fused_kernel(v_dim, monkeypatch):
    forest = build_forest([[1, 2, 3], [1, 2, 4, 5]])
    inputs = qkv(forest, v_dim=v_dim)
    expected = plain_attention(*inputs, forest_mask(forest), scale=0.3)
    monkeypatch.setattr(kernels, "_scores", None)  # the matmul kernel cannot run without it
    out = ForestPlan(forest, kernel="flash").attend(0, *inputs, scale=0.3)
    assert (out - expected).abs().max() < 1e-12
    for ours, plain in zip(grads_of(out, inputs), grads_of(expected, inputs), strict=True):
        assert (ours - plain).abs().max() < 1e-12


def test_many_short_leaves_of_mixed_length_are_stacked_and_exact():
    rng = np.random.default_rng(3)
    rows = [np.concatenate([np.arange(20), rng.integers(20, 90, n)]) for n in rng.integers(1, 60, 64)]
    forest = build_forest(rows)
    plan = ForestPlan(forest)
    stacked = sum(int(batch.is_live.sum()) for batch in plan.leaf_batches)
    padding = sum(int((~batch.is_live).sum()) for batch in plan.leaf_batches)
    assert stacked > 1000
    assert len(plan.rectangles) < 30
    assert padding < stacked
    inputs = qkv(forest)
    expected = plain_attention(*inputs, forest_mask(forest), scale=0.3)
    out = plan.attend(0, *inputs, scale=0.3)
    assert (out - expected).abs().max() < 1e-12
    for ours, plain in zip(grads_of(out, inputs), grads_of(expected, inputs), strict=True):
        assert (ours - plain).abs().max() < 1e-12


def test_changing_one_row_leaves_the_others_bit_for_bit():
    forest = build_forest([[1, 2, 3, 4], [1, 2, 5, 6], [7, 8]])
    q, k, v = (x.detach() for x in qkv(forest))
    before = ForestPlan(forest).attend(0, q, k, v, scale=0.3)
    private = [int(forest.row(0)[i]) for i in (2, 3)]
    for x in (q, k, v):
        x[:, :, private] += 1.0
    after = ForestPlan(forest).attend(0, q, k, v, scale=0.3)
    moved = (after != before).any(-1).any(1)[0]
    assert set(moved.nonzero().flatten().tolist()) == set(private)


def test_a_call_without_a_plan_or_with_dropout_is_refused():
    q = torch.zeros(1, NUM_HEADS, 2, HEAD_DIM)
    with pytest.raises(InputError, match="without a plan"):
        forest_attention_forward(torch.nn.Identity(), q, q, q, None)
    plan = ForestPlan(build_forest([[1, 2]]))
    with pytest.raises(InputError, match="attention_dropout"):
        forest_attention_forward(torch.nn.Identity(), q, q, q, None, forest=plan, dropout=0.1)
