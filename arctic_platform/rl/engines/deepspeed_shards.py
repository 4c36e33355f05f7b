"""The gradients, weights and moments that one rank of DeepSpeed holds, by ZeRO stage.

    stage   weights      gradients after a call   moments and masters
    0       whole        whole, summed            whole
    1, 2    whole        a flat partition         a flat partition
    3       a slice of every tensor, in all three

A call's backward passes are one accumulation of DeepSpeed's, ended by a reduction over the ranks. What it leaves here
is taken out and DeepSpeed is left as before the call: the sum over the calls of a step is ours, so that a call can fail
or be weighed anew, and only `update` hands it back. All that reaches into DeepSpeed's own is in this file.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn

from arctic_platform.rl.engines.optimizer import MOMENTS


class Shards(ABC):
    """What one rank holds of `params`, the trainable ones, in the order of the optimizer."""

    is_divided: ClassVar[bool] = True

    def __init__(self, engine: Any, adamw: torch.optim.AdamW, params: list[nn.Parameter]) -> None:
        self.engine = engine
        self.zero = engine.optimizer
        self.adamw = adamw
        self.params = params
        self.num_passes = 0

    def backward(self, loss: Tensor) -> None:
        """Add a pass. DeepSpeed takes the mean over the ranks, our losses are parts of a sum."""
        self.engine.backward(loss * self.engine.seq_dp_world_size, scale_wrt_gas=False)
        self.num_passes += 1

    def take(self) -> list[Tensor]:
        """This rank's gradients, in fp32, of the passes since the last `reset`; collective."""
        if not self.num_passes:
            return self.zeros()
        self.engine.set_gradient_accumulation_boundary(True)
        self._reduce()
        shards = [shard.detach().to(torch.float32, copy=True) for shard in self._shards()]
        self.reset()
        return shards

    def reset(self) -> None:
        """Forget what was accumulated; the passes that follow are not the ones of an update."""
        self._forget()
        self.num_passes = 0
        self.engine.set_gradient_accumulation_boundary(False)

    def update(self, shards: list[Tensor]) -> None:
        """One AdamW update with these gradients; collective."""
        self._put(shards)
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.step()
        if not self.engine.was_step_applied():
            raise AssertionError("DeepSpeed skipped an update whose gradients are finite")
        self.reset()

    def moments_exist(self) -> bool:
        """Whether AdamW has made its first step."""
        return all(self.adamw.state.get(target) for target in self.targets)

    def renew_moments(self, num_updates: int) -> None:
        """Give AdamW moments of zero at a count of steps; at 0 it has none, as before the first update."""
        for target in self.targets:
            self.adamw.state.pop(target, None)
            if num_updates:
                step = torch.tensor(float(num_updates), dtype=torch.float32, device=target.device)
                self.adamw.state[target] = {"step": step, **{name: torch.zeros_like(target) for name in MOMENTS}}

    def held_tensors(self) -> list[Tensor]:
        """What takes memory between two calls beside parameters, `targets` and AdamW's state."""
        return []

    def whole(self, tensor: Tensor) -> Tensor:
        """All of a parameter, trainable or not, or of a buffer; collective."""
        return tensor.detach()

    @property
    @abstractmethod
    def targets(self) -> list[Tensor]:
        """What AdamW updates: parameters, or this rank's flat fp32 copies."""

    @abstractmethod
    def zeros(self) -> list[Tensor]:
        """As `take` gives them, for a call without a single pass."""

    @abstractmethod
    def by_parameter(self, shards: list[Tensor]) -> list[Tensor]:
        """The parts of what `take` gave that belong to each of `params`; empty where this rank has none."""

    @abstractmethod
    def read(self, at: int, kind: str) -> Tensor:
        """All of `param`, `master` or a moment of parameter `at`; collective."""

    @abstractmethod
    def write(self, at: int, kind: str, value: Tensor) -> None:
        """The inverse of `read`; every rank has the whole value."""

    @abstractmethod
    def _reduce(self) -> None: ...

    @abstractmethod
    def _shards(self) -> list[Tensor]: ...

    @abstractmethod
    def _forget(self) -> None: ...

    @abstractmethod
    def _put(self, shards: list[Tensor]) -> None: ...


