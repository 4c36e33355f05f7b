"""Named losses: pure functions on the packed response tokens of a batch.

All tensors are flat, `[M]`: the response tokens of all rows, one row behind the other, as `row_offsets [B+1]` says.
A loss first turns log-probs into one value per token (the *surrogate*), then sums the values with a weight per
token that holds the whole normalisation. The denominators count the whole optimizer step, not the micro-batch, so
the parts of a batch add up to the batch however it is cut.

    name                 surrogate per token                          weight of a live token     source
    grpo                 -min(r A, clip(r) A)                         1 / (rows * row's tokens)  arXiv 2402.03300
    dr_grpo              -min(r A, clip(r) A)                         1 / (rows * constant)      arXiv 2503.20783
    dapo                 -min(r A, clip(r) A), clipped higher         1 / tokens                 arXiv 2503.14476
    gspo                 -min(s A, clip(s) A), s the row's mean ratio 1 / (rows * row's tokens)  arXiv 2507.18071
    cispo                -sg(clip(r)) A log p                         1 / tokens                 arXiv 2506.13585
    ppo                  -min(r A, clip(r) A)                         1 / tokens                 arXiv 1707.06347
    importance_sampling  -r A                                         1 / tokens                 policy gradient
    sft                  -w log p, w the advantages or 1              1 / tokens                 maximum likelihood

`r = exp(logprobs - old_logprobs)` per token, `A` the advantage, `sg` stops the gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from arctic_platform.errors import ConfigError, InputError

MAX_LOG_RATIO = 20.0
"""Log-ratios are held within this, so that no ratio overflows; beyond it they carry no gradient."""

UNCLIPPED = ("importance_sampling", "sft")


@dataclass(frozen=True)
class TokenBatch:
    """What a loss reads.

    Attributes:
        logprobs: [M] with gradient. advantages: [M]. mask: [M] bool, True where a token carries loss.
        row_offsets: [B+1] int64; row b owns `[row_offsets[b], row_offsets[b+1])`.
        old_logprobs: [M]; none: `logprobs` without gradient, so that the ratio is exactly 1.
        ref_logprobs, rollout_logprobs, entropy: [M] or none; `entropy` may carry gradient.
    """

    logprobs: Tensor
    advantages: Tensor | None
    mask: Tensor
    row_offsets: Tensor
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    entropy: Tensor | None = None


@dataclass(frozen=True)
class LossSettings:
    """How to weigh the terms; the two counts are those of the whole optimizer step.

    Attributes:
        num_loss_tokens: tokens with loss, at least 1. num_loss_rows: rows with such a token, at least 1.
        clip_low, clip_high: how far the ratio may fall and rise; none: the loss's own.
        max_response_len: the constant of dr_grpo.
    """

    num_loss_tokens: int
    num_loss_rows: int
    clip_low: float | None = None
    clip_high: float | None = None
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    max_response_len: int | None = None


@dataclass(frozen=True)
class LossResult:
    """`loss`: scalar with gradient. `sums`: detached scalars that add up over micro-batches; `maxima` likewise."""

    loss: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]

    def detached(self) -> "LossResult":
        """The same without the graph, to be kept while other micro-batches run."""
        return LossResult(self.loss.detach(), self.sums, self.maxima)


class Surrogate(NamedTuple):
    """One value per token, and where clipping took the gradient away (both [M])."""

    values: Tensor
    is_clipped: Tensor


class _Terms(NamedTuple):
    """What a surrogate is made of: [M] each, and the bounds of the ratio."""

    batch: TokenBatch
    advantages: Tensor
    log_ratio: Tensor
    low: float
    high: float

    def clamp(self, ratio: Tensor) -> Tensor:
        """The ratio held within its bounds."""
        return ratio.clamp(1.0 - self.low, 1.0 + self.high)


class _Spec(NamedTuple):
    surrogate: Callable[[_Terms], Surrogate]
    normalise_by: str
    clip_low: float = 0.0
    clip_high: float = 0.0
    needs_advantages: bool = True


def compute_loss(name: str, batch: TokenBatch, settings: LossSettings) -> LossResult:
    """The loss `name` of `batch`; 0 with zero gradients when every token is masked.

    Raises:
        ConfigError: `name` is not in the registry. InputError: something that the loss needs is missing.
    """
    spec = _spec_of(name)
    check_terms(name, settings, has_advantages=batch.advantages is not None, has_ref=batch.ref_logprobs is not None)
    terms = _terms(spec, batch, settings)
    surrogate = spec.surrogate(terms)
    weights = _token_weights(spec.normalise_by, batch, settings)
    pg_loss = _weighted_sum(surrogate.values, weights, batch.mask)
    loss = pg_loss
    parts = {"pg_loss": pg_loss}
    if batch.ref_logprobs is not None:
        parts["kl_loss"] = _weighted_sum(k3_divergence(batch.logprobs, batch.ref_logprobs), weights, batch.mask)
        loss = loss + settings.kl_coef * parts["kl_loss"]
    if settings.entropy_coef:
        if batch.entropy is None:
            raise InputError("entropy_coef > 0 needs the entropy of every token")
        loss = loss - settings.entropy_coef * _weighted_sum(batch.entropy, weights, batch.mask)
    parts["loss"] = loss
    return LossResult(loss, _sums(terms, surrogate, parts), _maxima(batch))


def counted_by(name: str) -> str:
    """What the loss `name` divides by: "loss tokens" or "rows"."""
    return "loss tokens" if _spec_of(name).normalise_by == "tokens" else "rows"


def check_terms(name: str, settings: LossSettings, *, has_advantages: bool, has_ref: bool) -> None:
    """Raise before anything is computed: ConfigError for an unknown loss, InputError for what it lacks."""
    spec = _spec_of(name)
    if spec.needs_advantages and not has_advantages:
        raise InputError(f"loss={name!r} needs advantages; give one number per row or per response token")
    if settings.kl_coef and not has_ref:
        raise InputError("kl_coef > 0 needs ref_logprobs; get them from log_probs(batch, reference=True)")
    if settings.max_response_len is not None and name != "dr_grpo":
        raise InputError(f"max_response_len has no effect on loss={name!r}; drop it or use loss='dr_grpo'")
    if name in UNCLIPPED and (settings.clip_low, settings.clip_high) != (None, None):
        raise InputError(f"clip_low and clip_high have no effect on loss={name!r}; drop them or choose another loss")


def k3_divergence(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Per-token estimate of KL(policy || reference), never negative (Schulman's k3; arXiv 2402.03300)."""
    log_ratio = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio


