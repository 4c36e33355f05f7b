"""The training engine on DeepSpeed: ZeRO stages 0 to 3, by the user's own configuration of it.

    fwd_bwd   engine(run) and engine.backward(loss) for each pass, then one reduction; this rank's shard of the
              gradients is taken out of DeepSpeed (see deepspeed_shards.py) and kept here
    fwd_bwd   ... weighed and added to it
    step      norm and clipping by us, the shard put back, engine.step()

Passes, losses, schedule and checkpoints are those of the plain engine. DeepSpeed compiles C++ when it is used the plain
way on a CPU; it gets torch's AdamW and is told that no operator can be built.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn
from transformers import PreTrainedModel

from arctic_platform.errors import CheckpointError, ConfigError, MissingDependencyError
from arctic_platform.rl.config import ArcticRLClientConfig, OptimizerConfig, one_line_error
from arctic_platform.rl.engines.deepspeed_settings import deepspeed_settings
from arctic_platform.rl.engines.models import check_device
from arctic_platform.rl.engines.offload import needs_awake
from arctic_platform.rl.engines.optimizer import MOMENTS, Gradients, Optimizer, learning_rate, norm_of
from arctic_platform.rl.engines.torch_train import TorchTrainEngine
from arctic_platform.rl.engines.world import ALONE, World
from arctic_platform.rl.engines.wrapped import PassModule, Root

if TYPE_CHECKING:
    from arctic_platform.rl.engines.deepspeed_shards import Shards


class DeepSpeedTrainEngine(TorchTrainEngine):
    """A policy that DeepSpeed spreads over the ranks; exact as the plain engine is.

    On several ranks the default process group must have been initialised, with NCCL on CUDA and gloo on the CPU; alone,
    a group of one is made where there is none. DeepSpeed changes its process (environment, warnings and, with stage 3
    and until `close`, torch's linear function), so give it one of its own.

    Args:
        config, model, world: as of the plain engine. device='cuda' is the device of this rank on its machine.

    Raises:
        ConfigError: a key of `config.deepspeed` is unknown, ours, or contradicts ours.
        MissingDependencyError: DeepSpeed is not installed.
    """

    is_sharded: ClassVar[bool] = True

    def __init__(
        self, config: ArcticRLClientConfig, model: PreTrainedModel | None = None, world: World = ALONE
    ) -> None:
        self._settings = deepspeed_settings(config)
        check_device(config.device)
        _join_group(config, world)
        self._deepspeed = _start_deepspeed(config)
        self._linear = nn.functional.linear
        super().__init__(config, model, world)

    @property
    def num_parameters(self) -> int:
        """Of the whole policy."""
        return self._num_parameters

    def _wrap(self, model: PreTrainedModel) -> Root:
        """DeepSpeed's engine for the policy. A reference is never updated and stays whole on every rank."""
        root = PassModule(model)
        if model is not self.model:
            return root
        self._num_parameters = sum(param.numel() for param in model.parameters())
        params = [param for param in model.parameters() if param.requires_grad]
        optimizer = self.config.optimizer
        self._adamw = torch.optim.AdamW(
            params,
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        engine = self._initialised(root)
        head = model.get_output_embeddings()
        if engine.zero_optimization_partition_weights() and head is not None:
            for param in head.parameters():
                self._deepspeed.zero.register_external_parameter(root, param)
        return engine

    def _initialised(self, root: PassModule) -> Any:
        try:
            engine, *_ = self._deepspeed.initialize(
                model=root, optimizer=self._adamw, config=self._settings, dist_init_required=False
            )
        except ValidationError as error:
            raise ConfigError(f"deepspeed: {one_line_error(error)}") from error
        return engine

    def _training_of(self, params: list[nn.Parameter]) -> tuple[ZeroGradients, ZeroOptimizer]:
        from arctic_platform.rl.engines.deepspeed_shards import shards_of

        self.shards = shards_of(self.root, self._adamw, params)
        self.shards.reset()
        gradients = ZeroGradients(self.shards)
        return gradients, ZeroOptimizer(gradients, self.config.optimizer)

    def _backward(self, loss: Tensor) -> None:
        self.shards.backward(loss)

    def _taken_gradients(self) -> list[Tensor | None]:
        return list(self.shards.by_parameter(self.shards.take()))

    def _whole(self, tensor: Tensor) -> Tensor:
        return self.shards.whole(tensor)

    def _norm_over_ranks(self, own: float) -> float:
        squares = self.world.sum(own**2)
        return math.sqrt(squares if self.shards.is_divided else squares / self.world.size)

    @needs_awake
    @torch.no_grad()
    def gather_training(self) -> Iterator[tuple[str, Tensor]]:
        """As of the plain engine."""
        kinds = ["param", *(MOMENTS if self.shards.moments_exist() else ()), *self._master()]
        for at, name in enumerate(self.trainable):
            for kind in kinds:
                yield f"{kind}.{name}", self._for_first(self.shards.read(at, kind))

    @needs_awake
    @torch.no_grad()
    def scatter_training(self, read: Callable[[str], Tensor | None], optimizer_step: int) -> None:
        """As of the plain engine."""
        self.gradients.clear()
        self.shards.renew_moments(optimizer_step)
        for at, name in enumerate(self.trainable):
            master, value = read(f"master.{name}"), read(f"param.{name}")
            value = master if value is None else value
            if value is None:
                raise CheckpointError(f"there are no weights of {name!r} to continue from")
            self.shards.write(at, "param", value)
            for kind in self._master():
                self.shards.write(at, kind, value if master is None else master)
            for kind in MOMENTS:
                saved = read(f"{kind}.{name}") if optimizer_step else None
                if saved is not None:
                    self.shards.write(at, kind, saved)

    def _master(self) -> tuple[str, ...]:
        return ("master",) if self.config.dtype == "bfloat16" else ()

    def _held_tensors(self) -> Iterator[Tensor]:
        yield from super()._held_tensors()
        yield from self.shards.held_tensors()

    def close(self) -> None:
        """Take DeepSpeed's hooks and buffers away, and its linear function; no call may follow."""
        self.shards.engine.destroy()
        vars(nn.functional)["linear"] = self._linear

    @needs_awake
    @torch.no_grad()
    def weight_norm(self) -> float:
        """As of the plain engine; collective."""
        if self.config.lora is not None:
            return super().weight_norm()
        whole = (self.shards.whole(param) for param in self.model.parameters())
        return math.sqrt(math.fsum(norm_of([weight], torch.float64) ** 2 for weight in whole))


class ZeroGradients(Gradients):
    """This rank's shard of the gradients of all calls since the last step, in fp32.

    DeepSpeed holds those of one call, and only while it runs.
    """

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        super().__init__([])

    def clear(self) -> None:
        """Forget the gradients and the calls that made them."""
        super().clear()
        self.held: list[Tensor] = []

    def norm(self) -> float:
        """Euclidean norm over this rank's shard; in fp64, since a sum over one long run in fp32 is off by 3e-6."""
        return norm_of(self.held, torch.float64)

    def _set_aside(self) -> list[Tensor]:
        before, self.held = self.held, []
        return before

    def _put_back(self, before: list[Tensor]) -> None:
        self.shards.reset()
        self.held = before

    def _merge(self, before: list[Tensor], rescale: float) -> None:
        self.held = self.shards.take()
        for new, old in zip(self.held, before, strict=False):
            new.add_(old, alpha=rescale)


class ZeroOptimizer(Optimizer):
    """AdamW as DeepSpeed has taken it over: it updates this rank's shard of the weights."""

    def __init__(self, gradients: ZeroGradients, config: OptimizerConfig) -> None:
        self.gradients = gradients
        self.config = config
        self.adamw = gradients.shards.adamw
        self.targets = gradients.shards.targets

    def update(self, step: int, grad_norm: float) -> float:
        """Clip the gradients to the configured norm and apply update number `step`; returns the rate used."""
        limit, held = self.config.max_grad_norm, self.gradients.held
        if limit is not None and grad_norm > limit:
            torch._foreach_mul_(held, limit / grad_norm)
        lr = learning_rate(self.config, step)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.gradients.shards.update(held)
        return lr


def _join_group(config: ArcticRLClientConfig, world: World) -> None:
    """Choose this rank's device, and make a group of one where a process is alone."""
    device = torch.device(config.device)
    index = world.rank
    if device.type == "cuda":
        index = int(os.environ.get("LOCAL_RANK", world.rank % torch.cuda.device_count()))
        index = index if device.index is None else device.index
        torch.cuda.set_device(index)
    os.environ["LOCAL_RANK"] = str(index)
    if world.size == 1 and not dist.is_initialized():
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _start_deepspeed(config: ArcticRLClientConfig) -> Any:
    """The module, quiet and without a compiler. Raises MissingDependencyError."""
    os.environ["DS_ACCELERATOR"] = torch.device(config.device).type
    try:
        import deepspeed
        import deepspeed.ops
    except ImportError as error:
        raise MissingDependencyError(
            "training_engine='deepspeed' needs DeepSpeed; DS_BUILD_OPS=0 pip install 'zorro-rl[deepspeed]'"
        ) from error
    vars(deepspeed.ops)["__compatible_ops__"] = {}
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    return deepspeed
