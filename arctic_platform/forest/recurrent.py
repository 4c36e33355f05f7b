"""What a token inherits from the one before it: convolutions and recurrent states over a forest.

A recurrent layer reads the past as a state, and a state forks where the rows part:

    segment 0  s s s             level 0   [s s s]                                -> state 0
    segment 1    a a             level 1   [a a .]  [b b b]   both from state 0   -> states 1, 2
    segment 2    b b b

Levels run one after the other. Segments of one level stand side by side, those of similar length in one batch,
right-padded with zeros: the caller's scan must leave its state alone on an input of zeros.

A compiler leaves both out of its graphs: their shapes are those of each batch's forest.

A convolution reads the K-1 tokens before each token. In the pack those are a segment's own, but for its first K-1
tokens: these run again, each with its ancestors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from arctic_platform.forest.packing import group_by_length, pad_rows
from arctic_platform.forest.trie import Forest

Convolve = Callable[[Tensor], Tensor]
"""A causal convolution that pads with zeros on the left: `[b, C, L] -> [b, C, L]`."""

Scan = Callable[[Sequence[Tensor], Tensor | None, bool], tuple[Tensor, Tensor | None]]
"""`(inputs, each [b, L, ...]; initial state [b, ...] or None for zeros; is the final state wanted)` ->
`(outputs [b, L, ...], final state [b, ...] or None)`."""


@dataclass(frozen=True, eq=False)
class SegmentBatch:
    """Segments of one level that are scanned together.

    `num_tokens`: their tokens, as many of the sorted order. `index [b, L] int64`: into those tokens, right-padded with
    0, and `is_live [b, L] bool`; both None where nothing is padded. `shape`: `(b, L)`. `parent_slot [b] int64`: which
    states of the level above they go on from; at roots, which of those that the pass begins with. `has_children`:
    whether somebody needs their states.
    """

    num_tokens: int
    shape: tuple[int, int]
    index: Tensor | None
    is_live: Tensor | None
    parent_slot: Tensor
    has_children: bool

    def stack(self, x: Tensor) -> Tensor:
        """`[num_tokens, ...]` -> `[b, L, ...]`, zeros behind the end of each segment."""
        if self.index is None or self.is_live is None:
            return x.unflatten(0, self.shape)
        is_live = self.is_live.reshape(*self.shape, *[1] * (x.dim() - 1))
        return x[self.index].masked_fill(~is_live, 0)

    def unstack(self, x: Tensor) -> Tensor:
        """`[b, L, ...]` -> `[num_tokens, ...]`."""
        return x.flatten(0, 1) if self.is_live is None else x[self.is_live]


@dataclass(frozen=True, eq=False)
class ForestRecurrence:
    """Recurrent layers over a forest, each token once."""

    forest: Forest
    device: torch.device | str = "cpu"

    @torch.compiler.disable
    def convolve(self, conv: Convolve, x: Tensor, kernel_len: int) -> Tensor:
        """`conv` along every row: `x [1, C, T]` -> `[1, C, T]`."""
        out = conv(x)
        if kernel_len not in self._windows:
            self._windows[kernel_len] = self._heads(kernel_len)
        heads, ancestors = self._windows[kernel_len]
        if not len(heads):
            return out
        padded = torch.cat([x[0], x.new_zeros(x.shape[1], 1)], dim=1)  # index -1 reads the zero
        windows = padded[:, ancestors].transpose(0, 1)
        return out.index_copy(2, heads, conv(windows)[:, :, -1].T.unsqueeze(0).to(out.dtype))

    @torch.compiler.disable
    def scan(self, scan: Scan, inputs: Sequence[Tensor]) -> Tensor:
        """`scan` along every row: inputs `[1, T, ...]` -> outputs `[1, T, ...]`."""
        return self._scan(scan, inputs, begin=None, keep_all=False)[0]

    def _scan(
        self, scan: Scan, inputs: Sequence[Tensor], *, begin: Tensor | None, keep_all: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Also the states behind the segments, in the order of `_levels`: those with children, or all.

        begin: `[roots, ...]`, the states that the roots go on from; None for zeros.
        """
        order, restore = self._order
        sizes = [batch.num_tokens for level in self._levels for batch in level]
        pieces = zip(*(x[0][order].split(sizes) for x in inputs), strict=True)
        outputs: list[Tensor] = []
        kept: list[Tensor] = []
        above = begin
        for level in self._levels:
            states: list[Tensor] = []
            for batch in level:
                initial = None if above is None else above[batch.parent_slot]
                stacked = [batch.stack(x) for x in next(pieces)]
                out, state = scan(stacked, initial, batch.has_children or keep_all)
                outputs.append(batch.unstack(out))
                if state is not None:
                    states.append(state)
            above = torch.cat(states) if states else None
            kept += states
        return torch.cat(outputs)[restore].unsqueeze(0), kept

    @cached_property
    def _windows(self) -> dict[int, tuple[Tensor, Tensor]]:
        """By kernel length, what `_heads` found for the first layer."""
        return {}

    def _heads(self, kernel_len: int) -> tuple[Tensor, Tensor]:
        """Tokens whose `kernel_len` window leaves their own segment, `[n]`, and those windows, `[n, kernel_len]`.

        The first tokens of the pack need no second run: the convolution's own padding serves them.
        """
        forest = self.forest
        into = np.arange(forest.num_tokens) - forest.start[forest.segment_of_token]
        heads = np.flatnonzero((into < kernel_len - 1) & (forest.segment_of_token > 0))
        window = [heads]
        for _ in range(kernel_len - 1):
            window.append(np.where(window[-1] < 0, -1, forest.parent[window[-1]]))
        ancestors = np.stack(window[::-1], axis=1)
        return torch.from_numpy(heads).to(self.device), torch.from_numpy(ancestors).to(self.device)

    @cached_property
    def _segment_levels(self) -> list[list[np.ndarray]]:
        """Levels of the forest as batches of segments: inner ones first, each of similar length."""
        forest = self.forest
        depth = np.zeros(forest.num_segments, np.int64)
        for n, parent in enumerate(forest.segment_parent.tolist()):
            depth[n] = depth[parent] + 1 if parent >= 0 else 0
        lens = forest.end - forest.start
        levels = []
        for d in range(int(depth.max(initial=-1)) + 1):
            level: list[np.ndarray] = []
            for is_leaf in (False, True):
                segments = np.flatnonzero((depth == d) & (forest.is_leaf == is_leaf))
                level += [segments[group] for group in group_by_length(lens[segments])]
            levels.append(level)
        return levels

    @cached_property
    def _order(self) -> tuple[Tensor, Tensor]:
        """`[T] int64`: the packed tokens in the order in which batches take them, and the way back."""
        forest = self.forest
        segments = np.concatenate([np.empty(0, np.int64), *(s for level in self._segment_levels for s in level)])
        runs = [np.arange(forest.start[n], forest.end[n]) for n in segments]
        order = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *runs])).to(self.device)
        return order, torch.argsort(order)

    @cached_property
    def _levels(self) -> list[list[SegmentBatch]]:
        forest = self.forest
        slot = np.zeros(forest.num_segments, np.int64)
        root_slot = np.cumsum(forest.segment_parent < 0) - 1
        levels = []
        for level in self._segment_levels:
            inner = [segments for segments in level if not forest.is_leaf[segments[0]]]
            for place, n in enumerate(n for segments in inner for n in segments):
                slot[n] = place
            levels.append([self._batch(segments, slot, root_slot) for segments in level])
        return levels

    def _batch(self, segments: np.ndarray, slot: np.ndarray, root_slot: np.ndarray) -> SegmentBatch:
        forest = self.forest
        lens = forest.end[segments] - forest.start[segments]
        starts = np.cumsum(lens) - lens
        index, is_live = pad_rows([np.arange(a, a + n) for a, n in zip(starts, lens, strict=True)])
        parents = forest.segment_parent[segments]
        parent_slot = slot[parents] if parents[0] >= 0 else root_slot[segments]
        is_padded = not is_live.all()
        return SegmentBatch(
            num_tokens=int(lens.sum()),
            shape=(len(segments), int(lens.max())),
            index=torch.from_numpy(index).to(self.device) if is_padded else None,
            is_live=torch.from_numpy(is_live).to(self.device) if is_padded else None,
            parent_slot=torch.from_numpy(parent_slot).to(self.device),
            has_children=not forest.is_leaf[segments[0]],
        )


