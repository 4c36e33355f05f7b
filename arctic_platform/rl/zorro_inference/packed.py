"""Linear layers on weights that oneDNN has laid out for its matmul: the same product, faster for few rows.

The laid-out copies are made where enough steps are expected to pay for them, and kept until the weights change.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

PACK_FOR_STEPS = 12
"""Decode steps for which the lay-out, about as dear as four of them, is sure to be worth it."""


class PackedLinears:
    """Runs a model's fp32 and bf16 `nn.Linear` layers on the CPU on laid-out copies of their weights.

    The copies cost the memory of these layers once more. Whoever changes the weights calls `drop`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._forwards: dict[nn.Linear, Callable[[Tensor], Tensor]] = {}
        self._num_steps = 0
        self._is_packed = False

    @property
    def num_packed(self) -> int:
        """Layers that have a copy."""
        return len(self._forwards)

    def expect(self, num_rows: int, num_steps: int) -> None:
        """A step is due, and up to `num_steps` with it, of about `num_rows` rows; lay out where that pays."""
        self._num_steps += 1
        if not self._is_packed and self._num_steps + num_steps > PACK_FOR_STEPS:
            self.pack(num_rows)

    def pack(self, num_rows: int) -> None:
        """Lay out all layers for about `num_rows` rows of hidden states; none where oneDNN is not built in."""
        linears = [module for module in self._model.modules() if isinstance(module, nn.Linear) and _is_packable(module)]
        self._forwards = {linear: _packed_forward(linear, num_rows) for linear in linears}
        self._is_packed = True

    def drop(self) -> None:
        """The weights are about to change, or have."""
        self._forwards = {}
        self._num_steps = 0
        self._is_packed = False

    @contextmanager
    def active(self) -> Generator[None]:
        """The layers run on their copies; afterwards the model is as it was."""
        for linear, forward in self._forwards.items():
            vars(linear)["forward"] = forward
        try:
            yield
        finally:
            for linear in self._forwards:
                vars(linear).pop("forward", None)


def _is_packable(linear: nn.Linear) -> bool:
    """Neither a subclass nor a layer whose forward somebody replaced; hooks are fine, they run around it."""
    if type(linear) is not nn.Linear or "forward" in vars(linear) or linear.weight.device.type != "cpu":
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    has_bf16 = linear.weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return has_bf16 or linear.weight.dtype == torch.float32


def _packed_forward(linear: nn.Linear, num_rows: int) -> Callable[[Tensor], Tensor]:
    weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), num_rows)
    return partial(_linear, weight=weight, bias=linear.bias)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
