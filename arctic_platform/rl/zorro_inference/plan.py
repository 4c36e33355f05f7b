"""How a decode step reads the KV forest: which parts of it share one attention call.

`lay_out` writes the segments that the decoding rows need depth-first, one virtual token after another, and the rows in
the order of their paths' last tokens, `last`. In that order the rows below any segment are neighbours, and a row sees
the token `t` exactly when `t <= last < subtree_end[segment_of(t)]`.

A *lane* is a subtree, or one segment, read by the rows below it. A *block* is a set of lanes of which no row sees two;
it is one batched attention call. Three prompts that share `s`, and two of them `a`:

    s s s s s s s s s  a a x     block 0   one lane: s                      read by all rows
                       a a y     block 1   lanes [a x y] and [z z], padded  each by its own rows,
                       z z                                                  a mask hides x from y and y from x

Lanes that lie evenly in the pool are read in place; others are gathered, once per composition of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from arctic_platform.rl.zorro_inference.cache import Segment, branches

CALL_COST = 1024
"""What one more attention call costs, in pairs of a row and a token that it reads (SmolLM2-135M on a CPU core)."""

GATHER_COST = 1
"""What a token that must be gathered costs, in the same pairs, spread over the steps that read it."""


MAX_PADDING, FREE_PADDING = 0.04, 64
"""Lanes of one call may be padded by this share of their tokens, or by so many tokens whatever the share."""


@dataclass(frozen=True, eq=False)
class LiveForest:
    """What the decoding rows read, depth-first.

    Segments `[N] int64`: `start`, `end`, `subtree_end` (virtual tokens, half open), `segment_parent` (-1 at a root).
    Tokens `[T] int64`: `place` in the pool, `position` in the row. Rows in decode order, `[R] int64`: `row`, the
    caller's number; `last`, ascending, its path's last token; `path_lens`, tokens of its path.
    """

    start: np.ndarray
    end: np.ndarray
    subtree_end: np.ndarray
    segment_parent: np.ndarray
    place: np.ndarray
    position: np.ndarray
    row: np.ndarray
    last: np.ndarray

    @property
    def num_tokens(self) -> int:
        """Tokens T that a step cannot but read."""
        return len(self.place)

    @cached_property
    def path_lens(self) -> np.ndarray:
        """`[R] int64`: tokens of each row's path."""
        return self.position[self.last] + 1

    @cached_property
    def token_end(self) -> np.ndarray:
        """`[T] int64`: where the subtree of each token's segment ends."""
        return np.repeat(self.subtree_end, self.end - self.start)

    @cached_property
    def is_leaf(self) -> np.ndarray:
        """`[N] bool`: segments without children."""
        return self.subtree_end == self.end

    @cached_property
    def num_breaks(self) -> np.ndarray:
        """`[T] int64`: how often the places jump up to each token."""
        return np.cumsum(np.diff(self.place, prepend=self.place[:1] - 1) != 1)

    @cached_property
    def reads(self) -> list[BlockRead]:
        """The attention calls of a decode step; every token is in one lane."""
        return [_read(self, block) for block in _cut_blocks(self)]


@dataclass(frozen=True, eq=False)
class Block:
    """Lanes `[n, 2] int64`, virtual token ranges, read by one call. `is_flat`: every lane is a part of one segment."""

    lanes: np.ndarray
    is_flat: bool

    @cached_property
    def width(self) -> int:
        """Tokens per lane after padding."""
        return int((self.lanes[:, 1] - self.lanes[:, 0]).max())

    @cached_property
    def source(self) -> np.ndarray:
        """`[n, width] int64`: the virtual token behind each place; padding repeats a lane's last token."""
        steps = self.lanes[:, :1] + np.arange(self.width)
        return np.minimum(steps, self.lanes[:, 1:] - 1)


class Grid(NamedTuple):
    """Lanes that lie evenly in the pool: place `start + i * stride + j` is token j of lane i."""

    start: int
    stride: int


