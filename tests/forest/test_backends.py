"""Every attention implementation against textbook attention under the forest's mask."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from arctic_platform.errors import ConfigError
from arctic_platform.forest import ForestPlan, build_forest, forest_mask, plain_attention
from arctic_platform.forest.backends import ATTN_IMPLEMENTATIONS, check_implementation, plan_of
from arctic_platform.forest.flex import FlexPlan
from arctic_platform.forest.kernels import (
    Spans,
    _split_backward,
    _split_forward,
    rectangle_backward,
    rectangle_forward,
)
from arctic_platform.forest.varlen import VarlenPlan
from tests.forest.strategies import batches

ROWS = [
    np.array(row, np.int64)
    for row in ([1, 2, 3, 4, 4, 7], [1, 2, 3, 4, 4, 5, 6], [1, 2, 3, 4, 4], [1, 2, 9, 9, 8], [6, 6], [1, 2, 9, 9, 7])
]


class LoopVarlen:
    """The contract of a variable-length kernel, one sequence after the other; counts its calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    @staticmethod
    def _pieces(at_q: Spans, at_k: Spans):
        bounds = zip(at_q.offsets.tolist(), at_q.offsets.tolist()[1:], strict=False)
        for (q0, q1), k0, k1 in zip(bounds, at_k.offsets.tolist(), at_k.offsets.tolist()[1:], strict=False):
            assert q1 - q0 <= at_q.longest and k1 - k0 <= at_k.longest
            yield slice(q0, q1), slice(k0, k1)

    @staticmethod
    def _mask(causal: bool, window: int | None, num_q: int, num_k: int) -> torch.Tensor | None:
        if not causal:
            return None
        assert num_q == num_k, "causal kernels differ in how they align rectangles"
        steps = torch.arange(num_q)
        return steps[:, None] - steps[None, :] < (window or num_q)

    def forward(self, q, k, v, at_q, at_k, *, scale, causal, window=None):
        self.num_calls += 1
        out, lse = torch.empty(*q.shape[:2], v.shape[-1], dtype=q.dtype), []
        for rows, keys in self._pieces(at_q, at_k):
            parts = (x.transpose(0, 1).unsqueeze(0) for x in (q[rows], k[keys], v[keys]))
            mask = self._mask(causal, window, rows.stop - rows.start, keys.stop - keys.start)
            part, part_lse = rectangle_forward(*parts, scale=scale, causal=causal, mask=mask)
            out[rows] = part[0].transpose(0, 1)
            lse.append(part_lse[0])
        return out, torch.cat(lse, 1)

    def backward(self, do, q, k, v, out, lse, at_q, at_k, *, scale, causal, window=None):
        d_q, d_k, d_v = (torch.zeros_like(x) for x in (q, k, v))
        for rows, keys in self._pieces(at_q, at_k):
            seen = [x[rows].transpose(0, 1).unsqueeze(0) for x in (do, q)]
            pair = [x[keys].transpose(0, 1).unsqueeze(0) for x in (k, v)]
            merged = [out[rows].transpose(0, 1).unsqueeze(0), lse[:, rows].unsqueeze(0)]
            mask = self._mask(causal, window, rows.stop - rows.start, keys.stop - keys.start)
            parts = rectangle_backward(*seen, *pair, *merged, scale=scale, causal=causal, mask=mask)
            for total, part, where in zip((d_q, d_k, d_v), parts, (rows, keys, keys), strict=True):
                total[where] += part[0].transpose(0, 1)
        return d_q, d_k, d_v


def qkv(num_tokens: int, dtype: torch.dtype = torch.float64, device: str = "cpu", d: int = 16, d_v: int = 16):
    draw = torch.Generator().manual_seed(num_tokens)
    shapes = ((4, d), (2, d), (2, d_v))
    return [
        torch.randn(1, heads, num_tokens, size, generator=draw, dtype=torch.float64)
        .to(dtype)
        .to(device)
        .requires_grad_()
        for heads, size in shapes
    ]


def both(plan: ForestPlan, leaves: list[torch.Tensor], sinks: bool = False, **options: object):
    """Output and gradients of a plan and of textbook attention in fp64, for one set of leaves."""
    sink = torch.linspace(-1, 1, 4, dtype=torch.float64) if sinks else None
    weights = torch.randn(
        1, 4, plan.forest.num_tokens, leaves[2].shape[-1], generator=torch.Generator().manual_seed(1)
    ).double()
    results = []
    for is_exact in (False, True):
        used = [x.detach().cpu().double() if is_exact else x.detach() for x in leaves]
        used = [x.requires_grad_() for x in used]
        s = None if sink is None else sink.to(used[0]).requires_grad_()
        if is_exact:
            mask = forest_mask(plan.forest, options.get("sliding_window"))
            out = plain_attention(*used, mask, scale=0.3, softcap=options.get("softcap"), sinks=s)
        else:
            out = plan.attend(0, *used, scale=0.3, sinks=s, **options)
        (out * weights.to(out)).sum().backward()
        grads = [x.grad for x in (*used, *([s] if sinks else []))]
        results.append([x.detach().cpu().double() for x in (out, *grads)])
    return results


