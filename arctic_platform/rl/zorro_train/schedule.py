"""Cut a batch into micro-batches that are sub-forests: rows that share a prefix stay together."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

from arctic_platform.errors import ConfigError
from arctic_platform.forest import build_forest


def cut_micro_batches(rows: Sequence[Sequence[int] | np.ndarray], max_token_len: int | None) -> list[list[int]]:
    """Row indices of each micro-batch, every row in exactly one, at most `max_token_len` unique tokens in each.

    Rows are taken in depth-first order of their forest and a micro-batch ends where the next row would exceed the
    budget. A row that exceeds it alone goes alone, with a warning. None: one micro-batch. Raises ConfigError for a
    budget below 1.
    """
    if max_token_len is not None and max_token_len < 1:
        raise ConfigError(f"max_token_len={max_token_len} must be 1 or more, or None for no limit")
    if not len(rows):
        return []
    if max_token_len is None:
        return [list(range(len(rows)))]
    batches: list[list[int]] = []
    used = 0
    for b, shared, length in _depth_first(rows):
        new_tokens = length - shared
        if not batches or used + new_tokens > max_token_len:
            batches.append([])
            used, new_tokens = 0, length
        batches[-1].append(b)
        used += new_tokens
    longest = max(len(row) for row in rows)
    if longest > max_token_len:
        warnings.warn(
            f"a row of {longest} tokens exceeds max_token_len={max_token_len} and runs alone; raise the budget if "
            "memory allows",
            stacklevel=2,
        )
    return [sorted(batch) for batch in batches]


def _depth_first(rows: Sequence[Sequence[int] | np.ndarray]) -> list[tuple[int, int, int]]:
    """`(row, tokens shared with the row before it, length)` in depth-first order."""
    forest = build_forest(rows)
    last = np.array([forest.row(b)[-1] if forest.row_lens[b] else -1 for b in range(forest.num_rows)])
    visits, before = [], np.empty(0, np.int64)
    for b in np.argsort(last, kind="stable").tolist():
        path = forest.row(b)
        overlap = min(len(before), len(path))
        shared = int((before[:overlap] == path[:overlap]).sum())
        visits.append((b, shared, len(path)))
        before = path
    return visits
