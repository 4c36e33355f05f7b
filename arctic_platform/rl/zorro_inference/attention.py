"""Forest cascade attention: a decode step reads every shared part of the KV forest once.

The new tokens of R rows attend in a few batched calls: one per block of the forest (plan.py), one per bank of the rows'
own suffixes. Their results are merged by their log-sum-exps `l_p`, part p with weight `softmax(l)_p`. A sink is one
more `l`, without output.

The native kernel reads the queries where they are and merges in place. For torch's kernels the query heads of a
key-value head are folded into the query length, so that keys and values are neither repeated nor copied, and each row
finds its results among those of all calls by a table.

A query that a window leaves nothing in one block gets there a log-sum-exp so low that its weight is exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from arctic_platform.forest import native
from arctic_platform.forest.attention import with_sinks
from arctic_platform.forest.kernels import Kernel, acc_dtype, pick_kernel, rectangle_forward
from arctic_platform.forest.recurrent import StatefulPlan
from arctic_platform.forest.states import StepRecurrence
from arctic_platform.rl.zorro_inference.plan import BlockRead, LiveForest
from arctic_platform.rl.zorro_inference.pool import KvPool
from arctic_platform.rl.zorro_inference.suffix import SuffixCache

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Readers:
    """The rows of a decode step and the calls they need; stays while nobody joins, leaves or changes the bank.

    rows: in the order of the paths that `live` was laid out from. Calls are numbered: the suffix banks first, then
    `live.reads`. `order`: the rows in decode order.
    """

    def __init__(
        self, live: LiveForest, rows: Sequence[Hashable], suffix: SuffixCache, pool: KvPool, device: torch.device
    ) -> None:
        self.live = live
        self.pool = pool
        self.device = device
        self.order = [rows[i] for i in live.row.tolist()]
        self.banks = suffix.banks
        places = {row: i for i, row in enumerate(self.order)}
        self.bank_rows = [np.array([places[row] for row in bank.rows], np.int64) for bank in self.banks]
        self._gathered: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    @property
    def num_keys(self) -> int:
        """Keys of the forest that a step reads, padding included."""
        return sum(read.num_keys for read in self.live.reads)

    @cached_property
    def calls(self) -> list[Call]:
        """The calls of a step, in their order."""
        suffixes = [Call(len(rows), 1, self._index(rows)) for rows in self.bank_rows]
        return suffixes + [self._call_of(read) for read in self.live.reads]

    def _call_of(self, read: BlockRead) -> Call:
        """One lane is given out to the threads in equal parts of its rows: its heads alone may not divide evenly."""
        num_lanes, num_queries = read.take.shape
        if num_lanes == 1 and read.grid is not None:
            num_lanes = _even_parts(num_queries, self.pool.num_heads, torch.get_num_threads())
            num_queries //= num_lanes
        return Call(num_lanes, num_queries, self._index(read.take.reshape(-1)))

    @cached_property
    def named_rows(self) -> list[tuple[Tensor, int]]:
        """For each call its readers, lane by lane, `[num_lanes * num_queries] int64` with -1 for padding, and
        num_queries.
        """
        suffixes = [(self._to_device(rows), 1) for rows in self.bank_rows]
        return suffixes + [(self._to_device(read.named), read.take.shape[1]) for read in self.live.reads]

    @cached_property
    def is_even(self) -> bool:
        """Every call serves all rows in their order, so nothing need be looked up."""
        return all(call.rows is None for call in self.calls)

    @cached_property
    def table(self) -> Tensor:
        """`[R * P] int64`: where among the M queries each row finds its up to P results."""
        return self._to_device(np.maximum(self._table, 0).reshape(-1))

    @cached_property
    def missing(self) -> Tensor | None:
        """`[R, P, 1, 1] bool`: entries of the table without a result; None where there are none."""
        return self._to_device(self._table < 0)[:, :, None, None] if (self._table < 0).any() else None

    @property
    def table_shape(self) -> tuple[int, int]:
        """`(R, P)`."""
        return self._table.shape

    @cached_property
    def source_positions(self) -> list[np.ndarray]:
        """For each read, `[n, 1, width] int64`: the position of every key in its row."""
        return [self.live.position[read.block.source][:, None, :] for read in self.live.reads]

    def prefix(self, layer_idx: int) -> list[tuple[Tensor, Tensor]]:
        """For each read `[n, K, width, D]` of keys and values: views where they lie evenly, else copies kept here.

        n is that of the read's call, whose lane may be given out in parts.
        """
        calls = self.calls[len(self.banks) :]
        return [self._lanes(layer_idx, i, call.num_lanes) for i, call in enumerate(calls)]

    def lanes(self, layer_idx: int) -> list[tuple[Tensor, Tensor]]:
        """As `prefix`, with n the lanes of the read."""
        return [self._lanes(layer_idx, i, len(read.take)) for i, read in enumerate(self.live.reads)]

    def _lanes(self, layer_idx: int, i: int, num_lanes: int) -> tuple[Tensor, Tensor]:
        read = self.live.reads[i]
        if read.grid is not None:
            return self.pool.grid(layer_idx, *read.grid, num_lanes, read.block.width)
        if (layer_idx, i) not in self._gathered:
            self._gathered[layer_idx, i] = self.pool.gather(layer_idx, self._to_device(read.places))
        return self._gathered[layer_idx, i]

    @cached_property
    def _table(self) -> np.ndarray:
        num_rows = len(self.order)
        table = np.full((num_rows, 1 + len(self.live.reads)), -1, np.int64)
        table[np.concatenate(self.bank_rows), 0] = np.arange(num_rows)
        filled, offset = np.ones(num_rows, np.int64), num_rows
        for read in self.live.reads:
            table[read.rows, filled[read.rows]] = offset + read.place
            filled[read.rows] += 1
            offset += read.take.size
        return table[:, : filled.max()]

    def _index(self, rows: np.ndarray) -> Tensor | None:
        """None for all rows in their order."""
        return None if np.array_equal(rows, np.arange(len(self.order))) else self._to_device(rows)

    def _to_device(self, x: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(self.device)


class Call(NamedTuple):
    """One attention call: `num_lanes` runs of keys, each for `num_queries` rows.

    `rows [num_lanes * num_queries] int64`: who they are; None where they are all rows in their order.
    """

    num_lanes: int
    num_queries: int
    rows: Tensor | None

    def take(self, q_RKGD: Tensor) -> Tensor:
        """`[R, K, G, D]` -> `[num_lanes, K, num_queries * G, D]`."""
        q = q_RKGD if self.rows is None else q_RKGD.index_select(0, self.rows)
        if self.num_queries == 1:
            return q
        return q.unflatten(0, (self.num_lanes, self.num_queries)).transpose(1, 2).flatten(2, 3)

    def give(self, x: Tensor, num_groups: int) -> Tensor:
        """`[num_lanes, K, num_queries * G, ...]` -> `[num_lanes * num_queries, K, G, ...]`."""
        if self.num_queries == 1:
            return x
        return x.unflatten(2, (self.num_queries, num_groups)).transpose(1, 2).flatten(0, 1)


class DecodePlan(StatefulPlan):
    """One decode step: what `model(input_ids=[1, R], position_ids=[1, R], forest=plan)` carries to every layer.

    states: of the rows, for models with recurrent layers.
    """

    def __init__(self, readers: Readers, kernel: Kernel, states: StepRecurrence | None = None) -> None:
        self._states = states
        self._readers = readers
        self._kernel = kernel
        self._at = [bank.lens.copy() for bank in readers.banks]
        self._lens = [int(at.max()) + 1 for at in self._at]
        self._bank_rows = [call.rows for call in readers.calls[: len(readers.banks)]]
        self._where = [_places_of(at, readers.device) for at in self._at]
        self._masks: dict[int | None, list[Tensor | None]] = {}
        self._biases: dict[tuple, list[Tensor | None]] = {}
        self.positions = readers.live.path_lens.copy()
        """`[R] int64`: the position of each new token in its row."""
        for rows, at in zip(readers.bank_rows, self._at, strict=True):
            self.positions[rows] += at

    @property
    def num_keys(self) -> int:
        """Keys that each layer reads, padding included."""
        return self._readers.num_keys + sum(n * len(at) for n, at in zip(self._lens, self._at, strict=True))

    @property
    def recurrence(self) -> StepRecurrence:
        """The states of the rows, for the recurrent layers of one forward."""
        assert self._states is not None
        return self._states

    @property
    def num_tokens(self) -> int:
        """Tokens of the forest and of the suffixes, the new ones included: what a step cannot but read."""
        return self._readers.live.num_tokens + sum(int(at.sum()) + len(at) for at in self._at)

    def commit(self) -> None:
        """The pass is done: its tokens count."""
        for bank in self._readers.banks:
            bank.lens += 1

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
        suffixes = self._append(layer_idx, k, v)
        if self._kernel == "flash" and softcap is None and native.serves(q, k, v):
            return self._attend_native(layer_idx, q, suffixes, scale, sliding_window, sinks)
        num_groups, kernel = q.shape[1] // k.shape[1], pick_kernel(self._kernel, q, v, softcap=softcap)
        q_RKGD = q[0].transpose(0, 1).unflatten(1, (-1, num_groups))
        parts = []
        for call, (keys, values), bias in zip(
            self._readers.calls,
            [*suffixes, *self._readers.prefix(layer_idx)],
            self._bias(sliding_window, num_groups, q.dtype),
            strict=True,
        ):
            if bias is not None and len(bias) != call.num_lanes:
                bias = bias.view(call.num_lanes, 1, -1, bias.shape[-1])
            pair = attend_keys(call.take(q_RKGD), keys, values, bias, scale=scale, kernel=kernel, softcap=softcap)
            parts.append([call.give(x, num_groups) for x in pair])
        merged = _merge_even(parts, sinks) if self._readers.is_even else self._merge(parts, sinks)
        return merged.to(q.dtype).flatten(1, 2).transpose(0, 1).unsqueeze(0)

    def _attend_native(
        self,
        layer_idx: int,
        q: Tensor,
        suffixes: list[tuple[Tensor, Tensor]],
        scale: float,
        sliding_window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Every row is in one suffix bank; what it reads of the forest is merged with that."""
        q_1RHD = q.transpose(1, 2)
        out, lse = torch.empty_like(q_1RHD, memory_format=torch.contiguous_format), q.new_empty(q_1RHD.shape[:3])
        for n, ((keys, values), (rows, num_queries), mask) in enumerate(
            zip(
                [*suffixes, *self._readers.lanes(layer_idx)],
                self._readers.named_rows,
                self._visible(sliding_window),
                strict=True,
            )
        ):
            native.attend_(
                out,
                lse,
                q_1RHD,
                keys,
                values,
                num_queries=num_queries,
                rows=rows,
                mask=mask,
                scale=scale,
                merge=n >= len(suffixes),
            )
        return with_sinks(out.transpose(1, 2), lse.transpose(1, 2), sinks)[0]

    def _append(self, layer_idx: int, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Store the new tokens, and return what every bank then holds."""
        k_RKD, v_RKD = k[0].transpose(0, 1), v[0].transpose(0, 1)
        suffixes = []
        for bank, rows, where, length in zip(
            self._readers.banks, self._bank_rows, self._where, self._lens, strict=True
        ):
            own = (k_RKD, v_RKD) if rows is None else (k_RKD.index_select(0, rows), v_RKD.index_select(0, rows))
            bank.append(layer_idx, *own, *where)
            suffixes.append(bank.read(layer_idx, length))
        return suffixes

    def _merge(self, parts: Sequence[Sequence[Tensor]], sinks: Tensor | None) -> Tensor:
        """`out [n, K, G, Dv]` and `lse [n, K, G]` of every call -> `[R, K, G, Dv]`."""
        table, shape = self._readers.table, self._readers.table_shape
        out, lse = (torch.cat(xs) for xs in zip(*parts, strict=True))
        lse_RPKG = lse.index_select(0, table).unflatten(0, shape)
        if self._readers.missing is not None:
            lse_RPKG = lse_RPKG.masked_fill(self._readers.missing, float("-inf"))
        if sinks is not None:
            column = sinks.to(lse.dtype).view(1, 1, *lse.shape[1:]).expand(shape[0], -1, -1, -1)
            lse_RPKG = torch.cat([lse_RPKG, column], dim=1)
        weights = torch.softmax(lse_RPKG, dim=1)[:, : shape[1]].unsqueeze(-1)
        return (out.index_select(0, table).unflatten(0, shape) * weights).sum(1)

    def _bias(self, sliding_window: int | None, num_groups: int, dtype: torch.dtype) -> list[Tensor | None]:
        """What each call adds to its scores, made once per step for all layers that ask alike."""
        key = (self._window(sliding_window), num_groups, dtype)
        if key not in self._biases:
            masks = self._visible(sliding_window)
            self._biases[key] = [None if mask is None else _as_bias(mask, num_groups, dtype) for mask in masks]
        return self._biases[key]

    def _visible(self, sliding_window: int | None) -> list[Tensor | None]:
        """For each call `[n, m, W] bool`, the keys that each query may see; None where it sees all."""
        window = self._window(sliding_window)
        if window not in self._masks:
            masks = [*(_suffix_mask(at, window) for at in self._at), *self._prefix_masks(window)]
            whole = [mask if mask is None else torch.from_numpy(np.require(mask, requirements="CW")) for mask in masks]
            self._masks[window] = [mask if mask is None else mask.to(self._readers.device) for mask in whole]
        return self._masks[window]

    def _window(self, sliding_window: int | None) -> int | None:
        """None where no row is longer."""
        return sliding_window if sliding_window and int(self.positions.max()) >= sliding_window else None

    def _prefix_masks(self, window: int | None) -> list[np.ndarray | None]:
        masks = [read.visible for read in self._readers.live.reads]
        if window is None:
            return masks
        for i, (read, source) in enumerate(zip(self._readers.live.reads, self._readers.source_positions, strict=True)):
            near = self.positions[read.take][:, :, None] - source < window
            visible = near if masks[i] is None else near & masks[i]
            masks[i] = None if visible.all() else visible
        return masks


def _even_parts(num_rows: int, num_heads: int, num_threads: int) -> int:
    """Parts of equal size such that parts times heads are a multiple of the threads; 1 where there are none."""
    num_parts = num_threads // math.gcd(num_heads, num_threads)
    return num_parts if num_rows % num_parts == 0 else 1


def _merge_even(parts: Sequence[Sequence[Tensor]], sinks: Tensor | None) -> Tensor:
    """`out [R, K, G, Dv]` and `lse [R, K, G]` of every call, the rows' own suffixes first -> `[R, K, G, Dv]`."""
    out, lse = parts[0]
    for n, (part_out, part_lse) in enumerate(parts[1:], 2):
        out = torch.lerp(out, part_out, torch.sigmoid(part_lse - lse).unsqueeze(-1))
        if n < len(parts) or sinks is not None:
            lse = torch.logaddexp(lse, part_lse)
    return out if sinks is None else out * torch.sigmoid(lse - sinks.to(lse.dtype).view(lse.shape[1:])).unsqueeze(-1)


def _places_of(at: np.ndarray, device: torch.device) -> tuple[Tensor | slice, Tensor | int]:
    """Slots `0 .. n - 1` of a bank and the place of each one's new token, as `SuffixBank.append` takes them."""
    if (at == at[0]).all():
        return slice(0, len(at)), int(at[0])
    return torch.arange(len(at), device=device), torch.from_numpy(at).to(device)


def _suffix_mask(last: np.ndarray, window: int | None) -> np.ndarray | None:
    """`[n, 1, L] bool`, by slot: places that hold a token, within the window; the newest is at `last [n]`."""
    last, place = last[:, None, None], np.arange(last.max() + 1)
    visible = place <= last
    if window is not None:
        visible = visible & (last - place < window)
    return None if visible.all() else visible


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
    elif kernel == "flash" and not q.is_cuda:
        out, lse = _flash_forward(q, k, v, 0.0, False, attn_mask=bias, scale=scale)
    else:
        out, lse = rectangle_forward(q, k, v, scale=scale, causal=False, kernel="math", mask=bias == 0, softcap=softcap)
    return out.to(acc_dtype(q.dtype)), lse


def _as_bias(visible: Tensor, num_groups: int, dtype: torch.dtype) -> Tensor:
    """`[n, m, W] bool` -> `[n, 1, m * G, W]`: 0 where visible, else so low that nothing is left of the key."""
    mask = visible.repeat_interleave(num_groups, 1)
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return bias.masked_fill_(~mask, torch.finfo(dtype).min / 2).unsqueeze(1)