@dataclass(frozen=True, eq=False)
class BlockRead:
    """What the rows ask of one block; numbers of rows are places in the decode order.

    `take [n, m] int64`: the rows that read each lane, padded by repeating one. `rows`, `place`: row `rows[i]` finds its
    result at `place[i]` of `[n * m]`. `visible [n, m, width] bool`, None where everything is. `places [n, width] int64`
    in the pool; `grid` where they lie evenly, else None.
    """

    block: Block
    take: np.ndarray
    rows: np.ndarray
    place: np.ndarray
    visible: np.ndarray | None
    places: np.ndarray
    grid: Grid | None

    @property
    def num_keys(self) -> int:
        """Keys that the call reads, padding included."""
        return self.places.size

    @property
    def named(self) -> np.ndarray:
        """`[n * m] int64`: the rows that read each lane, -1 for padding."""
        named = np.full(self.take.size, -1, np.int64)
        named[self.place] = self.rows
        return named


def lay_out(paths: Sequence[Segment]) -> LiveForest:
    """The forest of the rows' paths, given by their last segments, all of them with tokens."""
    runs, parents = _runs_of(paths)
    lens = np.array([run[-1].end - run[0].depth for run in runs], np.int64)
    start = np.cumsum(lens) - lens
    sizes = lens.copy()
    for n in reversed(range(len(runs))):
        if parents[n] >= 0:
            sizes[parents[n]] += sizes[n]
    ends = {run[-1]: end - 1 for run, end in zip(runs, (start + lens).tolist(), strict=True)}
    last = np.array([ends[path] for path in paths], np.int64)
    order = np.argsort(last, kind="stable")
    first_places = np.array([run[0].span.start for run in runs], np.int64)
    depths = np.array([run[0].depth for run in runs], np.int64)
    return LiveForest(
        start=start,
        end=start + lens,
        subtree_end=start + sizes,
        segment_parent=np.array(parents, np.int64),
        place=np.arange(lens.sum()) + np.repeat(first_places - start, lens),
        position=np.arange(lens.sum()) + np.repeat(depths - start, lens),
        row=order,
        last=last[order],
    )


def _runs_of(paths: Sequence[Segment]) -> tuple[list[list[Segment]], list[int]]:
    """The segments depth-first, those joined that follow each other in the pool too, and each one's parent or -1."""
    ends_here = set(paths)
    children, tops = branches(ends_here)
    runs: list[list[Segment]] = []
    parents: list[int] = []
    todo = [(segment, -1) for segment in reversed(tops)]
    while todo:
        segment, parent = todo.pop()
        run = [segment]
        while segment not in ends_here and len(children[segment]) == 1:
            below = children[segment][0]
            if below.span.start != segment.span.end:
                break
            run.append(segment := below)
        todo += [(below, len(runs)) for below in reversed(children[segment])]
        runs.append(run)
        parents.append(parent)
    return runs, parents


def _read(live: LiveForest, block: Block) -> BlockRead:
    low = np.searchsorted(live.last, block.lanes[:, 0])
    ends = live.token_end[block.lanes[:, 0]] if block.is_flat else block.lanes[:, 1]
    counts = np.searchsorted(live.last, ends) - low
    steps = np.arange(counts.max())
    is_real = steps < counts[:, None]
    take = low[:, None] + np.minimum(steps, counts[:, None] - 1)
    places = live.place[block.source]
    return BlockRead(
        block,
        take,
        take[is_real],
        np.flatnonzero(is_real),
        _visible(live, block, take),
        places,
        _grid(live, block, places),
    )


def _grid(live: LiveForest, block: Block, places: np.ndarray) -> Grid | None:
    lens = block.lanes[:, 1] - block.lanes[:, 0]
    jumps = live.num_breaks[block.lanes[:, 1] - 1] - live.num_breaks[block.lanes[:, 0]]
    strides = np.diff(places[:, 0])
    if jumps.any() or lens.min() < block.width or (len(strides) and (strides != strides[0]).any()):
        return None
    return Grid(int(places[0, 0]), int(strides[0]) if len(strides) else 0)


