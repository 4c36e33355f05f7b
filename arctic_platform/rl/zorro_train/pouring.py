"""Ranks filled up to a common goal: what is dear to cut goes first and whole, what is cheap to cut last, into the gaps.

    goal  ------------------------------      a piece that fits a gap whole goes to the tightest one; one that fits
          |xxxx|xxxx|xxxx|..c.|..c.|..c       none is cut at the node that loses least, a part for each of the largest
          |xxxx|xxx.|xx..|dddd|bbbb|aaa       gaps. Short prompts make cheap parts, so they wait.

What a cut computes again is its prefix; a rank that holds rows of the same tree in a micro-batch with room has that
prefix already (counted here by the tree's root; merging finds what is shared further down).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from arctic_platform.rl.zorro_train.pieces import Caps, Piece, cut_to_fit, take

TOLERANCE = 0.01
"""A rank is level when it costs at most this much more than the goal."""

NEARLY = 0.95
"""A part that fills so much of a gap is not cut more finely."""


@dataclass(frozen=True)
class Order:
    """Which piece goes first: its cost counts once, what a cut computes again `cut` times, its dearest row `row`."""

    cut: float
    row: float

    def key(self, piece: Piece) -> tuple[float, int]:
        """Smallest first."""
        return -piece.cost - self.cut * piece.base - self.row * piece.dearest_row, int(piece.at[0])


ORDERS = (Order(4, 4), Order(2, 2), Order(8, 4), Order(1, 4), Order(4, 2), Order(16, 8), Order(8, 1))
"""The usual one, and others that are tried where it leaves ranks apart; none is best for every batch."""

MANY_GOALS, FEW_CHILDREN = 4.0, 8.0
"""A tree that costs more than 4 goals is taken as its children, if 8 of them or fewer make a goal on average."""

NUM_TRIES = 16
"""Gaps that are looked at for a rank that holds rows of the same tree."""


@dataclass
class Gaps:
    """What every rank has, and what is left of the goal; `roots`: cost and tokens of each tree's root."""

    num_ranks: int
    goal: float
    caps: Caps
    roots: dict[int, tuple[float, int]]
    pieces: list[list[Piece]] = field(init=False)
    free: list[tuple[float, int]] = field(init=False)
    filled: list[dict[int, int]] = field(init=False)
    held: defaultdict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.pieces = [[] for _ in range(self.num_ranks)]
        self.free = [(self.goal, r) for r in range(self.num_ranks)]  # ascending
        self.filled = [{} for _ in range(self.num_ranks)]  # tokens of the last micro-batch of each tree
        self.held = defaultdict(int)  # ranks with rows of each tree

    def shared(self, r: int, piece: Piece) -> float:
        """Cost of a piece that rank r computes anyway."""
        filled = self.filled[r].get(piece.tree)
        cost, num_tokens = self.roots[piece.tree]
        return 0.0 if filled is None or filled + piece.num_tokens - num_tokens > self.caps.tokens else cost

    def put(self, i: int, piece: Piece) -> None:
        """Give a piece to the rank of gap i."""
        room, r = self.free.pop(i)
        shared = self.shared(r, piece)
        is_new = piece.tree not in self.filled[r]
        self.held[piece.tree] += is_new
        before = self.filled[r][piece.tree] - self.roots[piece.tree][1] if shared and not is_new else 0
        self.filled[r][piece.tree] = before + piece.num_tokens
        self.pieces[r].append(piece)
        insort(self.free, (room - piece.cost + shared, r))

    def tightest(self, piece: Piece) -> int | None:
        """The smallest gap that takes a piece whole, None where there is none."""
        need = piece.cost - 1e-9 * self.goal
        if self.held[piece.tree]:
            first = bisect_left(self.free, (need - self.roots[piece.tree][0], -1))
            for i in range(first, min(first + NUM_TRIES, len(self.free))):
                if self.free[i][0] + self.shared(self.free[i][1], piece) >= need:
                    return i
        i = bisect_left(self.free, (need, -1))
        return i if i < len(self.free) else None

    def part_for_largest(self, piece: Piece) -> tuple[int, np.ndarray]:
        """The largest gap, and the rows of a piece that fill it; no rows where none fit."""
        last = range(max(len(self.free) - NUM_TRIES // 2, 0), len(self.free)) if self.held[piece.tree] else [-1]
        rooms = [(self.free[i][0] + self.shared_of_part(self.free[i][1], piece), i) for i in last]
        room, i = max(rooms)
        return i % len(self.free), take(piece, room, NEARLY * room)

    def shared_of_part(self, r: int, piece: Piece) -> float:
        """As `shared`, for a part as large as the rank's micro-batch takes."""
        return self.roots[piece.tree][0] if piece.tree in self.filled[r] else 0.0


@dataclass(frozen=True)
class Poured:
    """Pieces of each rank, the mean load, and whether every load `keeps` the goal."""

    ranks: list[list[Piece]]
    mean: float
    keeps: bool


def pour(trees: list[Piece], num_ranks: int, goal: float, caps: Caps, order: Order = ORDERS[0]) -> Poured:
    """Fill ranks up to a goal; what fits nowhere goes, whole, to a rank with much room."""
    gaps = Gaps(num_ranks, goal, caps, {tree.tree: _root_of(tree) for tree in trees})
    units = [unit for tree in trees for unit in _units(tree, goal, caps)]
    keeps = True
    for piece in sorted(units, key=order.key):
        rest: Piece | None = piece
        while rest is not None:
            i = gaps.tightest(rest)
            if i is None:
                i, chosen = gaps.part_for_largest(rest)
                if len(chosen):
                    part, rest = rest.split(chosen)
                    gaps.put(i, part)
                    continue
                keeps = False
            gaps.put(i, rest)
            rest = None
    return Poured(gaps.pieces, goal - float(np.mean([room for room, _ in gaps.free])), keeps)


def least_goal(trees: list[Piece], num_ranks: int, least: float, caps: Caps) -> float:
    """A goal, at least `least`, below which the work and the cuts that it demands do not fit the ranks.

    A tree of cost c whose root costs b needs (c - b) / (goal - b) parts, each with a root of its own; as many as its
    tokens need under `caps` in any case.
    """
    costs = np.array([tree.cost for tree in trees])
    bases = np.array([tree.base for tree in trees])
    roots = np.array([_root_of(tree)[1] for tree in trees])
    rest = np.array([tree.num_tokens for tree in trees]) - roots
    goals = least * np.geomspace(1.0, 3.0, 128)[:, None]
    parts = np.ceil((costs - bases) / np.maximum(goals - bases, 1e-9 * goals) - 1e-9)
    parts = np.maximum(parts, np.ceil(rest / np.maximum(caps.tokens - roots, 1)))
    fits = (costs + bases * np.maximum(parts - 1, 0)).sum(1) <= num_ranks * goals[:, 0]
    return float(goals[np.argmax(fits), 0]) if fits.any() else least


def _root_of(tree: Piece) -> tuple[float, int]:
    return tree.base, tree.node.depth if len(tree) > 1 else tree.num_tokens


def _units(piece: Piece, goal: float, caps: Caps) -> list[Piece]:
    """Parts of a tree that are placed by themselves: within the goal and the caps, or single rows."""
    if len(piece) == 1 or (piece.cost <= (1 + TOLERANCE) * goal and piece.fits(caps)):
        return [piece]
    if piece.cost > MANY_GOALS * goal and FEW_CHILDREN * piece.node.costs.mean() >= goal:
        return [unit for child in piece.children for unit in _units(child, goal, caps)]
    parts = [piece] if piece.fits(caps) else cut_to_fit(piece, caps)
    return [unit for part in parts for unit in cut_to_goal(part, goal)]


def cut_to_goal(piece: Piece, goal: float) -> list[Piece]:
    """Parts of a piece that cost at most `goal`, all but the last close to it; a dearer row is a part by itself."""
    parts = []
    while piece.cost > (1 + TOLERANCE) * goal and len(piece) > 1:
        chosen = take(piece, goal, NEARLY * goal)
        if not len(chosen):
            chosen = np.argmax(piece.costs.full[piece.at], keepdims=True)
        part, piece = piece.split(chosen)
        parts.append(part)
    return [*parts, piece]
