"""Attention of many queries by oneDNN's products: the contract of `rectangle_forward`, without masks.

Torch's flash kernel on the CPU multiplies through MKL, which on AMD processors reaches half of what oneDNN does. So a
prefill takes a tile of queries, all heads of one key-value head, against every key that any of them sees: two products
and a softmax. Its log-sum-exp is the largest score less the log of the largest probability.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from arctic_platform.forest.attention import Rule

MIN_QUERIES, MIN_KEYS = 128, 128
"""Per key-value head; fewer are left to the flash kernel."""

TILE_QUERIES, TILE_SCORES = 128, 2**20
"""Positions of one tile, fewer where its scores would exceed that count: they are to stay in the cache."""

_linear = torch.ops.mkldnn._linear_pointwise.default


@dataclass(frozen=True)
class ProductsRule(Rule):
    """A Rule that gives large rectangles to oneDNN."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool = True
    ) -> tuple[Tensor, Tensor]:
        """One rectangle: `(out, lse)`."""
        if self.kernel == "flash" and mask is None and _pays(q, k, v):
            return products_forward(q, k, v, scale=self.scale, causal=causal)
        return super().forward(q, k, v, mask, causal=causal)


def _pays(q: Tensor, k: Tensor, v: Tensor) -> bool:
    num_groups = q.shape[1] // k.shape[1]
    return (
        q.dtype == torch.float32
        and q.device.type == "cpu"
        and len(q) == 1
        and num_groups * q.shape[2] >= MIN_QUERIES
        and k.shape[2] >= MIN_KEYS
        and k.stride(-1) == v.stride(-1) == 1
        and torch.backends.mkldnn.is_available()
    )


def products_forward(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """`q [1, H, Lq, D]`, `k [1, K, Lk, D]`, `v [1, K, Lk, D]`, fp32 -> `out [1, H, Lq, D]`, `lse [1, H, Lq]`.

    causal: top-left aligned, as in `rectangle_forward`.
    """
    num_groups, num_queries, num_keys = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    out, lse = torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:3])
    step = max(min(TILE_QUERIES, TILE_SCORES // (num_groups * num_keys)), 1)
    hidden = torch.ones(step, step, dtype=torch.bool).triu(1) if causal else None
    for n in range(k.shape[1]):
        heads = slice(n * num_groups, (n + 1) * num_groups)
        keys, values = k[0, n].contiguous(), v[0, n].contiguous()  # oneDNN is slow where rows lie apart
        for start in range(0, num_queries, step):
            end = min(start + step, num_queries)
            seen = min(end, num_keys) if causal else num_keys
            scores = _linear((q[0, heads, start:end] * scale).flatten(0, 1), keys[:seen], None, "none", [], "")
            if hidden is not None and seen > start:
                corner = scores.view(num_groups, end - start, seen)[:, :, start:]
                corner.masked_fill_(hidden[: end - start, : seen - start], float("-inf"))
            probs = torch.softmax(scores, -1)
            part = _linear(probs, values[:seen].t(), None, "none", [], "")
            out[0, heads, start:end] = part.view(num_groups, end - start, -1)
            lse[0, heads, start:end] = (scores.amax(-1) - probs.amax(-1).log_()).view(num_groups, -1)
    return out, lse