class WholeShards(Shards):
    """Stage 0: every rank holds everything."""

    is_divided = False

    def __init__(self, engine: Any, adamw: torch.optim.AdamW, params: list[nn.Parameter]) -> None:
        """In half precision DeepSpeed has made an update by zeros, to allocate: its count and decay are undone."""
        super().__init__(engine, adamw, params)
        self.renew_moments(0)
        for at, param in enumerate(params):
            if self.targets[at] is not param:
                self.write(at, "master", param.detach())

    @property
    def targets(self) -> list[Tensor]:
        """The parameters, or their fp32 masters."""
        return list(self.adamw.param_groups[0]["params"])

    def zeros(self) -> list[Tensor]:
        """A gradient of zeros for every parameter."""
        return [torch.zeros_like(param, dtype=torch.float32) for param in self.params]

    def by_parameter(self, shards: list[Tensor]) -> list[Tensor]:
        """They are."""
        return shards

    def read(self, at: int, kind: str) -> Tensor:
        """As it lies here."""
        return self._place(at, kind).detach()

    @torch.no_grad()
    def write(self, at: int, kind: str, value: Tensor) -> None:
        """Into its place."""
        self._place(at, kind).copy_(value)

    def _place(self, at: int, kind: str) -> Tensor:
        if kind == "param":
            return self.params[at]
        target = self.targets[at]
        return target if kind == "master" else self.adamw.state[target][kind]

    def _reduce(self) -> None:
        self.engine.allreduce_gradients()

    def _shards(self) -> list[Tensor]:
        return [_grad(param) for param in self.params]

    def _forget(self) -> None:
        self.engine.zero_grad()

    def _put(self, shards: list[Tensor]) -> None:
        for param, shard in zip(self.params, shards, strict=True):
            param.grad = shard.to(param.dtype)


class FlatShards(Shards):
    """Stages 1 and 2: one run of the flattened gradients and moments."""

    @property
    def targets(self) -> list[Tensor]:
        """This rank's run of the flat fp32 weights."""
        return list(self.zero.single_partition_of_fp32_groups)

    def zeros(self) -> list[Tensor]:
        """A run of zeros."""
        return [torch.zeros_like(target) for target in self.targets]

    def renew_moments(self, num_updates: int) -> None:
        """Also lets DeepSpeed find in them what belongs to each parameter, which it looks up once only."""
        super().renew_moments(num_updates)
        self.zero._hp_optimizer_states_linked = False
        if num_updates:
            self.zero._lazy_init_hp_params_optimizer_state()

    def by_parameter(self, shards: list[Tensor]) -> list[Tensor]:
        """By DeepSpeed's own map of the run; there is one, since AdamW has one group of parameters."""
        (run,) = shards
        places = [getattr(param, "_hp_mapping", None) for param in self.params]
        addresses = [None if place is None else place.hp_fragment_address for place in places]
        return [run[:0] if at is None else run[at.start : at.start + at.numel] for at in addresses]

    def read(self, at: int, kind: str) -> Tensor:
        """Weights as they are here, the rest gathered from the runs of all ranks."""
        param = self.params[at]
        if kind == "param":
            return param.detach()
        if kind == "master":
            return safe_get_full_fp32_param(param)
        return safe_get_full_optimizer_state(param, kind)

    @torch.no_grad()
    def write(self, at: int, kind: str, value: Tensor) -> None:
        """The weights, whole, and the part of the run that belongs to the parameter."""
        param = self.params[at]
        if kind == "param":
            param.copy_(value)
        if kind == "master" or (kind == "param" and param.dtype == torch.float32):
            safe_set_full_fp32_param(param, value)
        elif kind in MOMENTS:
            safe_set_full_optimizer_state(param, value, kind)

    def _reduce(self) -> None:
        if self.zero.partition_gradients:
            self.zero.finalize_gradient_accumulation_boundary()
        else:
            self.engine.allreduce_gradients()

    def _shards(self) -> list[Tensor]:
        if self.zero.cpu_offload:
            return [_grad(target) for target in self.targets]
        groups = self.zero.averaged_gradients
        return [torch.cat([part.reshape(-1) for part in groups[at]]) for at in range(len(self.targets))]

    def _forget(self) -> None:
        zero = self.zero
        zero.zero_grad()
        zero.micro_step_id = -1
        for at in range(len(self.targets)):
            zero.averaged_gradients[at] = None
            zero.all_grad_tensors[at] = None
        if zero.cpu_offload:
            zero.reset_cpu_buffers()
            zero.accumulated_grads_in_cpu.clear()
            for target in self.targets:
                _grad(target).zero_()

    def _put(self, shards: list[Tensor]) -> None:
        for at, (target, shard) in enumerate(zip(self.targets, shards, strict=True)):
            if self.zero.cpu_offload:
                _grad(target).copy_(shard)
            else:
                self.zero.averaged_gradients[at] = [shard]


