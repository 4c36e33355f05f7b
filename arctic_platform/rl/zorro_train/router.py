"""The load-balancing loss of a mixture of experts, as if nothing were shared.

A family's own function takes a weight per token, which it expects to be an attention mask. Given the number of rows
through each packed token instead, it counts a shared token once per row, as the unshared batch does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from arctic_platform.errors import InputError, UnsupportedModelError
from arctic_platform.forest import Forest

RouterLogits = tuple[Tensor, ...]
"""Per layer, `[tokens, num_experts]`."""


@dataclass(frozen=True)
class RouterLoss:
    """`router_loss(logits, weights)`: the family's auxiliary loss, a scalar without its coefficient.

    `function`: the family's own, `(logits, num_experts, top_k, weights [b, s] or None)`; `coef`: what a training loss
    multiplies it by.
    """

    function: Callable[..., Tensor]
    num_experts: int
    top_k: int
    coef: float

    def __call__(self, logits: RouterLogits, weights: Tensor | None) -> Tensor:
        """weights: how often each token counts, `[b, s]`, flattened in the order of the logits; None: once each."""
        return self.function(tuple(logits), self.num_experts, self.top_k, weights)


def find_router_loss(model: PreTrainedModel) -> RouterLoss | None:
    """The auxiliary loss that `config.output_router_logits` asks for, None where it asks for none.

    Raises UnsupportedModelError for a family that computes it in a way of its own.
    """
    if not getattr(model.config.get_text_config(), "output_router_logits", False):
        return None
    function = vars(sys.modules[type(model).__module__]).get("load_balancing_loss_func")
    own = vars(model)
    if function is None or not {"num_experts", "num_experts_per_tok", "router_aux_loss_coef"} <= own.keys():
        raise UnsupportedModelError(
            f"{type(model).__name__} asks for a router auxiliary loss of a kind that a shared pass cannot count per "
            "row; set config.output_router_logits = False"
        )
    return RouterLoss(function, own["num_experts"], own["num_experts_per_tok"], float(own["router_aux_loss_coef"]))


def rows_through(forest: Forest, device: torch.device) -> Tensor:
    """`[1, T] float32`: how many rows hold each packed token."""
    counts = np.bincount(forest.row_index, minlength=forest.num_tokens)
    return torch.from_numpy(counts.astype(np.float32)).to(device).unsqueeze(0)


def check_router_gradients(hidden: Tensor, logits: RouterLogits) -> None:
    """Raise InputError when the hidden states have a graph and the router logits lost theirs."""
    if hidden.requires_grad and not all(layer.requires_grad for layer in logits):
        raise InputError(
            "the router logits carry no gradient, as under reentrant gradient checkpointing; enable it with "
            "gradient_checkpointing_kwargs={'use_reentrant': False}, or set config.output_router_logits = False"
        )
