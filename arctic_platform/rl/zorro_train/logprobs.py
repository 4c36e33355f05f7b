"""Log-probs and entropies of the targets, from hidden states at predicting positions only.

z = logits / temperature, once, before both: logprob(y) = z_y - logsumexp(z); entropy = logsumexp(z) - sum(p * z).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from arctic_platform.errors import ConfigError

LogitsMode = Literal["none", "compute", "memory"]
LOGITS_MODES: tuple[LogitsMode, ...] = ("none", "compute", "memory")

GIB = 2**30
DEFAULT_PEAK_GIB = 0.25
WIDE_COPIES = 4
"""Tensors as large as a chunk's wide logits that exist at one moment of its reduction or backward, at most."""

CHUNK_BYTES = int(DEFAULT_PEAK_GIB * GIB) // WIDE_COPIES
"""Wide logits that a chunk of the `compute` and `memory` modes may hold where the caller sets no peak."""


@dataclass(frozen=True)
class LinearHead:
    """`softcap * tanh(factor * (hidden @ weight.T + bias) / softcap)`, without what is absent. weight: `[V, E]`."""

    weight: Tensor
    bias: Tensor | None = None
    factor: float = 1.0
    softcap: float | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """`[u, E] -> [u, V]`, in the dtype of the weight."""
        return finish_logits(linear(hidden.to(self.weight.dtype), self.weight, self.bias), self.factor, self.softcap)

    def differentiate_(self, logits: Tensor, d_logits: Tensor) -> Tensor:
        """The gradient of `hidden @ weight.T + bias`, made of that of the result; overwrites both."""
        if self.softcap is not None:
            d_logits.mul_(logits.div_(self.softcap).square_().neg_().add_(1.0))
        return d_logits if self.factor == 1.0 else d_logits.mul_(self.factor)


def finish_logits(logits: Tensor, factor: float, softcap: float | None) -> Tensor:
    """What some families do to the projection: division or a factor (Granite, Cohere), soft-capping (Gemma 2)."""
    if factor != 1.0:
        logits = logits * factor
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


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
    peak_gib: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`(logprobs [M], entropy [M] or None)` in fp32 (fp64 for fp64 hidden states).

    hidden: `[U, E]` at the predicting positions; head: hidden states to logits, `[u, E] -> [u, V]`, best a LinearHead,
    whose weight takes one gradient in `memory` however many chunks there are; target_ids,
    target_slot: `[M] int64`, target m is predicted by `hidden[target_slot[m]]`, slots ascending.
    mode: `none` keeps the logits for backward and reduces them in one piece; `compute` keeps them and reduces them in
    chunks, so that no second copy of their size exists; `memory` keeps nothing of width V: backward computes each
    chunk again.
    peak_gib: memory that the reduction of a chunk may take in `compute` and `memory`, in GiB (that of the hidden states
    and the head's weights not counted), by default 0.25; one position is the least.
    """
    if not len(target_ids):
        nothing = hidden.to(_wide(hidden)).flatten()[:0]
        return nothing, nothing if calculate_entropy else None
    chunk_len = _chunk_len(vocab_size, hidden, peak_gib)
    at = (target_ids, target_slot)
    if mode == "memory" and isinstance(head, LinearHead):
        logprobs, entropy = _LinearReduce.apply(
            hidden, head.weight, head.bias, *at, head, temperature, calculate_entropy, chunk_len
        )
    elif mode == "memory":
        logprobs, entropy = _recomputed(hidden, head, *at, chunk_len, temperature, calculate_entropy)
    else:
        logits = head(hidden)
        chunk_len = len(logits) if mode == "none" else chunk_len
        logprobs, entropy = _Reduce.apply(logits, *at, temperature, calculate_entropy, chunk_len)
    return logprobs, entropy[target_slot] if calculate_entropy else None


def check_logits_mode(mode: str) -> LogitsMode:
    """Raise ConfigError unless `mode` is one of the three."""
    for known in LOGITS_MODES:
        if mode == known:
            return known
    raise ConfigError(f"logits_optimization={mode!r} is not known; choose one of {', '.join(LOGITS_MODES)}")


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def check_peak(peak_gib: float | None, mode: LogitsMode) -> float | None:
    """Raise ConfigError for a peak that is not above 0, or that nothing reads."""
    if peak_gib is None:
        return None
    if mode == "none":
        raise ConfigError(
            "logits_optimization_peak_mem_size_in_gib has no effect with logits_optimization='none'; choose compute or "
            "memory"
        )
    if not peak_gib > 0:
        raise ConfigError(f"logits_optimization_peak_mem_size_in_gib={peak_gib} must be above 0")
    return float(peak_gib)


def _chunk_len(vocab_size: int, like: Tensor, peak_gib: float | None) -> int:
    """Predicting positions whose reduction fills the peak."""
    chunk_bytes = CHUNK_BYTES if peak_gib is None else int(peak_gib * GIB) // WIDE_COPIES
    return max(1, chunk_bytes // (vocab_size * torch.finfo(_wide(like)).bits // 8))


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
    chunk_len: int,
    temperature: float,
    calculate_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """Head and reduction of one chunk at a time; backward computes each chunk again."""

    def one(rows: slice, at: slice) -> tuple[Tensor, Tensor]:
        logits = head(hidden[rows])
        slots = target_slot[at] - rows.start
        return _Reduce.apply(logits, target_ids[at], slots, temperature, calculate_entropy, len(logits))

    chunks = _chunks(len(hidden), chunk_len, target_slot)
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
        logprobs, entropy = _empty_values(logits, len(target_ids), calculate_entropy)
        for rows, at in ctx.chunks:
            slots = target_slot[at] - rows.start
            _reduce_into(logprobs[at], entropy[rows], logits[rows], target_ids[at], slots, temperature)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        logits, target_ids, target_slot = ctx.saved_tensors
        d_logprobs, d_entropy = grads
        d_logits = torch.empty_like(logits)
        for rows, at in ctx.chunks:
            slots = target_slot[at] - rows.start
            d_rows = d_entropy[rows] if ctx.calculate_entropy else None
            d_logits[rows] = _differentiate(
                logits[rows], target_ids[at], slots, ctx.temperature, d_logprobs[at], d_rows
            )
        return d_logits, None, None, None, None, None


class _LinearReduce(torch.autograd.Function):
    """A linear head and its reduction, `chunk_len` positions at a time; keeps nothing of width V.

    The weight's gradient is one tensor that all chunks add to, in fp32 or fp64; autograd would make one per chunk.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target_ids: Tensor,
        target_slot: Tensor,
        head: LinearHead,
        temperature: float,
        calculate_entropy: bool,
        chunk_len: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, bias, target_ids, target_slot)
        ctx.factor, ctx.softcap = head.factor, head.softcap
        ctx.temperature, ctx.calculate_entropy = temperature, calculate_entropy
        ctx.chunks = _chunks(len(hidden), chunk_len, target_slot)
        logprobs, entropy = _empty_values(weight, len(target_ids), calculate_entropy, len(hidden))
        for rows, at in ctx.chunks:
            slots = target_slot[at] - rows.start
            _reduce_into(logprobs[at], entropy[rows], head(hidden[rows]), target_ids[at], slots, temperature)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        hidden, weight, bias, target_ids, target_slot = ctx.saved_tensors
        d_logprobs, d_entropy = grads
        head = LinearHead(weight, bias, ctx.factor, ctx.softcap)
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=_wide(weight)) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias, dtype=_wide(bias)) if bias is not None else None
        for rows, at in ctx.chunks:
            states, slots = hidden[rows].to(weight.dtype), target_slot[at] - rows.start
            logits = head(states)
            d_rows = d_entropy[rows] if ctx.calculate_entropy else None
            d_logits = _differentiate(logits, target_ids[at], slots, ctx.temperature, d_logprobs[at], d_rows)
            d_raw = head.differentiate_(logits, d_logits).to(weight.dtype)
            del logits, d_logits
            d_hidden[rows] = (d_raw @ weight).to(hidden.dtype)
            if d_weight is not None:
                _add_product_(d_weight, d_raw.mT, states)
            if d_bias is not None:
                d_bias += d_raw.sum(0)
        wide_grads = (None if x is None else x.to(weight.dtype) for x in (d_weight, d_bias))
        return d_hidden, *wide_grads, None, None, None, None, None, None


