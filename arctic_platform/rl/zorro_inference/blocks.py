"""Which blocks of a paged key-value cache a decode step reads once for several requests.

A block table lists the cache blocks of one request, in order. Requests whose tables begin alike share those blocks, so
the tables of a batch are rows of block ids and form a forest, as rows of token ids do:

    tables        7 8 9 | 3 | 11            reads     7 8 9     for requests 0 1 2
                  7 8 9 | 3 | 12                        3       for requests 0 1
                  7 8 9 | 4 |               tails     11, 12, 4 one request each, with the part that is being filled

Only full blocks are shared. What follows them is a request's own tail, read token by token up to its length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arctic_platform.forest import Forest, build_forest

CALL_COST = 512
"""Tokens whose repeated reading costs about as much as one more attention call per layer."""


@dataclass(frozen=True, eq=False)
class SharedRead:
    """`blocks [w] int64`, read once for the requests `readers [m] int64`, which are places in `CascadePlan.rows`.

    level: how many reads of its requests come before this one; the reads of one level have no request in common.
    """

    blocks: np.ndarray
    readers: np.ndarray
    level: int


@dataclass(frozen=True, eq=False)
class CascadePlan:
    """`rows [R] int64`: the requests that share something. `tail_start [R] int64`: blocks that `reads` cover."""

    rows: np.ndarray
    reads: tuple[SharedRead, ...]
    tail_start: np.ndarray
    block_size: int

    @property
    def shared_tokens(self) -> int:
        """Tokens of all shared reads: what a step reads once."""
        return sum(len(read.blocks) for read in self.reads) * self.block_size

    @property
    def repeated_tokens(self) -> int:
        """The same tokens counted for every request that reads them."""
        return sum(len(read.blocks) * len(read.readers) for read in self.reads) * self.block_size

    def levels(self) -> list[list[SharedRead]]:
        """Reads by level, the roots first."""
        num = max(read.level for read in self.reads) + 1
        return [[read for read in self.reads if read.level == level] for level in range(num)]


def plan_cascade(
    tables: list[np.ndarray], rows: np.ndarray, *, block_size: int, call_cost: int = CALL_COST
) -> CascadePlan | None:
    """Plan the reads of one step, or None where sharing is not worth a call.

    tables: the full blocks of each decoding request. rows: `[len(tables)] int64`, the requests' places in the batch.
    call_cost: a run of blocks is read once only where that saves at least so many tokens.
    """
    forest = build_forest(tables)
    reads, tail_start = _shared_reads(forest, min_saved=max(-(-call_cost // block_size), 1))
    taking_part = np.flatnonzero(tail_start)
    if not len(taking_part):
        return None
    place = np.cumsum(tail_start > 0) - 1
    return CascadePlan(
        rows=rows[taking_part],
        reads=tuple(SharedRead(read.blocks, place[read.readers], read.level) for read in reads),
        tail_start=tail_start[taking_part],
        block_size=block_size,
    )


def _shared_reads(forest: Forest, *, min_saved: int) -> tuple[list[SharedRead], np.ndarray]:
    """From the roots downwards; a segment not worth a call is left to the segments below it, which become longer."""
    num = forest.num_segments
    branches = np.bincount(forest.segment_parent + 1, minlength=num + 1)[1:]
    last_segment = _last_segments(forest)
    branches += np.bincount(last_segment[last_segment >= 0], minlength=num)
    covered, level = np.zeros(num + 1, np.int64), np.zeros(num + 1, np.int64)  # entry -1: above the roots
    reads = []
    for n, parent in enumerate(forest.segment_parent.tolist()):
        top, depth = covered[parent], int(forest.position_ids[forest.end[n] - 1]) + 1
        is_read = branches[n] > 1 and (branches[n] - 1) * (depth - top) >= min_saved
        covered[n], level[n] = (depth, level[parent] + 1) if is_read else (top, level[parent])
        if is_read:
            readers = forest.segment_rows(n)
            blocks = forest.input_ids[forest.row(readers[0])[top:depth]]
            reads.append(SharedRead(blocks, readers, int(level[parent])))
    return reads, covered[last_segment]


def _last_segments(forest: Forest) -> np.ndarray:
    """`[B] int64`: the segment in which each row ends, -1 for an empty row."""
    last = np.full(forest.num_rows, -1, np.int64)
    has_tokens = forest.row_lens > 0
    ends = forest.row_index[forest.row_offsets[1:][has_tokens] - 1]
    last[has_tokens] = forest.segment_of_token[ends]
    return last


@dataclass
class ReadCounters:
    """Keys read from the cache, in tokens times layers, where requests shared something.

    shared: by reads for several requests, once each. tail: by the requests' own reads. apart: what the same requests
    would have read without sharing.
    """

    steps: int = 0
    shared: int = 0
    tail: int = 0
    apart: int = 0

    def count(self, plan: CascadePlan, num_keys: int) -> None:
        """One layer of one step, whose sharing requests have `num_keys` keys in all."""
        self.steps += 1
        self.shared += plan.shared_tokens
        self.tail += num_keys - plan.repeated_tokens
        self.apart += num_keys
