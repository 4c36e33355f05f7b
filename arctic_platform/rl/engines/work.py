"""One call's rows on this rank: how they are run, and what all ranks of the call have to agree on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from arctic_platform.errors import InputError, NonFiniteError
from arctic_platform.rl.correction import RolloutCorrection
from arctic_platform.rl.engines.optimizer import Gradients, Share
from arctic_platform.rl.engines.passes import MicroBatch, PassPlan, RowPasses, Rows, flat
from arctic_platform.rl.engines.world import World
from arctic_platform.rl.losses import (
    LossResult,
    LossSettings,
    Pairs,
    TokenBatch,
    check_terms,
    compute_loss,
    counted_by,
    row_scores,
    summarise,
)
from arctic_platform.rl.protocol import FwdBwdResponse, Processing, RolloutBatch
from arctic_platform.rl.ragged import Ragged, array_of
from arctic_platform.rl.zorro_train.staged import num_staged_groups

Backward = Callable[[Tensor], None]


@dataclass(frozen=True)
class Totals:
    """Of all ranks' rows of one call. num_passes: the most micro-batches of a rank. is_shared: on any rank."""

    num_loss_tokens: int
    num_loss_rows: int
    num_loss_pairs: int
    num_tokens: int
    num_passes: int
    is_shared: bool

    @classmethod
    def over(cls, world: World, batch: RolloutBatch, rows: Rows, plan: PassPlan) -> Totals:
        """From every rank's own."""
        counts = (batch.num_loss_tokens, batch.num_loss_rows, batch.num_loss_pairs, rows.num_tokens)
        ranks = world.gather((counts, len(plan.parts), plan.is_shared))
        sums = [sum(of_ranks) for of_ranks in zip(*(counts for counts, _, _ in ranks), strict=True)]
        return cls(*sums, max(num for _, num, _ in ranks), any(is_shared for _, _, is_shared in ranks))


