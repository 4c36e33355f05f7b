"""Padded batches <-> rows, and which packed positions predict which packed targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from arctic_platform.errors import InputError
from arctic_platform.forest.trie import Forest


@dataclass(frozen=True, eq=False)
class Targets:
    """The tokens whose log-probs are wanted, each computed once however many rows contain it.

    `parents [U]`: distinct packed positions that predict something, ascending. `ids [M]`: distinct target tokens,
    ordered by the position that predicts them; `parent_slot [M]`: the index into `parents` of that position (one
    position predicts several targets where the forest branches). `value_index [sum of targets]`: for the targets of
    row 0, then row 1, ..., each one's index into `ids`; row `b` owns `value_offsets[b]:value_offsets[b + 1]`.
    """

    parents: np.ndarray
    ids: np.ndarray
    parent_slot: np.ndarray
    value_index: np.ndarray
    value_offsets: np.ndarray


def find_targets(forest: Forest, target_masks: Sequence[ArrayLike]) -> Targets:
    """Targets of a forest, given one boolean mask per row (True where the row's token is a target).

    Raises InputError when a mask's length is not its row's, or when a row's first token is a target: nothing
    predicts it.
    """
    masks = [np.asarray(mask, dtype=bool).reshape(-1) for mask in target_masks]
    if [len(mask) for mask in masks] != forest.row_lens.tolist():
        raise InputError("target_masks must hold one entry per token of every row")
    flat = np.concatenate([np.empty(0, bool), *masks])
    counts = np.array([mask.sum() for mask in masks], np.int64)
    packed = forest.row_index[flat]
    if (forest.parent[packed] < 0).any():
        raise InputError("the first token of a row cannot be a target: nothing predicts it; give a prompt token")
    tokens, value_index = np.unique(packed, return_inverse=True)
    by_parent = np.argsort(forest.parent[tokens], kind="stable")
    rank = np.empty_like(by_parent)
    rank[by_parent] = np.arange(len(by_parent))
    tokens = tokens[by_parent]
    parents, parent_slot = np.unique(forest.parent[tokens], return_inverse=True)
    return Targets(
        parents=parents,
        ids=forest.input_ids[tokens],
        parent_slot=parent_slot.reshape(-1),
        value_index=rank[value_index.reshape(-1)],
        value_offsets=np.concatenate([[0], np.cumsum(counts)]),
    )


def rows_from_padded(input_ids: ArrayLike, attention_mask: ArrayLike | None = None) -> list[np.ndarray]:
    """Take the live tokens of every row of a padded batch.

    input_ids: `[B, S] int`, padded on either side or both. attention_mask: `[B, S]`, nonzero at live tokens; the mask
    decides, never the pad id. Raises InputError for a mask of another shape.
    """
    ids = np.asarray(input_ids)
    if ids.ndim != 2:
        raise InputError(f"input_ids must have shape [B, S], got {list(ids.shape)}")
    if attention_mask is None:
        return list(ids)
    mask = np.asarray(attention_mask)
    if mask.shape != ids.shape:
        raise InputError(f"attention_mask has shape {list(mask.shape)}, input_ids {list(ids.shape)}; they must agree")
    return [row[live] for row, live in zip(ids, mask.astype(bool), strict=True)]


def response_masks(rows: Sequence[Sequence[int] | np.ndarray], response_lens: Sequence[int]) -> list[np.ndarray]:
    """One boolean mask per row that is True on its last `response_lens[b]` tokens."""
    masks = []
    for b, (row, num) in enumerate(zip(rows, response_lens, strict=True)):
        if not 0 <= num <= len(row):
            raise InputError(f"row {b} has {len(row)} tokens and cannot hold a response of {num}")
        masks.append(np.arange(len(row)) >= len(row) - num)
    return masks


def pad_rows(rows: Sequence[np.ndarray], pad_value: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Right-pad rows to one length: `(values [B, S] int64, is_live [B, S] bool)`."""
    longest = max((len(row) for row in rows), default=0)
    is_live = np.arange(longest) < np.array([len(row) for row in rows], np.int64)[:, None]
    padded = np.full((len(rows), longest), pad_value, np.int64)
    padded[is_live] = np.concatenate([np.empty(0, np.int64), *rows])
    return padded, is_live


def group_by_length(lens: np.ndarray) -> list[np.ndarray]:
    """Cut `lens [n] int64` into groups to stack: indices of similar length, at most a third of a stack is padding."""
    order = np.argsort(lens, kind="stable")
    groups, first = [], 0
    for i in range(1, len(order) + 1):
        grown = order[first : i + 1]
        if i == len(order) or 3 * lens[grown].sum() < 2 * len(grown) * lens[order[i]]:
            groups.append(order[first:i])
            first = i
    return groups
