"""Recurrent states of the sampler: those that a prefill pass goes on from, and those of the decoding rows.

A segment of the KV forest may keep what recurrent layers know behind its last token. A pass below it goes on from
there, and every row that decodes behind it takes a copy of its own: the state forks where the rows part.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from arctic_platform.forest.states import StepRecurrence
from arctic_platform.rl.zorro_inference.cache import Segment

States = list[Tensor]
"""Behind one token: `[...]` per recurrent call of the model."""

FIRST_SLOTS = 4


def initial_states(roots: Sequence[Segment]) -> States | None:
    """What the segments go on from, per call `[len(roots), ...]`; zeros where a row begins, None where all do."""
    above = [segment.parent for segment in roots]
    known = [None if segment is None or segment.parent is None else segment.states for segment in above]
    like = next((states for states in known if states is not None), None)
    if like is None:
        return None
    return [
        torch.stack([zero if states is None else states[call] for states in known])
        for call, zero in enumerate(map(torch.zeros_like, like))
    ]


class RowStates:
    """The states of decoding rows, per call `[slots, ...]`."""

    def __init__(self) -> None:
        self._slots: dict[Hashable, int] = {}
        self._free: list[int] = []
        self._calls: States = []

    def __len__(self) -> int:
        """Rows that are here."""
        return len(self._slots)

    def add(self, row: Hashable, states: States) -> None:
        """A row goes on from a copy of `states`."""
        if not self._free:
            self._grow(states)
        self._slots[row] = slot = self._free.pop()
        for kept, x in zip(self._calls, states, strict=True):
            kept[slot] = x

    def remove(self, row: Hashable) -> None:
        """A row leaves."""
        self._free.append(self._slots.pop(row))

    def of(self, row: Hashable) -> States:
        """A copy of the states of one row."""
        return [x[self._slots[row]].clone() for x in self._calls]

    def step(self, rows: Sequence[Hashable]) -> StepRecurrence:
        """One more token for each of `rows`; their states are replaced in place."""
        slots = torch.tensor([self._slots[row] for row in rows], device=self._calls[0].device)
        return StepRecurrence(self._calls, slots)

    def free_memory(self) -> None:
        """Drop the storage; no row may be left."""
        assert not self._slots
        self._free, self._calls = [], []

    def _grow(self, like: States) -> None:
        num = len(self._slots)
        num_new = max(num, FIRST_SLOTS)
        old = self._calls or [x.new_zeros(0, *x.shape) for x in like]
        self._calls = [torch.cat([x, x.new_zeros(num_new, *x.shape[1:])]) for x in old]
        self._free = list(range(num, num + num_new))
