"""Pieces over ranks, so that all finish together: whole pieces first, cuts only where nothing else levels the load."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from arctic_platform.rl.zorro_train.pieces import Caps, Costs, Piece, fitting, fitting_evenly, merge, take
from arctic_platform.rl.zorro_train.pouring import ORDERS, TOLERANCE, Poured, least_goal, pour

WITHIN_REACH = 1.25
"""Whole pieces are exchanged where the dearest rank costs at most so many times a level load."""

LEVEL_ENOUGH, LEVEL_WELL = 0.02, 1.03
"""Ranks are not filled where the dearest is so near to what no plan can beat, and not in other orders where it is so
near to the mean."""

FINEST = 0.005
"""Goals, and the costs of dearest ranks, that are nearer to each other count as equal."""

WORTH_A_CUT = 0.05
"""A rank is cut only for at least this part of a level load; smaller gains are left to whole pieces."""

NUM_RECEIVERS, NUM_CUTS = 32, 3
"""Ranks with the least load that are tried for whole pieces, and for cuts."""

MAX_GOALS = 8
"""Common goals that ranks are filled to."""


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

    @classmethod
    def joining(cls, costs: Costs, caps: Caps, ranks: list[list[Piece]]) -> Loads:
        """The same for ranks with several pieces of one tree, which are joined where they fit one micro-batch."""
        state = cls(costs, caps, [[] for _ in ranks])
        for r, pieces in enumerate(ranks):
            for piece in pieces:
                state.add(r, piece)
        return state

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


def spread(costs: Costs, groups: list[Piece], num_ranks: int, caps: Caps) -> list[list[Piece]]:
    """Pieces of the groups for each rank: near-equal cost, sharing kept where it can be, no rank empty while rows last.

    Deterministic. Pieces fit `caps` or are single rows. Whole pieces are tried first; where they do not level the
    ranks, these are filled up to the least common goal that a search finds.
    """
    num_rows = sum(len(group) for group in groups)
    if num_ranks >= num_rows:
        rows = [group.select(np.array([i])) for group in groups for i in range(len(group))]
        rows.sort(key=lambda row: (-row.cost, int(row.at[0])))
        return [[row] for row in rows] + [[] for _ in range(num_ranks - num_rows)]
    pieces = fitting(groups, caps)
    least = max(sum(piece.cost for piece in pieces) / num_ranks, _dearest_row(groups))
    best = _exchanged(costs, caps, _longest_first(pieces, num_ranks), least)
    if best.makespan > (1 + LEVEL_ENOUGH) * least and len(pieces) > len(groups):
        state = _exchanged(costs, caps, _longest_first(fitting_evenly(groups, caps), num_ranks), least)
        best = state if _is_better(state, best) else best
    if best.makespan > (1 + LEVEL_ENOUGH) * least:
        for poured, goal in _filled(groups, num_ranks, caps, best.makespan):
            state = Loads.joining(costs, caps, poured.ranks)
            level(state, min(goal, float(state.loads.mean())))
            best = state if _is_better(state, best) else best
    _fill_empty(best)
    return best.ranks


def _exchanged(costs: Costs, caps: Caps, ranks: list[list[Piece]], least: float) -> Loads:
    """Ranks that are levelled if they are near to it."""
    state = Loads(costs, caps, ranks)
    if state.makespan <= WITHIN_REACH * least:
        level(state, least)
    return state


def _filled(groups: list[Piece], num_ranks: int, caps: Caps, most: float) -> Iterator[tuple[Poured, float]]:
    """Ranks filled to the least goal below `most` that is found to be kept, then to the largest that is not."""
    least = max(sum(group.cost for group in groups) / num_ranks, _dearest_row(groups))
    low, high, step = least_goal(groups, num_ranks, least, caps), most, 1 + TOLERANCE
    kept: Poured | None = None
    missed: Poured | None = None
    for _ in range(MAX_GOALS):
        is_level = kept is not None and high <= LEVEL_WELL * max(kept.mean, least)
        if high <= (1 + (TOLERANCE if is_level else FINEST)) * low:
            break
        middle = math.sqrt(low * high)
        goal = middle if kept else min(low * step, middle)
        poured = pour(groups, num_ranks, goal, caps)
        if poured.keeps:
            kept, high = poured, goal
        else:
            missed, low, step = poured, goal, 1 + 2 * (step - 1)
    for order in ORDERS[1:]:
        while kept and high > LEVEL_WELL * max(kept.mean, least):
            goal = high / (1 + FINEST / 2)
            poured = pour(groups, num_ranks, goal, caps, order)
            if not poured.keeps:
                break
            kept, high = poured, goal
    for found, goal in ((kept, high), (missed, low)):
        if found:
            yield found, goal


def _is_better(state: Loads, other: Loads) -> bool:
    """Finishes clearly earlier, or about as early and computes less."""
    if abs(state.makespan - other.makespan) > FINEST / 2 * other.makespan:
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


def _dearest_first(pieces: list[Piece]) -> list[Piece]:
    return sorted(pieces, key=lambda piece: (-piece.cost, int(piece.at[0])))


def _dearest_row(pieces: list[Piece]) -> float:
    return max((piece.dearest_row for piece in pieces), default=0.0)


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
            or _trade(state, donor, WORTH_A_CUT * (float(state.loads[donor]) - target))
            or _exchange_whole(state, donor, receivers, WORTH_A_CUT * (float(state.loads[donor]) - target))
        ):
            return


def _move_to_kin(state: Loads, donor: int, target: float) -> bool:
    """Rows to a rank that holds others of their tree already, so that no prefix is computed once more."""
    surplus = float(state.loads[donor]) - target
    for i, piece in enumerate(state.ranks[donor]):
        kin = [r for r in state.holders[piece.tree] if r != donor and state.loads[r] < state.loads[donor]]
        for receiver in sorted(kin, key=lambda r: (state.loads[r], r))[:2]:
            gap = float(state.loads[donor] - state.loads[receiver])
            room = min(max(float(target - state.loads[receiver]), gap / 2), surplus)
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


def _trade(state: Loads, donor: int, least: float) -> bool:
    """Exchange children of one node between two ranks that both hold some of them: no prefix is computed once more."""
    for i, piece in enumerate(state.ranks[donor]):
        kin = sorted(state.holders[piece.tree] - {donor}, key=lambda r: (state.loads[r], r))
        for r in kin[:NUM_RECEIVERS]:
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
    if not (len(kept) or d):
        return False
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


def spread_equally(costs: Costs, groups: list[Piece], num_ranks: int, caps: Caps) -> list[list[Piece]]:
    """Pieces for each rank: equal numbers of rows (the first ranks have one more where they do not divide).

    Dearest piece first, to the rank with the least load that has room for all its rows; where none has, it is cut.
    Whole pieces of equal size are then exchanged between the dearest and cheaper ranks while that helps.
    """
    pieces = fitting(groups, caps)
    num_rows = sum(len(piece) for piece in pieces)
    small, num_large = divmod(num_rows, num_ranks)
    ranks: list[list[Piece]] = [[] for _ in range(num_ranks)]
    room = np.array([small + (r < num_large) for r in range(num_ranks)])
    loads = np.zeros(num_ranks)
    queue = _dearest_first(pieces)[::-1]
    while queue:
        piece = queue.pop()
        roomy = np.flatnonzero(room >= len(piece))
        if not len(roomy):
            r = int(np.argmax(room))
            chosen = take(piece, np.inf, np.inf, int(room[r]))
            piece, rest = piece.split(chosen)
            queue.append(rest)
        else:
            r = int(roomy[np.argmin(loads[roomy])])
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
