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
    dpo                  -log sigmoid(b (s+ - s-)), per pair of rows  1 / pairs                  arXiv 2305.18290

`r = exp(logprobs - old_logprobs)` per token, `A` the advantage, `sg` stops the gradient, `s` a row's sum of
`logprobs - ref_logprobs`. What is done about a sampler that differs from the trainer is in correction.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from arctic_platform.errors import ConfigError, InputError
from arctic_platform.rl.correction import MAX_LOG_RATIO, Corrected, RolloutCorrection, correct

UNCLIPPED = ("importance_sampling", "sft", "dpo")
UNCORRECTED = ("sft", "dpo")
DEFAULT_DPO_BETA = 0.1


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
    pairs: "Pairs | None" = None


@dataclass(frozen=True)
class Pairs:
    """The pairs of a batch, of which a micro-batch holds some rows; its partners may be in another one.

    Attributes:
        index: [K, 2] int64, the preferred and the other row of each pair, numbered in the whole batch.
        rows: [B] int64, the whole batch's numbers of the rows at hand.
        scores: [all rows], every row's sum of `logprobs - ref_logprobs` over its loss tokens, without gradient; those
            of the rows at hand are not read.
    """

    index: Tensor
    rows: Tensor
    scores: Tensor


@dataclass(frozen=True)
class LossSettings:
    """How to weigh the terms; the counts are those of the whole optimizer step.

    Attributes:
        num_loss_tokens: tokens with loss, at least 1. num_loss_rows: rows with such a token, at least 1.
            num_loss_pairs: pairs, at least 1.
        clip_low, clip_high: how far the ratio may fall and rise; none: the loss's own.
        max_response_len: the constant of dr_grpo. dpo_beta: that of dpo, 0.1 if none.
        correction: what is done about the difference of sampler and trainer.
    """

    num_loss_tokens: int
    num_loss_rows: int
    clip_low: float | None = None
    clip_high: float | None = None
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    max_response_len: int | None = None
    num_loss_pairs: int = 1
    dpo_beta: float | None = None
    correction: RolloutCorrection = field(default_factory=RolloutCorrection)


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
    check_terms(
        name,
        settings,
        has_advantages=batch.advantages is not None,
        has_ref=batch.ref_logprobs is not None,
        has_rollout=batch.rollout_logprobs is not None,
        has_pairs=batch.pairs is not None,
    )
    if name == "dpo":
        return _preference_loss(batch, settings)
    spec = LOSSES[name]
    terms = _terms(spec, batch, settings)
    surrogate = spec.surrogate(terms)
    corrected = _corrected(terms, settings)
    live = batch.mask & corrected.is_kept
    weights = _token_weights(spec.normalise_by, batch, settings)
    pg_loss = _weighted_sum(surrogate.values * corrected.weights, weights, live)
    loss = pg_loss
    parts = {"pg_loss": pg_loss}
    if batch.ref_logprobs is not None:
        parts["kl_loss"] = _weighted_sum(k3_divergence(batch.logprobs, batch.ref_logprobs), weights, live)
        loss = loss + settings.kl_coef * parts["kl_loss"]
    if settings.entropy_coef:
        if batch.entropy is None:
            raise InputError("entropy_coef > 0 needs the entropy of every token")
        loss = loss - settings.entropy_coef * _weighted_sum(batch.entropy, weights, live)
    parts["loss"] = loss
    sums = _sums(terms, surrogate, parts)
    if settings.correction.is_active:
        sums |= _correction_sums(corrected, batch.mask)
    return LossResult(loss, sums, _maxima(batch))


def counted_by(name: str) -> str:
    """What the loss `name` divides by: "loss tokens", "rows" or "pairs"."""
    if name == "dpo":
        return "pairs"
    return "loss tokens" if _spec_of(name).normalise_by == "tokens" else "rows"


def check_terms(
    name: str,
    settings: LossSettings,
    *,
    has_advantages: bool,
    has_ref: bool,
    has_rollout: bool = False,
    has_pairs: bool = False,
) -> None:
    """Raise before anything is computed: ConfigError for an unknown loss, InputError for what it lacks."""
    settings.correction.check(has_rollout=has_rollout)
    if settings.correction.is_active and name in UNCORRECTED:
        raise InputError(f"rollout_is and rollout_rs have no effect on loss={name!r}; drop them")
    _check_pairs(name, settings, has_pairs=has_pairs, has_ref=has_ref)
    needs_advantages = name != "dpo" and _spec_of(name).needs_advantages
    if needs_advantages and not has_advantages:
        raise InputError(f"loss={name!r} needs advantages; give one number per row or per response token")
    if settings.kl_coef and not has_ref:
        raise InputError("kl_coef > 0 needs ref_logprobs; get them from log_probs(batch, reference=True)")
    if settings.max_response_len is not None and name != "dr_grpo":
        raise InputError(f"max_response_len has no effect on loss={name!r}; drop it or use loss='dr_grpo'")
    if name in UNCLIPPED and (settings.clip_low, settings.clip_high) != (None, None):
        raise InputError(f"clip_low and clip_high have no effect on loss={name!r}; drop them or choose another loss")