@dataclass(frozen=True, eq=False)
class RowsRecurrence:
    """The slow twin: every row is rebuilt and runs by itself; a shared token takes the value of its first row.

    row_index: `[B, S] int64`, packed indices, right-padded; owner: `[T] int64`, where in the flattened rows each packed
    token takes its output from (RowsPlan has both).
    """

    row_index: Tensor
    owner: Tensor

    def convolve(self, conv: Convolve, x: Tensor, kernel_len: int) -> Tensor:
        """As ForestRecurrence.convolve."""
        out = conv(x[0][:, self.row_index].transpose(0, 1))
        return out.transpose(0, 1).flatten(1, 2)[:, self.owner].unsqueeze(0)

    def scan(self, scan: Scan, inputs: Sequence[Tensor]) -> Tensor:
        """As ForestRecurrence.scan."""
        out, _ = scan([x[0][self.row_index] for x in inputs], None, False)
        return out.flatten(0, 1)[self.owner].unsqueeze(0)


class Recurrence(Protocol):
    """How a recurrent layer reads the past of each token."""

    def convolve(self, conv: Convolve, x: Tensor, kernel_len: int) -> Tensor:
        """`conv` along every row: `x [1, C, T]` -> `[1, C, T]`."""

    def scan(self, scan: Scan, inputs: Sequence[Tensor]) -> Tensor:
        """`scan` along every row: inputs `[1, T, ...]` -> outputs `[1, T, ...]`."""


class StatefulPlan:
    """Base of plans that serve layers with a state too."""

    @property
    def recurrence(self) -> Recurrence:
        """Serves the recurrent layers of one forward."""
        raise NotImplementedError
