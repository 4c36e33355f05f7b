"""What a batch costs with and without sharing, in tokens and FLOPs, and how much sharing can save."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from arctic_platform.forest.trie import Forest


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a causal LM that its cost depends on.

    `layer_params`: parameters of all layers that a token multiplies with (embeddings and head excluded).
    """

    num_layers: int
    num_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    layer_params: int

    @classmethod
    def of(cls, config: Any, layer_params: int) -> ModelShape:
        """Read the sizes from a Hugging Face config."""
        heads = config.num_attention_heads
        return cls(
            num_layers=config.num_hidden_layers,
            num_heads=heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            layer_params=layer_params,
        )


@dataclass(frozen=True)
class ForestCost:
    """Tokens and forward+backward FLOPs of one pass, shared and with every row by itself."""

    tokens: int
    tokens_unshared: int
    flops: float
    flops_unshared: float

    @property
    def saving(self) -> float:
        """Share of the unshared FLOPs that is not computed, 0 to 1."""
        return 1.0 - self.flops / self.flops_unshared if self.flops_unshared else 0.0

    @property
    def bound(self) -> float:
        """The speed-up that this batch can reach: unshared over shared FLOPs."""
        return self.flops_unshared / self.flops if self.flops else 1.0


def forest_cost(forest: Forest, shape: ModelShape, *, num_predicting: int, num_targets: int) -> ForestCost:
    """Cost of one forward and backward pass.

    Per token: 6 FLOPs a layer parameter; per attended pair: 12 * layers * heads * head_dim; per position with logits:
    6 * hidden * vocab. A token at position p attends p + 1 keys whatever is shared, so pairs are counted by positions.
    num_predicting: distinct positions with logits (U); num_targets: response tokens of all rows.
    """
    pair = 12.0 * shape.num_layers * shape.num_heads * shape.head_dim
    logit = 6.0 * shape.hidden_size * shape.vocab_size

    def flops(positions: np.ndarray, num_logits: int) -> float:
        return float(6.0 * shape.layer_params * len(positions) + pair * (positions + 1).sum() + logit * num_logits)

    return ForestCost(
        tokens=forest.num_tokens,
        tokens_unshared=forest.num_row_tokens,
        flops=flops(forest.position_ids, num_predicting),
        flops_unshared=flops(forest.position_ids[forest.row_index], num_targets),
    )
