"""AdamW with clipping and a schedule, and the gradients that wait for it."""

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from arctic_platform.errors import InputError
from arctic_platform.rl.config import OptimizerConfig

GIVEN = "given counts"
MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Rate of update number `step` (from 0): linear warm-up, then constant, linear or cosine; 0 from total_steps on."""
    warmup = config.num_warmup_steps
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.total_steps is None or config.schedule == "constant":
        return config.lr
    done = min((step - warmup) / (config.total_steps - warmup), 1.0)
    if config.schedule == "linear":
        return config.lr * (1.0 - done)
    return config.lr * 0.5 * (1.0 + math.cos(math.pi * done))


class Optimizer:
    """AdamW over the parameters; half-precision ones get fp32 masters, since small updates vanish in bf16.

    Every parameter is updated in every step, one that had no part in the loss by a gradient of zero, so that one count
    of steps holds for all of them and every engine's weights are the same. Parameters may be shards (DTensors).
    """

    def __init__(self, params: list[nn.Parameter], config: OptimizerConfig) -> None:
        self.params = params
        self.config = config
        self.has_masters = any(p.dtype in (torch.bfloat16, torch.float16) for p in params)
        self.targets = [p.detach().float().requires_grad_() for p in params] if self.has_masters else params
        self.adamw = torch.optim.AdamW(
            self.targets, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=True
        )

    def update(self, step: int, grad_norm: float) -> float:
        """Clip the gradients to the configured norm and apply update number `step`; returns the rate used."""
        limit = self.config.max_grad_norm
        if limit is not None and grad_norm > limit:
            torch._foreach_mul_([local_part(p.grad) for p in self.params if p.grad is not None], limit / grad_norm)
        if any(p.grad is not None for p in self.params):
            for param in self.params:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        lr = learning_rate(self.config, step)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        if self.has_masters:
            self._update_masters()
        else:
            self.adamw.step()
        return lr

    @torch.no_grad()
    def _update_masters(self) -> None:
        for master, param in zip(self.targets, self.params, strict=True):
            master.grad = None if param.grad is None else param.grad.float()
        self.adamw.step()
        self.adamw.zero_grad()
        for master, param in zip(self.targets, self.params, strict=True):
            param.copy_(master)

    @property
    def num_updates(self) -> int:
        """AdamW's count of steps; a step without a single gradient is none."""
        return max((int(state["step"]) for state in self.adamw.state.values()), default=0)

    def moments(self, target: Tensor) -> dict[str, Tensor]:
        """AdamW's two moments of one of `targets`, by their names; none before its first update."""
        state = self.adamw.state.get(target, {})
        return {name: state[name] for name in MOMENTS if name in state}

    def renewed_moments(self, target: Tensor, num_updates: int) -> dict[str, Tensor]:
        """Moments of zero at a count of steps, to be filled; at 0 there are none, as before the first update."""
        self.adamw.state.pop(target, None)
        if not num_updates:
            return {}
        step = torch.tensor(float(num_updates), dtype=torch.float32, device=target.device)
        moments = {name: torch.zeros_like(target, memory_format=torch.preserve_format) for name in MOMENTS}
        self.adamw.state[target] = {"step": step, **moments}
        return moments

    def state_dict(self) -> dict[str, Any]:
        """AdamW's state and, in half precision, the masters."""
        masters = [master.detach() for master in self.targets] if self.has_masters else []
        return {"adamw": self.adamw.state_dict(), "masters": masters}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()` of an optimizer over the same parameters; the settings stay the configured ones.

        Raises ValueError, before anything is changed, when the state is of other parameters.
        """
        masters = self.targets if self.has_masters else []
        if len(masters) != len(state["masters"]):
            raise ValueError(f"{len(state['masters'])} fp32 masters were saved, {len(masters)} are needed")
        settings = {key: value for key, value in self.adamw.param_groups[0].items() if key != "params"}
        self.adamw.load_state_dict(state["adamw"])
        self.adamw.param_groups[0].update(settings)
        for master, saved in zip(masters, state["masters"], strict=True):
            master.copy_(saved)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, in the same memory: its shard, or the tensor itself."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def norm_of(tensors: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> float:
    """Euclidean norm over all tensors, in `dtype` or wider; 0 where there are none."""
    if not tensors:
        return 0.0
    wide = [torch.promote_types(tensor.dtype, dtype) for tensor in tensors]
    norms = [torch.linalg.vector_norm(tensor, dtype=to) for tensor, to in zip(tensors, wide, strict=True)]
    return float(torch.linalg.vector_norm(torch.stack(norms)))


@dataclass(frozen=True)
class Share:
    """What one call adds: the loss is divided by `total` of `counted_by`; `own` is the call's own count."""

    counted_by: str
    own: int
    total: int

    @property
    def is_given(self) -> bool:
        """Whether the caller gave the count of the whole step."""
        return self.counted_by == GIVEN


class Gradients:
    """The gradients between two steps, always those of all calls since the last one.

    A call that does not say how many tokens (or rows) the whole step has is divided by what is known so far, and the
    earlier gradients are scaled down to match: calls in any split give the gradient of one call with all rows.
    """

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self.clear()

    def clear(self) -> None:
        """Forget the gradients and the calls that made them."""
        self._counted_by: str | None = None
        self._count = 0
        for param in self.params:
            param.grad = None

    @property
    def has_calls(self) -> bool:
        """Whether a call was added since the last `clear`, be it one without a single loss token."""
        return self._counted_by is not None

    def share_of_call(self, counted_by: str, count: int, given: int | None) -> Share:
        """How a call is to be divided. Raises InputError when calls of one step count by different things."""
        name = counted_by if given is None else GIVEN
        if self._counted_by not in (None, name):
            raise InputError(
                f"fwd_bwd calls of one step divide their losses by {self._counted_by} and by {name}; "
                "give num_loss_tokens and num_loss_rows (or num_loss_pairs) of the whole step in each call, or in none"
            )
        return Share(name, count, self._count + count if given is None else given)

    @contextmanager
    def adding(self, share: Share) -> Generator[None]:
        """Run a call's backward passes inside; an exception leaves everything as it was before the call."""
        before = self._set_aside()
        try:
            yield
        except BaseException:
            self._put_back(before)
            raise
        rescale = 1.0 if share.is_given or not share.total else self._count / share.total
        self._merge(before, rescale)
        self._counted_by = share.counted_by
        self._count += share.own

    @contextmanager
    def discarding(self) -> Generator[None]:
        """Run backward passes whose gradients are thrown away."""
        before = self._set_aside()
        try:
            yield
        finally:
            self._put_back(before)

    def norm(self) -> float:
        """Euclidean norm over all gradients that this rank holds, in fp32 or wider; 0 where there are none."""
        return norm_of([local_part(p.grad) for p in self.params if p.grad is not None])

    def _set_aside(self) -> list[Any]:
        before = [param.grad for param in self.params]
        for param in self.params:
            param.grad = None
        return before

    def _put_back(self, before: list[Any]) -> None:
        for param, grad in zip(self.params, before, strict=True):
            param.grad = grad

    def _merge(self, before: list[Any], rescale: float) -> None:
        for param, old in zip(self.params, before, strict=True):
            if old is None:
                continue
            if rescale != 1.0:
                old.mul_(rescale)
            param.grad = old if param.grad is None else old.add_(param.grad)
