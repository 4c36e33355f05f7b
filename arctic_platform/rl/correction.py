"""What a loss does about a sampler that is not the trainer: weights and rejection, under verl's names.

Sampler and trainer compute the same policy with other kernels, precisions or weights, so a sampled token has the ratio
`rho = p_trainer / p_sampler = exp(old_logprobs - rollout_logprobs)`, 1 where both agree.

    rollout_is    token      w = min(rho, C)                       truncated importance sampling (TIS)
                  sequence   w = min(product of the row's rho, C)  the same for a whole row
    rollout_rs    token      a token with rho outside [low, high] carries no loss
                  sequence   a row whose product of rho is outside carries no loss
                  geometric  a row whose geometric mean of rho is outside carries no loss

`w` multiplies the policy term and has no gradient. rollout_is with rollout_rs of the same level is masked importance
sampling (MIS): a weight beyond C becomes 0 and not C. rollout_is=token with rollout_rs=token and both bounds is
IcePop's two-sided mask (arXiv 2510.18855). Denominators stay as they are: a rejected token counts and adds 0.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from arctic_platform.errors import InputError

MAX_LOG_RATIO = 20.0
"""Log-ratios are held within this, so that no ratio overflows."""

DEFAULT_THRESHOLD = 2.0


@dataclass(frozen=True)
class RolloutCorrection:
    """Levels and bounds, see above; `rollout_rs_threshold_lower` none: one over the upper bound."""

    rollout_is: Literal["token", "sequence"] | None = None
    rollout_is_threshold: float | None = None
    rollout_rs: Literal["token", "sequence", "geometric"] | None = None
    rollout_rs_threshold: float | None = None
    rollout_rs_threshold_lower: float | None = None

    @property
    def is_active(self) -> bool:
        """Whether anything is weighed or rejected."""
        return self.rollout_is is not None or self.rollout_rs is not None

    @property
    def bounds(self) -> tuple[float, float]:
        """The ratios that are not rejected, lowest and highest."""
        high = DEFAULT_THRESHOLD if self.rollout_rs_threshold is None else self.rollout_rs_threshold
        return (1.0 / high if self.rollout_rs_threshold_lower is None else self.rollout_rs_threshold_lower), high

    def check(self, *, has_rollout: bool) -> None:
        """Raise InputError for a bound that nothing reads, bounds the wrong way round, or absent rollout_logprobs."""
        if self.rollout_is is None and self.rollout_is_threshold is not None:
            raise InputError("rollout_is_threshold has no effect without rollout_is; set it to token or sequence")
        given = (self.rollout_rs_threshold, self.rollout_rs_threshold_lower)
        if self.rollout_rs is None and given != (None, None):
            raise InputError("rollout_rs_threshold has no effect without rollout_rs; set token, sequence or geometric")
        low, high = self.bounds
        if low > high:
            raise InputError(f"rollout_rs accepts ratios from {low} to {high}, which is none; swap the thresholds")
        if self.is_active and not has_rollout:
            raise InputError("rollout_is and rollout_rs need rollout_logprobs, the log-probs that generate() returned")


class Corrected(NamedTuple):
    """[M] each: what a token's policy term is multiplied with, whether it carries loss, and where it was truncated."""

    weights: Tensor
    is_kept: Tensor
    is_truncated: Tensor


def correct(rule: RolloutCorrection, log_rho: Tensor, mask: Tensor, row_offsets: Tensor) -> Corrected:
    """Weights and rejection of packed tokens.

    Args:
        log_rho: [M] old minus rollout log-probs, without gradient. mask: [M] bool, tokens with loss; only these count
            for their row. row_offsets: [B+1] int64.
    """
    log_rho = torch.where(mask, log_rho, torch.zeros_like(log_rho))
    weights, is_kept = torch.ones_like(log_rho), torch.ones_like(mask)
    is_truncated = torch.zeros_like(mask)
    if rule.rollout_is is not None:
        ratio = _at_level(rule.rollout_is, log_rho, mask, row_offsets)
        limit = DEFAULT_THRESHOLD if rule.rollout_is_threshold is None else rule.rollout_is_threshold
        weights, is_truncated = ratio.clamp(max=limit), ratio > limit
    if rule.rollout_rs is not None:
        low, high = rule.bounds
        ratio = _at_level(rule.rollout_rs, log_rho, mask, row_offsets)
        is_kept = (ratio >= low) & (ratio <= high)
    return Corrected(weights, is_kept, is_truncated & is_kept)


def _at_level(level: str, log_rho: Tensor, mask: Tensor, row_offsets: Tensor) -> Tensor:
    """The ratio that decides about each token: its own, or its row's."""
    if level != "token":
        lens = row_offsets.diff()
        rows = torch.repeat_interleave(torch.arange(len(lens), device=lens.device), lens)
        sums = log_rho.new_zeros(len(lens)).index_add_(0, rows, log_rho)
        if level == "geometric":
            counts = log_rho.new_zeros(len(lens)).index_add_(0, rows, mask.to(log_rho.dtype))
            sums = sums / counts.clamp(min=1.0)
        log_rho = sums[rows]
    return log_rho.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
