"""The training engine on plain PyTorch: one process, one device, AdamW."""

import math
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from arctic_platform.errors import (
    ArcticError,
    CheckpointError,
    ConfigError,
    InputError,
    NonFiniteError,
    WorkerLostError,
)
from arctic_platform.rl.config import ArcticRLClientConfig
from arctic_platform.rl.engines import saving
from arctic_platform.rl.engines.lora import (
    adapters_disabled,
    apply_lora,
    base_manifest,
    merged_norm,
    merged_weights,
)
from arctic_platform.rl.engines.models import copy_model, enable_checkpointing, load_model
from arctic_platform.rl.engines.offload import Offload, Target, module_tensors, needs_awake
from arctic_platform.rl.engines.optimizer import Gradients, Optimizer, local_part, norm_of
from arctic_platform.rl.engines.passes import RowPasses
from arctic_platform.rl.engines.rank_receipts import receipt_over_ranks
from arctic_platform.rl.engines.work import Work, response_of, run_losses
from arctic_platform.rl.engines.world import ALONE, World
from arctic_platform.rl.engines.wrapped import PassModule, Root
from arctic_platform.rl.protocol import (
    CheckpointResponse,
    FwdBwdResponse,
    LogProbsResponse,
    Processing,
    RolloutBatch,
    StepResponse,
)
from arctic_platform.rl.weight_sync.base import Manifest


