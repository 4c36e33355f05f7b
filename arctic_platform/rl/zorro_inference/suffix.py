"""Keys and values of what each row generates, in banks of equal capacity.

A row starts in the bank of the smallest capacity and moves on when it is full, so that a bank is one attention call
over rows of similar length: per layer `[slots, K, capacity, D]`, slots `0 .. n - 1` in use, without gaps.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

FIRST_CAPACITY = 16
FIRST_SLOTS = 4


def next_capacity(capacity: int) -> int:
    """The capacities are 16, 32, 48, 64, 96, 128, 192 ...: powers of two, and halfway from 32 on."""
    is_power = capacity & (capacity - 1) == 0
    if capacity < 32:
        return 2 * capacity
    return capacity * 3 // 2 if is_power else capacity * 4 // 3


def capacity_for(num_tokens: int) -> int:
    """The smallest capacity that holds `num_tokens`."""
    capacity = FIRST_CAPACITY
    while capacity < num_tokens:
        capacity = next_capacity(capacity)
    return capacity


class SuffixBank:
    """Rows of one capacity; slot s is that of `rows[s]`, which has stored `lens[s]` tokens."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.rows: list[Hashable] = []
        self.lens = np.zeros(0, np.int64)
        self._num_slots = FIRST_SLOTS
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def max_len(self) -> int:
        """Tokens of its longest row."""
        return int(self.lens.max())

    def add(self, rows: Sequence[Hashable], length: int) -> None:
        """Take the next slots."""
        self.rows += rows
        self.lens = np.append(self.lens, np.full(len(rows), length, np.int64))
        if len(self.rows) > self._num_slots:
            self._num_slots = max(2 * self._num_slots, len(self.rows))
            self._layers = {i: (self._grown(k), self._grown(v)) for i, (k, v) in self._layers.items()}

    def remove(self, row: Hashable, *, clear: bool = False) -> None:
        """Give a slot back; the row in the last one moves into it. clear: its values may not be finite."""
        slot, last = self.rows.index(row), len(self.rows) - 1
        length = int(self.lens[last])
        for layer in self._layers.values():
            for x in layer:
                if slot != last:
                    x[slot, :, :length] = x[last, :, :length]
                if clear:
                    x[slot, :, length if slot != last else 0 :] = 0
        self.rows[slot], self.lens[slot] = self.rows[last], length
        self.rows.pop()
        self.lens = self.lens[:last]

    def append(self, layer_idx: int, k: Tensor, v: Tensor, slots: Tensor | slice, at: Tensor | int) -> None:
        """Store `k [n, K, D]` and `v [n, K, Dv]`, one token per row, at place `at[i]` of slot `slots[i]`.

        A slice of slots with one place for all of them is cheaper.
        """
        if layer_idx not in self._layers:
            self._layers[layer_idx] = self._zeros(k), self._zeros(v)
        for kept, x in zip(self._layers[layer_idx], (k, v), strict=True):
            kept[slots, :, at] = x

    def read(self, layer_idx: int, length: int) -> tuple[Tensor, Tensor]:
        """Views `[n, K, length, D]` of keys and values; places beyond a row's length hold finite leftovers."""
        keys, values = (x[: len(self.rows), :, :length] for x in self._layers[layer_idx])
        return keys, values

    def copy_rows(self, other: SuffixBank, slots: list[int], num_tokens: int) -> None:
        """Fill the last `len(slots)` slots with the first tokens of another bank's slots."""
        index, first = torch.tensor(slots), len(self.rows) - len(slots)
        for layer_idx, layer in other._layers.items():
            if layer_idx not in self._layers:
                self._layers[layer_idx] = self._zeros(layer[0]), self._zeros(layer[1])
            for kept, x in zip(self._layers[layer_idx], layer, strict=True):
                kept[first : len(self.rows), :, :num_tokens] = x[index.to(x.device), :, :num_tokens]

    def tokens(self, layer_idx: int, slots: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Copies `[1, K, t, D]` of keys and values: token `at[i]` of slot `slots[i]`."""
        keys, values = (x[slots, :, at].transpose(0, 1)[None] for x in self._layers[layer_idx])
        return keys, values

    @property
    def layers(self) -> list[int]:
        """Indices of the layers that were stored."""
        return list(self._layers)

    def _zeros(self, like: Tensor) -> Tensor:
        """like: `[n, K, ..., D]`."""
        return like.new_zeros(self._num_slots, like.shape[1], self.capacity, like.shape[-1])

    def _grown(self, x: Tensor) -> Tensor:
        grown = x.new_zeros(self._num_slots, *x.shape[1:])
        grown[: len(x)] = x
        return grown


class SuffixCache:
    """All banks."""

    def __init__(self) -> None:
        self._banks: dict[int, SuffixBank] = {}
        self._bank_of: dict[Hashable, SuffixBank] = {}

    @property
    def banks(self) -> list[SuffixBank]:
        """Banks with rows, the smallest capacity first."""
        return [bank for _, bank in sorted(self._banks.items()) if bank.rows]

    @property
    def num_places(self) -> int:
        """Tokens that the rows' slots have room for."""
        return sum(bank.capacity * len(bank.rows) for bank in self._banks.values())

    @property
    def num_missing(self) -> int:
        """Places that `make_room` will add."""
        return sum((next_capacity(bank.capacity) - bank.capacity) * len(_full(bank)) for bank in self.banks)

    def add(self, rows: Sequence[Hashable]) -> None:
        """Rows that have generated nothing."""
        self._put(rows, FIRST_CAPACITY, 0)

    def remove(self, row: Hashable, *, clear: bool = False) -> None:
        """A row leaves. clear: its values may not be finite."""
        self._bank_of.pop(row).remove(row, clear=clear)

    def length(self, row: Hashable) -> int:
        """Tokens stored for a row."""
        bank = self._bank_of[row]
        return int(bank.lens[bank.rows.index(row)])

    def make_room(self) -> bool:
        """Give every row room for one more token; True where rows moved to another bank."""
        moved = False
        for bank in reversed(self.banks):
            slots = _full(bank)
            if slots:
                rows = [bank.rows[slot] for slot in slots]
                larger = self._put(rows, next_capacity(bank.capacity), bank.capacity)
                larger.copy_rows(bank, slots, bank.capacity)
                for row in reversed(rows):
                    bank.remove(row)
                moved = True
        return moved

    def free_memory(self) -> None:
        """Drop the storage; no row may be left."""
        assert not self._bank_of
        self._banks.clear()

    def bank_of(self, row: Hashable) -> SuffixBank:
        """Where a row is."""
        return self._bank_of[row]

    def _put(self, rows: Sequence[Hashable], capacity: int, length: int) -> SuffixBank:
        bank = self._banks.setdefault(capacity, SuffixBank(capacity))
        bank.add(rows, length)
        self._bank_of.update(dict.fromkeys(rows, bank))
        return bank


def _full(bank: SuffixBank) -> list[int]:
    return np.flatnonzero(bank.lens == bank.capacity).tolist()
