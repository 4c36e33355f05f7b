"""The training engine on plain PyTorch: one process, one device, AdamW."""

import math
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from arctic_platform.errors import ConfigError, InputError, NonFiniteError
from arctic_platform.rl.config import ArcticRLClientConfig
from arctic_platform.rl.correction import RolloutCorrection
from arctic_platform.rl.engines import saving
from arctic_platform.rl.engines.models import copy_model, enable_checkpointing, load_model
from arctic_platform.rl.engines.offload import Offload, Target, module_tensors, needs_awake
from arctic_platform.rl.engines.optimizer import Gradients, Optimizer, Share
from arctic_platform.rl.engines.passes import MicroBatch, RowPasses, Rows, flat
from arctic_platform.rl.engines.world import ALONE, World
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
from arctic_platform.rl.protocol import (
    CheckpointResponse,
    FwdBwdResponse,
    LogProbsResponse,
    Processing,
    RolloutBatch,
    StepResponse,
)
from arctic_platform.rl.ragged import Ragged, array_of
from arctic_platform.rl.weight_sync.base import Manifest, manifest_of, weights_of
from arctic_platform.rl.zorro_train.staged import num_staged_groups


class TorchTrainEngine:
    """A policy with its optimizer and, with `config.reference`, a frozen copy of the first weights.

    A call that raises leaves weights, optimizer, schedule, step and accumulated gradients as they were; the one
    exception is documented at `step`.

    Args:
        config: what to load and how to train. model: use this built model instead of loading `config.model`.
    """

    def __init__(
        self, config: ArcticRLClientConfig, model: PreTrainedModel | None = None, world: World = ALONE
    ) -> None:
        self.config = config
        self.world = world
        dtype = getattr(torch, config.dtype)
        self.model = model if model is not None else load_model(config.model, dtype, config.device, seed=config.seed)
        reference = copy_model(self.model) if config.reference else None
        self.model.train()
        if config.gradient_checkpointing:
            enable_checkpointing(self.model)
        params = [param for param in self.model.parameters() if param.requires_grad]
        self.gradients = Gradients(params)
        self.optimizer = Optimizer(params, config.optimizer)
        self.passes = RowPasses(self.model, config.zorro_train)
        self.reference_passes = RowPasses(reference, config.zorro_train) if reference is not None else None
        self.num_steps = 0
        self.version = 0
        self.run_id = uuid.uuid4().hex
        self._receipt_due = config.zorro_train.receipt_every > 0
        self._offload: Offload | None = None

    @property
    def num_parameters(self) -> int:
        """Of the whole policy."""
        return sum(param.numel() for param in self.model.parameters())

    @property
    def has_pending_gradients(self) -> bool:
        """Whether `fwd_bwd` was called since the last `step`."""
        return self.gradients.has_calls

    @needs_awake
    @torch.no_grad()
    def log_probs(
        self, batch: RolloutBatch, processing: Processing | None = None, *, reference: bool = False
    ) -> LogProbsResponse:
        """Score every response token, without gradients, with the policy or the reference.

        Raises ConfigError when a reference is asked for and none was configured.
        """
        started = time.perf_counter()
        processing = processing or Processing()
        passes = self.passes
        if reference:
            if self.reference_passes is None:
                raise ConfigError("log_probs(reference=True) needs a reference model; set reference: true")
            passes = self.reference_passes
        work = _Work(passes, passes.rows_of(batch), processing, scoring=True)
        with passes.evaluating(), work.attention():
            parts = [part.detached() for part in work.micro_batches()]
        return LogProbsResponse(
            logprobs=_by_row(parts, batch.num_rows, "logprobs"),
            entropy=_by_row(parts, batch.num_rows, "entropy") if work.wants_entropy else None,
            metrics=work.metrics(parts, started),
        )

    @needs_awake
    def fwd_bwd(self, batch: RolloutBatch, processing: Processing | None = None) -> FwdBwdResponse:
        """Forward, loss and backward; the gradients are added to those since the last `step`.

        Calls that do not give the counts of the whole step are weighed by their own, so that any split of a batch
        over calls gives the gradient of one call.

        Raises:
            InputError: the loss lacks something, or calls of one step count differently.
            NonFiniteError: the loss is NaN or infinite. ExactnessError: a receipt is beyond its tolerance.
        """
        return self._train(batch, processing or Processing(), keep=True)

    @needs_awake
    def fwd_bwd_discarding(self, batch: RolloutBatch, processing: Processing | None = None) -> FwdBwdResponse:
        """The whole work of `fwd_bwd`; the gradients are thrown away and nothing else is touched."""
        return self._train(batch, processing or Processing(), keep=False)

    @needs_awake
    @torch.no_grad()
    def fwd_no_grad(self, batch: RolloutBatch, processing: Processing | None = None) -> FwdBwdResponse:
        """The forward and loss of `fwd_bwd`, of this batch alone, without gradients."""
        started = time.perf_counter()
        processing = processing or Processing()
        _check_terms(processing, batch)
        work = _Work(self.passes, self.passes.rows_of(batch), processing, scoring=True)
        share = _share(processing, batch, Gradients([]))
        with self.passes.evaluating():
            parts, results = _run(work, batch, share, backward=False)
        return _response(work, batch, parts, results, share, started)

    def _train(self, batch: RolloutBatch, processing: Processing, *, keep: bool) -> FwdBwdResponse:
        started = time.perf_counter()
        _check_terms(processing, batch)
        work = _Work(self.passes, self.passes.rows_of(batch), processing)
        share = _share(processing, batch, self.gradients if keep else Gradients([]))
        receipt = self._receipt(work) if keep else {}
        with self.gradients.adding(share) if keep else self.gradients.discarding():
            parts, results = _run(work, batch, share, backward=True)
            response = _response(work, batch, parts, results, share, started)
        response.metrics.update(receipt)
        self._receipt_due = self._receipt_due and not receipt
        return response

    def _receipt(self, work: "_Work") -> dict[str, float]:
        """Compare shared with unshared results when one is due; the first shared batch that comes settles it."""
        if not (self._receipt_due and work.plan.is_shared):
            return {}
        started = time.perf_counter()
        metrics = work.passes.receipt(work.rows, work.plan, work.processing.temperature)
        return {**metrics, "receipt/seconds": time.perf_counter() - started}

    @needs_awake
    def step(self) -> StepResponse:
        """Clip to the configured norm, update, advance the schedule, clear the gradients.

        Raises:
            InputError: no `fwd_bwd` since the last step.
            NonFiniteError: the gradient norm is NaN or infinite. Weights, optimizer and schedule stay as they are;
                the gradients, which nothing can repair, are cleared.
        """
        started = time.perf_counter()
        if not self.gradients.has_calls:
            raise InputError("step() has no gradients to apply; call fwd_bwd(batch) first")
        grad_norm = self.gradients.norm()
        if not math.isfinite(grad_norm):
            self.gradients.clear()
            raise NonFiniteError(
                f"the gradient norm is {grad_norm}; the step was dropped, weights and optimizer are unchanged: look at "
                "the batches since the last step, lower the learning rate, or use dtype=float32"
            )
        lr = self.optimizer.update(self.num_steps, grad_norm)
        self.gradients.clear()
        self.num_steps += 1
        self.version += 1
        every = self.config.zorro_train.receipt_every
        self._receipt_due = self._receipt_due or (every > 0 and self.num_steps % every == 0)
        seconds = time.perf_counter() - started
        return StepResponse(
            metrics={"step": float(self.num_steps), "lr": lr, "grad_norm": grad_norm, "seconds": seconds}
        )

    @needs_awake
    def save_checkpoint(
        self, path: str | None = None, client_state: dict[str, Any] | None = None
    ) -> CheckpointResponse:
        """Write weights, optimizer, schedule, random state and `client_state` as one folder, or nothing.

        Raises CheckpointError when the folder cannot be written, ConfigError when there is neither `path` nor
        `checkpoint_path`, InputError when gradients are pending or `client_state` is not JSON.
        """
        return saving.save_checkpoint(self, path, client_state)

    @needs_awake
    def load_checkpoint(self, path: str | None = None) -> CheckpointResponse:
        """Continue exactly where a checkpoint was written; pending gradients are dropped.

        Raises CheckpointError when it is missing, incomplete or of another model; nothing is changed then.
        """
        response = saving.load_checkpoint(self, path)
        self.gradients.clear()
        return response

    @needs_awake
    def export_model(self, path: str) -> str:
        """Write the weights (and the tokenizer, where it is at hand) as a Hugging Face folder; returns its path."""
        return saving.export_model(self, path)

    @needs_awake
    @torch.no_grad()
    def weight_norm(self) -> float:
        """Euclidean norm over all parameters."""
        norms = [torch.linalg.vector_norm(param, dtype=torch.float64) for param in self.model.parameters()]
        return float(torch.linalg.vector_norm(torch.stack(norms)))

    def close(self) -> None:
        """Nothing runs beside this object."""

    @property
    def is_asleep(self) -> bool:
        """Whether weights and optimizer are out of the device's memory."""
        return self._offload is not None

    def sleep(self, target: Target = "cpu") -> None:
        """Move weights, optimizer state and reference out of the device's memory, until `wake`.

        Raises InputError when gradients wait for a step, CheckpointError when the disk is full; all is as before then.
        """
        if self.has_pending_gradients:
            raise InputError("sleep_training() cannot keep gradients that wait for a step; call step() before it")
        if self._offload is not None:
            if self._offload.target != target:
                raise InputError(f"the trainer is asleep on {self._offload.target!r}; call wake_training() before")
            return
        offload = Offload(self._held_tensors(), target, self.world, self.config.checkpoint_folder)
        offload.leave()
        self._offload = offload

    def wake(self) -> None:
        """Bring everything back as it was, bit for bit."""
        if self._offload is not None:
            self._offload.come_back()
            self._offload = None

    def _held_tensors(self) -> Iterator[Tensor]:
        """All that takes memory between two calls."""
        passes = [self.passes] if self.reference_passes is None else [self.passes, self.reference_passes]
        yield from module_tensors(one.model for one in passes)
        yield from self.optimizer.targets
        for state in self.optimizer.adamw.state.values():
            yield from state.values()

    @property
    def optimizer_step(self) -> int:
        """Updates that AdamW counted."""
        return max((int(state["step"]) for state in self.optimizer.adamw.state.values()), default=0)

    @needs_awake
    def gather_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Each distinct parameter and saved buffer by its first name."""
        yield from weights_of(self.model).items()

    def weight_specs(self) -> Manifest:
        """Names, shapes and dtypes of `gather_weights`."""
        return manifest_of(self.model)

    @needs_awake
    def gather_training(self) -> Iterator[tuple[str, Tensor]]:
        """`param.`, `exp_avg.`, `exp_avg_sq.` and, in half precision, `master.` of everything that is trained."""
        for name, param, target in self._trained():
            yield f"param.{name}", param.detach()
            for kind in ("exp_avg", "exp_avg_sq"):
                if target in self.optimizer.adamw.state:
                    yield f"{kind}.{name}", self.optimizer.adamw.state[target][kind]
            if target is not param:
                yield f"master.{name}", target.detach()

    @needs_awake
    @torch.no_grad()
    def scatter_training(self, read: Callable[[str], Tensor | None], optimizer_step: int) -> None:
        """The inverse of `gather_training`."""
        for name, param, target in self._trained():
            saved = read(f"param.{name}")
            assert saved is not None
            param.copy_(saved)
            moments = {kind: read(f"{kind}.{name}") for kind in ("exp_avg", "exp_avg_sq")}
            self.optimizer.adamw.state.pop(target, None)
            if moments["exp_avg"] is not None:
                state = {
                    kind: torch.empty_like(target).copy_(value) for kind, value in moments.items() if value is not None
                }
                state["step"] = torch.tensor(float(optimizer_step), device=param.device)
                self.optimizer.adamw.state[target] = state
            if target is not param:
                master = read(f"master.{name}")
                target.copy_(saved if master is None else master)

    def _trained(self) -> list[tuple[str, Tensor, Tensor]]:
        named = [(name, param) for name, param in self.model.named_parameters() if param.requires_grad]
        targets = self.optimizer.targets
        return [(name, param, target) for (name, param), target in zip(named, targets, strict=True)]


class _Work:
    """One call's rows, and how they are run."""

    def __init__(self, passes: RowPasses, rows: Rows, processing: Processing, *, scoring: bool = False) -> None:
        self.passes = passes
        self.rows = rows
        self.processing = processing
        self.plan = passes.plan(rows, processing.zorro, scoring=scoring)
        self.wants_entropy = processing.calculate_entropy or processing.entropy_coef > 0.0

    def attention(self) -> AbstractContextManager[None]:
        """Hold this open around `micro_batches` and the backward passes."""
        return self.passes.attention(self.plan.is_shared)

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Forward passes, one at a time."""
        return self.passes.micro_batches(
            self.rows,
            self.plan,
            temperature=self.processing.temperature,
            calculate_entropy=self.wants_entropy,
        )

    def metrics(self, parts: list[MicroBatch], started: float) -> dict[str, float]:
        """What was computed."""
        return {
            "tokens_computed": float(sum(part.tokens for part in parts)),
            "tokens_naive": float(self.rows.num_tokens),
            "zorro_active": float(self.plan.is_shared),
            "num_micro_batches": float(len(parts)),
            "num_staged_groups": float(num_staged_groups(self.plan.stages)),
            "seconds": time.perf_counter() - started,
        }


def _run(
    work: _Work, batch: RolloutBatch, share: Share, *, backward: bool
) -> tuple[list[MicroBatch], list[LossResult]]:
    """Loss of every micro-batch, and its backward before the next one is computed."""
    parts, results = [], []
    settings = _settings(work.processing, share)
    with work.attention():
        scores = _pair_scores(work, batch)
        for part in work.micro_batches():
            result = compute_loss(work.processing.loss, _token_batch(batch, part, scores), settings)
            result = _with_router_loss(result, work, part, share)
            if not torch.isfinite(result.loss):
                raise NonFiniteError(
                    f"the loss of rows {part.rows[0]} to {part.rows[-1]} is {result.loss.item()}; nothing was changed: "
                    "look at these rows, or use a smaller learning rate or dtype=float32"
                )
            if backward and result.loss.requires_grad:
                result.loss.backward()
            parts.append(part.detached())
            results.append(result.detached())
    return parts, results


@torch.no_grad()
def _pair_scores(work: _Work, batch: RolloutBatch) -> Tensor | None:
    """What a pair's loss needs of a row that is in another micro-batch, all rows: [B]. None for other losses.

    Costs a forward pass more where the batch is cut, and nothing where it is in one piece.
    """
    if work.processing.loss != "dpo":
        return None
    scores = torch.zeros(batch.num_rows, dtype=torch.float64, device=work.passes.device)
    for part in work.micro_batches() if len(work.plan.parts) > 1 else ():
        scores[part.rows] = row_scores(_token_batch(batch, part)).to(scores)
    return scores


def _with_router_loss(result: LossResult, work: _Work, part: MicroBatch, share: Share) -> LossResult:
    """Add the routers' load-balancing loss, where the model asks for it, weighed by the tokens of the rows."""
    aux_loss, coef = part.values.aux_loss, work.passes.router_coef
    if aux_loss is None:
        return result
    aux_loss = aux_loss * (work.rows.select(part.rows).num_tokens / work.rows.num_tokens)
    added = aux_loss * (coef * share.own / max(share.total, 1))
    sums = {**result.sums, "loss": result.sums["loss"] + added.detach(), "router_loss": aux_loss.detach()}
    return LossResult(result.loss + added, sums, result.maxima)


