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
    mode: `none` keeps the logits for backward and reduces them in one piece; `compute` keeps them and reduces them in
    chunks, so that no second copy of their size exists; `memory` keeps nothing of width V: backward computes each
    chunk again.
    """
    if not len(target_ids):
        nothing = hidden.to(_wide(hidden)).flatten()[:0]
        return nothing, nothing if calculate_entropy else None
    if mode == "memory":
        at = (target_ids, target_slot)
        logprobs, entropy = _recomputed(hidden, head, *at, vocab_size, temperature, calculate_entropy)
    else:
        logits = head(hidden)
        chunk_len = len(logits) if mode == "none" else _chunk_len(vocab_size, logits)
        logprobs, entropy = _Reduce.apply(logits, target_ids, target_slot, temperature, calculate_entropy, chunk_len)
    return logprobs, entropy[target_slot] if calculate_entropy else None


def check_logits_mode(mode: str) -> LogitsMode:
    """Raise ConfigError unless `mode` is one of the three."""
    for known in LOGITS_MODES:
        if mode == known:
            return known
    raise ConfigError(f"logits_optimization={mode!r} is not known; choose one of {', '.join(LOGITS_MODES)}")


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _chunk_len(vocab_size: int, like: Tensor) -> int:
    """Predicting positions whose wide logits fill CHUNK_BYTES."""
    return max(1, CHUNK_BYTES // (vocab_size * torch.finfo(_wide(like)).bits // 8))


def _chunks(num_slots: int, chunk_len: int, target_slot: Tensor) -> list[tuple[slice, slice]]:
    """Slices of predicting positions, each with the slice of its targets."""
    bounds = [*range(0, num_slots, chunk_len), num_slots]
    edges = torch.searchsorted(target_slot, torch.tensor(bounds, device=target_slot.device)).tolist()
    return [(slice(*rows), slice(*at)) for rows, at in zip(pairwise(bounds), pairwise(edges), strict=True)]


def _recomputed(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    target_ids: Tensor,
    target_slot: Tensor,
    vocab_size: int,
    temperature: float,
    calculate_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """Head and reduction of one chunk at a time; backward computes each chunk again."""

    def one(rows: slice, at: slice) -> tuple[Tensor, Tensor]:
        logits = head(hidden[rows])
        slots = target_slot[at] - rows.start
        return _Reduce.apply(logits, target_ids[at], slots, temperature, calculate_entropy, len(logits))

    chunks = _chunks(len(hidden), _chunk_len(vocab_size, hidden), target_slot)
    pieces = [checkpoint(one, *chunk, use_reentrant=False) for chunk in chunks]
    logprobs, entropies = zip(*pieces, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


class _Reduce(torch.autograd.Function):
    """`logits [U, V]` -> `logprobs [M]` and `entropy [U]` (empty when not asked for), `chunk_len` positions at a time.

    Keeps the logits and nothing else of their size.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target_ids: Tensor,
        target_slot: Tensor,
        temperature: float,
        calculate_entropy: bool,
        chunk_len: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(logits, target_ids, target_slot)
        ctx.temperature, ctx.calculate_entropy = temperature, calculate_entropy
        ctx.chunks = _chunks(len(logits), chunk_len, target_slot)
        logprobs = logits.new_empty(len(target_ids), dtype=_wide(logits))
        entropy = logprobs.new_empty(len(logits) if calculate_entropy else 0)
        for rows, at in ctx.chunks:
            scaled = _scaled(logits[rows], temperature)
            lse = torch.logsumexp(scaled, dim=-1)
            slots = target_slot[at] - rows.start
            logprobs[at] = scaled[slots, target_ids[at]] - lse[slots]
            if calculate_entropy:
                entropy[rows] = lse - (torch.exp(scaled - lse.unsqueeze(-1)) * scaled).sum(-1)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        """dz = g_logprob * (onehot - p) - g_entropy * p * (log p + entropy); dlogits = dz / temperature."""
        logits, target_ids, target_slot = ctx.saved_tensors
        d_logprobs, d_entropy = grads
        d_logits = torch.empty_like(logits)
        for rows, at in ctx.chunks:
            slots = target_slot[at] - rows.start
            scaled = _scaled(logits[rows], ctx.temperature)
            probs = torch.softmax(scaled, dim=-1)
            weight = -d_logprobs.new_zeros(len(probs)).index_add_(0, slots, d_logprobs[at]).unsqueeze(-1)
            if ctx.calculate_entropy:
                logp = torch.log_softmax(scaled, dim=-1)
                entropy = -(probs * logp).sum(-1, keepdim=True)
                weight = weight - d_entropy[rows].unsqueeze(-1) * (logp + entropy)
            d_scaled = probs.mul_(weight)
            d_scaled.index_put_((slots, target_ids[at]), d_logprobs[at], accumulate=True)
            d_logits[rows] = d_scaled.div_(ctx.temperature).to(logits.dtype)
        return d_logits, None, None, None, None, None


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Wide logits over temperature; no copy where neither changes anything."""
    wide = logits.to(_wide(logits))
    return wide if temperature == 1.0 else wide / temperature
