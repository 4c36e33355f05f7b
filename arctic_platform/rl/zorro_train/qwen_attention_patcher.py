"""The attention of a model alone: for callers who pack with `ZoRRoTrain` and keep their own forward, head and loss.

    patcher = QwenAttentionOncePatcher(model)
    patcher.patch_forward()
    ids, positions, info = ZoRRoTrain.create_deduplicated_batch(..., use_unpad=True)
    logits = model(input_ids=ids, position_ids=positions, forest=patcher.plan(ids, info), use_cache=False).logits
    rows = ZoRRoTrain.reconstruct_sequences(logits, info)

`plan` also refuses what would be wrong: a pack with padding in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from arctic_platform.errors import InputError
from arctic_platform.forest import ATTENTION_NAME, Forest, ForestPlan, RowsPlan
from arctic_platform.forest.backends import plan_of
from arctic_platform.rl.zorro_train.module_patcher import ModuleReconstructionPatcher


class QwenAttentionOncePatcher:
    """Puts the forest attention on a model and leaves everything else as it is.

    While patched, every call of the model needs the keyword `forest=patcher.plan(...)`. Any model that
    `ModuleReconstructionPatcher` accepts will do; the name is the documented one.

    Args:
        model: a causal LM whose attention goes through transformers' registry.
        use_split_attention: attend over segments; False rebuilds every row inside the attention instead.
        attn_implementation: "eager", "sdpa", "flash_attention_2", "flash_attention_3" or "flex_attention".

    Raises:
        ConfigError: `attn_implementation` is not known. UnsupportedModelError: the isolation probe refused the model.
    """

    def __init__(
        self, model: PreTrainedModel, use_split_attention: bool = True, attn_implementation: str = "sdpa"
    ) -> None:
        probed = ModuleReconstructionPatcher(
            model, attn_implementation=attn_implementation, use_split_attention=use_split_attention
        )
        probed.unpatch_forward()
        self.model = model
        self.use_split_attention = use_split_attention
        self.attn_implementation = attn_implementation
        self.stock_attention: str = model.config._attn_implementation

    def patch_forward(self) -> PreTrainedModel:
        """Switch the model's attention; safe to repeat. Returns the model."""
        self.model.set_attn_implementation(ATTENTION_NAME)
        return self.model

    def unpatch_forward(self) -> None:
        """Give the model its own attention back."""
        self.model.set_attn_implementation(self.stock_attention)

    def plan(self, dedup_input_ids: Tensor, reconstruction_info: Mapping[str, Any]) -> ForestPlan | RowsPlan:
        """The `forest` keyword for one packed batch.

        Args:
            dedup_input_ids: [1, T'] as `ZoRRoTrain.create_deduplicated_batch` returned them.
            reconstruction_info: the info that came with them.

        Raises:
            InputError: the pack holds padding, which attention would see.
        """
        forest = forest_of_pack(dedup_input_ids, reconstruction_info)
        if self.use_split_attention:
            return plan_of(self.attn_implementation, forest, dedup_input_ids.device)
        return RowsPlan(forest, device=dedup_input_ids.device)


def forest_of_pack(dedup_input_ids: Tensor, reconstruction_info: Mapping[str, Any]) -> Forest:
    """The forest of a pack by `ZoRRoTrain`, in the pack's own order: prompts are roots, responses their leaves."""
    row_index = reconstruction_info["live_index"].cpu().numpy()
    row_offsets = reconstruction_info["live_offsets"].cpu().numpy()
    num_packed = dedup_input_ids.shape[1]
    if len(np.unique(row_index)) != num_packed:
        raise InputError("this pack holds padding, which attention would see; pack with use_unpad=True and the mask")
    start, end, subtree_end, segment_parent = _segment_arrays(reconstruction_info["segment_info"])
    parent = np.full(num_packed, -1)
    not_last = np.ones(len(row_index), bool)
    not_last[row_offsets[1:][np.diff(row_offsets) > 0] - 1] = False
    parent[row_index[1:][not_last[:-1]]] = row_index[:-1][not_last[:-1]]
    position_ids = np.zeros(num_packed, np.int64)
    position_ids[row_index] = np.arange(len(row_index)) - np.repeat(row_offsets[:-1], np.diff(row_offsets))
    return Forest(
        input_ids=dedup_input_ids[0].cpu().numpy(),
        position_ids=position_ids,
        parent=parent,
        start=start,
        end=end,
        subtree_end=subtree_end,
        segment_parent=segment_parent,
        row_index=row_index,
        row_offsets=row_offsets,
    )


def _segment_arrays(segment_info: list[dict[str, Any]]) -> tuple[np.ndarray, ...]:
    """`start`, `end`, `subtree_end`, `segment_parent` of the segments that hold a token, [N] int64 each."""
    group_end = {segment["group_idx"]: segment["end"] for segment in segment_info}
    prompt_slot: dict[int, int] = {}
    arrays: list[tuple[int, int, int, int]] = []
    for segment in segment_info:
        if segment["start"] == segment["end"]:
            continue
        start, end, group = segment["start"], segment["end"], segment["group_idx"]
        if segment["type"] == "prompt":
            prompt_slot[group] = len(arrays)
            arrays.append((start, end, group_end[group], -1))
        else:
            arrays.append((start, end, end, prompt_slot.get(group, -1)))
    columns = np.array(arrays, np.int64).reshape(-1, 4).T
    return tuple(np.ascontiguousarray(column) for column in columns)
