"""Log-probs and entropies of the targets, from hidden states at predicting positions only.

z = logits / temperature, once, before both: logprob(y) = z_y - logsumexp(z); entropy = logsumexp(z) - sum(p * z).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from arctic_platform.errors import ConfigError

LogitsMode = Literal["none", "compute", "memory"]
LOGITS_MODES: tuple[LogitsMode, ...] = ("none", "compute", "memory")

CHUNK_BYTES = 64 * 2**20
"""Wide logits that a chunk of the `compute` and `memory` modes may hold."""


def target_logprobs(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    target_ids: Tensor,
    target_slot: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    mode: LogitsMode = "none",
    calculate_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`(logprobs [M], entropy [M] or None)` in fp32 (fp64 for fp64 hidden states).

    hidden: `[U, E]` at the predicting positions; head: hidden states to logits, `[u, E] -> [u, V]`; target_ids,
    target_slot: `[M] int64`, target m is predicted by `hidden[target_slot[m]]`, slots ascending.
    mode: `none` keeps the logits for backward and lets autograd do the rest; `compute` keeps the logits and reduces
    them in chunks, so that no wide copy exists; `memory` keeps nothing of width V and computes each chunk again.
    """
    if not len(target_ids):
        nothing = hidden.to(_wide(hidden)).flatten()[:0]
        return nothing, nothing if calculate_entropy else None
    if mode == "memory":
        logprobs, entropy = _in_chunks(
            hidden, head, target_ids, target_slot, vocab_size, temperature, calculate_entropy
        )
    else:
        reduce = _reduce if mode == "none" else _ChunkedReduce.apply
        logprobs, entropy = reduce(head(hidden), target_ids, target_slot, temperature, calculate_entropy)
    return logprobs, entropy[target_slot] if calculate_entropy else None


def check_logits_mode(mode: str) -> LogitsMode:
    """Raise ConfigError unless `mode` is one of the three."""
    for known in LOGITS_MODES:
        if mode == known:
            return known
    raise ConfigError(f"logits_optimization={mode!r} is not known; choose one of {', '.join(LOGITS_MODES)}")


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _reduce(
    logits: Tensor, target_ids: Tensor, target_slot: Tensor, temperature: float, calculate_entropy: bool
) -> tuple[Tensor, Tensor]:
    """`logprobs [M]` and `entropy [U]` (empty when not asked for) of `logits [U, V]`, differentiable."""
    scaled = logits.to(_wide(logits)) / temperature
    lse = torch.logsumexp(scaled, dim=-1)
    logprobs = scaled[target_slot, target_ids] - lse[target_slot]
    if not calculate_entropy:
        return logprobs, lse.new_zeros(0)
    return logprobs, lse - (torch.exp(scaled - lse.unsqueeze(-1)) * scaled).sum(-1)


def _chunks(num_slots: int, vocab_size: int, target_slot: Tensor, itemsize: int) -> list[tuple[slice, slice]]:
    """Slices of predicting positions, each with the slice of its targets."""
    size = max(1, CHUNK_BYTES // (vocab_size * itemsize))
    bounds = list(range(0, num_slots, size)) + [num_slots]
    edges = torch.searchsorted(target_slot, torch.tensor(bounds, device=target_slot.device)).tolist()
    return [(slice(*rows), slice(*at)) for rows, at in zip(pairwise(bounds), pairwise(edges), strict=True)]


def _in_chunks(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    target_ids: Tensor,
    target_slot: Tensor,
    vocab_size: int,
    temperature: float,
    calculate_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """Head and reduction of one chunk at a time; backward computes each chunk again."""

    def one(rows: slice, targets: slice) -> tuple[Tensor, Tensor]:
        slots = target_slot[targets] - rows.start
        return _reduce(head(hidden[rows]), target_ids[targets], slots, temperature, calculate_entropy)

    wide = torch.finfo(_wide(hidden)).bits // 8
    pieces = [
        checkpoint(one, *chunk, use_reentrant=False) for chunk in _chunks(len(hidden), vocab_size, target_slot, wide)
    ]
    logprobs, entropies = zip(*pieces, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


class _ChunkedReduce(torch.autograd.Function):
    """`_reduce` of kept logits, chunk by chunk in both directions."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target_ids: Tensor, target_slot: Tensor, temperature: float, calculate_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(logits, target_ids, target_slot)
        ctx.temperature, ctx.calculate_entropy = temperature, calculate_entropy
        wide = torch.finfo(_wide(logits)).bits // 8
        ctx.chunks = _chunks(len(logits), logits.shape[-1], target_slot, wide)
        pieces = [
            _reduce(logits[rows], target_ids[at], target_slot[at] - rows.start, temperature, calculate_entropy)
            for rows, at in ctx.chunks
        ]
        logprobs, entropies = zip(*pieces, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        """dz = g_logprob * (onehot - p) - g_entropy * p * (log p + entropy); dlogits = dz / temperature."""
        logits, target_ids, target_slot = ctx.saved_tensors
        d_logprobs, d_entropy = grads
        d_logits = torch.empty_like(logits)
        for rows, at in ctx.chunks:
            slots = target_slot[at] - rows.start
            logp = torch.log_softmax(logits[rows].to(d_logprobs.dtype) / ctx.temperature, dim=-1)
            probs = torch.exp(logp)
            mass = d_logprobs.new_zeros(len(logp)).index_add_(0, slots, d_logprobs[at])
            d_scaled = probs * -mass.unsqueeze(-1)
            if ctx.calculate_entropy:
                entropy = -(probs * logp).sum(-1, keepdim=True)
                d_scaled -= d_entropy[rows].unsqueeze(-1) * probs * (logp + entropy)
            d_scaled.index_put_((slots, target_ids[at]), d_logprobs[at], accumulate=True)
            d_logits[rows] = (d_scaled / ctx.temperature).to(logits.dtype)
        return d_logits, None, None, None, None
