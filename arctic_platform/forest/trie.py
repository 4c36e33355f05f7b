"""Rows of token ids -> a prefix forest, depth-first, without a Python step per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from arctic_platform.errors import InputError

Granularity = Literal["trie", "prompt"]
MAX_TOKEN_ID = np.iinfo(np.int32).max

NUM_NEXT = 16
"""Tokens that rows are sorted by at a time."""


@dataclass(frozen=True, eq=False)
class Forest:
    """A batch of rows with every shared token stored once.

    Packed arrays, `[T] int64`, depth-first: `input_ids`; `position_ids`, the depth of a token, equal to its index
    in every row that holds it; `parent`, the packed index of the token before it (-1 at a root).
    Segments, `[N] int64`: `start`, `end`, `subtree_end` (packed, half open) and `segment_parent` (-1 at a root).
    A segment's subtree is the packed range `[start, subtree_end)`, and a row is a path of whole segments.
    Rows, CSR: row `b` reads the packed indices `row_index[row_offsets[b]:row_offsets[b + 1]]`.
    """

    input_ids: np.ndarray
    position_ids: np.ndarray
    parent: np.ndarray
    start: np.ndarray
    end: np.ndarray
    subtree_end: np.ndarray
    segment_parent: np.ndarray
    row_index: np.ndarray
    row_offsets: np.ndarray

    @property
    def num_tokens(self) -> int:
        """Packed tokens T: what a pass computes."""
        return len(self.input_ids)

    @property
    def num_row_tokens(self) -> int:
        """Tokens of all rows together: what a pass without sharing computes."""
        return len(self.row_index)

    @property
    def num_rows(self) -> int:
        """Rows B of the caller's batch, in the caller's order."""
        return len(self.row_offsets) - 1

    @property
    def num_segments(self) -> int:
        """Segments N."""
        return len(self.start)

    @cached_property
    def row_lens(self) -> np.ndarray:
        """`[B] int64`: tokens of each row."""
        return np.diff(self.row_offsets)

    @cached_property
    def is_leaf(self) -> np.ndarray:
        """`[N] bool`: segments without children."""
        return self.subtree_end == self.end

    @cached_property
    def segment_of_token(self) -> np.ndarray:
        """`[T] int64`: the segment that stores each packed token."""
        return np.repeat(np.arange(self.num_segments), self.end - self.start)

    def row(self, b: int) -> np.ndarray:
        """The packed indices of row `b`, `[row_lens[b]] int64`."""
        return self.row_index[self.row_offsets[b] : self.row_offsets[b + 1]]

    def segment_rows(self, n: int) -> np.ndarray:
        """The rows whose path goes through segment `n`."""
        if not self.num_row_tokens:
            return np.empty(0, np.int64)
        holds = np.flatnonzero(self.row_index == self.start[n])
        return np.searchsorted(self.row_offsets, holds, side="right") - 1


@dataclass(frozen=True, eq=False)
class RowOrder:
    """The rows of a batch in depth-first order; with it every forest of some of them is known without building one.

    `order [B] int64`: the row visited i-th. `shared [B] int64`: tokens that it has in common with the row visited
    before it, 0 for the first. `lens [B] int64`: its length. Two rows share the minimum of `shared` between them.
    """

    order: np.ndarray
    shared: np.ndarray
    lens: np.ndarray

    def select(self, rows: Sequence[int]) -> RowOrder:
        """The order of some rows, which count from 0 as they are given."""
        number = np.full(len(self.order), -1)
        number[list(rows)] = np.arange(len(rows))
        at = np.flatnonzero(number[self.order] >= 0)
        shared = np.zeros(len(at), np.int64)
        if len(at) > 1:
            shared[1:] = np.minimum.reduceat(self.shared[: at[-1] + 1], at[:-1] + 1)
        return RowOrder(number[self.order[at]], shared, self.lens[at])

    def num_packed(self, min_shared: int = 1) -> int:
        """Tokens T of the forest of all rows."""
        return int(self.lens.sum()) - sum(_snapped(self, min_shared))


def order_rows(
    rows: Sequence[ArrayLike],
    *,
    prompt_lens: ArrayLike | None = None,
    granularity: Granularity = "trie",
    content_keys: Sequence[ArrayLike] | None = None,
) -> RowOrder:
    """Sort `rows` depth-first and find what neighbours share; arguments and errors are those of `build_forest`."""
    ids = [_as_ids(row, b) for b, row in enumerate(rows)]
    keys = ids if content_keys is None else _merge_keys(ids, content_keys)
    if granularity == "trie":
        order, shared = _shared_prefixes(keys)
    elif granularity == "prompt":
        order, shared = _shared_prompts(keys, _checked_prompt_lens(ids, prompt_lens))
    else:
        raise InputError(f"granularity={granularity!r} is not known; choose trie or prompt")
    lens = np.array([len(ids[b]) for b in order], np.int64)
    return RowOrder(np.array(order, np.int64), shared, lens)


def build_forest(
    rows: Sequence[ArrayLike],
    *,
    prompt_lens: ArrayLike | None = None,
    granularity: Granularity = "trie",
    min_shared: int = 1,
    content_keys: Sequence[ArrayLike] | None = None,
    visits: RowOrder | None = None,
) -> Forest:
    """Build the prefix forest of `rows`, token-id arrays of any lengths and order (an empty row is allowed).

    granularity: `trie` shares any common prefix, answers included; `prompt` shares only whole equal prompts of
    `prompt_lens` tokens. min_shared: a branch point that would leave a segment shorter than this moves up to the
    branch point above it. content_keys: one integer per token; two tokens are shared only where ids and keys agree
    (equal placeholder ids in front of different images). visits: the order of these rows under the same options, where
    it is known; otherwise they are sorted. Sorting and comparing cost O(all tokens).
    Raises InputError for ids below 0 or above int32, or arrays whose lengths disagree.
    """
    if min_shared < 1:
        raise InputError(f"min_shared={min_shared} must be 1 or more")
    rows = [np.asarray(row) for row in rows]
    if visits is None:
        visits = order_rows(rows, prompt_lens=prompt_lens, granularity=granularity, content_keys=content_keys)
    return _assemble(rows, visits, _snapped(visits, min_shared))


def _as_ids(row: ArrayLike, b: int) -> np.ndarray:
    ids = np.asarray(row)
    if ids.size == 0:
        return np.empty(0, np.int64)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise InputError(f"row {b} must be a flat list of integer token ids, got {ids.dtype} of shape {ids.shape}")
    if _largest(ids) > MAX_TOKEN_ID:
        raise InputError(f"row {b} holds a token id outside 0..{MAX_TOKEN_ID}: drop padding before building a forest")
    return ids


def _largest(ids: np.ndarray) -> int:
    """The largest id; where one is negative, something beyond every id."""
    if ids.dtype == np.int64:  # one pass: as unsigned numbers, negative ones are the largest
        return int(ids.view(np.uint64).max())
    return int(ids.max()) if ids.min() >= 0 else MAX_TOKEN_ID + 1


def _merge_keys(ids: list[np.ndarray], content_keys: Sequence[ArrayLike]) -> list[np.ndarray]:
    """Replace each (token id, content key) pair by one integer, equal exactly when both are equal."""
    keys = [np.asarray(key, dtype=np.int64).reshape(-1) for key in content_keys]
    if [len(key) for key in keys] != [len(row) for row in ids]:
        raise InputError("content_keys must hold one integer per token of every row")
    if not ids:
        return []
    pairs = np.stack([np.concatenate(ids), np.concatenate(keys)], axis=1)
    merged = np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
    return np.split(merged, np.cumsum([len(row) for row in ids])[:-1])


def _checked_prompt_lens(ids: list[np.ndarray], prompt_lens: ArrayLike | None) -> np.ndarray:
    if prompt_lens is None:
        raise InputError("granularity='prompt' needs prompt_lens, one length per row")
    lens = np.asarray(prompt_lens, dtype=np.int64).reshape(-1)
    if len(lens) != len(ids) or any(n < 0 or n > len(row) for n, row in zip(lens, ids, strict=False)):
        raise InputError("prompt_lens must hold one length per row, between 0 and the row's own length")
    return lens


def _shared_prefixes(keys: list[np.ndarray]) -> tuple[list[int], np.ndarray]:
    """Sort the rows; for each, the length of the prefix it shares with the row before it in that order.

    Runs of rows that agree so far are sorted by their next few tokens; rows that agree in those too are split by where
    each of them leaves the middle one. So a token is compared about once, and no row is compared as a whole.
    """
    order: list[int] = []
    shared: list[int] = []
    runs = [_Run(list(range(len(keys))), 0, 0)]  # the next one is the last
    while runs:
        run = runs.pop()
        if len(run.rows) == 1 or run.depth is None:
            order += run.rows
            shared += [run.before] + [len(keys[b]) for b in run.rows[1:]]
            continue
        for part in reversed(_split_by_next(keys, run)):
            if len(part.rows) == 1 or part.depth is None:
                runs.append(part)
            else:
                runs += reversed(_split_by_pivot(keys, part))
    return order, np.array(shared, np.int64)


class _Run(NamedTuple):
    """Rows that agree in their first `depth` tokens (None: in all), the first shares `before` with the row before."""

    rows: list[int]
    depth: int | None
    before: int


def _split_by_next(keys: list[np.ndarray], run: _Run) -> list[_Run]:
    """Runs in order, by the next NUM_NEXT tokens."""
    rows, depth, before = run
    assert depth is not None
    nexts = [keys[b][depth : depth + NUM_NEXT].astype(">i4").tobytes() for b in rows]
    parts: list[_Run] = []
    last, members = None, []
    for i in sorted(range(len(rows)), key=nexts.__getitem__):
        if nexts[i] == last:
            members.append(rows[i])
            continue
        members = [rows[i]]
        if last is not None:
            before = depth + _common_words(last, nexts[i])
        last = nexts[i]
        parts.append(_Run(members, depth + NUM_NEXT if len(last) == 4 * NUM_NEXT else None, before))
    return parts


def _common_words(a: bytes, b: bytes) -> int:
    """Equal 4-byte words at the beginning of two strings."""
    limit = min(len(a), len(b))
    differing = int.from_bytes(a[:limit], "big") ^ int.from_bytes(b[:limit], "big")
    return (8 * limit - differing.bit_length()) // 32


def _split_by_pivot(keys: list[np.ndarray], run: _Run) -> list[_Run]:
    """Runs in order, by where rows leave the middle one: rows below it the later the larger, above it the earlier."""
    rows, depth, before = run
    assert depth is not None
    pivot = keys[rows[len(rows) // 2]]
    below: dict[int, list[int]] = {}
    above: dict[int, list[int]] = {}
    equal: list[int] = []
    for b in rows:
        row = keys[b]
        common = len(pivot) if row is pivot else _common_prefix_len(pivot, row, depth)
        if common == len(pivot) == len(row):
            equal.append(b)
        elif common == len(row) or (common < len(pivot) and row[common] < pivot[common]):
            below.setdefault(common, []).append(b)
        else:
            above.setdefault(common, []).append(b)
    parts: list[_Run] = []
    for common in sorted(below):
        parts.append(_Run(below[common], common, before))
        before = common
    parts.append(_Run(equal, None, before))
    return parts + [_Run(above[common], common, common) for common in sorted(above, reverse=True)]


def _common_prefix_len(a: np.ndarray, b: np.ndarray, start: int = 0) -> int:
    """Tokens that agree, given that the first `start` do; cheap where rows part early, few long steps otherwise."""
    limit = min(len(a), len(b))
    low, step = start, 256
    while low < limit:
        high = min(low + step, limit)
        differs = a[low:high] != b[low:high]
        first = int(differs.argmax())
        if differs[first]:
            return low + first
        low, step = high, 8 * step
    return limit


def _shared_prompts(keys: list[np.ndarray], prompt_lens: np.ndarray) -> tuple[list[int], np.ndarray]:
    """Rows of equal prompts side by side, groups in first-seen order; they share the prompt and nothing more."""
    groups: dict[bytes, list[int]] = {}
    for b, (row, prompt_len) in enumerate(zip(keys, prompt_lens, strict=True)):
        groups.setdefault(row[:prompt_len].tobytes(), []).append(b)
    order = [b for members in groups.values() for b in sorted(members, key=lambda b: len(keys[b]) > prompt_lens[b])]
    firsts = np.cumsum([0] + [len(members) for members in groups.values()])[:-1]
    shared = prompt_lens[order].copy()
    shared[firsts] = 0
    return order, shared


def _snapped(visits: RowOrder, min_shared: int) -> list[int]:
    """Where each visited row leaves the path before it: at `shared`, or, instead of a sliver, at the cut above."""
    if min_shared == 1:
        return visits.shared.tolist()
    leaves_at, path_len = [], 0
    cuts: list[int] = []  # depths, ascending, where a segment starts on the current path
    for shared, length in zip(visits.shared.tolist(), visits.lens.tolist(), strict=True):
        cut = _snap(cuts, shared, min_shared) if shared < path_len else shared
        while cuts and cuts[-1] >= cut:
            cuts.pop()
        if cut < length:
            cuts.append(cut)
        leaves_at.append(cut)
        path_len = length
    return leaves_at


def _snap(cuts: list[int], common: int, min_shared: int) -> int:
    """`common`, or the cut above when the piece between would be a sliver."""
    above = max((cut for cut in cuts if cut <= common), default=0)
    return common if common == above or common - above >= min_shared else above


def _assemble(rows: Sequence[np.ndarray], visits: RowOrder, cuts: list[int]) -> Forest:
    """Append each row's unshared tail to the pack; a segment starts at every tail and at every branch point."""
    lens = np.array([len(row) for row in rows], np.int64)
    row_offsets = np.concatenate([[0], np.cumsum(lens)])
    row_index = np.empty(row_offsets[-1], np.int64)
    tail_lens = visits.lens - np.array(cuts, np.int64)
    packed = np.arange(tail_lens.sum())
    path = row_index[:0]
    starts, tails, tail_parents = [], [], []
    num_packed = 0
    for b, cut in zip(visits.order.tolist(), cuts, strict=True):
        own = row_index[row_offsets[b] : row_offsets[b + 1]]
        if cut < min(len(path), len(own)):
            starts.append(int(path[cut]))
        own[:cut] = path[:cut]
        if cut < len(own):
            own[cut:] = packed[num_packed : num_packed + len(own) - cut]
            starts.append(num_packed)
            tail_parents.append(int(path[cut - 1]) if cut else -1)
            tails.append(rows[b][cut:])
            num_packed += len(own) - cut
        path = own
    input_ids = np.concatenate([np.empty(0, np.int64), *tails]).astype(np.int64, copy=False)
    tail_starts = (np.cumsum(tail_lens) - tail_lens)[tail_lens > 0]
    parent = packed - 1
    parent[tail_starts] = tail_parents
    depths = np.array(cuts, np.int64) - np.cumsum(tail_lens) + tail_lens
    position_ids = packed + np.repeat(depths, tail_lens)
    return _finish(input_ids, position_ids, parent, np.unique(np.array(starts, np.int64)), row_index, row_offsets)


def _finish(
    input_ids: np.ndarray,
    position_ids: np.ndarray,
    parent: np.ndarray,
    start: np.ndarray,
    row_index: np.ndarray,
    row_offsets: np.ndarray,
) -> Forest:
    end = np.append(start[1:], len(input_ids)).astype(np.int64)[: len(start)]
    segment_parent = np.searchsorted(start, parent[start], side="right") - 1
    return Forest(
        input_ids=input_ids,
        position_ids=position_ids,
        parent=parent,
        start=start,
        end=end,
        subtree_end=_subtree_ends(position_ids[start], start, len(input_ids)),
        segment_parent=segment_parent.astype(np.int64),
        row_index=row_index,
        row_offsets=row_offsets,
    )


def _subtree_ends(depths: np.ndarray, start: np.ndarray, num_tokens: int) -> np.ndarray:
    """A subtree ends where the next segment that is no deeper begins."""
    ends = np.full(len(start), num_tokens, np.int64)
    open_segments: list[int] = []
    for n, depth in enumerate(depths.tolist()):
        while open_segments and depths[open_segments[-1]] >= depth:
            ends[open_segments.pop()] = start[n]
        open_segments.append(n)
    return ends
