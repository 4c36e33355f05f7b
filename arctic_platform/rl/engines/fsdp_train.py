"""The training engine on FSDP2: every rank holds a shard of each weight, its gradient and its optimizer state.

    root (PassModule)      embedding, last norm, head: gathered for a whole pass
      decoder layer 0      gathered while it runs, forward and backward, and sharded again behind it
      decoder layer 1      ...

Weights are gathered and gradients summed by `fully_shard`; all else is as in the plain engine. Shards are DTensors,
cut along the first dimension.
"""

from __future__ import annotations

import math
import os
from typing import ClassVar

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from arctic_platform.errors import ConfigError
from arctic_platform.rl.config import ArcticRLClientConfig
from arctic_platform.rl.engines.models import check_device, load_model
from arctic_platform.rl.engines.torch_train import TorchTrainEngine
from arctic_platform.rl.engines.world import ALONE, World
from arctic_platform.rl.engines.wrapped import PassModule
from arctic_platform.rl.weight_sync.base import digest, weights_of

FILLS_UNUSED = Version(torch.__version__).release >= (2, 13)
"""Whether this torch can reduce weights that had no part in one rank's pass, such as an expert that got no token."""


class FsdpTrainEngine(TorchTrainEngine):
    """A policy that is spread over the ranks by `fully_shard`; exact as the plain engine is.

    On several ranks the default process group must have been initialised, with NCCL (and gloo, for offloaded shards)
    on CUDA and gloo on the CPU; alone, a group of one is made where there is none. Every rank loads the whole model
    into CPU memory once, and the shards go to its device layer by layer. Ranks of different weights are refused.

    Args:
        config, model, world: as of the plain engine. device='cuda' is the device of this rank on its machine.

    Raises:
        ConfigError: the device is not there, or ranks have loaded different weights.
    """

    is_sharded: ClassVar[bool] = True

    def __init__(
        self, config: ArcticRLClientConfig, model: PreTrainedModel | None = None, world: World = ALONE
    ) -> None:
        check_device(config.device)
        self.device = _device_of(config, world)
        self._mesh = _mesh_of(self.device, world)
        self._roots: list[PassModule] = []
        super().__init__(config, model, world)

    def _load_model(self) -> PreTrainedModel:
        with self.world.together():
            model = load_model(self.config.model, getattr(torch, self.config.dtype), "cpu", seed=self.config.seed)
            own = {name: (tuple(weight.shape), digest(weight)) for name, weight in weights_of(model).items()}
        first, *_ = self.world.gather(own)
        with self.world.together():
            wrong = [name for name in sorted(own.keys() | first.keys()) if own.get(name) != first.get(name)]
            if wrong:
                raise ConfigError(
                    f"rank {self.world.rank} loaded another {wrong[0]} than rank 0 from model={self.config.model!r}; "
                    "give every machine the same folder"
                )
        return model

    def _wrap(self, model: PreTrainedModel) -> PassModule:
        root = PassModule(model)
        settings = self.config.fsdp
        offload = CPUOffloadPolicy(pin_memory=True) if settings.cpu_offload else OffloadPolicy()
        for module in [*_layers_of(model), root]:
            fully_shard(
                module,
                mesh=self._mesh,
                reshard_after_forward=settings.reshard_after_forward if module is not root else None,
                mp_policy=MixedPrecisionPolicy(reduce_dtype=_wide(model.dtype)),
                offload_policy=offload,
            )
        for module in _sharded(root):
            _sum_gradients(module)
        self._roots.append(root)
        return root

    def _settle(self) -> None:
        # A pass without gradients leaves weights gathered, and the next one would take them for current behind a step.
        for root in self._roots:
            for module in _sharded(root):
                module.reshard()

    def _norm_over_ranks(self, own: float) -> float:
        return math.sqrt(self.world.sum(own**2)) if self.world.size > 1 else own

    def _whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def _write_part(self, target: Tensor, whole: Tensor) -> None:
        if not isinstance(target, DTensor):
            target.copy_(whole)
            return
        whole = whole.to(device=target.device, dtype=target.dtype)
        part = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
        target.copy_(part)


def _sharded(root: nn.Module) -> list[FSDPModule]:
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def _sum_gradients(module: FSDPModule) -> None:
    """Let a module's gradients be the sum over ranks, by a reduction that every backend has."""
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    if FILLS_UNUSED:
        module.set_reduce_scatter_unused_params(True, recurse=False)


def _layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """The outermost modules that transformers says are not to be split: the decoder layers."""
    names = set(model._no_split_modules or ())
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if type(module).__name__ in names and not is_inside:
            found[name] = module
    return list(found.values())


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Type in which gradients are summed over ranks."""
    return torch.promote_types(dtype, torch.float32)


def _device_of(config: ArcticRLClientConfig, world: World) -> torch.device:
    """The device of this rank: of several on a machine each takes its own."""
    if config.device != "cuda":
        return torch.device(config.device)
    index = int(os.environ.get("LOCAL_RANK", world.rank % torch.cuda.device_count()))
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _mesh_of(device: torch.device, world: World) -> DeviceMesh:
    """All ranks in one dimension; a group of one is made where a process is alone."""
    if world.size == 1 and not dist.is_initialized():
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device.type, (world.size,))
