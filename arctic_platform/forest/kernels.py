"""One attention rectangle: a run of queries against a run of keys, with its log-sum-exp, forward and backward.

Two kernels hold the same contract. `flash` calls fused ones: torch's own on CPU and CUDA, ours (native.py) on CPUs
where it serves. `math` is plain matmuls: any device, dtype and head size, and the only one that knows soft-capping.

Shapes: `q [b, H, Lq, D]`, `k [b, K, Lk, D]`, `v [b, K, Lk, Dv]`, H a multiple of K (grouped queries are native);
`out [b, H, Lq, Dv]` in the dtype of q; `lse [b, H, Lq]` in fp32, or fp64 for fp64 inputs. `causal` is top-left
aligned: query i sees keys 0..i, also where Lq and Lk differ. `mask` is bool, `[Lq, Lk]` or `[b, 1, Lq, Lk]`, True =
visible, and narrows `causal` further.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from arctic_platform.forest import native

Kernel = Literal["flash", "math"]

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial results of `dtype` inputs are merged and log-sum-exps are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def pick_kernel(prefer: Kernel, q: Tensor, v: Tensor, *, softcap: float | None = None) -> Kernel:
    """`prefer` where it serves these tensors.

    Flash needs equal head sizes of q and v and no soft-cap; on CUDA also bf16 or fp16, and heads of a multiple of 8 up
    to 256.
    """
    flash_serves = q.shape[-1] == v.shape[-1] and softcap is None and _has_flash(q)
    return "flash" if prefer == "flash" and flash_serves else "math"


def _has_flash(q: Tensor) -> bool:
    if q.device.type == "cuda":
        return q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return q.device.type == "cpu"


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

    A masked call runs on our native kernel or on the math kernel. A query that sees nothing has lse -inf and output 0.
    """
    if kernel == "flash" and native.serves(q, k, v):
        out, lse = torch.empty_like(q.transpose(1, 2)).transpose(1, 2), q.new_empty(q.shape[:3])
        _native_forward_(out, lse, q, k, v, scale=scale, causal=causal, mask=mask, merge=False)
        return out, lse
    if kernel == "flash" and mask is None:
        if q.is_cuda:
            return _split_forward(VARLEN, q, k, v, scale=scale, causal=causal)
        return _flash_forward(q, k, v, 0.0, causal, scale=scale)
    _, scores = _scores(q, k, scale=scale, causal=causal, mask=mask, softcap=softcap)
    lse = torch.logsumexp(scores, dim=-1, keepdim=True)
    out = torch.matmul(torch.exp(scores - finite_lse(lse)), v.to(scores.dtype))
    return _unfold(out, q).to(q.dtype), _unfold(lse, q).squeeze(-1)


def _native_forward_(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool,
    mask: Tensor | None,
    merge: bool,
) -> None:
    if mask is not None:
        mask = (mask.squeeze(1) if mask.dim() == 4 else mask.unsqueeze(0)).contiguous()
    rows = (x.transpose(1, 2) for x in (out, lse, q))
    native.attend_(*rows, k, v, num_queries=q.shape[2], scale=scale, mask=mask, causal=causal, merge=merge)


def rectangle_merge_(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool,
    kernel: Kernel = "math",
    mask: Tensor | None = None,
    softcap: float | None = None,
) -> None:
    """`rectangle_forward`, merged in place into what its queries have seen elsewhere, in the accumulation dtype."""
    if kernel == "flash" and native.serves(q, k, v):
        _native_forward_(out, lse, q, k, v, scale=scale, causal=causal, mask=mask, merge=True)
    else:
        part = rectangle_forward(q, k, v, scale=scale, causal=causal, kernel=kernel, mask=mask, softcap=softcap)
        merge_(out, lse, *part)


def merge_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge one partial attention into `out [..., D]` and `lse [...]`, in place, by log-sum-exp."""
    total = torch.logaddexp(lse, part_lse)
    safe = finite_lse(total)
    out.mul_(torch.exp(lse - safe).unsqueeze(-1))
    out.addcmul_(part_out.to(out.dtype), torch.exp(part_lse - safe).unsqueeze(-1))
    lse.copy_(total)


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
        if q.is_cuda:
            return _split_backward(VARLEN, do, q, k, v, out, lse, scale=scale, causal=causal)
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


class Spans(NamedTuple):
    """Where each of n sequences lies: `offsets [n + 1] int32` on the device, and the longest one's length."""

    offsets: Tensor
    longest: int

    @classmethod
    def equal(cls, num: int, length: int, device: torch.device) -> Spans:
        """`num` sequences of one length."""
        return cls(torch.arange(num + 1, dtype=torch.int32, device=device) * length, length)


