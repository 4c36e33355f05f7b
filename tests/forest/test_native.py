"""The native attention kernel against plain matmuls in fp64, and against torch's flash kernel in fp32."""

import os
import platform
import shutil
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from arctic_platform.forest import native
from arctic_platform.forest.kernels import merge_, rectangle_forward, rectangle_merge_

has_kernel = pytest.mark.skipif(not native.is_available(), reason="the package was installed without a compiler")
HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"


@pytest.fixture(params=["_attend_avx512", "_attend_avx2"])
def library(request, monkeypatch):
    if request.param == "_attend_avx512" and not HAS_AVX512:
        pytest.skip("this processor has no AVX-512")
    monkeypatch.setattr(native, "LIBRARIES", {torch.backends.cpu.get_cpu_capability(): (request.param,)})
    native._functions.cache_clear()
    yield request.param
    native._functions.cache_clear()


@pytest.fixture(params=[1, 2, 5])
def num_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def tensors(num: int, heads: int, groups: int, num_queries: int, num_keys: int, dim: int) -> list[Tensor]:
    """q `[n, H, Lq, D]`, k and v `[n, K, Lk, D]`, each laid out as tokens of heads, some scores large."""
    random = torch.Generator().manual_seed(num_queries * 1000 + num_keys)
    shapes = [(num, num_queries, heads * groups, dim), (num, num_keys, heads, dim), (num, num_keys, heads, dim)]
    q, k, v = (torch.randn(shape, generator=random).transpose(1, 2) for shape in shapes)
    return [3 * q, k, v]


def torch_flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool, scale: float) -> list[Tensor]:
    """Torch's own kernel; a fully masked row is set by hand, since it says 0 there."""
    bias = None
    if mask is not None:
        seen = mask & torch.ones(mask.shape[-2:], dtype=torch.bool).tril() if causal else mask
        bias = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf")).expand(len(q), 1, *seen.shape[-2:])
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    out, lse = op(q, keys, values, 0.0, causal and bias is None, attn_mask=bias, scale=scale)
    if bias is not None:
        lse = lse.masked_fill((bias == float("-inf")).all(-1), float("-inf"))
    return [out, lse]


def error(ours: Tensor, exact: Tensor) -> float:
    """The largest, where both are finite; where one is not, both must be the same."""
    is_finite = exact.isfinite()
    assert torch.equal(ours.isfinite(), is_finite)
    assert torch.equal(ours[~is_finite].double(), exact[~is_finite])
    return float((ours.double() - exact)[is_finite].abs().max()) if is_finite.any() else 0.0


def assert_exact(ours, exact, plain) -> None:
    """No worse than twice torch's kernel, or than a rounding error of such values."""
    for got, truth, theirs in zip(ours, exact, plain, strict=True):
        largest = float(truth.abs().masked_fill(~truth.isfinite(), 0).max().clamp_min(1))
        assert error(got, truth) <= max(2 * error(theirs, truth), 4 * torch.finfo(torch.float32).eps * largest)


SHAPES = [
    (1, 3, 3, 16, 2049, 64),  # sixteen rollouts of SmolLM2 on one prompt
    (4, 3, 3, 8, 700, 64),
    (16, 3, 3, 1, 64, 64),  # their suffixes
    (5, 1, 1, 1, 1, 64),
    (2, 2, 4, 1, 129, 128),
    (1, 2, 7, 11, 33, 128),
    (1, 1, 4, 40, 300, 256),
    (2, 8, 2, 1, 65, 80),
    (1, 2, 5, 7, 300, 8),
    (1, 4, 1, 300, 300, 32),
]


@has_kernel
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_kernel_is_the_rectangle(shape, causal, library, num_threads):
    q, k, v = tensors(*shape)
    assert native.serves(q, k, v)
    exact = rectangle_forward(q.double(), k.double(), v.double(), scale=0.2, causal=causal)
    ours = rectangle_forward(q, k, v, scale=0.2, causal=causal, kernel="flash")
    assert_exact(ours, exact, torch_flash(q, k, v, None, causal=causal, scale=0.2))


@has_kernel
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[3] < 300], ids=str)
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_mask_hides_keys_and_queries_that_see_nothing_say_so(shape, is_shared, causal, library):
    q, k, v = tensors(*shape)
    random = torch.Generator().manual_seed(1)
    mask = torch.rand(len(q), 1, q.shape[2], k.shape[2], generator=random) < 0.3
    mask[:, :, -1] = False
    if is_shared:
        mask = mask[0, 0]
    exact = rectangle_forward(q.double(), k.double(), v.double(), scale=0.2, causal=causal, mask=mask)
    ours = rectangle_forward(q, k, v, scale=0.2, causal=causal, mask=mask, kernel="flash")
    assert (ours[1][:, :, -1] == float("-inf")).all()
    assert not ours[0][:, :, -1].any()
    plain = rectangle_forward(q, k, v, scale=0.2, causal=causal, mask=mask)
    assert_exact(ours, exact, plain)


@has_kernel
def test_window_and_columns_of_a_wider_mask_are_read_where_they_lie(library):
    q, k, v = tensors(1, 2, 3, 70, 150, 64)
    steps = torch.arange(300)
    window = (steps[:70, None] + 80 - steps[None, :]).abs() < 40
    mask = window[:, 20:170]
    exact = rectangle_forward(q.double(), k.double(), v.double(), scale=0.2, causal=False, mask=mask)
    ours = rectangle_forward(q, k, v, scale=0.2, causal=False, mask=mask, kernel="flash")
    assert_exact(ours, exact, rectangle_forward(q, k, v, scale=0.2, causal=False, mask=mask))


