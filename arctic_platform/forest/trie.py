"""Rows of token ids -> a prefix forest, depth-first, without a Python step per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from arctic_platform.errors import InputError

Granularity = Literal["trie", "prompt"]
MAX_TOKEN_ID = np.iinfo(np.int32).max


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


def build_forest(
    rows: Sequence[ArrayLike],
    *,
    prompt_lens: ArrayLike | None = None,
    granularity: Granularity = "trie",
    min_shared: int = 1,
    content_keys: Sequence[ArrayLike] | None = None,
) -> Forest:
    """Build the prefix forest of `rows`, token-id arrays of any lengths and order (an empty row is allowed).

    granularity: `trie` shares any common prefix, answers included; `prompt` shares only whole equal prompts of
    `prompt_lens` tokens. min_shared: a branch point that would leave a segment shorter than this moves up to the
    branch point above it. content_keys: one integer per token; two tokens are shared only where ids and keys agree
    (equal placeholder ids in front of different images). Sorting and comparing cost O(all tokens).
    Raises InputError for ids below 0 or above int32, or arrays whose lengths disagree.
    """
    ids = [_as_ids(row, b) for b, row in enumerate(rows)]
    keys = ids if content_keys is None else _merge_keys(ids, content_keys)
    if granularity == "trie":
        order, shared = _shared_prefixes(keys)
    elif granularity == "prompt":
        order, shared = _shared_prompts(keys, _checked_prompt_lens(ids, prompt_lens))
    else:
        raise InputError(f"granularity={granularity!r} is not known; choose trie or prompt")
    if min_shared < 1:
        raise InputError(f"min_shared={min_shared} must be 1 or more")
    return _assemble(ids, order, shared, min_shared)


def _as_ids(row: ArrayLike, b: int) -> np.ndarray:
    ids = np.asarray(row)
    if ids.size == 0:
        return np.empty(0, np.int64)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise InputError(f"row {b} must be a flat list of integer token ids, got {ids.dtype} of shape {ids.shape}")
    if ids.min() < 0 or ids.max() > MAX_TOKEN_ID:
        raise InputError(f"row {b} holds a token id outside 0..{MAX_TOKEN_ID}: drop padding before building a forest")
    return ids.astype(np.int64, copy=False)


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
    """Sort the rows; for each, the length of the prefix it shares with the row before it in that order."""
    as_bytes = [row.astype(">i4").tobytes() for row in keys]
    order = sorted(range(len(keys)), key=as_bytes.__getitem__)
    shared = np.zeros(len(keys), np.int64)
    for i in range(1, len(order)):
        shared[i] = _common_prefix_len(keys[order[i - 1]], keys[order[i]])
    return order, shared


def _common_prefix_len(a: np.ndarray, b: np.ndarray) -> int:
    """Galloping comparison: cheap where rows part early, one vector compare where they do not."""
    limit = min(len(a), len(b))
    low, high = 0, min(64, limit)
    while low < limit:
        differs = a[low:high] != b[low:high]
        if differs.any():
            return low + int(differs.argmax())
        low, high = high, min(4 * high, limit)
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


def _assemble(ids: list[np.ndarray], order: list[int], shared: np.ndarray, min_shared: int) -> Forest:
    """Append each row's unshared tail to the pack; a segment starts at every tail and at every branch point."""
    paths: list[np.ndarray] = [np.empty(0, np.int64)] * len(ids)
    path = np.empty(0, np.int64)
    cuts: list[int] = []  # depths, ascending, where a segment starts on the current path
    starts: list[int] = []
    tails, tail_parents, tail_depths = [], [], []
    num_packed = 0
    for b, common in zip(order, shared.tolist(), strict=True):
        cut = _snap(cuts, common, min_shared) if common < len(path) else common
        if cut < len(path) and cut < len(ids[b]):
            starts.append(int(path[cut]))
        while cuts and cuts[-1] >= cut:
            cuts.pop()
        tail = ids[b][cut:]
        if len(tail):
            starts.append(num_packed)
            tail_parents.append(int(path[cut - 1]) if cut else -1)
            tail_depths.append(cut)
            tails.append(tail)
            cuts.append(cut)
        path = np.concatenate([path[:cut], np.arange(num_packed, num_packed + len(tail))])
        paths[b] = path
        num_packed += len(tail)
    return _finish(paths, tails, tail_parents, tail_depths, np.unique(np.array(starts, np.int64)))


def _snap(cuts: list[int], common: int, min_shared: int) -> int:
    """Where a row leaves the path: at `common`, or at the cut above when the piece between would be a sliver."""
    above = max((cut for cut in cuts if cut <= common), default=0)
    return common if common == above or common - above >= min_shared else above


def _finish(
    paths: list[np.ndarray], tails: list[np.ndarray], tail_parents: list[int], tail_depths: list[int], start: np.ndarray
) -> Forest:
    empty = np.empty(0, np.int64)
    input_ids = np.concatenate([empty, *tails])
    tail_lens = np.array([len(tail) for tail in tails], np.int64)
    tail_starts = np.cumsum(tail_lens) - tail_lens
    index = np.arange(len(input_ids))
    position_ids = index + np.repeat(np.array(tail_depths, np.int64) - tail_starts, tail_lens)
    parent = index - 1
    parent[tail_starts] = tail_parents
    end = np.append(start[1:], len(input_ids)).astype(np.int64)[: len(start)]
    before_start = parent[start]
    segment_of = np.repeat(np.arange(len(start)), end - start)
    segment_parent = np.where(before_start < 0, -1, segment_of[before_start] if len(segment_of) else -1)
    return Forest(
        input_ids=input_ids,
        position_ids=position_ids,
        parent=parent,
        start=start,
        end=end,
        subtree_end=_subtree_ends(position_ids[start], start, len(input_ids)),
        segment_parent=segment_parent.astype(np.int64),
        row_index=np.concatenate([empty, *paths]),
        row_offsets=np.cumsum([0] + [len(path) for path in paths]),
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
