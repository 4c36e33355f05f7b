"""Keys and values: of the prompt forest, each token once, and of every rollout's own suffix."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from arctic_platform.forest import ForestPlan
from arctic_platform.rl.zorro_inference.plan import BlockRead, PrefillPass, PromptForest

FIRST_CAPACITY = 16
"""Tokens per rollout that a suffix cache has room for at first; it doubles when full."""


class PrefixCache:
    """Keys and values of a prompt forest, per layer `[K, places, D]` in the model's dtype, block after block.

    Every token of the forest has one place; lanes of one block are padded to equal length, so that a block is a view
    `[n, K, width, D]` and no step copies anything.
    """

    def __init__(self, plan: PromptForest, device: torch.device) -> None:
        sources = [block.source.reshape(-1) for block in plan.blocks]
        self._source = np.concatenate(sources)
        offsets = np.cumsum([0] + [len(source) for source in sources]).tolist()
        self._offsets = dict(zip(map(id, plan.blocks), offsets, strict=False))
        self._device = device
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.num_tokens = plan.forest.num_tokens

    @property
    def layers(self) -> list[int]:
        """Indices of the layers that were stored."""
        return sorted(self._layers)

    def places(self, step: PrefillPass) -> tuple[Tensor, Tensor]:
        """Where the tokens of one prefill pass go: places, and for each its index in the pass; both int64."""
        places = np.flatnonzero((self._source >= step.start) & (self._source < step.end))
        return self._to_device(places), self._to_device(self._source[places] - step.start)

    def store(self, layer_idx: int, k: Tensor, v: Tensor, places: Tensor, tokens: Tensor) -> None:
        """Keep `k [1, K, t, D]` and `v [1, K, t, Dv]` of one pass."""
        if layer_idx not in self._layers:
            self._layers[layer_idx] = self._empty(k), self._empty(v)
        for kept, x in zip(self._layers[layer_idx], (k, v), strict=True):
            kept.index_copy_(1, places, x[0].index_select(1, tokens))

    def read(self, layer_idx: int, read: BlockRead) -> tuple[Tensor, Tensor]:
        """Views `[lanes, K, width, D]` of the keys and the values of a block's lanes."""
        width = read.block.width
        start = self._offsets[id(read.block)] + read.first_lane * width
        lanes = slice(start, start + read.num_lanes * width)
        keys, values = (x[:, lanes].unflatten(1, (-1, width)).transpose(0, 1) for x in self._layers[layer_idx])
        return keys, values

    def _empty(self, x: Tensor) -> Tensor:
        return x.new_empty(x.shape[1], len(self._source), x.shape[3])

    def _to_device(self, index: np.ndarray) -> Tensor:
        return torch.from_numpy(index).to(self._device)


class SuffixCache:
    """Keys and values of what the rollouts generated, per layer `[slots, K, capacity, D]`.

    Slots `0 .. num_used - 1` are in use, without gaps: a rollout that leaves is replaced by the one in the last slot.
    `lens [slots] int64` counts tokens stored per slot.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_used = 0
        self.lens = np.zeros(num_slots, np.int64)
        self._capacity = FIRST_CAPACITY
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self) -> int:
        """Take a slot for a new rollout."""
        slot = self.num_used
        self.lens[slot] = 0
        self.num_used += 1
        return slot

    def remove(self, slot: int) -> int:
        """Give a slot back; the rollout in the slot that is returned (the last one) now lives in `slot`."""
        moved = self.num_used - 1
        if moved != slot:
            length = int(self.lens[moved])
            for layer in self._layers.values():
                for x in layer:
                    x[slot, :, :length] = x[moved, :, :length]
            self.lens[slot] = length
        self.num_used = moved
        return moved

    def make_room(self) -> None:
        """Make sure that every slot in use can take one more token."""
        if not self.num_used or self.lens[: self.num_used].max() < self._capacity:
            return
        self._capacity *= 2
        for layer_idx, (keys, values) in self._layers.items():
            self._layers[layer_idx] = self._grown(keys), self._grown(values)

    def append(self, layer_idx: int, k: Tensor, v: Tensor, slots: Tensor, at: Tensor) -> None:
        """Store `k [1, K, R, D]` and `v [1, K, R, Dv]`, token r in slot `slots[r]` at place `at[r]`."""
        if layer_idx not in self._layers:
            self._layers[layer_idx] = self._zeros(k), self._zeros(v)
        for kept, x in zip(self._layers[layer_idx], (k, v), strict=True):
            kept[slots, :, at] = x[0].transpose(0, 1)

    def read(self, layer_idx: int, length: int) -> tuple[Tensor, Tensor]:
        """Views `[num_used, K, length, D]` of keys and values; places beyond a slot's length hold finite leftovers."""
        keys, values = (x[: self.num_used, :, :length] for x in self._layers[layer_idx])
        return keys, values

    def _zeros(self, x: Tensor) -> Tensor:
        return x.new_zeros(self.num_slots, x.shape[1], self._capacity, x.shape[3])

    def _grown(self, x: Tensor) -> Tensor:
        grown = self._zeros(x)
        grown[:, :, : x.shape[2]] = x
        return grown


class CapturePlan:
    """A forest's own training attention for one prefill pass, with its keys and values kept on the way."""

    def __init__(self, plan: ForestPlan, cache: PrefixCache, step: PrefillPass) -> None:
        self._plan = plan
        self._cache = cache
        self._places, self._tokens = cache.places(step)

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, **rule) -> Tensor:
        """Store k and v, then attend as in training; see AttendPlan."""
        self._cache.store(layer_idx, k, v, self._places, self._tokens)
        return self._plan.attend(layer_idx, q, k, v, **rule)