def _check_pairs(name: str, settings: LossSettings, *, has_pairs: bool, has_ref: bool) -> None:
    if name != "dpo":
        if settings.dpo_beta is not None:
            raise InputError(f"dpo_beta has no effect on loss={name!r}; drop it or use loss='dpo'")
        return
    if not has_pairs:
        raise InputError("loss='dpo' needs pairs, [preferred row, other row] for each; add pairs to the batch")
    if not has_ref:
        raise InputError("loss='dpo' needs ref_logprobs; get them from log_probs(batch, reference=True)")
    if settings.kl_coef or settings.entropy_coef:
        raise InputError("kl_coef and entropy_coef have no effect on loss='dpo'; dpo_beta is its weight of the KL term")


def row_scores(batch: TokenBatch) -> Tensor:
    """Each row's sum of `logprobs - ref_logprobs` over its loss tokens: [B]."""
    assert batch.ref_logprobs is not None, "check_terms was called before"
    values = torch.where(batch.mask, batch.logprobs - batch.ref_logprobs, torch.zeros_like(batch.logprobs))
    return values.new_zeros(len(batch.row_offsets) - 1).index_add(0, _rows_of_tokens(batch), values)


def _preference_loss(batch: TokenBatch, settings: LossSettings) -> LossResult:
    """DPO (arXiv 2305.18290, eq. 7), a mean over pairs.

    A pair counts where its preferred row is; where only the other row is at hand, it gives its gradient and no value.
    """
    pairs = batch.pairs
    assert pairs is not None, "check_terms was called before"
    is_here = torch.zeros_like(pairs.scores, dtype=torch.bool).index_fill_(0, pairs.rows, True)
    scores = pairs.scores.detach().index_copy(0, pairs.rows, row_scores(batch).to(pairs.scores.dtype))
    preferred, other = pairs.index.unbind(1)
    beta = DEFAULT_DPO_BETA if settings.dpo_beta is None else settings.dpo_beta
    margins = beta * (scores[preferred] - scores[other])
    values = torch.nn.functional.softplus(-margins)
    counts = is_here[preferred]
    gradient_only = torch.where(is_here[other], values - values.detach(), torch.zeros_like(values))
    loss = torch.where(counts, values, gradient_only).sum() / settings.num_loss_pairs
    sums = {
        "loss": loss.detach(),
        "pg_loss": loss.detach(),
        "num_loss_tokens": batch.mask.sum(),
        "num_loss_pairs": counts.sum(),
        "dpo_accuracy": (counts & (margins > 0)).sum(),
        "dpo_margin": torch.where(counts, margins.detach(), torch.zeros_like(values)).sum(),
    }
    return LossResult(loss, sums, {})


def k3_divergence(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Per-token estimate of KL(policy || reference), never negative (Schulman's k3; arXiv 2402.03300)."""
    log_ratio = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio


def summarise(results: list[LossResult]) -> dict[str, float]:
    """Metrics of a batch from the results of its micro-batches (names as in `protocol.FwdBwdResponse`)."""
    sums = {key: sum(float(result.sums[key]) for result in results) for key in (results[0].sums if results else ())}
    metrics = {key: value / max(sums[MEANS[key]], 1.0) if key in MEANS else value for key, value in sums.items()}
    for key in results[0].maxima if results else ():
        metrics[key] = max(float(result.maxima[key]) for result in results)
    return metrics


def _spec_of(name: str) -> _Spec:
    if name not in LOSSES:
        raise ConfigError(f"loss={name!r} is not known; choose one of {', '.join([*LOSSES, 'dpo'])}")
    return LOSSES[name]


def _corrected(terms: _Terms, settings: LossSettings) -> Corrected:
    """Weights and rejection by the ratio of trainer and sampler; the trainer's old values, or else its current ones."""
    batch = terms.batch
    if not settings.correction.is_active:
        return Corrected(torch.ones_like(batch.logprobs), torch.ones_like(batch.mask), torch.zeros_like(batch.mask))
    assert batch.rollout_logprobs is not None, "check_terms was called before"
    trainer = batch.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    return correct(settings.correction, trainer - batch.rollout_logprobs, batch.mask, batch.row_offsets)


def _correction_sums(corrected: Corrected, mask: Tensor) -> dict[str, Tensor]:
    return {
        "rollout_is_mean": _weighted_sum(corrected.weights, 1.0, mask),
        "rollout_is_truncated": (corrected.is_truncated & mask).sum(),
        "rollout_rs_rejected": (mask & ~corrected.is_kept).sum(),
    }


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


MEANS = dict.fromkeys(
    (
        "clip_fraction",
        "ppo_kl",
        "entropy",
        "sampler_diff_mean",
        "rollout_is_mean",
        "rollout_is_truncated",
        "rollout_rs_rejected",
    ),
    "num_loss_tokens",
) | {"dpo_accuracy": "num_loss_pairs", "dpo_margin": "num_loss_pairs"}
"""Sums that are reported per token or per pair: the sum that divides each."""


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