def _response(
    work: _Work,
    batch: RolloutBatch,
    parts: list[MicroBatch],
    results: list[LossResult],
    share: Share,
    started: float,
) -> FwdBwdResponse:
    metrics = {"loss": 0.0, "pg_loss": 0.0, **summarise(results)}
    own_part = share.total / share.own if share.own and not share.is_given else 1.0
    for name in ("loss", "pg_loss", "kl_loss"):
        if name in metrics:
            metrics[name] *= own_part
    metrics["num_loss_tokens"], metrics["num_loss_rows"] = float(batch.num_loss_tokens), float(batch.num_loss_rows)
    return FwdBwdResponse(
        logprobs=_by_row(parts, batch.num_rows, "logprobs"),
        entropy=_by_row(parts, batch.num_rows, "entropy") if work.wants_entropy else None,
        metrics={**metrics, **work.metrics(parts, started)},
    )


def _share(processing: Processing, batch: RolloutBatch, gradients: Gradients) -> Share:
    """How this call's loss is divided, given the calls whose gradients wait already."""
    counts = counted_by(processing.loss)
    name = {"loss tokens": "num_loss_tokens", "rows": "num_loss_rows", "pairs": "num_loss_pairs"}[counts]
    return gradients.share_of_call(counts, getattr(batch, name), getattr(processing, name))


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