def summarise(results: list[LossResult]) -> dict[str, float]:
    """Metrics of a batch from the results of its micro-batches (names as in `protocol.FwdBwdResponse`)."""
    sums = {key: sum(float(result.sums[key]) for result in results) for key in (results[0].sums if results else ())}
    count = max(sums.get("num_loss_tokens", 0.0), 1.0)
    per_token = ("clip_fraction", "ppo_kl", "entropy", "sampler_diff_mean")
    metrics = {key: value / count if key in per_token else value for key, value in sums.items()}
    for key in results[0].maxima if results else ():
        metrics[key] = max(float(result.maxima[key]) for result in results)
    return metrics


def _spec_of(name: str) -> _Spec:
    if name not in LOSSES:
        raise ConfigError(f"loss={name!r} is not known; choose one of {', '.join(LOSSES)}")
    return LOSSES[name]


def _terms(spec: _Spec, batch: TokenBatch, settings: LossSettings) -> _Terms:
    old = batch.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    return _Terms(
        batch=batch,
        advantages=torch.ones_like(batch.logprobs) if batch.advantages is None else batch.advantages,
        log_ratio=(batch.logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO),
        low=spec.clip_low if settings.clip_low is None else settings.clip_low,
        high=spec.clip_high if settings.clip_high is None else settings.clip_high,
    )


def _clipped(terms: _Terms) -> Surrogate:
    ratio = terms.log_ratio.exp()
    plain = -ratio * terms.advantages
    bounded = -terms.clamp(ratio) * terms.advantages
    return Surrogate(torch.maximum(plain, bounded), (bounded > plain).detach())


def _sequence_clipped(terms: _Terms) -> Surrogate:
    """The row's ratio in value, each token's own gradient: `s * p / sg(p)` (GSPO-token)."""
    logprobs = terms.batch.logprobs
    mean = _row_mean(terms.log_ratio.detach(), terms.batch)
    return _clipped(terms._replace(log_ratio=mean + (logprobs - logprobs.detach())))