OPTIONS = [{}, {"sinks": True}, {"softcap": 1.5}, {"sliding_window": 3}, {"sliding_window": 50}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("d_v", [16, 8])
def test_varlen_calls_equal_the_dense_mask_forward_and_backward(options, d_v):
    forest = build_forest(ROWS)
    plan = VarlenPlan(forest, varlen=LoopVarlen())
    for ours, theirs in zip(*both(plan, qkv(forest.num_tokens, d_v=d_v), **options), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)
    runs_varlen = options in ({}, {"sinks": True}, {"sliding_window": 50})
    assert plan.varlen.num_calls == (1 + len(plan.levels) if runs_varlen else 0)


def test_varlen_takes_one_call_per_level_of_the_forest():
    deep = [np.array([1] * n + [2, n]) for n in range(1, 6)]
    assert len(VarlenPlan(build_forest(deep)).levels) == 4
    assert len(VarlenPlan(build_forest([np.array([1, 2, n]) for n in range(50)])).levels) == 1
    assert VarlenPlan(build_forest([np.array([n]) for n in range(3)])).levels == []


def test_windows_without_branches_are_left_to_the_varlen_kernel():
    forest = build_forest([np.arange(9), np.arange(20, 26)])
    plan = VarlenPlan(forest, varlen=LoopVarlen())
    for ours, theirs in zip(*both(plan, qkv(forest.num_tokens), sliding_window=3), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)
    assert plan.varlen.num_calls == 1


@given(rows=batches())
@settings(max_examples=40)
def test_varlen_is_exact_on_any_forest(rows):
    forest = build_forest(rows)
    if not forest.num_tokens:
        return
    plan = VarlenPlan(forest, varlen=LoopVarlen())
    for ours, theirs in zip(*both(plan, qkv(forest.num_tokens)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("len_q", "len_k"), [(5, 5), (7, 3), (3, 7), (1, 4)])
@pytest.mark.parametrize("num", [1, 3])
def test_rectangle_by_a_varlen_kernel_is_top_left_aligned(num, len_q, len_k, causal):
    draw = torch.Generator().manual_seed(0)
    q, do = (torch.randn(num, 4, len_q, 8, generator=draw, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(num, 2, len_k, 8, generator=draw, dtype=torch.float64) for _ in range(2))
    out, lse = rectangle_forward(q, k, v, scale=0.3, causal=causal)
    ours = _split_forward(LoopVarlen(), q, k, v, scale=0.3, causal=causal)
    for mine, theirs in zip(ours, (out, lse), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    merged_lse = lse + 0.7
    theirs = rectangle_backward(do, q, k, v, out, merged_lse, scale=0.3, causal=causal)
    mine = _split_backward(LoopVarlen(), do, q, k, v, out, merged_lse, scale=0.3, causal=causal)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("d_v", [16, 8])
def test_flex_attention_equals_the_dense_mask_forward(options, d_v):
    forest = build_forest(ROWS)
    leaves = qkv(forest.num_tokens, torch.float32, d_v=d_v)
    sinks = torch.linspace(-1, 1, 4) if options.get("sinks") else None
    given_options = {name: value for name, value in options.items() if name != "sinks"}
    with torch.no_grad():
        ours = FlexPlan(forest).attend(0, *leaves, scale=0.3, sinks=sinks, **given_options)
        theirs = ForestPlan(forest, kernel="math").attend(0, *leaves, scale=0.3, sinks=sinks, **given_options)
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_flex_attention_names_what_it_cannot_do_on_cpu():
    forest = build_forest(ROWS)
    with pytest.raises(ConfigError, match="has no backward on CPU"):
        FlexPlan(forest).attend(0, *qkv(forest.num_tokens, torch.float32), scale=0.3)


@pytest.mark.parametrize("name", ATTN_IMPLEMENTATIONS)
def test_every_documented_name_has_a_plan(name):
    forest = build_forest(ROWS)
    assert plan_of(name, forest, "cpu").forest is forest
    if name.startswith("flash"):
        with pytest.raises(ConfigError, match=f"{name} needs CUDA, the device is cpu"):
            check_implementation(name, "cpu")
    else:
        check_implementation(name, "cpu", torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_flash_attention_refuses_wide_dtypes(dtype):
    with pytest.raises(ConfigError, match="computes in bf16 or fp16"):
        check_implementation("flash_attention_2", "cuda", dtype)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match="'sdpa2' is not registered; choose one of eager, sdpa, flash_attention_2"):
        check_implementation("sdpa2", "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["eager", "sdpa", "flash_attention_2", "flex_attention"])
def test_on_cuda_errors_are_at_most_three_times_those_of_plain_attention(name, dtype, options):
    rows = [np.concatenate([row] * 9) for row in ROWS]
    forest = build_forest(rows)
    leaves = qkv(forest.num_tokens, dtype, "cuda", d=32, d_v=32)
    ours, exact = both(plan_of(name, forest, "cuda"), leaves, **options)
    rounded, _ = both(ForestPlan(forest, kernel="math", device="cuda"), leaves, **options)
    for mine, plain, reference in zip(ours, rounded, exact, strict=True):
        assert (mine - reference).abs().max() <= 3 * (plain - reference).abs().max() + 1e-3


@pytest.mark.gpu
def test_on_cuda_flash_attention_3_is_exact_or_says_what_to_install():
    forest = build_forest(ROWS)
    try:
        check_implementation("flash_attention_3", "cuda", torch.bfloat16)
    except ConfigError as error:
        assert "install flash-attn-3" in str(error)
        return
    plan = plan_of("flash_attention_3", forest, "cuda")
    ours, exact = both(plan, qkv(forest.num_tokens, torch.bfloat16, "cuda", d=64, d_v=64))
    for mine, reference in zip(ours, exact, strict=True):
        assert (mine - reference).norm() <= 0.03 * reference.norm()
