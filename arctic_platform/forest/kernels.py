"""One attention rectangle: a run of queries against a run of keys, with its log-sum-exp, forward and backward.

Two kernels hold the same contract. `flash` calls torch's own fused CPU kernels. `math` is plain matmuls: any device,
any head size, and the only one that knows masks and soft-capping.

Shapes: `q [b, H, Lq, D]`, `k [b, K, Lk, D]`, `v [b, K, Lk, Dv]`, H a multiple of K (grouped queries are native);
`out [b, H, Lq, Dv]` in the dtype of q; `lse [b, H, Lq]` in fp32, or fp64 for fp64 inputs. `causal` is top-left
aligned: query i sees keys 0..i, also where Lq and Lk differ. `mask` is bool, `[Lq, Lk]` or `[b, 1, Lq, Lk]`, True =
visible, and narrows `causal` further.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Kernel = Literal["flash", "math"]

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial results of `dtype` inputs are merged and log-sum-exps are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def pick_kernel(prefer: Kernel, q: Tensor, v: Tensor, *, softcap: float | None = None) -> Kernel:
    """`prefer` where it serves these tensors; flash needs a CPU, equal head sizes of q and v, and no soft-cap."""
    flash_serves = q.device.type == "cpu" and q.shape[-1] == v.shape[-1] and softcap is None
    return "flash" if prefer == "flash" and flash_serves else "math"


def rectangle_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool,
    kernel: Kernel = "math",
    mask: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend the queries to the keys of one rectangle: `(out, lse)`.

    A masked call runs on the math kernel. A query that sees nothing has lse -inf and output 0.
    """
    if kernel == "flash" and mask is None:
        return _flash_forward(q, k, v, 0.0, causal, scale=scale)
    _, scores = _scores(q, k, scale=scale, causal=causal, mask=mask, softcap=softcap)
    lse = torch.logsumexp(scores, dim=-1, keepdim=True)
    out = torch.matmul(torch.exp(scores - finite_lse(lse)), v.to(scores.dtype))
    return _unfold(out, q).to(q.dtype), _unfold(lse, q).squeeze(-1)


def rectangle_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    causal: bool,
    kernel: Kernel = "math",
    mask: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one rectangle's q, k, v, given the *merged* output and log-sum-exp of its queries.

    Probabilities are `exp(scores - lse)` with the merged lse, so the sum over all rectangles of a query is its exact
    gradient (the way of ring attention, Liu et al. 2023, arXiv 2310.01889).
    """
    if kernel == "flash" and mask is None:
        return _flash_backward(do, q, k, v, out, lse, 0.0, causal, scale=scale)
    raw, scores = _scores(q, k, scale=scale, causal=causal, mask=mask, softcap=softcap)
    dtype = scores.dtype
    q_wide, do_wide, out_wide, lse_wide = (_fold(x, k).to(dtype) for x in (q, do, out, lse.unsqueeze(-1)))
    probs = torch.exp(scores - finite_lse(lse_wide))
    d_v = torch.matmul(probs.mT, do_wide)
    d_scores = probs * (torch.matmul(do_wide, v.to(dtype).mT) - (do_wide * out_wide).sum(-1, keepdim=True))
    if softcap is not None:
        d_scores = d_scores * (1 - torch.tanh(raw / softcap) ** 2)
    d_scores = d_scores * scale
    d_q, d_k = torch.matmul(d_scores, k.to(dtype)), torch.matmul(d_scores.mT, q_wide)
    return _unfold(d_q, q).to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype)


def finite_lse(lse: Tensor) -> Tensor:
    """Replace -inf (a query that sees nothing) by 0, so that its probabilities come out 0 and not NaN."""
    return lse.masked_fill(lse == float("-inf"), 0.0)


def _scores(
    q: Tensor, k: Tensor, *, scale: float, causal: bool, mask: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """`[b, K, G * Lq, Lk]`: scaled scores, and the same after soft-capping and masking."""
    dtype = acc_dtype(q.dtype)
    raw = torch.matmul(_fold(q, k).to(dtype), k.to(dtype).mT) * scale
    scores = raw if softcap is None else softcap * torch.tanh(raw / softcap)
    visible = mask
    if causal:
        lower = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        visible = lower if mask is None else mask & lower
    if visible is None:
        return raw, scores
    num_groups = q.shape[1] // k.shape[1]
    visible = visible.repeat(*[1] * (visible.dim() - 2), num_groups, 1)
    return raw, scores.masked_fill(~visible, float("-inf"))


def _fold(x: Tensor, k: Tensor) -> Tensor:
    """`[b, H, L, D]` -> `[b, K, G * L, D]`: the query heads of one key-value head side by side along the length."""
    b, num_heads, length, d = x.shape
    return x.reshape(b, k.shape[1], num_heads // k.shape[1] * length, d)


def _unfold(x: Tensor, q: Tensor) -> Tensor:
    """`[b, K, G * Lq, D]` -> `[b, H, Lq, D]`."""
    return x.reshape(x.shape[0], q.shape[1], q.shape[2], x.shape[-1])