class TorchTrainEngine:
    """A policy with its optimizer and, with `config.reference`, a frozen copy of the first weights.

    With `config.lora` adapters are trained; the reference is the model without them, and weights leave it merged.

    A call that raises leaves weights, optimizer, schedule, step and accumulated gradients as they were; the one
    exception is documented at `step`.

    On rank r of N every call is made on all ranks alike, each with its own rows, or with `batch=None` where a rank has
    none. Losses are divided by the counts of all ranks, gradients are summed, metrics are those of the whole call, and
    what one rank finds wrong all ranks raise. Log-probs are those of the rank's own rows.

    Args:
        config: what to load and how to train. model: use this built model instead of loading `config.model`.
        world: the ranks that train together; this class itself is for one.
    """

    is_sharded: ClassVar[bool] = False
    """Whether passes contain collectives even on one rank, so that no forward may run outside the root."""

    def __init__(
        self, config: ArcticRLClientConfig, model: PreTrainedModel | None = None, world: World = ALONE
    ) -> None:
        self.config = config
        self.world = world
        if world.size > 1 and not self.is_sharded:
            raise ConfigError("training_engine='torch' trains on one rank; use 'fsdp' or 'deepspeed' on several")
        self.model = model if model is not None else self._load_model()
        reference = copy_model(self.model) if config.reference and config.lora is None else None
        if config.lora is not None:
            apply_lora(self.model, config.lora, base=config.model, seed=config.seed)
        self.model.train()
        if config.gradient_checkpointing:
            enable_checkpointing(self.model)
        self.root = self._wrap(self.model)
        self.trainable = {name: param for name, param in self.model.named_parameters() if param.requires_grad}
        self.gradients, self.optimizer = self._training_of(list(self.trainable.values()))
        self.passes = self._passes_of(self.model, self.root)
        self.reference_passes = None if reference is None else self._passes_of(reference, self._wrap(reference))
        self.num_steps = 0
        self.version = 0
        self.run_id = uuid.uuid4().hex
        self._receipt_due = config.zorro_train.receipt_every > 0
        self._broken_by: str | None = None
        self._offload: Offload | None = None

    @property
    def num_parameters(self) -> int:
        """Of the whole policy."""
        return sum(param.numel() for param in self.model.parameters())

    @property
    def has_pending_gradients(self) -> bool:
        """Whether `fwd_bwd` was called since the last `step`."""
        return self.gradients.has_calls

    # What an engine that spreads the model over ranks does in its own way.

    def _load_model(self) -> PreTrainedModel:
        dtype = getattr(torch, self.config.dtype)
        return load_model(self.config.model, dtype, self.config.device, seed=self.config.seed)

    def _wrap(self, model: PreTrainedModel) -> Root:
        """What every pass of `model` runs inside."""
        return PassModule(model)

    def _training_of(self, params: list[nn.Parameter]) -> tuple[Gradients, Optimizer]:
        """What keeps the gradients of `params` between steps, and what applies them."""
        return Gradients(params), Optimizer(params, self.config.optimizer)

    def _backward(self, loss: Tensor) -> None:
        """Add the gradient of this rank's loss; the ranks' gradients are summed."""
        loss.backward()

    def _taken_gradients(self) -> list[Tensor | None]:
        """This rank's parts of the gradients of `trainable` since they were last taken or set aside; clears them."""
        taken = [None if param.grad is None else local_part(param.grad) for param in self.trainable.values()]
        for param in self.trainable.values():
            param.grad = None
        return taken

    def _settle(self) -> None:
        """Bring the weights to rest behind a call's passes: parameters are what the optimizer updates."""

    def _norm_over_ranks(self, own: float) -> float:
        """The norm of a whole from the norm of what this rank holds of it."""
        return own

    def _whole(self, tensor: Tensor) -> Tensor:
        """All of a tensor of which this rank may hold a part; collective."""
        return tensor

    def _write_part(self, target: Tensor, whole: Tensor) -> None:
        """Write this rank's part of a whole tensor."""
        target.copy_(whole)

    def _passes_of(self, model: PreTrainedModel, root: Root) -> RowPasses:
        in_lockstep = self.is_sharded or self.world.size > 1
        try:
            return RowPasses(model, self.config.zorro_train, root=root, in_lockstep=in_lockstep)
        finally:
            self._settle()

    @contextmanager
    def _at_work(self, passes: RowPasses, *, evaluating: bool) -> Generator[None]:
        """Run a call's passes inside. Where they contain collectives, one that breaks in the middle ends the engine:
        other ranks wait in it, and what gathers weights and sums gradients does not know where it stopped."""
        self._check_whole()
        try:
            with passes.evaluating() if evaluating else nullcontext():
                yield
        except ArcticError:
            raise
        except Exception as error:
            if not passes.in_lockstep:
                raise
            self._broken_by = f"{type(error).__name__}: {error}"
            raise self._broken() from error
        finally:
            self._settle()

    def _check_whole(self) -> None:
        """Raises WorkerLostError behind a pass that broke."""
        if self._broken_by is not None:
            raise self._broken()

    def _broken(self) -> WorkerLostError:
        return WorkerLostError(
            f"rank {self.world.rank} of {self.world.size} broke in the middle of a pass ({self._broken_by}); what it "
            "computes from now on cannot be trusted: start its group anew from a checkpoint with load_checkpoint()"
        )

    @needs_awake
    @torch.no_grad()
    def log_probs(
        self, batch: RolloutBatch | None, processing: Processing | None = None, *, reference: bool = False
    ) -> LogProbsResponse:
        """Score every response token, without gradients, with the policy or the reference.

        Raises ConfigError when a reference is asked for and none was configured.
        """
        if reference and not self.config.reference:
            raise ConfigError("log_probs(reference=True) needs a reference model; set reference: true")
        passes = self.reference_passes if reference and self.reference_passes is not None else self.passes
        is_base = reference and self.config.lora is not None
        with adapters_disabled(self.model) if is_base else nullcontext(), self._at_work(passes, evaluating=True):
            work = Work(passes, batch, processing or Processing(), self.world, scoring=True, with_loss=False)
            with work.attention():
                parts = [part.detached() for part in work.micro_batches()]
        return LogProbsResponse(
            logprobs=work.by_row(parts, "logprobs"),
            entropy=work.by_row(parts, "entropy") if work.wants_entropy else None,
            metrics=work.metrics(parts),
        )

    @needs_awake
    def fwd_bwd(self, batch: RolloutBatch | None, processing: Processing | None = None) -> FwdBwdResponse:
        """Forward, loss and backward; the gradients are added to those since the last `step`.

        Calls that do not give the counts of the whole step are weighed by their own, so that any split of a batch
        over calls gives the gradient of one call.

        Raises:
            InputError: the loss lacks something, or calls of one step count differently.
            NonFiniteError: the loss is NaN or infinite. ExactnessError: a receipt is beyond its tolerance.
        """
        return self._train(batch, processing or Processing(), keep=True)

    @needs_awake
    def fwd_bwd_discarding(self, batch: RolloutBatch | None, processing: Processing | None = None) -> FwdBwdResponse:
        """The whole work of `fwd_bwd`; the gradients are thrown away and nothing else is touched."""
        return self._train(batch, processing or Processing(), keep=False)

    @needs_awake
    @torch.no_grad()
    def fwd_no_grad(self, batch: RolloutBatch | None, processing: Processing | None = None) -> FwdBwdResponse:
        """The forward and loss of `fwd_bwd`, of this batch alone, without gradients."""
        with self._at_work(self.passes, evaluating=True):
            work = Work(self.passes, batch, processing or Processing(), self.world, scoring=True)
            share = work.share(Gradients([]))
            parts, results = run_losses(work, share, None)
        return response_of(work, parts, results, share)

    def _train(self, batch: RolloutBatch | None, processing: Processing, *, keep: bool) -> FwdBwdResponse:
        with self._at_work(self.passes, evaluating=False):
            work = Work(self.passes, batch, processing, self.world)
            share = work.share(self.gradients if keep else Gradients([]))
            receipt = self._receipt(work) if keep and self._receipt_due and work.totals.is_shared else {}
            with self.gradients.adding(share) if keep else self.gradients.discarding():
                parts, results = run_losses(work, share, self._backward)
                response = response_of(work, parts, results, share)
        response.metrics.update(receipt)
        self._receipt_due = self._receipt_due and not receipt
        return response

    def _receipt(self, work: Work) -> dict[str, float]:
        """Compare shared with unshared results; the first shared batch that comes settles a receipt that is due."""
        started = time.perf_counter()
        if work.passes.in_lockstep:
            with self.gradients.discarding():
                metrics = receipt_over_ranks(work, list(self.trainable), self._backward, self._taken_gradients)
        else:
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
        self._check_whole()
        if not self.gradients.has_calls:
            raise InputError("step() has no gradients to apply; call fwd_bwd(batch) first")
        grad_norm = self._norm_over_ranks(self.gradients.norm())
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

    # The state as whole tensors, for checkpoints and syncs; collective, so all ranks read to the end.

    @property
    def optimizer_step(self) -> int:
        """AdamW's count of steps."""
        return self.optimizer.num_updates

    def weight_specs(self) -> Manifest:
        """Names, shapes and dtypes of what `gather_weights` gives, without moving anything."""
        return base_manifest(self.model)

    @needs_awake
    @torch.no_grad()
    def gather_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Each distinct parameter and saved buffer, under its first name; whole on the first rank, empty on others.

        Adapters come merged into the base's weights. Raises WeightSyncError, behind the last of them, when adapters
        were trained and rounding leaves nothing of them.
        """
        for name, tensor in merged_weights(self.model, whole=self._whole, refuse_unchanged=True):
            yield name, self._for_first(tensor)

    @needs_awake
    @torch.no_grad()
    def gather_training(self) -> Iterator[tuple[str, Tensor]]:
        """`param.<name>`, `exp_avg.<name>`, `exp_avg_sq.<name>` and, in half precision, `master.<name>` of everything
        that is trained; whole on the first rank, empty on others. Before the first update there are no moments."""
        for name, param, target in self._with_targets():
            yield f"param.{name}", self._for_first(self._whole(param.detach()))
            for moment, value in self.optimizer.moments(target).items():
                yield f"{moment}.{name}", self._for_first(self._whole(value))
            if self.optimizer.has_masters:
                yield f"master.{name}", self._for_first(self._whole(target.detach()))

    @needs_awake
    @torch.no_grad()
    def scatter_training(self, read: Callable[[str], Tensor | None], optimizer_step: int) -> None:
        """Take over what `gather_training` of any engine gave; each rank reads whole tensors and keeps its part.

        read: the tensor of a name, None where there is none; names and shapes were checked by the caller. Weights
        without a master become their own, and with optimizer_step=0 AdamW starts anew. Pending gradients are dropped.
        """
        self.gradients.clear()
        for name, param, target in self._with_targets():
            master, value = read(f"master.{name}"), read(f"param.{name}")
            value = master if value is None else value
            if value is None:
                raise CheckpointError(f"there are no weights of {name!r} to continue from")
            self._write_part(param, value)
            if self.optimizer.has_masters:
                self._write_part(target, value if master is None else master)
            for moment, held in self.optimizer.renewed_moments(target, optimizer_step).items():
                saved = read(f"{moment}.{name}")
                if saved is not None:
                    self._write_part(held, saved)

    def _with_targets(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        for (name, param), target in zip(self.trainable.items(), self.optimizer.targets, strict=True):
            yield name, param, target

    def _for_first(self, whole: Tensor) -> Tensor:
        return whole if self.world.is_first else whole.new_empty(0)

    @needs_awake
    def save_checkpoint(
        self, path: str | None = None, client_state: dict[str, Any] | None = None
    ) -> CheckpointResponse:
        """Write weights, optimizer, schedule, random state and `client_state` as one folder, or nothing.

        Raises CheckpointError when the folder cannot be written, ConfigError when there is neither `path` nor
        `checkpoint_path`, InputError when gradients are pending or `client_state` is not JSON.
        """
        self._check_whole()
        return saving.save_checkpoint(self, path, client_state)

    @needs_awake
    def load_checkpoint(self, path: str | None = None) -> CheckpointResponse:
        """Continue exactly where a checkpoint was written; pending gradients are dropped.

        Raises CheckpointError when it is missing, incomplete or of another model; nothing is changed then.
        """
        self._check_whole()
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
        """Euclidean norm over all parameters; with adapters, over the merged ones."""
        if self.config.lora is not None:
            return merged_norm(self.model, whole=self._whole)
        return self._norm_over_ranks(norm_of([local_part(p) for p in self.model.parameters()], torch.float64))

    @property
    def is_asleep(self) -> bool:
        """Whether weights and optimizer are out of the device's memory."""
        return self._offload is not None

    def sleep(self, target: Target = "cpu") -> None:
        """Move weights, optimizer state and reference out of the device's memory, until `wake`.

        Raises InputError when gradients wait for a step, CheckpointError when the disk is full; all is as before then.
        """
        self._check_whole()
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

    def close(self) -> None:
        """Nothing runs beside this object."""
