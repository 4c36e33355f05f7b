"""Parts of a batch that share: sets of rows in depth-first order, what they cost, and where cutting them loses least.

Rows in depth-first order form a tree by what neighbours share; nothing else of the forest is needed:

      row   tokens shared with the row before        a piece is any set of rows; its tokens are the sum of lengths
      r0    0     s s s a a x                        minus the sum of `shared`. The smallest entry of `shared`
      r1    5     s s s a a y y                      (after the first) is the depth of its top node: cut there,
      r2    3     s s s b z z                        r0 r1 | r2, and only 3 tokens are computed twice.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from arctic_platform.forest.cost import ModelShape
from arctic_platform.forest.trie import RowOrder

SLACK = 0.03
"""How much longer than on average the pieces of a group may be that is cut evenly."""


SLACK = 0.03
"""How much longer than on average the pieces of a group may be that is cut evenly."""


@dataclass(frozen=True)
class Caps:
    """What one micro-batch may hold at most: packed tokens, and rows; infinite for no limit."""

    tokens: float = np.inf
    rows: float = np.inf


@dataclass(frozen=True, eq=False)
class Costs:
    """Costs of the rows of a batch, visited in depth-first order; all arrays `[B]` in that order.

    `prompt_lens`: tokens before the first target (a row's whole length where it has none). Without a model's shape a
    token costs 1, wherever it stands.
    """

    visits: RowOrder
    prompt_lens: np.ndarray
    shape: ModelShape | None = None

    @cached_property
    def full(self) -> np.ndarray:
        """`[B] float64`: the cost of each row alone."""
        return self.of_prefix(np.arange(len(self.visits.lens)), self.visits.lens)

    @cached_property
    def of_depth(self) -> np.ndarray:
        """`[S + 1] float64`: the cost of the first 0, 1, ... tokens of a row, logits excluded; S is the longest row."""
        depths = np.arange(int(self.visits.lens.max(initial=0)) + 1)
        return depths.astype(np.float64) if self.shape is None else self.shape.path_flops(depths)

    def of_prefix(self, at: np.ndarray, depths: np.ndarray, ends: np.ndarray | int = 0) -> np.ndarray:
        """Cost of the first `depths` tokens of the rows visited `at`, with the logits that are predicted there.

        ends: 1 where the last of these tokens predicts nothing, because the row that is shared with ends there.
        """
        cost = self.of_depth[depths]
        if self.shape is None:
            return cost
        before = self.prompt_lens[at]
        last = np.minimum(depths - ends + 1, self.visits.lens[at])
        return cost + self.shape.logit_flops * np.maximum(last - before, 0)

    def of_root(self, at: int, depth: int) -> float:
        """`of_prefix` for one row."""
        num_predicting = max(min(depth + 1, int(self.visits.lens[at])) - int(self.prompt_lens[at]), 0)
        return float(self.of_depth[depth]) + (self.shape.logit_flops * num_predicting if self.shape else 0.0)


@dataclass(frozen=True, eq=False)
class Piece:
    """Rows that are computed together, `at [n] int64`: their places in depth-first order, ascending.

    `cut [n] int64`: tokens that each shares with the one before it in the piece, 0 for the first. `tree`: number of
    the tree (rows with at least one token in common) that the rows come from.
    """

    costs: Costs
    at: np.ndarray
    cut: np.ndarray
    tree: int

    def __len__(self) -> int:
        return len(self.at)

    @cached_property
    def own(self) -> np.ndarray:
        """`[n] float64`: what each row adds to the cost of those before it."""
        if len(self) <= 1:
            return self.costs.full[self.at]
        ends = np.zeros(len(self), np.int64)
        ends[1:] = self.costs.visits.lens[self.at[:-1]] == self.cut[1:]
        own = self.costs.full[self.at] - self.costs.of_prefix(self.at, self.cut, ends)
        own[0] = self.costs.full[self.at[0]]
        return own

    @cached_property
    def cost(self) -> float:
        """Cost of one pass over the piece."""
        return float(self.own.sum())

    @cached_property
    def num_tokens(self) -> int:
        """Packed tokens of the piece."""
        return int(self.costs.visits.lens[self.at].sum() - self.cut.sum())

    @cached_property
    def node(self) -> Node:
        """The top node: where a cut loses least."""
        depth = int(self.cut[1:].min()) if len(self) > 1 else 0
        firsts = np.concatenate([[0], 1 + np.flatnonzero(self.cut[1:] == depth)])
        base = self.costs.of_root(int(self.at[0]), depth)
        own, tokens = self.own.copy(), self.costs.visits.lens[self.at] - self.cut
        own[0] -= base
        tokens[0] -= depth
        return Node(
            depth=depth,
            base=base,
            bounds=np.append(firsts, len(self)),
            costs=np.add.reduceat(own, firsts),
            tokens=np.add.reduceat(tokens, firsts),
        )

    @cached_property
    def base(self) -> float:
        """Cost of what every row has in common: what each further part of the piece computes again."""
        return self.node.base if len(self) > 1 else self.cost

    @cached_property
    def dearest_row(self) -> float:
        """Cost of the dearest row alone."""
        return float(self.costs.full[self.at].max(initial=0.0))

    @cached_property
    def children(self) -> list[Piece]:
        """The piece cut at its top node."""
        return [self.select(np.arange(first, end)) for first, end in pairwise(self.node.bounds.tolist())]

    def fits(self, caps: Caps) -> bool:
        """Whether the piece may be a micro-batch."""
        return self.num_tokens <= caps.tokens and len(self) <= caps.rows

    def select(self, chosen: np.ndarray) -> Piece:
        """The rows at the ascending places `chosen [m]` of this piece."""
        cut = np.zeros(len(chosen), np.int64)
        if len(chosen) > 1:
            cut[1:] = np.minimum.reduceat(self.cut[: chosen[-1] + 1], chosen[:-1] + 1)
        return Piece(self.costs, self.at[chosen], cut, self.tree)

    def split(self, chosen: np.ndarray) -> tuple[Piece, Piece]:
        """The rows at the ascending places `chosen`, and the others."""
        rest = np.ones(len(self), bool)
        rest[chosen] = False
        return self.select(chosen), self.select(np.flatnonzero(rest))


@dataclass(frozen=True, eq=False)
class Node:
    """Where the rows of a piece part: `depth` tokens of cost `base` above, children below.

    Child c has the piece's rows `bounds[c]:bounds[c + 1]` and adds `costs[c]`, `tokens[c]` to what is above.
    """

    depth: int
    base: float
    bounds: np.ndarray
    costs: np.ndarray
    tokens: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """`[C]`: rows of each child."""
        return np.diff(self.bounds)

    def rows_of(self, children: list[int]) -> np.ndarray:
        """Ascending places of the rows of some children."""
        spans = [np.arange(self.bounds[c], self.bounds[c + 1]) for c in sorted(children)]
        return np.concatenate([np.empty(0, np.int64), *spans])


def merge(costs: Costs, pieces: list[Piece]) -> Piece:
    """All rows of some pieces as one; prefixes that they have in common are shared."""
    if len(pieces) == 1:
        return pieces[0]
    at = np.sort(np.concatenate([np.empty(0, np.int64), *(piece.at for piece in pieces)]))
    cut = np.zeros(len(at), np.int64)
    if len(at) > 1:
        cut[1:] = np.minimum.reduceat(costs.visits.shared[: at[-1] + 1], at[:-1] + 1)
    return Piece(costs, at, cut, pieces[0].tree if pieces else 0)


def trees(costs: Costs) -> list[Piece]:
    """One piece for each tree of the batch, in depth-first order; rows without a token are trees of their own."""
    shared = costs.visits.shared
    firsts = np.flatnonzero(shared == 0)
    return [
        Piece(costs, np.arange(first, end), shared[first:end], number)
        for number, (first, end) in enumerate(pairwise([*firsts.tolist(), len(shared)]))
    ]


def fitting(groups: list[Piece], caps: Caps) -> list[Piece]:
    """The groups, those that exceed `caps` cut."""
    return [part for group in groups for part in ([group] if group.fits(caps) else cut_to_fit(group, caps))]


def fitting_evenly(groups: list[Piece], caps: Caps) -> list[Piece]:
    """The same in as many pieces, those of a group about equally long, where that can be had."""
    pieces: list[Piece] = []
    for group in groups:
        full = [group] if group.fits(caps) else cut_to_fit(group, caps)
        top = group.node.depth if len(group) > 1 else 0
        part = top + (1 + SLACK) * (group.num_tokens - top) / len(full)
        even = cut_to_fit(group, Caps(min(part, caps.tokens), caps.rows)) if len(full) > 1 else full
        pieces += even if len(even) == len(full) else full
    return pieces


def cut_to_fit(piece: Piece, caps: Caps) -> list[Piece]:
    """Pieces that fit `caps` (a row that does not fit alone is one by itself), as few as best-fit packing finds.

    Cuts are made as high as possible: children of a node are packed whole, and a child is cut only where it does not
    fit by itself. Parts of such a child and whole children share what is left of a micro-batch.
    """
    too_long = piece.costs.visits.lens[piece.at] > caps.tokens
    alone = [piece.select(np.array([i])) for i in np.flatnonzero(too_long)]
    if len(alone):
        piece = piece.select(np.flatnonzero(~too_long))
    if not len(piece):
        return alone
    nodes, parents = [piece], [-1]
    whole: list[list[tuple[int, int, np.ndarray]]] = []  # of each node: tokens, rows, places in `piece`
    offsets = [np.arange(len(piece))]
    for n, part in enumerate(nodes):
        fitting: list[tuple[int, int, np.ndarray]] = []
        node = part.node
        for c, (tokens, size) in enumerate(zip(node.tokens.tolist(), node.sizes.tolist(), strict=True)):
            chosen = np.arange(node.bounds[c], node.bounds[c + 1])
            if node.depth + tokens <= caps.tokens and size <= caps.rows:
                fitting.append((node.depth + tokens, size, offsets[n][chosen]))
            else:
                nodes.append(part.select(chosen))
                parents.append(n)
                offsets.append(offsets[n][chosen])
        whole.append(fitting)
    for n in reversed(range(len(nodes))):
        packed = _pack(whole[n], nodes[n].node.depth, caps)
        if parents[n] < 0:
            return alone + [piece.select(np.sort(places)) for _, _, places in packed]
        whole[parents[n]].extend(packed)
    raise AssertionError("the first node has no parent")


def _pack(items: list[tuple[int, int, np.ndarray]], depth: int, caps: Caps) -> list[tuple[int, int, np.ndarray]]:
    """Best fit, largest first: items `(tokens, rows, places)` that share `depth` tokens, joined while they fit."""
    bins: list[list[tuple[int, int, np.ndarray]]] = []
    used: list[tuple[float, int]] = []  # (free tokens, bin), ascending
    free_rows: list[float] = []
    for item in sorted(items, key=lambda item: (-item[0], -item[1])):
        tokens, rows, _ = item
        where = bisect_left(used, (tokens - depth, -1))
        while where < len(used) and free_rows[used[where][1]] < rows:
            where += 1
        if where < len(used):
            free, b = used.pop(where)
            bins[b].append(item)
            free_rows[b] -= rows
            left = free - (tokens - depth)
        else:
            b = len(bins)
            bins.append([item])
            free_rows.append(caps.rows - rows)
            left = caps.tokens - tokens
        if free_rows[b] > 0:
            entry = (left, b)
            used.insert(bisect_left(used, entry), entry)
    return [_join(members, depth) for members in bins]


def _join(members: list[tuple[int, int, np.ndarray]], depth: int) -> tuple[int, int, np.ndarray]:
    tokens = sum(tokens for tokens, _, _ in members) - depth * (len(members) - 1)
    return tokens, sum(rows for _, rows, _ in members), np.concatenate([places for _, _, places in members])


def take(piece: Piece, room: float, enough: float, max_rows: float = np.inf) -> np.ndarray:
    """Places of rows whose pass costs at most `room`, close to it, cutting the piece as high as possible.

    Whole children of the top node are taken, largest first; while less than `enough` is reached, one child more is
    cut, and so on downwards. Empty when no row fits, and never the whole piece.
    """
    taken = [np.empty(0, np.int64)]
    offset, cost, paid, limit = 0, 0.0, 0.0, min(max_rows, len(piece) - 1)
    while len(piece) > 1 and limit > 0:
        node = piece.node
        shared = node.base - paid
        if shared >= room - cost:
            break
        chosen, gained = _largest_first(node, room - cost - shared, limit)
        if chosen:
            rows = node.rows_of(chosen)
            taken.append(offset + rows)
            limit -= len(rows)
            cost += shared + gained
            paid = node.base
        composite = node.sizes > 1
        composite[chosen] = False
        if cost >= enough or not composite.any():
            break
        child = int(np.argmax(np.where(composite, node.costs, -1.0)))
        offset += int(node.bounds[child])
        piece = piece.select(np.arange(node.bounds[child], node.bounds[child + 1]))
    return np.sort(np.concatenate(taken))


def _largest_first(node: Node, room: float, max_rows: float) -> tuple[list[int], float]:
    """Children that together add at most `room` and `max_rows`, largest first; what they add."""
    by_cost = np.argsort(-node.costs, kind="stable")
    costs, sizes = node.costs[by_cost], node.sizes[by_cost]
    chosen: list[int] = []
    gained, at = 0.0, 0
    smallest = float(costs[-1])
    while at < len(costs) and room - gained >= smallest and max_rows > 0:
        at += int(np.searchsorted(-costs[at:], gained - room, side="left"))
        if at < len(costs) and sizes[at] <= max_rows:
            chosen.append(int(by_cost[at]))
            gained += float(costs[at])
            max_rows -= int(sizes[at])
        at += 1
    return chosen, gained