def _empty_values(like: Tensor, num_targets: int, calculate_entropy: bool, num_slots: int | None = None):
    """Where log-probs `[M]` and entropies `[U]` (none: empty) are written."""
    logprobs = like.new_empty(num_targets, dtype=_wide(like))
    num_slots = len(like) if num_slots is None else num_slots
    return logprobs, logprobs.new_empty(num_slots if calculate_entropy else 0)


def _reduce_into(
    logprobs: Tensor, entropy: Tensor, logits: Tensor, target_ids: Tensor, slots: Tensor, temperature: float
) -> None:
    """Log-probs of a chunk's targets, and the entropy of its positions where there is room for it."""
    scaled = _scaled(logits, temperature)
    lse = torch.logsumexp(scaled, dim=-1)
    logprobs.copy_(scaled[slots, target_ids] - lse[slots])
    if len(entropy):
        entropy.copy_(lse - _row_dot((scaled - lse.unsqueeze(-1)).exp_(), scaled))


def _differentiate(
    logits: Tensor,
    target_ids: Tensor,
    slots: Tensor,
    temperature: float,
    d_logprobs: Tensor,
    d_entropy: Tensor | None,
) -> Tensor:
    """Gradient of a chunk's logits, wide: dz = g_logprob (onehot - p) - g_entropy p (log p + entropy), over T."""
    logp = torch.log_softmax(_scaled(logits, temperature), dim=-1)
    probs = logp.exp_() if d_entropy is None else torch.exp(logp)
    weight = -d_logprobs.new_zeros(len(probs)).index_add_(0, slots, d_logprobs).unsqueeze(-1)
    if d_entropy is not None:
        entropy = -_row_dot(probs, logp).unsqueeze(-1)
        weight = logp.add_(entropy).mul_(-d_entropy.unsqueeze(-1)).add_(weight)
    d_scaled = probs.mul_(weight)
    d_scaled.index_put_((slots, target_ids), d_logprobs, accumulate=True)
    return d_scaled.div_(temperature)


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a @ b`, in the dtype of `total`."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def _row_dot(a: Tensor, b: Tensor) -> Tensor:
    """`sum(a * b, -1)` of `[u, V]` tensors without a third one."""
    return torch.bmm(a.unsqueeze(1), b.unsqueeze(2)).flatten()


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Wide logits over temperature; no copy where neither changes anything."""
    wide = logits.to(_wide(logits))
    return wide if temperature == 1.0 else wide / temperature
