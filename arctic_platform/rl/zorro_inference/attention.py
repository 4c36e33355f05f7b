"""Forest cascade attention: a decode step reads every shared part of the prompts once.

The new tokens of R rollouts attend in a few batched calls: one per block of the prompt forest (plan.py), one for the
rollouts' own suffixes. The query heads of a key-value head are folded into the query length, so keys and values are
neither repeated nor gathered. Each rollout then finds its results among those of all calls by a table, and they are
merged by their log-sum-exps `l_p`, part p with weight `softmax(l)_p`. A sink is one more `l`, without output.

A query that a window leaves nothing in one block gets there a log-sum-exp so low that its weight is exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from arctic_platform.forest.kernels import Kernel, acc_dtype, pick_kernel, rectangle_forward
from arctic_platform.rl.zorro_inference.cache import PrefixCache, SuffixCache
from arctic_platform.rl.zorro_inference.plan import BlockRead, PromptForest, read_blocks

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, eq=False)
class Readers:
    """The rollouts of a decode step and the calls they need; stays while nobody joins or leaves.

    `active [R] int64`: places in the decode order, ascending; `slots [R] int64`: their suffix slots, a permutation of
    `0 .. R - 1`. Calls are numbered: the suffixes first, then `reads`.
    """

    plan: PromptForest
    active: np.ndarray
    slots: np.ndarray
    device: torch.device

    @cached_property
    def reads(self) -> list[BlockRead]:
        """The prefix calls."""
        return read_blocks(self.plan, self.active)

    @cached_property
    def take(self) -> Tensor:
        """`[M] int64`: the rollout of every query of all calls, one call after another."""
        by_slot = np.argsort(self.slots)
        return self._to_device(np.concatenate([by_slot, *(read.take.reshape(-1) for read in self.reads)]))

    @cached_property
    def table(self) -> Tensor:
        """`[R, P] int64`: where among the M queries each rollout finds its up to P results."""
        return self._to_device(np.maximum(self._table, 0))

    @cached_property
    def missing(self) -> Tensor | None:
        """`[R, P] bool`: entries of the table without a result; None where there are none."""
        return self._to_device(self._table < 0) if (self._table < 0).any() else None

    @cached_property
    def slot_index(self) -> Tensor:
        """`slots` on the device."""
        return self._to_device(self.slots)

    @cached_property
    def source_positions(self) -> list[np.ndarray]:
        """For each read, `[n, 1, width] int64`: the position of every key in its row."""
        return [self.plan.forest.position_ids[read.source][:, None, :] for read in self.reads]

    @cached_property
    def _table(self) -> np.ndarray:
        num_rows = len(self.active)
        columns, filled = [self.slots], np.ones(num_rows, np.int64)
        table = np.full((num_rows, 1 + len(self.reads)), -1, np.int64)
        table[:, 0] = columns[0]
        offset = num_rows
        for read in self.reads:
            table[read.rows, filled[read.rows]] = offset + read.place
            filled[read.rows] += 1
            offset += read.take.size
        return table[:, : filled.max()]

    def _to_device(self, x: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(self.device)


class DecodePlan:
    """One decode step: what `model(input_ids=[1, R], position_ids=[1, R], forest=plan)` carries to every layer."""

    def __init__(self, readers: Readers, prefix: PrefixCache, suffix: SuffixCache, kernel: Kernel) -> None:
        self._readers = readers
        self._prefix = prefix
        self._suffix = suffix
        self._kernel = kernel
        self._at = suffix.lens[readers.slots]
        self._at_index = torch.from_numpy(self._at).to(readers.device)
        self._biases: dict[tuple, list[Tensor | None]] = {}

    @property
    def positions(self) -> np.ndarray:
        """`[R] int64`: the position of each new token in its row."""
        return self._readers.plan.prompt_lens[self._readers.active] + self._at

    def attend(
        self,
        layer_idx: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """`q [1, H, R, D]`, `k [1, K, R, D]`, `v [1, K, R, Dv]` -> `out [1, H, R, Dv]`; stores k and v first."""
        self._suffix.append(layer_idx, k, v, self._readers.slot_index, self._at_index)
        num_groups = q.shape[1] // k.shape[1]
        queries = q[0].unflatten(0, (-1, num_groups)).transpose(1, 2).index_select(1, self._readers.take)
        kernel = pick_kernel(self._kernel, q, v, softcap=softcap)
        outs, lses, start = [], [], 0
        for (n, m), (keys, values), bias in zip(
            self._sizes, self._keys_and_values(layer_idx), self._bias(sliding_window, num_groups, q.dtype), strict=True
        ):
            part = queries[:, start : start + n * m].unflatten(1, (n, m)).transpose(0, 1).flatten(2, 3)
            out, lse = attend_keys(part, keys, values, bias, scale=scale, kernel=kernel, softcap=softcap)
            outs.append(out.transpose(0, 1).reshape(-1, n * m, num_groups, out.shape[-1]))
            lses.append(lse.transpose(0, 1).reshape(-1, n * m, num_groups))
            start += n * m
        return self._merge(torch.cat(outs, 1), torch.cat(lses, 1), sinks).to(q.dtype)

    @cached_property
    def _sizes(self) -> list[tuple[int, int]]:
        """Lanes and queries per lane of every call."""
        return [(len(self._at), 1), *(read.take.shape for read in self._readers.reads)]

    def _keys_and_values(self, layer_idx: int) -> list[tuple[Tensor, Tensor]]:
        suffix = self._suffix.read(layer_idx, int(self._at.max()) + 1)
        return [suffix, *(self._prefix.read(layer_idx, read) for read in self._readers.reads)]

    def _merge(self, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
        """`out [K, M, G, Dv]`, `lse [K, M, G]` of all calls -> `[1, H, R, Dv]`."""
        table = self._readers.table
        lse_KRPG = lse.index_select(1, table.flatten()).unflatten(1, table.shape)
        if self._readers.missing is not None:
            lse_KRPG = lse_KRPG.masked_fill(self._readers.missing[:, :, None], float("-inf"))
        if sinks is not None:
            column = sinks.to(lse.dtype).view(lse.shape[0], 1, 1, -1).expand(-1, len(table), 1, -1)
            lse_KRPG = torch.cat([lse_KRPG, column], dim=2)
        weights = torch.softmax(lse_KRPG, dim=2)[:, :, : table.shape[1]].unsqueeze(-1)
        parts = out.index_select(1, table.flatten()).unflatten(1, table.shape)
        merged = (parts * weights).sum(2)
        return merged.transpose(0, 1).flatten(1, 2).transpose(0, 1).unsqueeze(0)

    def _bias(self, sliding_window: int | None, num_groups: int, dtype: torch.dtype) -> list[Tensor | None]:
        """What each call adds to its scores, made once per step for all layers that ask alike."""
        window = sliding_window if sliding_window and int(self.positions.max()) >= sliding_window else None
        key = (window, num_groups, dtype)
        if key not in self._biases:
            masks = [self._suffix_mask(window), *self._prefix_masks(window)]
            self._biases[key] = [
                None if mask is None else _as_bias(mask, num_groups, dtype, self._readers.device) for mask in masks
            ]
        return self._biases[key]

    def _suffix_mask(self, window: int | None) -> np.ndarray | None:
        """`[R, 1, L] bool`, by slot: places that hold a token, within the window."""
        by_slot = np.argsort(self._readers.slots)
        last, place = self._at[by_slot][:, None, None], np.arange(self._at.max() + 1)
        visible = place <= last
        if window is not None:
            visible = visible & (last - place < window)
        return None if visible.all() else visible

    def _prefix_masks(self, window: int | None) -> list[np.ndarray | None]:
        masks = [read.visible for read in self._readers.reads]
        if window is None:
            return masks
        for i, (read, source) in enumerate(zip(self._readers.reads, self._readers.source_positions, strict=True)):
            near = self.positions[read.take][:, :, None] - source < window
            visible = near if masks[i] is None else near & masks[i]
            masks[i] = None if visible.all() else visible
        return masks


def attend_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    *,
    scale: float,
    kernel: Kernel,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """One call, without causality: `out [n, K, L, Dv]` and `lse [n, K, L]`, both in the accumulation dtype.

    `q [n, K, L, D]`, `k [n, K, W, D]`, `v [n, K, W, Dv]`; bias: `[n, 1, L, W]` in the dtype of q, or None.
    """
    if bias is None:
        out, lse = rectangle_forward(q, k, v, scale=scale, causal=False, kernel=kernel, softcap=softcap)
    elif kernel == "flash":
        out, lse = _flash_forward(q, k, v, 0.0, False, attn_mask=bias, scale=scale)
    else:
        out, lse = rectangle_forward(q, k, v, scale=scale, causal=False, kernel="math", mask=bias == 0, softcap=softcap)
    return out.to(acc_dtype(q.dtype)), lse


def _as_bias(visible: np.ndarray, num_groups: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[n, m, W] bool` -> `[n, 1, m * G, W]`: 0 where visible, else so low that nothing is left of the key."""
    mask = torch.from_numpy(np.repeat(visible, num_groups, axis=1)).to(device)
    bias = torch.zeros(mask.shape, dtype=dtype, device=device)
    return bias.masked_fill_(~mask, torch.finfo(dtype).min / 2).unsqueeze(1)
