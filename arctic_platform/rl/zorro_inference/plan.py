"""How a decode step reads the prompt forest: which parts of it share one attention call.

Rollouts are ordered by the packed index of their prompt's last token, `last`. In that order the rollouts below any
segment are neighbours, and a rollout sees the prompt token `t` exactly when `t <= last < subtree_end[segment_of(t)]`.

A *lane* is a subtree, or one segment, of the prompt forest, read by the rollouts below it. A *block* is a set of lanes
of which no rollout sees two; it is one batched attention call. Three prompts that share `s`, and two of them `a`:

    s s s s s s s s s  a a x     block 0   one lane: s                      read by all rollouts
                       a a y     block 1   lanes [a x y] and [z z], padded  each by its own rollouts,
                       z z                                                  a mask hides x from y and y from x
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from arctic_platform.forest import Forest, build_forest

CALL_COST = 1024
"""What one more attention call costs, in pairs of a rollout and a token that it reads (SmolLM2-135M on a CPU core)."""

MAX_PASS_TOKENS = 8192
"""Prompts that share nothing are prefilled in passes of about this many tokens, to bound activations."""


@dataclass(frozen=True, eq=False)
class PromptForest:
    """The forest of the prompts, and the rollouts in the order in which they decode.

    `rollout [N] int64`: the caller's number of each rollout (prompt * n + j); `last [N] int64`, ascending: the packed
    index of its prompt's last token; `prompt_lens [N] int64`.
    """

    forest: Forest
    rollout: np.ndarray
    last: np.ndarray
    prompt_lens: np.ndarray

    @cached_property
    def token_end(self) -> np.ndarray:
        """`[T] int64`: where the subtree of each token's segment ends."""
        return self.forest.subtree_end[self.forest.segment_of_token]

    @cached_property
    def blocks(self) -> list[Block]:
        """The attention calls of a decode step, cheapest first guess over all rollouts; every token is in one lane."""
        return _cut_blocks(self.forest, self.last)

    @cached_property
    def passes(self) -> list[PrefillPass]:
        """The prefill, cut between roots where the forest is larger than one pass."""
        roots = np.flatnonzero(self.forest.segment_parent < 0)
        bounds, start = [], 0
        for end in self.forest.subtree_end[roots].tolist():
            if bounds and end - start <= MAX_PASS_TOKENS:
                bounds[-1] = (start, end)
            else:
                start = bounds[-1][1] if bounds else 0
                bounds.append((start, end))
        return [PrefillPass(_slice_forest(self.forest, *bound), *bound) for bound in bounds]


@dataclass(frozen=True, eq=False)
class PrefillPass:
    """The packed tokens `[start, end)`, whole trees of the forest, as a forest of their own without rows."""

    forest: Forest
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Block:
    """Lanes `[n, 2] int64`, packed token ranges, read by one call. `is_flat`: every lane is a part of one segment."""

    lanes: np.ndarray
    is_flat: bool

    @cached_property
    def width(self) -> int:
        """Tokens per lane after padding."""
        return int((self.lanes[:, 1] - self.lanes[:, 0]).max())

    @cached_property
    def source(self) -> np.ndarray:
        """`[n, width] int64`: the packed token behind each place; padding repeats a lane's last token."""
        steps = self.lanes[:, :1] + np.arange(self.width)
        return np.minimum(steps, self.lanes[:, 1:] - 1)


@dataclass(frozen=True, eq=False)
class BlockRead:
    """What the active rollouts ask of one block; numbers of rollouts are places in the active order.

    `first_lane`, `num_lanes`: the run of lanes that has readers. `take [n, m] int64`: the rollouts that read each
    lane, padded by repeating one. `rows`, `place`: rollout `rows[i]` finds its result at `place[i]` of `[n * m]`.
    `visible [n, m, width] bool`, None where everything is.
    """

    block: Block
    first_lane: int
    take: np.ndarray
    rows: np.ndarray
    place: np.ndarray
    visible: np.ndarray | None

    @property
    def num_lanes(self) -> int:
        """Lanes that take part in the call."""
        return len(self.take)

    @property
    def source(self) -> np.ndarray:
        """`[n, width] int64`: packed tokens of the lanes that take part."""
        return self.block.source[self.first_lane : self.first_lane + self.num_lanes]


def plan_prompts(prompts: list[np.ndarray], *, n: int, share: bool) -> PromptForest:
    """Lay out `n` rollouts of each prompt. Not shared: every rollout is a root of its own, prompts included."""
    if share:
        forest = build_forest(prompts)
        row_of_rollout = np.repeat(np.arange(len(prompts)), n)
    else:
        prompts = [prompt for prompt in prompts for _ in range(n)]
        forest = build_forest(prompts, content_keys=[np.full(len(prompt), i) for i, prompt in enumerate(prompts)])
        row_of_rollout = np.arange(len(prompts))
    last = forest.row_index[forest.row_offsets[1:] - 1][row_of_rollout]
    order = np.argsort(last, kind="stable")
    return PromptForest(forest, order, last[order], forest.row_lens[row_of_rollout][order])


def read_blocks(plan: PromptForest, active: np.ndarray) -> list[BlockRead]:
    """Plan the calls of one step. active: `[R] int64`, ascending places in the decode order."""
    last = plan.last[active]
    reads = (_read_block(plan, block, last) for block in plan.blocks)
    return [read for read in reads if read is not None]


