"""Linear layers on weights that oneDNN has laid out for its matmul: the same product, about twice as fast on a CPU.

The copies are made where enough tokens are due to pay for them, and kept until the weights change. A call that is
measured by itself (`pays`) takes the copies or does not whatever ran before it, so that it repeats to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

PACK_FOR_TOKENS = 256
"""Tokens that pay for the lay-out: it is about as dear as what they save."""

TOKENS_OF_A_PASS = 12
"""What a pass saves beside its tokens, in tokens: few rows wait for the weights to arrive."""

NUM_ROWS = 16
"""Rows of hidden states that the copies are laid out for; others gain as much."""


class PackedLinears:
    """Runs a model's fp32 and bf16 `nn.Linear` layers on the CPU on laid-out copies of their weights.

    The copies cost the memory of these layers once more. Whoever changes the weights calls `drop`.
    """

    def __init__(self, model: nn.Module, *, enable: bool = True) -> None:
        self._model = model
        self._enable = enable
        self._forwards: dict[nn.Linear, Callable[[Tensor], Tensor]] = {}
        self._num_tokens = 0
        self._is_packed = False

    @property
    def num_packed(self) -> int:
        """Layers that have a copy."""
        return len(self._forwards)

    def is_due(self, num_tokens: int, *, pays: bool | None = None) -> bool:
        """Count a pass of `num_tokens`; whether it runs on laid-out weights.

        pays: decided by the caller; None for what was run since the weights changed.
        """
        self._num_tokens += num_tokens + TOKENS_OF_A_PASS
        return self._enable and (self._num_tokens >= PACK_FOR_TOKENS if pays is None else pays)

    @contextmanager
    def active(self, is_due: bool) -> Generator[None]:
        """A pass, on the copies where they are due; afterwards the model is as it was."""
        if not is_due:
            yield
            return
        if not self._is_packed:
            self.pack()
        for linear, forward in self._forwards.items():
            vars(linear)["forward"] = forward
        try:
            yield
        finally:
            for linear in self._forwards:
                vars(linear).pop("forward", None)

    def pack(self) -> None:
        """Lay out all layers; none where oneDNN is not built in."""
        linears = [module for module in self._model.modules() if isinstance(module, nn.Linear) and _is_packable(module)]
        self._forwards = {linear: _packed_forward(linear) for linear in linears}
        self._is_packed = True

    def drop(self) -> None:
        """The weights are about to change, or have, or memory is wanted."""
        self._forwards = {}
        self._num_tokens = 0
        self._is_packed = False


def pays_for(num_tokens: int, num_steps: int) -> bool:
    """Whether a call of so many tokens, in at least so many passes, pays for the copies by itself."""
    return num_tokens + TOKENS_OF_A_PASS * num_steps >= PACK_FOR_TOKENS


@dataclass(frozen=True, eq=False)
class Product:
    """One or several linear layers as one product, `x [T, in] -> [T, out]`, with what comes behind it in the same call.

    `weight`: laid out where oneDNN takes it, else as it is.
    """

    weight: Tensor
    bias: Tensor | None
    is_packed: bool

    @classmethod
    def of(cls, *linears: nn.Linear) -> Product:
        """The outputs of `linears`, one behind the other."""
        weight = linears[0].weight.detach()
        bias = None if linears[0].bias is None else linears[0].bias.detach()
        if len(linears) > 1:
            weight = torch.cat([linear.weight.detach() for linear in linears])
            if any(linear.bias is not None for linear in linears):
                bias = torch.cat([_bias_of(linear) for linear in linears])
        is_packed = all(map(_is_packable, linears))
        return cls(_reordered(weight) if is_packed else weight, bias, is_packed)

    def __call__(self, x: Tensor) -> Tensor:
        """The product."""
        if self.is_packed:
            return _pointwise(x, self.weight, self.bias, "none", [], "")
        return functional.linear(x, self.weight, self.bias)

    def silu(self, x: Tensor) -> Tensor:
        """SiLU of the product."""
        if self.is_packed:
            return _pointwise(x, self.weight, self.bias, "swish", [], "")
        return functional.silu(self(x))

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """The product, times `other`."""
        return _pointwise_binary(x, other, self.weight, self.bias, "mul") if self.is_packed else self(x) * other

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """The product, plus `other`."""
        return _pointwise_binary(x, other, self.weight, self.bias, "add") if self.is_packed else self(x) + other


_pointwise = torch.ops.mkldnn._linear_pointwise.default
_pointwise_binary = torch.ops.mkldnn._linear_pointwise.binary


def _reordered(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, NUM_ROWS)


def _bias_of(linear: nn.Linear) -> Tensor:
    return linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()


def _is_packable(linear: nn.Linear) -> bool:
    """Neither a subclass nor a layer whose forward somebody replaced; hooks are fine, they run around it."""
    if type(linear) is not nn.Linear or "forward" in vars(linear) or linear.weight.device.type != "cpu":
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    has_bf16 = linear.weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return has_bf16 or linear.weight.dtype == torch.float32


def _packed_forward(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    return partial(_linear, weight=_reordered(linear.weight.detach()), bias=linear.bias)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _pointwise(x, weight, bias, "none", [], "")