def _weight_clipped(terms: _Terms) -> Surrogate:
    ratio = terms.log_ratio.detach().exp()
    bounded = terms.clamp(ratio)
    return Surrogate(-bounded * terms.advantages * terms.batch.logprobs, bounded != ratio)


def _importance(terms: _Terms) -> Surrogate:
    return Surrogate(-terms.log_ratio.exp() * terms.advantages, torch.zeros_like(terms.batch.mask))


def _likelihood(terms: _Terms) -> Surrogate:
    return Surrogate(-terms.advantages * terms.batch.logprobs, torch.zeros_like(terms.batch.mask))


LOSSES: dict[str, _Spec] = {
    "grpo": _Spec(_clipped, "row_mean", 0.2, 0.2),
    "dr_grpo": _Spec(_clipped, "row_sum", 0.2, 0.2),
    "dapo": _Spec(_clipped, "tokens", 0.2, 0.28),
    "gspo": _Spec(_sequence_clipped, "row_mean", 3e-4, 4e-4),
    "cispo": _Spec(_weight_clipped, "tokens", 1.0, 4.0),
    "ppo": _Spec(_clipped, "tokens", 0.2, 0.2),
    "importance_sampling": _Spec(_importance, "tokens"),
    "sft": _Spec(_likelihood, "tokens", needs_advantages=False),
}


def _token_weights(normalise_by: str, batch: TokenBatch, settings: LossSettings) -> Tensor | float:
    if normalise_by == "tokens":
        return 1.0 / settings.num_loss_tokens
    if normalise_by == "row_sum":
        return 1.0 / (settings.num_loss_rows * (settings.max_response_len or 1))
    return 1.0 / (settings.num_loss_rows * _row_counts(batch).clamp(min=1.0))


def _weighted_sum(values: Tensor, weights: Tensor | float, mask: Tensor) -> Tensor:
    """Sum of the live tokens; masked ones add neither value nor gradient, whatever they hold."""
    return torch.where(mask, values * weights, torch.zeros_like(values)).sum()


def _rows_of_tokens(batch: TokenBatch) -> Tensor:
    lens = batch.row_offsets.diff()
    return torch.repeat_interleave(torch.arange(len(lens), device=lens.device), lens)


def _row_sums(values: Tensor, batch: TokenBatch) -> Tensor:
    """Sum over each token's row, for every token: [M]."""
    rows = _rows_of_tokens(batch)
    sums = values.new_zeros(len(batch.row_offsets) - 1).index_add_(0, rows, values)
    return sums[rows]


def _row_counts(batch: TokenBatch) -> Tensor:
    return _row_sums(batch.mask.to(batch.logprobs.dtype), batch)


def _row_mean(values: Tensor, batch: TokenBatch) -> Tensor:
    live = torch.where(batch.mask, values, torch.zeros_like(values))
    return _row_sums(live, batch) / _row_counts(batch).clamp(min=1.0)


def _sums(terms: _Terms, surrogate: Surrogate, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    batch, mask = terms.batch, terms.batch.mask
    sums = {key: value.detach() for key, value in parts.items()}
    sums["num_loss_tokens"] = mask.sum()
    sums["clip_fraction"] = (surrogate.is_clipped & mask).sum()
    sums["ppo_kl"] = _weighted_sum(-terms.log_ratio.detach(), 1.0, mask)
    if batch.entropy is not None:
        sums["entropy"] = _weighted_sum(batch.entropy.detach(), 1.0, mask)
    if batch.rollout_logprobs is not None:
        sums["sampler_diff_mean"] = _weighted_sum(_sampler_diff(batch.logprobs, batch.rollout_logprobs), 1.0, mask)
    return sums


def _maxima(batch: TokenBatch) -> dict[str, Tensor]:
    if batch.rollout_logprobs is None:
        return {}
    diff = torch.where(batch.mask, _sampler_diff(batch.logprobs, batch.rollout_logprobs), 0.0)
    return {"sampler_diff_max": diff.max() if len(diff) else diff.sum()}


def _sampler_diff(logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    return (logprobs.detach() - rollout_logprobs).abs()