def _visible(live: LiveForest, block: Block, take: np.ndarray) -> np.ndarray | None:
    source = block.source[:, None, :]
    lens = block.lanes[:, 1] - block.lanes[:, 0]
    if block.is_flat and lens.min() == block.width:
        return None
    visible = np.broadcast_to((np.arange(block.width) < lens[:, None])[:, None], (*take.shape, block.width))
    if not block.is_flat:
        reader = live.last[take][:, :, None]
        visible = visible & (source <= reader) & (reader < live.token_end[source])
    return None if visible.all() else visible


def _cut_blocks(live: LiveForest) -> list[Block]:
    """Bottom up over segments: read a subtree as one masked lane, or its first segment alone and then its children."""
    children: list[list[int]] = [[] for _ in range(len(live.start) + 1)]
    for n, parent in enumerate(live.segment_parent.tolist()):
        children[parent].append(n)  # the roots land in the last entry
    readers = np.searchsorted(live.last, live.subtree_end) - np.searchsorted(live.last, live.start)
    costs = np.zeros(len(live.start))
    splits: list[list[_Choice] | None] = [None] * len(live.start)
    for n in reversed(range(len(live.start))):
        size = live.subtree_end[n] - live.start[n]
        whole = CALL_COST + readers[n] * size + (0 if _is_run(live, n) else GATHER_COST * size)
        below = _choose(children[n], live, readers, costs)
        split = CALL_COST + readers[n] * (live.end[n] - live.start[n]) + sum(choice.cost for choice in below)
        is_split = bool(children[n]) and split < whole
        costs[n], splits[n] = min(split, whole), below if is_split else None
    return _collect(live, splits, _choose(children[-1], live, readers, costs))


def _is_run(live: LiveForest, n: int) -> bool:
    """The subtree's places follow each other."""
    return bool(live.num_breaks[live.subtree_end[n] - 1] == live.num_breaks[live.start[n]])


@dataclass(frozen=True)
class _Choice:
    """Sibling segments whose subtrees are the lanes of one block, or are read each in its own best way."""

    segments: list[int]
    is_block: bool
    cost: float


def _choose(siblings: list[int], live: LiveForest, readers: np.ndarray, costs: np.ndarray) -> list[_Choice]:
    """Siblings of similar size go together; each such set is one block where that is cheaper than apart."""
    sizes = live.subtree_end - live.start
    choices, waste, padding, first = [], 0.0, 0, 0
    siblings = sorted(siblings, key=lambda n: -sizes[n])
    for i in range(1, len(siblings) + 1):
        width = sizes[siblings[first]]
        widest = readers[siblings[first:i]].max() * width
        if i < len(siblings):
            waste += max(widest - readers[siblings[i]] * sizes[siblings[i]], 0)
            padding += width - sizes[siblings[i]]
            if waste <= CALL_COST and padding <= max(FREE_PADDING, MAX_PADDING * width * (i + 1 - first)):
                continue
        members = sorted(siblings[first:i])
        together = CALL_COST + widest * len(members) + _gather_cost(live, members, sizes)
        apart = float(costs[members].sum())
        choices.append(_Choice(members, bool(together <= apart), float(min(together, apart))))
        waste, padding, first = 0.0, 0, i
    return choices


def _gather_cost(live: LiveForest, members: list[int], sizes: np.ndarray) -> float:
    strides = np.diff(live.place[live.start[members]])
    widths = sizes[members]
    is_even = (widths == widths[0]).all() and (strides == strides[:1]).all() and all(_is_run(live, n) for n in members)
    return 0.0 if is_even else float(GATHER_COST * len(members) * widths.max())


def _collect(live: LiveForest, splits: list[list[_Choice] | None], choices: list[_Choice]) -> list[Block]:
    blocks, todo = [], list(choices)
    while todo:
        choice = todo.pop()
        if choice.is_block:
            nodes = np.array(choice.segments)
            lanes = np.stack([live.start[nodes], live.subtree_end[nodes]], axis=1)
            blocks.append(Block(lanes, bool(live.is_leaf[nodes].all())))
            continue
        for n in choice.segments:
            below = splits[n]
            end = live.subtree_end[n] if below is None else live.end[n]
            blocks.append(Block(np.array([[live.start[n], end]]), below is not None or bool(live.is_leaf[n])))
            todo.extend(below or [])
    return blocks
