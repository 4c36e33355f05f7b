"""The idea: a batch of rollouts is a prefix forest, and each of its tokens is computed once.

Shapes, the legend of the whole project: `B` rows, `S` padded row length, `P`/`R` padded prompt/response length,
`T` packed tokens, `N` segments, `U` predicting positions, `M` distinct targets, `H` heads, `K` key-value heads,
`D` head dim, `E` hidden size, `V` vocabulary.
"""

from arctic_platform.forest.attention import (
    ATTENTION_NAME,
    ForestPlan,
    RowsPlan,
    forest_attention_forward,
    forest_mask,
    plain_attention,
)
from arctic_platform.forest.packing import Targets, find_targets, pad_rows, response_masks, rows_from_padded
from arctic_platform.forest.trie import Forest, RowOrder, build_forest, order_rows

__all__ = [
    "ATTENTION_NAME",
    "Forest",
    "ForestPlan",
    "RowOrder",
    "RowsPlan",
    "Targets",
    "build_forest",
    "find_targets",
    "forest_attention_forward",
    "forest_mask",
    "order_rows",
    "pad_rows",
    "plain_attention",
    "response_masks",
    "rows_from_padded",
]