def _read_block(plan: PromptForest, block: Block, last: np.ndarray) -> BlockRead | None:
    low, high = np.searchsorted(last, block.lanes[:, 0]), np.searchsorted(last, block.lanes[:, 1])
    if block.is_flat:
        high = np.searchsorted(last, plan.token_end[block.lanes[:, 0]])
    with_readers = np.flatnonzero(high > low)
    if not len(with_readers):
        return None
    lanes = slice(int(with_readers[0]), int(with_readers[-1]) + 1)
    low, counts = low[lanes], (high - low)[lanes]
    steps = np.arange(counts.max())
    is_real = steps < counts[:, None]
    take = np.minimum(low[:, None] + np.minimum(steps, np.maximum(counts - 1, 0)[:, None]), len(last) - 1)
    read = BlockRead(block, lanes.start, take, take[is_real], np.flatnonzero(is_real), None)
    return replace(read, visible=_visible(plan, read, last))


def _visible(plan: PromptForest, read: BlockRead, last: np.ndarray) -> np.ndarray | None:
    block, source = read.block, read.source[:, None, :]
    lens = (block.lanes[:, 1] - block.lanes[:, 0])[read.first_lane : read.first_lane + read.num_lanes]
    if block.is_flat and lens.min() == block.width:
        return None
    visible = np.broadcast_to((np.arange(block.width) < lens[:, None])[:, None], (*read.take.shape, block.width))
    if not block.is_flat:
        reader = last[read.take][:, :, None]
        visible = visible & (source <= reader) & (reader < plan.token_end[source])
    return None if visible.all() else visible


def _cut_blocks(forest: Forest, last: np.ndarray) -> list[Block]:
    """Bottom up over segments: read a subtree as one masked lane, or its first segment alone and then its children."""
    children: list[list[int]] = [[] for _ in range(forest.num_segments + 1)]
    for n, parent in enumerate(forest.segment_parent.tolist()):
        children[parent].append(n)  # the roots land in the last entry
    readers = np.searchsorted(last, forest.subtree_end) - np.searchsorted(last, forest.start)
    costs = np.zeros(forest.num_segments)
    splits: list[list[_Choice] | None] = [None] * forest.num_segments
    for n in reversed(range(forest.num_segments)):
        whole = CALL_COST + readers[n] * (forest.subtree_end[n] - forest.start[n])
        below = _choose(children[n], forest, readers, costs)
        split = CALL_COST + readers[n] * (forest.end[n] - forest.start[n]) + sum(choice.cost for choice in below)
        is_split = bool(children[n]) and split < whole
        costs[n], splits[n] = min(split, whole), below if is_split else None
    return _collect(forest, splits, _choose(children[-1], forest, readers, costs))


@dataclass(frozen=True)
class _Choice:
    """Sibling segments whose subtrees are the lanes of one block, or are read each in its own best way."""

    segments: list[int]
    is_block: bool
    cost: float


def _choose(siblings: list[int], forest: Forest, readers: np.ndarray, costs: np.ndarray) -> list[_Choice]:
    """Siblings of similar size go together; each such set is one block where that is cheaper than apart."""
    sizes = forest.subtree_end - forest.start
    choices, waste, first = [], 0.0, 0
    siblings = sorted(siblings, key=lambda n: -sizes[n])
    for i in range(1, len(siblings) + 1):
        widest = readers[siblings[first:i]].max() * sizes[siblings[first]]
        if i < len(siblings):
            waste += max(widest - readers[siblings[i]] * sizes[siblings[i]], 0)
            if waste <= CALL_COST:
                continue
        members = siblings[first:i]
        together, apart = CALL_COST + widest * len(members), float(costs[members].sum())
        choices.append(_Choice(sorted(members), bool(together <= apart), float(min(together, apart))))
        waste, first = 0.0, i
    return choices


def _collect(forest: Forest, splits: list[list[_Choice] | None], choices: list[_Choice]) -> list[Block]:
    blocks, todo = [], list(choices)
    while todo:
        choice = todo.pop()
        if choice.is_block:
            nodes = np.array(choice.segments)
            lanes = np.stack([forest.start[nodes], forest.subtree_end[nodes]], axis=1)
            blocks.append(Block(lanes, bool(forest.is_leaf[nodes].all())))
            continue
        for n in choice.segments:
            below = splits[n]
            end = forest.subtree_end[n] if below is None else forest.end[n]
            blocks.append(Block(np.array([[forest.start[n], end]]), below is not None or bool(forest.is_leaf[n])))
            todo.extend(below or [])
    return blocks


def _slice_forest(forest: Forest, start: int, end: int) -> Forest:
    """Whole trees of a forest, packed `[start, end)`, without rows."""
    inside = (forest.start >= start) & (forest.start < end)
    first_segment = int(np.searchsorted(forest.start, start))
    parent, segment_parent = forest.parent[start:end], forest.segment_parent[inside]
    empty = np.empty(0, np.int64)
    return Forest(
        input_ids=forest.input_ids[start:end],
        position_ids=forest.position_ids[start:end],
        parent=np.where(parent < 0, -1, parent - start),
        start=forest.start[inside] - start,
        end=forest.end[inside] - start,
        subtree_end=forest.subtree_end[inside] - start,
        segment_parent=np.where(segment_parent < 0, -1, segment_parent - first_segment),
        row_index=empty,
        row_offsets=np.zeros(1, np.int64),
    )