class SliceShards(Shards):
    """Stage 3: a slice of every parameter, gradient and moment."""

    @property
    def targets(self) -> list[Tensor]:
        """This rank's slices of the fp32 weights, one after the other, by sub-group."""
        return list(self.zero.fp32_partitioned_groups_flat)

    def zeros(self) -> list[Tensor]:
        """Slices of zeros."""
        return [torch.zeros_like(shard, dtype=torch.float32) for shard in self._shards()]

    def held_tensors(self) -> list[Tensor]:
        """The slices of the weights, frozen ones too, and the buffer of the gradients."""
        parameters: list[Any] = list(self.engine.module.parameters())
        return [*(param.ds_tensor for param in parameters), self.zero.grad_partitions_flat_buffer]

    def whole(self, tensor: Tensor) -> Tensor:
        """Gathered, where it is a parameter."""
        if not hasattr(tensor, "ds_id"):
            return tensor.detach()
        with GatheredParameters([tensor]):
            return tensor.detach().clone()

    def by_parameter(self, shards: list[Tensor]) -> list[Tensor]:
        """In the order of the sub-groups, which is that of the parameters."""
        sizes = [param.partition_numel() for group in self.zero.fp16_groups for param in group]
        return list(torch.cat(shards).split(sizes))

    def read(self, at: int, kind: str) -> Tensor:
        """Gathered from the slices of all ranks."""
        param = self.params[at]
        if kind == "param":
            return self.whole(param)
        if kind == "master":
            return safe_get_full_fp32_param(param)
        return safe_get_full_optimizer_state(param, kind)

    @torch.no_grad()
    def write(self, at: int, kind: str, value: Tensor) -> None:
        """This rank's slice, or, of the weights, the first rank's value for all."""
        param: Any = self.params[at]
        if kind == "param":
            with GatheredParameters([param], modifier_rank=0):
                param.copy_(value)
        if kind == "master" or (kind == "param" and param.dtype == torch.float32):
            safe_set_local_fp32_param(param, _slice_of(param, value))
        elif kind in MOMENTS:
            safe_set_local_optimizer_state(param, _slice_of(param, value), kind)

    def _reduce(self) -> None:
        self.zero.finalize_gradient_accumulation_boundary()

    def _shards(self) -> list[Tensor]:
        if self.zero.offload_optimizer:
            return [_grad(target) for target in self.targets]
        return [self.zero.grad_partitions_flat_buffer]

    def _forget(self) -> None:
        zero = self.zero
        zero.zero_grad()
        zero.grad_partitions_flat_buffer.zero_()
        if zero.offload_optimizer:
            zero.reset_cpu_buffers()
            for target in self.targets:
                _grad(target).zero_()

    def _put(self, shards: list[Tensor]) -> None:
        if self.zero.offload_optimizer:
            for target, shard in zip(self.targets, shards, strict=True):
                _grad(target).copy_(shard)
            return
        (shard,) = shards
        for at, group in enumerate(self.zero.fp16_groups):
            sizes = [param.partition_numel() for param in group]
            self.zero.averaged_gradients[at] = list(shard[: sum(sizes)].split(sizes))
            shard = shard[sum(sizes) :]


def shards_of(engine: Any, adamw: torch.optim.AdamW, params: list[nn.Parameter]) -> Shards:
    """The shards of an initialised engine, by its stage."""
    kinds = {0: WholeShards, 1: FlatShards, 2: FlatShards, 3: SliceShards}
    return kinds[int(engine.zero_optimization_stage())](engine, adamw, params)


def _grad(tensor: Tensor) -> Tensor:
    """A gradient that is there: DeepSpeed fills those of parameters without a part in the loss with zeros."""
    assert tensor.grad is not None
    return tensor.grad


def _slice_of(param: Any, value: Tensor) -> Tensor:
    """This rank's slice of a whole tensor; the last ranks' slices are filled up with zeros."""
    size = param.ds_tensor.numel()
    start = min(size * dist.get_rank(param.ds_process_group), value.numel())
    part = value.reshape(-1)[start : start + size]
    return torch.cat([part, part.new_zeros(size - part.numel())])