@has_kernel
def test_merging_two_parts_of_the_keys_is_attending_to_all(library, num_threads):
    q, k, v = tensors(1, 3, 3, 16, 900, 64)
    exact = rectangle_forward(q.double(), k.double(), v.double(), scale=0.2, causal=False)
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], float("-inf"))
    plain = [out.clone(), lse.clone()]
    for part in (slice(0, 500), slice(500, 500 + 33), slice(533, None)):
        rectangle_merge_(out, lse, q, k[:, :, part], v[:, :, part], scale=0.2, causal=False, kernel="flash")
        merge_(*plain, *torch_flash(q, k[:, :, part], v[:, :, part], None, causal=False, scale=0.2))
    assert_exact((out, lse), exact, plain)


@has_kernel
def test_named_rows_are_served_wherever_they_are_and_others_stay(library):
    num_rows, num_queries, num_runs = 9, 3, 2
    q, k, v = tensors(num_runs, 2, 3, num_queries, 40, 64)
    rows = torch.tensor([7, 2, -1, 0, 8, 3])
    packed = torch.full((num_rows, 6, 64), float("nan"))
    for n, row in enumerate(rows.tolist()):
        if row >= 0:
            packed[row] = q[n // num_queries, :, n % num_queries]
    out, lse = torch.full_like(packed, 5.0), torch.full((num_rows, 6), 6.0)
    native.attend_(out[None], lse[None], packed[None], k, v, rows=rows, num_queries=num_queries, scale=0.2)
    theirs = rectangle_forward(q, k, v, scale=0.2, causal=False, kernel="flash")
    for n, row in enumerate(rows.tolist()):
        if row >= 0:
            assert torch.equal(out[row], theirs[0][n // num_queries, :, n % num_queries])
            assert torch.equal(lse[row], theirs[1][n // num_queries, :, n % num_queries])
    assert (out[[1, 4, 5, 6]] == 5).all()
    assert (lse[[1, 4, 5, 6]] == 6).all()


@has_kernel
@pytest.mark.parametrize("num_queries", [1, 16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible(bad, num_queries, library):
    q, k, v = tensors(1, 2, 3, num_queries, 300, 64)
    for x in (q, k, v):
        spoiled = [y.clone() if y is x else y for y in (q, k, v)]
        next(y for y, old in zip(spoiled, (q, k, v), strict=True) if old is x)[0, 0, 0, 5] = bad
        exact, _ = rectangle_forward(*(y.double() for y in spoiled), scale=0.2, causal=False)
        out, _ = rectangle_forward(*spoiled, scale=0.2, causal=False, kernel="flash")
        assert not exact.isfinite().all()
        assert torch.equal(out.isfinite(), exact.isfinite())


@has_kernel
@pytest.mark.parametrize("spread", [1e-3, 1e3])
@pytest.mark.parametrize("num_queries", [1, 200])
def test_log_sum_exp_is_exact_for_flat_and_for_peaked_scores(spread, num_queries, library):
    q, k, v = tensors(1, 2, 3, num_queries, 200, 32)
    exact = rectangle_forward((spread * q).double(), k.double(), v.double(), scale=1.0, causal=False)
    ours = rectangle_forward(spread * q, k, v, scale=1.0, causal=False, kernel="flash")
    torch.testing.assert_close(ours[1].double(), exact[1], atol=1e-5, rtol=5e-6)


@has_kernel
def test_equal_calls_give_equal_bits(num_threads):
    q, k, v = tensors(1, 3, 3, 16, 2049, 64)
    calls = [rectangle_forward(q, k, v, scale=0.2, causal=False, kernel="flash") for _ in range(5)]
    assert all(torch.equal(out, calls[0][0]) and torch.equal(lse, calls[0][1]) for out, lse in calls)


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: (q.double(), k.double(), v.double()),
        lambda q, k, v: (q.bfloat16(), k.bfloat16(), v.bfloat16()),
        lambda q, k, v: (q, k, v[..., :32]),
        lambda q, k, v: (q[..., :36], k[..., :36], v[..., :36]),
        lambda q, k, v: (q.repeat(1, 1, 1, 5), k.repeat(1, 1, 1, 5), v.repeat(1, 1, 1, 5)),
        lambda q, k, v: (q, k.mT.contiguous().mT, v),
        lambda q, k, v: (q[:, :, :0], k, v),
    ],
    ids=["fp64", "bf16", "other values", "odd heads", "large heads", "transposed keys", "no queries"],
)
def test_what_the_kernel_does_not_serve_is_left_to_others(change):
    assert not native.serves(*change(*tensors(1, 2, 3, 8, 40, 64)))


def test_variable_switches_the_kernel_off():
    code = "from arctic_platform.forest import native; print(native.is_available())"
    env = {native.VARIABLE: "0"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_installation_with_a_compiler_has_the_kernel():
    has_flags = platform.machine() == "x86_64" and torch.backends.cpu.get_cpu_capability() in native.LIBRARIES
    is_wanted = os.environ.get(native.VARIABLE) != "0"
    if not (has_flags and is_wanted and sys.platform == "linux" and shutil.which("g++")):
        pytest.skip("nothing to compile with, or for")
    assert native.is_available(), native.why_absent()
