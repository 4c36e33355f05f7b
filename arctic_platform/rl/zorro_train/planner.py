"""A batch of rows -> micro-batches that are sub-forests, over ranks that finish together.

Order the rows depth-first, cut what exceeds a budget (`pieces`), level the ranks (`levelling`), pack each rank's
pieces into micro-batches. Nothing here runs a model; everything is deterministic, and no shape of a batch is refused.

A group whose shared prompt alone exceeds `max_token_len` is marked `is_staged`: its prompt is worth one forward whose
keys and values are held while the branches run (`staged`). The micro-batches planned here do not rely on that: each is
complete, its rows run alone and compute the prompt again.
"""

from __future__ import annotations

import heapq
import warnings
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

from arctic_platform.errors import ConfigError, InputError
from arctic_platform.forest.cost import ModelShape
from arctic_platform.forest.trie import Granularity, RowOrder, order_rows
from arctic_platform.rl.config import ZoRRoTrainConfig
from arctic_platform.rl.zorro_train.levelling import spread, spread_equally
from arctic_platform.rl.zorro_train.pieces import Caps, Costs, Piece, merge, trees

T = TypeVar("T")

NUM_TRIES = 16
"""Micro-batches that are looked at for a piece, the best first, before it gets another place."""

NUM_HALVINGS = 6
"""Steps of the search for the budget that fills the micro-batches of a rank evenly."""


