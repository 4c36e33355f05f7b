"""Linear layers on weights that oneDNN has laid out for its matmul: the same product, faster for few rows.

The laid-out copies live as long as the context and belong to it alone, so that they cannot outlive a weight update.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

PACK_AFTER_STEPS = 8
"""Decode steps after which the lay-out, about as dear as four of them, is sure to be worth it."""


@contextmanager
def packed_linears(model: nn.Module, *, num_rows: int) -> Generator[int]:
    """Run the model's fp32 and bf16 `nn.Linear` layers on the CPU with laid-out copies of their weights.

    num_rows: rows of hidden states that the copies are laid out for; others work too. Yields how many layers there
    are, 0 where oneDNN is not built in. Weights must not change inside the context; it costs a copy of them.
    """
    linears = [module for module in model.modules() if isinstance(module, nn.Linear) and _is_packable(module)]
    with ExitStack() as restore:
        for linear in linears:
            vars(linear)["forward"] = _packed_forward(linear, num_rows)
            restore.callback(vars(linear).pop, "forward")
        yield len(linears)


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
