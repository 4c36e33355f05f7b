"""Pieces over ranks, so that all finish together: whole pieces first, cuts only where nothing else levels the load."""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from arctic_platform.rl.zorro_train.pieces import Caps, Costs, Piece, merge, take

TOLERANCE = 0.01
"""A rank is level when it costs at most this much more than the mean (or than the dearest row)."""

LEVEL_ENOUGH = 0.02
"""No further goal is tried once the dearest rank is so near to the mean (or to the dearest row)."""

WORTH_A_CUT = 0.05
"""A rank is cut only for at least this part of a level load; smaller gains are left to whole pieces."""

NUM_RECEIVERS, NUM_CUTS = 32, 3
"""Ranks with the least load that are tried for whole pieces, and for cuts."""

MAX_GOALS, MAX_GOAL_RANKS = 12, 4096
"""Loads between the mean and the first result that are tried as the common goal of all ranks: at most 12, and for more
than 341 ranks as many as make 4,096 ranks in all. What a goal leads to is not monotone, so they are tried in turn."""


@dataclass
class Loads:
    """Pieces of every rank and what they cost."""

    costs: Costs
    caps: Caps
    ranks: list[list[Piece]]
    loads: np.ndarray = field(init=False)
    holders: dict[int, set[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.loads = np.array([sum(piece.cost for piece in pieces) for pieces in self.ranks], np.float64)
        self.holders = defaultdict(set)
        for r, pieces in enumerate(self.ranks):
            for piece in pieces:
                self.holders[piece.tree].add(r)

    @property
    def makespan(self) -> float:
        """Cost of the dearest rank."""
        return float(self.loads.max())

    def remove(self, r: int, i: int) -> Piece:
        """Take piece i from rank r."""
        piece = self.ranks[r].pop(i)
        self.loads[r] -= piece.cost
        if all(other.tree != piece.tree for other in self.ranks[r]):
            self.holders[piece.tree].discard(r)
        return piece

    def add(self, r: int, piece: Piece) -> None:
        """Give a piece to rank r, where it joins a piece of its tree if both fit one micro-batch."""
        i = self.partner(r, piece)
        if i is not None:
            piece = merge(self.costs, [piece, self.remove(r, i)])
        self.ranks[r].append(piece)
        self.loads[r] += piece.cost
        self.holders[piece.tree].add(r)

    def partner(self, r: int, piece: Piece) -> int | None:
        """The piece of rank r that `piece` can be joined with."""
        if r not in self.holders[piece.tree]:
            return None
        for i, other in enumerate(self.ranks[r]):
            is_small = len(other) + len(piece) <= self.caps.rows
            if other.tree == piece.tree and is_small and merge(self.costs, [piece, other]).fits(self.caps):
                return i
        return None


def spread(costs: Costs, pieces: list[Piece], num_ranks: int, caps: Caps) -> list[list[Piece]]:
    """Pieces for each rank: near-equal cost, sharing kept where it can be, no rank empty while rows last.

    Deterministic. Pieces must fit `caps` or be single rows; those returned do too.
    """
    num_rows = sum(len(piece) for piece in pieces)
    if num_ranks >= num_rows:
        rows = [piece.select(np.array([i])) for piece in pieces for i in range(len(piece))]
        rows.sort(key=lambda row: (-row.cost, int(row.at[0])))
        return [[row] for row in rows] + [[] for _ in range(num_ranks - num_rows)]
    dearest_row = _dearest_row(pieces)
    least = max(sum(piece.cost for piece in pieces) / num_ranks, dearest_row)
    best = _levelled(costs, caps, _longest_first(pieces, num_ranks), least)
    num_goals = min(MAX_GOALS, max(MAX_GOAL_RANKS // num_ranks, 1))
    for goal in np.linspace(least, max(best.makespan, least), num_goals + 1)[:-1].tolist():
        level_load = max(float(best.loads.mean()), dearest_row)
        if best.makespan <= max((1 + TOLERANCE) * goal, (1 + LEVEL_ENOUGH) * level_load):
            break
        state = _levelled(costs, caps, _fullest_first(pieces, num_ranks, goal), goal)
        best = state if _is_better(state, best) else best
    _fill_empty(best)
    return best.ranks


def _is_better(state: Loads, other: Loads) -> bool:
    """Finishes clearly earlier, or about as early and computes less."""
    if abs(state.makespan - other.makespan) > TOLERANCE / 2 * other.makespan:
        return state.makespan < other.makespan
    return state.loads.sum() < other.loads.sum()


def _longest_first(pieces: list[Piece], num_ranks: int) -> list[list[Piece]]:
    """Each piece to the rank with the least load, dearest piece first."""
    ranks: list[list[Piece]] = [[] for _ in range(num_ranks)]
    heap = [(0.0, r) for r in range(num_ranks)]
    for piece in _dearest_first(pieces):
        load, r = heapq.heappop(heap)
        ranks[r].append(piece)
        heapq.heappush(heap, (load + piece.cost, r))
    return ranks


def _fullest_first(pieces: list[Piece], num_ranks: int, goal: float) -> list[list[Piece]]:
    """Each piece to the fullest rank that stays within the goal; what exceeds it is cut into parts first."""
    ranks: list[list[Piece]] = [[] for _ in range(num_ranks)]
    loads = [(0.0, r) for r in range(num_ranks)]  # ascending
    parts = [part for piece in pieces for part in _cut_to(piece, goal)]
    for piece in _dearest_first(parts):
        i = max(bisect_right(loads, ((1 + TOLERANCE) * goal - piece.cost, num_ranks)) - 1, 0)
        load, r = loads.pop(i)
        ranks[r].append(piece)
        insort(loads, (load + piece.cost, r))
    return ranks


def _cut_to(piece: Piece, goal: float) -> list[Piece]:
    """Parts of a piece that cost at most `goal`, all but the last close to it; a dearer row is a part by itself."""
    parts = []
    while piece.cost > (1 + TOLERANCE) * goal and len(piece) > 1:
        chosen = take(piece, goal, (1 - WORTH_A_CUT) * goal)
        if not len(chosen):
            chosen = np.argmax(piece.costs.full[piece.at], keepdims=True)
        part, piece = piece.split(chosen)
        parts.append(part)
    return [*parts, piece]


def _dearest_first(pieces: list[Piece]) -> list[Piece]:
    return sorted(pieces, key=lambda piece: (-piece.cost, int(piece.at[0])))


def _dearest_row(pieces: list[Piece]) -> float:
    return max((float(piece.costs.full[piece.at].max()) for piece in pieces if len(piece)), default=0.0)


def _levelled(costs: Costs, caps: Caps, ranks: list[list[Piece]], goal: float) -> Loads:
    state = Loads(costs, caps, ranks)
    level(state, goal)
    return state


def level(state: Loads, goal: float) -> None:
    """Move work from the dearest rank until it costs at most `goal`, the mean or the dearest row, or nothing helps."""
    dearest_row = _dearest_row([piece for pieces in state.ranks for piece in pieces])
    num_pieces = sum(map(len, state.ranks))
    for _ in range(4 * (len(state.ranks) + num_pieces)):
        target = max(goal, float(state.loads.mean()), dearest_row)
        donor = int(np.argmax(state.loads))
        if state.loads[donor] <= (1 + TOLERANCE) * target:
            return
        receivers = np.argsort(state.loads, kind="stable")[:NUM_RECEIVERS]
        if not (
            _move_to_kin(state, donor, target)
            or _exchange_whole(state, donor, receivers, 0.5 * (float(state.loads[donor]) - target))
            or any(_cut(state, donor, r, target) for r in receivers[:NUM_CUTS].tolist())
            or _trade(state, donor, receivers, WORTH_A_CUT * (float(state.loads[donor]) - target))
            or _exchange_whole(state, donor, receivers, WORTH_A_CUT * (float(state.loads[donor]) - target))
        ):
            return


def _move_to_kin(state: Loads, donor: int, target: float) -> bool:
    """Rows to a rank that holds others of their tree already, so that no prefix is computed once more."""
    surplus = float(state.loads[donor]) - target
    for i, piece in enumerate(state.ranks[donor]):
        kin = [r for r in state.holders[piece.tree] if r != donor and state.loads[r] < target]
        for receiver in sorted(kin, key=lambda r: (state.loads[r], r))[:2]:
            room = min(float(target - state.loads[receiver]), surplus)
            base = piece.node.base if len(piece) > 1 else 0.0
            chosen = take(piece, base + room, base + room)
            if len(chosen) and _gains(state, donor, receiver, i, chosen, WORTH_A_CUT * surplus):
                return True
    return False


def _gains(state: Loads, donor: int, receiver: int, i: int, chosen: np.ndarray, least: float) -> bool:
    """Move the chosen rows of a donor's piece, if the dearer of both ranks then costs less by more than `least`."""
    piece = state.ranks[donor][i]
    moved, rest = piece.split(chosen)
    partner = state.partner(receiver, moved)
    added = moved.cost
    if partner is not None:
        other = state.ranks[receiver][partner]
        added = merge(state.costs, [moved, other]).cost - other.cost
    before = float(state.loads[donor])
    after = max(before - piece.cost + rest.cost, float(state.loads[receiver]) + added)
    if after >= before - max(least, 1e-9 * before):
        return False
    state.remove(donor, i)
    state.add(donor, rest)
    state.add(receiver, moved)
    return True


def _exchange_whole(state: Loads, donor: int, receivers: np.ndarray, least: float) -> bool:
    """Give a whole piece, or swap it for a cheaper one, where the dearer of both ranks then costs less by `least`."""
    ours = np.array([piece.cost for piece in state.ranks[donor]])
    places = [(r, i) for r in receivers.tolist() if r != donor for i in range(-1, len(state.ranks[r]))]
    if not len(ours) or not places:
        return False
    theirs = np.array([state.ranks[r][i].cost if i >= 0 else 0.0 for r, i in places])
    moved = ours[:, None] - theirs
    loads = state.loads[[r for r, _ in places]]
    before = float(state.loads[donor])
    after = np.maximum(before - moved, loads + moved)
    n, at = np.unravel_index(int(np.argmin(after)), after.shape)
    if before - after[n, at] <= max(least, 1e-9 * before):
        return False
    receiver, i = places[at]
    mine, other = state.remove(donor, int(n)), state.remove(receiver, i) if i >= 0 else None
    state.add(receiver, mine)
    if other is not None:
        state.add(donor, other)
    return True


def _trade(state: Loads, donor: int, receivers: np.ndarray, least: float) -> bool:
    """Exchange children of one node between two ranks that both hold some of them: no prefix is computed once more."""
    for i, piece in enumerate(state.ranks[donor]):
        for r in receivers.tolist():
            if r == donor or r not in state.holders[piece.tree]:
                continue
            for j, other in enumerate(state.ranks[r]):
                if other.tree == piece.tree and _trade_children(state, (donor, i), (r, j), least):
                    return True
    return False


def _trade_children(state: Loads, ours: tuple[int, int], theirs: tuple[int, int], least: float) -> bool:
    """Swap the pair of children, or give one, that levels both ranks best, if it gains more than `least`."""
    mine, other = (state.ranks[r][i] for r, i in (ours, theirs))
    if mine.node.depth != other.node.depth:
        return False
    before, load = float(state.loads[ours[0]]), float(state.loads[theirs[0]])
    moved = mine.node.costs[:, None] - np.append(0.0, other.node.costs)
    after = np.maximum(before - moved, load + moved)
    c, d = np.unravel_index(int(np.argmin(after)), after.shape)
    if before - after[c, d] <= least:
        return False
    given, kept = mine.split(mine.node.rows_of([int(c)]))
    parts = [[kept], [given, other]]
    if d:
        taken, rest = other.split(other.node.rows_of([int(d) - 1]))
        parts = [[kept, taken], [given, rest]]
    new_mine, new_other = (merge(state.costs, [part for part in side if len(part)]) for side in parts)
    gained = before - max(before - mine.cost + new_mine.cost, load - other.cost + new_other.cost)
    if gained <= max(least, 1e-9 * before) or not (new_mine.fits(state.caps) and new_other.fits(state.caps)):
        return False
    for (r, i), piece in ((ours, new_mine), (theirs, new_other)):
        state.remove(r, i)
        state.add(r, piece)
    return True


def _cut(state: Loads, donor: int, receiver: int, target: float) -> bool:
    """Rows of a piece of the donor, cut at the node that loses least, to fill the receiver."""
    room = target - float(state.loads[receiver])
    surplus = float(state.loads[donor]) - target
    gap = float(state.loads[donor] - state.loads[receiver])
    pieces = state.ranks[donor]
    for i in sorted((i for i in range(len(pieces)) if len(pieces[i]) > 1), key=lambda i: (pieces[i].node.base, i)):
        base = pieces[i].node.base
        for amount in (min(surplus, room - base), room - base, (gap - base) / 2, gap - base):
            if amount <= 0:
                continue
            chosen = take(pieces[i], base + amount, base + (1 - WORTH_A_CUT) * amount)
            if len(chosen) and _gains(state, donor, receiver, i, chosen, WORTH_A_CUT * surplus):
                return True
    return False


def _fill_empty(state: Loads) -> None:
    """A row, or half a piece, for every rank that has none."""
    for r, pieces in enumerate(state.ranks):
        if pieces:
            continue
        many = [s for s, held in enumerate(state.ranks) if sum(map(len, held)) > 1]
        donor = max(many, key=lambda s: (state.loads[s], -s))
        i = max(range(len(state.ranks[donor])), key=lambda i: (state.ranks[donor][i].cost, -i))
        piece = state.remove(donor, i)
        if len(piece) > 1 and not state.ranks[donor]:
            piece, rest = piece.split(np.arange(len(piece) // 2))
            state.add(donor, rest)
        state.add(r, piece)


def spread_equally(costs: Costs, pieces: list[Piece], num_ranks: int, caps: Caps) -> list[list[Piece]]:
    """Pieces for each rank: equal numbers of rows (the first ranks have one more where they do not divide).

    Dearest piece first, to the rank with the least load that has room for all its rows; where none has, it is cut.
    Whole pieces of equal size are then exchanged between the dearest and cheaper ranks while that helps.
    """
    num_rows = sum(len(piece) for piece in pieces)
    small, num_large = divmod(num_rows, num_ranks)
    ranks: list[list[Piece]] = [[] for _ in range(num_ranks)]
    room = np.array([small + (r < num_large) for r in range(num_ranks)])
    loads = np.zeros(num_ranks)
    queue = _dearest_first(pieces)[::-1]
    while queue:
        piece = queue.pop()
        fitting = np.flatnonzero(room >= len(piece))
        if not len(fitting):
            r = int(np.argmax(room))
            chosen = take(piece, np.inf, np.inf, int(room[r]))
            piece, rest = piece.split(chosen)
            queue.append(rest)
        else:
            r = int(fitting[np.argmin(loads[fitting])])
        ranks[r].append(piece)
        room[r] -= len(piece)
        loads[r] += piece.cost
    state = Loads(costs, caps, ranks)
    _exchange(state)
    return state.ranks


def _exchange(state: Loads) -> None:
    """Swap whole pieces of equal numbers of rows while the dearest rank gets cheaper by it."""
    for _ in range(4 * len(state.ranks)):
        donor = int(np.argmax(state.loads))
        if not any(_swap_alike(state, donor, r) for r in np.argsort(state.loads, kind="stable")[:8].tolist()):
            return


def _swap_alike(state: Loads, donor: int, receiver: int) -> bool:
    gap = float(state.loads[donor] - state.loads[receiver])
    pairs = [
        (abs(gap / 2 - (ours.cost - theirs.cost)), i, j)
        for i, ours in enumerate(state.ranks[donor])
        for j, theirs in enumerate(state.ranks[receiver])
        if len(ours) == len(theirs) and 0 < ours.cost - theirs.cost < gap
    ]
    if not pairs or min(pairs)[0] > 0.45 * gap:
        return False
    _, i, j = min(pairs)
    mine, other = state.remove(donor, i), state.remove(receiver, j)
    state.add(receiver, mine)
    state.add(donor, other)
    return True