class Work:
    """One call's rows, and how they are run.

    batch: this rank's rows; none: it has none, and keeps step with the ranks that have. with_loss: check what the loss
    needs. Raises on all ranks what any of them finds wrong with its rows, before anything is computed.
    """

    def __init__(
        self,
        passes: RowPasses,
        batch: RolloutBatch | None,
        processing: Processing,
        world: World,
        *,
        scoring: bool = False,
        with_loss: bool = True,
    ) -> None:
        self.passes, self.processing, self.world = passes, processing, world
        self.started = time.perf_counter()
        self.wants_entropy = processing.calculate_entropy or processing.entropy_coef > 0.0
        passes.prepare(processing.zorro)
        with world.together():
            self.batch = _batch_of_rank(batch, world)
            if with_loss and batch is not None:
                _check_terms(processing, batch)
            self.rows = passes.rows_of(self.batch)
            self.plan = passes.plan(self.rows, processing.zorro, scoring=scoring)
        self.totals = Totals.over(world, self.batch, self.rows, self.plan)

    def attention(self) -> AbstractContextManager[None]:
        """Hold this open around `micro_batches` and the backward passes."""
        return self.passes.attention(self.plan.is_shared)

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Forward passes, one at a time, as many as every other rank has."""
        return self.passes.micro_batches(
            self.rows,
            self.plan,
            temperature=self.processing.temperature,
            calculate_entropy=self.wants_entropy,
            num_passes=self.totals.num_passes,
        )

    def share(self, gradients: Gradients) -> Share:
        """How the loss is divided, given the calls whose gradients wait already; counts are those of all ranks."""
        counts = counted_by(self.processing.loss)
        name = {"loss tokens": "num_loss_tokens", "rows": "num_loss_rows", "pairs": "num_loss_pairs"}[counts]
        return gradients.share_of_call(counts, getattr(self.totals, name), getattr(self.processing, name))

    def by_row(self, parts: list[MicroBatch], name: str) -> Ragged:
        """Values of this rank's rows, in the caller's order."""
        return _by_row(parts, self.batch.num_rows, name)

    def metrics(self, parts: list[MicroBatch]) -> dict[str, float]:
        """What was computed, over all ranks."""
        real = [part for part in parts if not part.is_empty]
        tokens, numbers, seconds = zip(
            *self.world.gather((sum(part.tokens for part in real), len(real), time.perf_counter() - self.started)),
            strict=True,
        )
        return {
            "tokens_computed": float(sum(tokens)),
            "tokens_naive": float(self.totals.num_tokens),
            "zorro_active": float(self.totals.is_shared),
            "num_micro_batches": float(sum(numbers)),
            "num_staged_groups": float(num_staged_groups(self.plan.stages)),
            "seconds": max(seconds),
        }


def run_losses(work: Work, share: Share, backward: Backward | None) -> tuple[list[MicroBatch], list[LossResult]]:
    """Loss of every micro-batch, and its backward before the next one is computed.

    Raises NonFiniteError, where ranks keep step only behind the last pass and then on all of them; the backward of
    such a loss runs with a gradient of zero.
    """
    parts, results = [], []
    failure: NonFiniteError | None = None
    settings = _settings(work.processing, share)
    with work.attention():
        scores = _pair_scores(work)
        for part in work.micro_batches():
            loss = part.values.logprobs[:0].sum()
            if not part.is_empty:
                result = compute_loss(work.processing.loss, _token_batch(work.batch, part, scores), settings)
                result = _with_router_loss(result, work, part, share)
                if torch.isfinite(result.loss):
                    loss = result.loss
                else:
                    failure = failure or _not_finite(part, result, work.world)
                    if not work.passes.in_lockstep:
                        raise failure
                results.append(result.detached())
            if backward is not None and loss.requires_grad:
                backward(loss)
            parts.append(part.detached())
    with work.world.together():
        if failure is not None:
            raise failure
    return parts, results


def response_of(work: Work, parts: list[MicroBatch], results: list[LossResult], share: Share) -> FwdBwdResponse:
    """Values of this rank's rows, and metrics of all ranks' rows."""
    everything = [result for of_rank in work.world.gather([_on_host(x) for x in results]) for result in of_rank]
    metrics = {"loss": 0.0, "pg_loss": 0.0, **summarise(everything)}
    own_part = share.total / share.own if share.own and not share.is_given else 1.0
    for name in ("loss", "pg_loss", "kl_loss"):
        if name in metrics:
            metrics[name] *= own_part
    metrics["num_loss_tokens"] = float(work.totals.num_loss_tokens)
    metrics["num_loss_rows"] = float(work.totals.num_loss_rows)
    return FwdBwdResponse(
        logprobs=work.by_row(parts, "logprobs"),
        entropy=work.by_row(parts, "entropy") if work.wants_entropy else None,
        metrics={**metrics, **work.metrics(parts)},
    )


def _batch_of_rank(batch: RolloutBatch | None, world: World) -> RolloutBatch:
    if batch is None and world.size == 1:
        raise InputError("there is no batch; only one of several ranks may be without rows")
    return RolloutBatch(prompts=[], responses=[]) if batch is None else batch


def _not_finite(part: MicroBatch, result: LossResult, world: World) -> NonFiniteError:
    where = f" of rank {world.rank}" if world.size > 1 else ""
    return NonFiniteError(
        f"the loss of rows {part.rows[0]} to {part.rows[-1]}{where} is {result.loss.item()}; nothing was changed: "
        "look at these rows, or use a smaller learning rate or dtype=float32"
    )


def _on_host(result: LossResult) -> LossResult:
    sums, maxima = ({name: value.cpu() for name, value in of.items()} for of in (result.sums, result.maxima))
    return LossResult(result.loss.cpu(), sums, maxima)


@torch.no_grad()
def _pair_scores(work: Work) -> Tensor | None:
    """What a pair's loss needs of a row that is in another micro-batch, all rows: [B]. None for other losses.

    Both rows of a pair are on one rank. Costs a forward pass more where the batch is cut, and nothing where it is in
    one piece.
    """
    if work.processing.loss != "dpo":
        return None
    scores = torch.zeros(work.batch.num_rows, dtype=torch.float64, device=work.passes.device)
    for part in work.micro_batches() if work.totals.num_passes > 1 else ():
        if not part.is_empty:
            scores[part.rows] = row_scores(_token_batch(work.batch, part)).to(scores)
    return scores


def _with_router_loss(result: LossResult, work: Work, part: MicroBatch, share: Share) -> LossResult:
    """Add the routers' load-balancing loss, where the model asks for it, weighed by the tokens of the rows.

    Those of all ranks count: a pass weighs as much as its rows, wherever they are.
    """
    aux_loss, coef = part.values.aux_loss, work.passes.router_coef
    if aux_loss is None:
        return result
    aux_loss = aux_loss * (work.rows.select(part.rows).num_tokens / work.totals.num_tokens)
    added = aux_loss * (coef * share.own / max(share.total, 1))
    sums = {**result.sums, "loss": result.sums["loss"] + added.detach(), "router_loss": aux_loss.detach()}
    return LossResult(result.loss + added, sums, result.maxima)


def _settings(processing: Processing, share: Share | None = None) -> LossSettings:
    total = max(share.total, 1) if share is not None else 1
    return LossSettings(
        num_loss_tokens=total,
        num_loss_rows=total,
        num_loss_pairs=total,
        clip_low=processing.clip_low,
        clip_high=processing.clip_high,
        kl_coef=processing.kl_coef,
        entropy_coef=processing.entropy_coef,
        max_response_len=processing.max_response_len,
        dpo_beta=processing.dpo_beta,
        correction=RolloutCorrection(
            rollout_is=processing.rollout_is,
            rollout_is_threshold=processing.rollout_is_threshold,
            rollout_rs=processing.rollout_rs,
            rollout_rs_threshold=processing.rollout_rs_threshold,
            rollout_rs_threshold_lower=processing.rollout_rs_threshold_lower,
        ),
    )


def _check_terms(processing: Processing, batch: RolloutBatch) -> None:
    check_terms(
        processing.loss,
        _settings(processing),
        has_advantages=batch.advantages is not None,
        has_ref=batch.ref_logprobs is not None,
        has_rollout=batch.rollout_logprobs is not None,
        has_pairs=batch.pairs is not None,
    )


def _token_batch(batch: RolloutBatch, part: MicroBatch, scores: Tensor | None = None) -> TokenBatch:
    """The packed tokens of a micro-batch as the losses want them. scores: [B] of the whole batch, for pairs."""
    logprobs, rows = part.values.logprobs, part.rows
    mask = flat(batch.response_mask, rows, logprobs)
    pairs = None
    if scores is not None:
        index = torch.from_numpy(np.array(batch.pairs, np.int64)).reshape(-1, 2).to(scores.device)
        pairs = Pairs(index, torch.tensor(rows, device=scores.device), scores)
    return TokenBatch(
        logprobs=logprobs,
        advantages=flat(batch.advantages, rows, logprobs),
        mask=torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask.bool(),
        row_offsets=torch.from_numpy(part.values.offsets).to(logprobs.device),
        old_logprobs=flat(batch.old_logprobs, rows, logprobs),
        ref_logprobs=flat(batch.ref_logprobs, rows, logprobs),
        rollout_logprobs=flat(batch.rollout_logprobs, rows, logprobs),
        entropy=part.values.entropy,
        pairs=pairs,
    )


def _by_row(parts: list[MicroBatch], num_rows: int, name: str) -> Ragged:
    """Values of all micro-batches by row, in the caller's order."""
    rows = [np.empty(0, np.float32)] * num_rows
    for part in parts:
        values = Ragged(array_of(getattr(part.values, name)), part.values.offsets)
        for at, b in enumerate(part.rows):
            rows[b] = values.array(at)
    return Ragged.from_rows(rows)