class Varlen(Protocol):
    """Attention of many sequences end to end: `q [Tq, H, D]`, `k [Tk, K, D]`, `v [Tk, K, D]`, `lse [H, Tq]`.

    Sequence i of the queries sees sequence i of the keys; `causal` only where both have equal lengths. `window`: each
    query sees itself and the `window - 1` keys before it, with `causal`.
    """

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        at_q: Spans,
        at_k: Spans,
        *,
        scale: float,
        causal: bool,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`(out [Tq, H, D], lse [H, Tq])`."""
        ...

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        at_q: Spans,
        at_k: Spans,
        *,
        scale: float,
        causal: bool,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`(dq, dk, dv)`, given the merged out and lse."""
        ...


class TorchVarlen:
    """Torch's built-in flash kernels on CUDA; FlashAttention-3 where `torch.nn.attention` has activated it."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        at_q: Spans,
        at_k: Spans,
        *,
        scale: float,
        causal: bool,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See Varlen."""
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            at_q.offsets,
            at_k.offsets,
            at_q.longest,
            at_k.longest,
            0.0,
            causal,
            False,
            scale=scale,
            **_window_sides(window),
        )
        return out, lse

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        at_q: Spans,
        at_k: Spans,
        *,
        scale: float,
        causal: bool,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See Varlen."""
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        return torch.ops.aten._flash_attention_backward(
            do,
            q,
            k,
            v,
            out,
            lse,
            at_q.offsets,
            at_k.offsets,
            at_q.longest,
            at_k.longest,
            0.0,
            causal,
            no_dropout,
            no_dropout,
            scale=scale,
            **_window_sides(window),
        )


VARLEN = TorchVarlen()


def _window_sides(window: int | None) -> dict[str, int]:
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def _split_forward(
    varlen: Varlen, q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """One rectangle by a varlen kernel, whose causal mask need not be top-left aligned: a square and the rest below."""
    parts = [
        varlen.forward(*(_flat(x) for x in (q[:, :, seen], k[:, :, keys], v[:, :, keys])), *at, scale=scale, causal=cut)
        for seen, keys, at, cut in _pieces(q, k, causal)
    ]
    outs = [_batched(out, len(q)) for out, _ in parts]
    lses = [lse.unflatten(1, (len(q), -1)).transpose(0, 1) for _, lse in parts]
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _split_backward(
    varlen: Varlen,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward of `_split_forward`; keys of both pieces get the sum, in fp32."""
    d_q = torch.empty_like(q)
    d_k, d_v = (torch.zeros_like(x, dtype=acc_dtype(x.dtype)) for x in (k, v))
    for seen, keys, at, cut in _pieces(q, k, causal):
        rows = [_flat(x[:, :, seen]) for x in (do, q)]
        pair = [_flat(x[:, :, keys]) for x in (k, v)]
        merged = [_flat(out[:, :, seen]), lse[:, :, seen].transpose(0, 1).flatten(1).contiguous()]
        parts = varlen.backward(*rows, *pair, *merged, *at, scale=scale, causal=cut)
        d_q[:, :, seen] = _batched(parts[0], len(q))
        d_k[:, :, keys] += _batched(parts[1], len(q))
        d_v[:, :, keys] += _batched(parts[2], len(q))
    return d_q, d_k.to(k.dtype), d_v.to(v.dtype)


def _pieces(q: Tensor, k: Tensor, causal: bool) -> list[tuple[slice, slice, tuple[Spans, Spans], bool]]:
    """Queries, keys, their spans, and whether causal, of each call that makes up one rectangle."""
    num, len_q, len_k = len(q), q.shape[2], k.shape[2]
    square = min(len_q, len_k) if causal else 0
    bounds = [(0, square, square, True)] if square else []
    if len_q > square:
        bounds.append((square, len_q, len_k, False))
    return [
        (
            slice(start, end),
            slice(0, keys),
            (Spans.equal(num, end - start, q.device), Spans.equal(num, keys, q.device)),
            cut,
        )
        for start, end, keys, cut in bounds
    ]


def _flat(x: Tensor) -> Tensor:
    """`[b, H, L, D]` -> `[b * L, H, D]`."""
    return x.transpose(1, 2).flatten(0, 1).contiguous()


def _batched(x: Tensor, num: int) -> Tensor:
    """`[b * L, H, D]` -> `[b, H, L, D]`."""
    return x.unflatten(0, (num, -1)).transpose(1, 2)


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