@dataclass(frozen=True)
class Limits:
    """What a plan has to keep to.

    `max_token_len`: most packed tokens (unshared: padded positions) in one micro-batch. `max_rows`: most rows in one.
    `max_group_rows`: most rows of one tree in one. `num_ranks`: data-parallel ranks, not the world size.
    `equal_counts`: every rank gets the same number of micro-batches, empty ones at the end where rows or groups run
    out. `min_micro_batches`, `multiple_of`: of each rank's number. `equal_rows`: ranks get equal numbers of rows, as
    callers need that split a batch by rows; the first ranks get one more where they do not divide.

    Raises ConfigError for a limit below 1.
    """

    max_token_len: int | None = None
    max_rows: int | None = None
    max_group_rows: int | None = None
    num_ranks: int = 1
    equal_counts: bool = False
    min_micro_batches: int = 1
    multiple_of: int = 1
    equal_rows: bool = False

    def __post_init__(self) -> None:
        for name in ("max_token_len", "max_rows", "max_group_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be 1 or more, or None for no limit")
        for name in ("num_ranks", "min_micro_batches", "multiple_of"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be 1 or more")

    @classmethod
    def of(cls, config: ZoRRoTrainConfig, *, num_ranks: int = 1, scoring: bool = False) -> Limits:
        """The limits that a config sets, for `num_ranks` ranks; scoring: of passes without gradients."""
        max_token_len, max_rows = config.max_token_len, config.max_rows
        if scoring:
            max_token_len, max_rows = (
                config.log_prob_max_token_len or max_token_len,
                config.log_prob_max_rows or max_rows,
            )
        return cls(
            max_token_len=max_token_len, max_rows=max_rows, max_group_rows=config.max_rollouts, num_ranks=num_ranks
        )

    @property
    def most_rows(self) -> int | None:
        """Most rows of one tree in a micro-batch, by either limit."""
        return min((rows for rows in (self.max_rows, self.max_group_rows) if rows is not None), default=None)

    @property
    def of_piece(self) -> Caps:
        """Of rows that share."""
        return Caps(self.of_batch.tokens, self.most_rows or np.inf)

    @property
    def of_batch(self) -> Caps:
        """Of one micro-batch."""
        tokens = np.inf if self.max_token_len is None else self.max_token_len
        return Caps(tokens, np.inf if self.max_rows is None else self.max_rows)


@dataclass(frozen=True)
class PlannedBatch:
    """One micro-batch: `rows` of the caller's batch, ascending; what a pass over them computes and costs.

    `exceeds_budget`: one row, longer than `max_token_len`. `is_staged`: its group's shared prompt alone is longer.
    """

    rows: tuple[int, ...]
    num_tokens: int
    cost: float
    exceeds_budget: bool = False
    is_staged: bool = False


@dataclass(frozen=True)
class Plan:
    """The micro-batches of every rank, dearest first, and what the batch as a whole would take.

    Costs are FLOPs, or tokens where no model's shape was given. `num_tokens_unshared`: tokens of all rows;
    `num_tokens_whole`, `cost_whole`: of one pass over the whole forest, uncut; `dearest_row`: cost of the dearest row
    alone, below which no rank can stay that has it. `staged_groups`: rows that share more than `max_token_len` tokens.
    """

    ranks: tuple[tuple[PlannedBatch, ...], ...]
    num_tokens_unshared: int
    num_tokens_whole: int
    cost_whole: float
    dearest_row: float
    staged_groups: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def rank_costs(self) -> np.ndarray:
        """`[num_ranks] float64`: what each rank computes."""
        return np.array([sum(batch.cost for batch in batches) for batches in self.ranks], np.float64)

    @cached_property
    def num_tokens(self) -> int:
        """Tokens that are computed, prefixes once for every micro-batch that has them."""
        return sum(batch.num_tokens for batches in self.ranks for batch in batches)

    @property
    def makespan(self) -> float:
        """Cost of the dearest rank: when all are done."""
        return float(self.rank_costs.max())

    @property
    def ideal(self) -> float:
        """The larger of the mean cost of a rank and the dearest row: no assignment of this work ends earlier."""
        return max(float(self.rank_costs.mean()), self.dearest_row)

    @property
    def bound(self) -> float:
        """The same for the uncut forest: no plan at all ends earlier."""
        return max(self.cost_whole / len(self.ranks), self.dearest_row)

    @property
    def saving_kept(self) -> float:
        """Of the tokens that sharing the whole batch saves, the part that is still saved, 0 to 1; 1 without any."""
        whole = self.num_tokens_unshared - self.num_tokens_whole
        return (self.num_tokens_unshared - self.num_tokens) / whole if whole else 1.0

    def rank_rows(self, rank: int) -> list[int]:
        """The rows of one rank, ascending."""
        return sorted(row for batch in self.ranks[rank] for row in batch.rows)

    def in_callers_order(self, values: Sequence[T]) -> list[T]:
        """One value per row, given rank by rank and micro-batch by micro-batch -> in the order of the batch.

        Raises InputError for another number of values.
        """
        order = [row for batches in self.ranks for batch in batches for row in batch.rows]
        if len(values) != len(order):
            raise InputError(f"{len(values)} values were given for {len(order)} rows; give one per row of the plan")
        result = list(values)
        for row, value in zip(order, values, strict=True):
            result[row] = value
        return result


def plan_batch(
    rows: Sequence[ArrayLike],
    limits: Limits,
    *,
    prompt_lens: ArrayLike | None = None,
    shape: ModelShape | None = None,
    granularity: Granularity = "trie",
    min_shared: int = 1,
) -> Plan:
    """Plan the shared passes over `rows`, token-id arrays in any order; every row is in exactly one micro-batch.

    A group stays whole while it fits, and is cut at the node that loses least: n rows cut in m parts at a prefix keep
    (n - m) / (n - 1) of what sharing it saves. prompt_lens: tokens before each row's first target, for the cost of
    logits (and for granularity `prompt`). shape: of the model; without it a token costs 1. granularity, min_shared:
    those of the passes, see `forest.build_forest`.

    A row above `max_token_len` gets a micro-batch of its own, with one warning. Raises InputError for token ids that
    are none.
    """
    visits = order_rows(rows, prompt_lens=prompt_lens, granularity=granularity)
    return plan_visits(visits, limits, prompt_lens=prompt_lens, shape=shape, min_shared=min_shared)


def plan_visits(
    visits: RowOrder,
    limits: Limits,
    *,
    prompt_lens: ArrayLike | None = None,
    shape: ModelShape | None = None,
    min_shared: int = 1,
) -> Plan:
    """`plan_batch` for rows that are in depth-first order already."""
    surely_shared = np.maximum(visits.shared - (min_shared - 1), 0)  # min_shared may move a branch up by so much
    before = visits.lens if prompt_lens is None else np.asarray(prompt_lens, np.int64)[visits.order]
    costs = Costs(RowOrder(visits.order, surely_shared, visits.lens), before, shape)
    groups = trees(costs)
    caps = limits.of_piece
    over_ranks = (spread_equally if limits.equal_rows else spread)(costs, groups, limits.num_ranks, caps)
    packed = [_pack_rank(held, limits, 0) for held in over_ranks]
    packed = _with_equal_counts(over_ranks, packed, limits)
    staged = _staged_groups(visits, limits.max_token_len)
    is_staged = {row for group in staged for row in group}
    _warn_of_long_rows(visits.lens, limits.max_token_len)
    return Plan(
        ranks=tuple(
            _in_cost_order([_planned(costs, pieces, limits, is_staged) for pieces in batches]) for batches in packed
        ),
        num_tokens_unshared=int(visits.lens.sum()),
        num_tokens_whole=sum(group.num_tokens for group in groups),
        cost_whole=sum(group.cost for group in groups),
        dearest_row=float(costs.full.max(initial=0.0)),
        staged_groups=staged,
    )


def plan_padded(row_lens: Sequence[int] | np.ndarray, limits: Limits, *, shape: ModelShape | None = None) -> Plan:
    """Plan passes that share nothing: padded batches of rows of like length, the padding counted.

    Ranks are levelled by the cost of their rows. `max_group_rows` has no meaning without groups. Warns and raises as
    `plan_batch`.
    """
    lens = np.asarray(row_lens, np.int64)
    alone = RowOrder(np.arange(len(lens)), np.zeros(len(lens), np.int64), lens)
    costs = Costs(alone, lens, shape)
    over_ranks = (spread_equally if limits.equal_rows else spread)(costs, trees(costs), limits.num_ranks, Caps())
    cuts = [_cut_padded(merge(costs, held).at, lens, limits) for held in over_ranks]
    counts = [_rounded(len(cut), limits) for cut in cuts]
    if limits.equal_counts:
        counts = [max(counts)] * len(counts)
    _warn_of_long_rows(lens, limits.max_token_len)
    return Plan(
        ranks=tuple(
            _in_cost_order([_padded(costs, rows, limits) for rows in cut + [[]] * (count - len(cut))])
            for cut, count in zip(cuts, counts, strict=True)
        ),
        num_tokens_unshared=int(lens.sum()),
        num_tokens_whole=int(lens.sum()),
        cost_whole=float(costs.full.sum()),
        dearest_row=float(costs.full.max(initial=0.0)),
    )


def _pack_rank(pieces: list[Piece], limits: Limits, num_batches: int) -> list[list[Piece]]:
    """Pieces of each micro-batch of one rank: as few as best fit finds but at least `num_batches`, near-equal."""
    if not pieces:
        return [[] for _ in range(num_batches)]
    by_size = sorted(pieces, key=lambda piece: (-piece.num_tokens, int(piece.at[0])))
    full = _fullest_first(by_size, limits, limits.of_batch.tokens)
    num_batches = max(num_batches, len(full))
    batches = _emptiest_first(pieces, limits, num_batches) or _evenly_full(by_size, limits, full)
    return batches + [[] for _ in range(num_batches - len(batches))]


@dataclass
class _Open:
    """A micro-batch that is being filled."""

    limits: Limits
    pieces: list[Piece]
    num_tokens: int = 0
    num_rows: int = 0
    cost: float = 0.0

    def accepts(self, piece: Piece) -> bool:
        """Whether one more piece keeps the limits; an empty micro-batch takes any."""
        caps = self.limits.of_batch
        if not self.pieces:
            return True
        if self.num_tokens + piece.num_tokens > caps.tokens or self.num_rows + len(piece) > caps.rows:
            return False
        most = self.limits.max_group_rows
        kin = sum(len(other) for other in self.pieces if other.tree == piece.tree) if most is not None else 0
        return most is None or kin == 0 or kin + len(piece) <= most

    def put(self, piece: Piece) -> None:
        """Add a piece."""
        self.pieces.append(piece)
        self.num_tokens += piece.num_tokens
        self.num_rows += len(piece)
        self.cost += piece.cost


def _evenly_full(by_size: list[Piece], limits: Limits, full: list[list[Piece]]) -> list[list[Piece]]:
    """As many micro-batches as `full` has, by best fit under the least budget that halving finds to be enough."""
    total = sum(piece.num_tokens for piece in by_size)
    low, high = total / len(full), min(limits.of_batch.tokens, total)
    for _ in range(NUM_HALVINGS):
        budget = (low + high) / 2
        tried = _fullest_first(by_size, limits, budget)
        if len(tried) <= len(full):
            full, high = tried, budget
        else:
            low = budget
    return full


def _fullest_first(by_size: list[Piece], limits: Limits, budget: float) -> list[list[Piece]]:
    """Best fit, largest first; a piece above the budget is alone."""
    batches: list[_Open] = []
    free: list[tuple[float, int]] = []  # (tokens, micro-batch), ascending
    for piece in by_size:
        first = bisect_left(free, (piece.num_tokens, -1))
        tried = range(first, min(first + NUM_TRIES, len(free)))
        where = next((i for i in tried if batches[free[i][1]].accepts(piece)), None)
        if where is None:
            batches.append(_Open(limits, []))
            b = len(batches) - 1
        else:
            b = free.pop(where)[1]
        batches[b].put(piece)
        insort(free, (budget - batches[b].num_tokens, b))
    return [batch.pieces for batch in batches]


def _emptiest_first(pieces: list[Piece], limits: Limits, num_batches: int) -> list[list[Piece]] | None:
    """Each piece to the cheapest micro-batch that takes it, dearest piece first; None where that fails."""
    batches = [_Open(limits, []) for _ in range(num_batches)]
    heap = [(0.0, b) for b in range(num_batches)]
    for piece in sorted(pieces, key=lambda piece: (-piece.cost, int(piece.at[0]))):
        refused = []
        while heap and len(refused) < NUM_TRIES and not batches[heap[0][1]].accepts(piece):
            refused.append(heapq.heappop(heap))
        if not heap or len(refused) == NUM_TRIES:
            return None
        b = heapq.heappop(heap)[1]
        batches[b].put(piece)
        for entry in [*refused, (batches[b].cost, b)]:
            heapq.heappush(heap, entry)
    return [batch.pieces for batch in batches]


def _with_equal_counts(
    over_ranks: list[list[Piece]], packed: list[list[list[Piece]]], limits: Limits
) -> list[list[list[Piece]]]:
    """Every rank's micro-batches, in the number that the limits want."""
    counts = [_rounded(len(batches), limits) for batches in packed]
    if limits.equal_counts:
        counts = [max(counts)] * len(counts)
    return [
        batches if len(batches) == count else _pack_rank(held, limits, count)
        for held, batches, count in zip(over_ranks, packed, counts, strict=True)
    ]


def _rounded(count: int, limits: Limits) -> int:
    """At least as many as wanted, and a multiple of what is wanted; none where there are no rows and none is asked."""
    if limits.min_micro_batches > 1 or limits.equal_counts:
        count = max(count, limits.min_micro_batches)
    return -(-count // limits.multiple_of) * limits.multiple_of


def _planned(costs: Costs, pieces: list[Piece], limits: Limits, is_staged: set[int]) -> PlannedBatch:
    whole = merge(costs, pieces)
    rows = costs.visits.order[whole.at].tolist()
    exceeds = limits.max_token_len is not None and whole.num_tokens > limits.max_token_len
    staged = any(row in is_staged for row in rows)
    return PlannedBatch(tuple(sorted(rows)), whole.num_tokens, whole.cost, exceeds, staged)


def _padded(costs: Costs, rows: list[int], limits: Limits) -> PlannedBatch:
    longest = int(costs.visits.lens[rows].max(initial=0))
    num_tokens = longest * len(rows)
    cost = len(rows) * float(costs.full[rows].max(initial=0.0))
    exceeds = limits.max_token_len is not None and num_tokens > limits.max_token_len
    return PlannedBatch(tuple(sorted(rows)), num_tokens, cost, exceeds)


def _cut_padded(rows: np.ndarray, lens: np.ndarray, limits: Limits) -> list[list[int]]:
    """Rows of padded batches within the limits, rows of like length together, longest first."""
    caps = limits.of_batch
    batches: list[list[int]] = []
    for row in rows[np.argsort(-lens[rows], kind="stable")].tolist():
        num = len(batches[-1]) + 1 if batches else 0
        if not batches or num > caps.rows or num * lens[batches[-1][0]] > caps.tokens:
            batches.append([])
        batches[-1].append(row)
    return batches


def _in_cost_order(batches: list[PlannedBatch]) -> tuple[PlannedBatch, ...]:
    """Dearest first, empty ones last, so that ranks that wait for each other do like work at a time."""
    return tuple(sorted(batches, key=lambda batch: (-batch.cost, not batch.rows, batch.rows[:1])))


def _staged_groups(visits: RowOrder, max_token_len: int | None) -> tuple[tuple[int, ...], ...]:
    """Runs of rows of which each shares more than the budget with the one before it."""
    if max_token_len is None:
        return ()
    groups: list[list[int]] = []
    last = -1
    for i in np.flatnonzero(visits.shared > max_token_len).tolist():
        if i != last + 1:
            groups.append([int(visits.order[i - 1])])
        groups[-1].append(int(visits.order[i]))
        last = i
    return tuple(tuple(sorted(group)) for group in groups)


def _warn_of_long_rows(lens: np.ndarray, max_token_len: int | None) -> None:
    num_long = 0 if max_token_len is None else int((lens > max_token_len).sum())
    if num_long:
        others = f" (so do {num_long - 1} more)" if num_long > 1 else ""
        warnings.warn(
            f"a row of {lens.max()} tokens exceeds max_token_len={max_token_len} and runs alone{others}; raise the "
            "budget if memory allows",
            stacklevel=3,
        )
