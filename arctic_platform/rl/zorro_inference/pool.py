"""Storage of keys and values: one place per token, the same in every layer.

Per layer a tensor `[K, places, D]` of keys and one of values, so that a run of places is a view. A run is handed out in
one piece while there is one; it is split rather than refused. Places that are free hold finite leftovers.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from torch import Tensor

FIRST_PLACES = 1024


class Span(NamedTuple):
    """The places `[start, end)`."""

    start: int
    end: int

    @property
    def num_places(self) -> int:
        """How many."""
        return self.end - self.start


class KvPool:
    """Keys and values of up to `max_places` tokens; memory grows with what is used and is freed by `free_memory`."""

    def __init__(self, max_places: int) -> None:
        self.max_places = max_places
        self.num_used = 0
        self._num_places = 0
        self._free: list[Span] = []  # ascending, no two of them adjacent
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def layers(self) -> list[int]:
        """Indices of the layers that were stored."""
        return sorted(self._layers)

    @property
    def num_heads(self) -> int:
        """K, of the first layer that was stored."""
        return next(iter(self._layers.values()))[0].shape[0]

    @property
    def bytes_per_place(self) -> int:
        """Of all layers that were stored."""
        return sum(x.element_size() * x.shape[0] * x.shape[2] for layer in self._layers.values() for x in layer)

    def allocate(self, num_places: int) -> list[Span]:
        """Hand out places, in one span if possible; the caller has seen that `max_places` allows it."""
        assert self.num_used + num_places <= self.max_places
        fits = [span for span in self._free if span.num_places >= num_places]
        if not fits:
            self._grow(num_places)
            fits = [span for span in self._free if span.num_places >= num_places]
        if fits:
            return [self._take(min(fits, key=lambda span: (span.num_places, span.start)), num_places)]
        spans = []
        while num_places:
            largest = max(self._free, key=lambda span: span.num_places)
            spans.append(self._take(largest, min(num_places, largest.num_places)))
            num_places -= spans[-1].num_places
        return spans

    def release(self, span: Span) -> None:
        """Take places back."""
        self.num_used -= span.num_places
        self._add_free(span)

    def clear_places(self, span: Span) -> None:
        """Overwrite what may not be finite."""
        for layer in self._layers.values():
            for x in layer:
                x[:, span.start : span.end] = 0

    def store(self, layer_idx: int, k: Tensor, v: Tensor, places: Tensor) -> None:
        """Keep `k [1, K, t, D]` and `v [1, K, t, Dv]` at `places [t] int64`."""
        for kept, x in zip(self._layer(layer_idx, k, v), (k, v), strict=True):
            kept.index_copy_(1, places, x[0])

    def view(self, layer_idx: int, span: Span) -> tuple[Tensor, Tensor]:
        """Views `[1, K, L, D]` and `[1, K, L, Dv]`."""
        keys, values = (x[None, :, span.start : span.end] for x in self._stored(layer_idx))
        return keys, values

    def grid(self, layer_idx: int, start: int, stride: int, num: int, width: int) -> tuple[Tensor, Tensor]:
        """Views `[num, K, width, D]`: place `start + i * stride + j` at `[i, :, j]`; a stride of 0 repeats them."""
        keys, values = (_grid(x, start, stride, num, width) for x in self._stored(layer_idx))
        return keys, values

    def gather(self, layer_idx: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """Copies `[n, K, width, D]` of `places [n, width] int64`."""
        n, width = places.shape
        flat = places.flatten()
        keys, values = (
            x.index_select(1, flat).unflatten(1, (n, width)).transpose(0, 1).contiguous()
            for x in self._stored(layer_idx)
        )
        return keys, values

    def free_memory(self) -> None:
        """Drop the storage; nothing may be in use."""
        assert not self.num_used
        self._num_places = 0
        self._free.clear()
        self._layers.clear()

    def _grow(self, num_places: int) -> None:
        """Room for a span of `num_places` behind the last place in use, as far as allowed; at least twice as much."""
        tail = self._free[-1].num_places if self._free and self._free[-1].end == self._num_places else 0
        wanted = max(2 * self._num_places, self._num_places + num_places - tail, FIRST_PLACES)
        num_new = min(wanted, self.max_places) - self._num_places
        if num_new > 0:
            self._add_free(Span(self._num_places, self._num_places + num_new))
            self._num_places += num_new

    def _take(self, span: Span, num_places: int) -> Span:
        at = bisect_left(self._free, span)
        taken = Span(span.start, span.start + num_places)
        self._free[at : at + 1] = [Span(taken.end, span.end)] if taken.end < span.end else []
        self.num_used += num_places
        return taken

    def _add_free(self, span: Span) -> None:
        at = bisect_left(self._free, span)
        if at < len(self._free) and self._free[at].start == span.end:
            span = Span(span.start, self._free.pop(at).end)
        if at and self._free[at - 1].end == span.start:
            at -= 1
            span = Span(self._free.pop(at).start, span.end)
        self._free.insert(at, span)

    def _layer(self, layer_idx: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if layer_idx not in self._layers:
            self._layers[layer_idx] = self._zeros(k[0]), self._zeros(v[0])
        return self._stored(layer_idx)

    def _stored(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """One layer, grown to all places that exist by now."""
        keys, values = self._layers[layer_idx]
        if keys.shape[1] < self._num_places:
            keys, values = self._layers[layer_idx] = self._grown(keys), self._grown(values)
        return keys, values

    def _zeros(self, x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[0], self._num_places, x.shape[2])

    def _grown(self, x: Tensor) -> Tensor:
        grown = self._zeros(x)
        grown[:, : x.shape[1]] = x
        return grown


def _grid(x: Tensor, start: int, stride: int, num: int, width: int) -> Tensor:
    """`x [K, places, D]` -> `[num, K, width, D]`."""
    by_head, by_place, by_dim = x.stride()
    shape, strides = (num, x.shape[0], width, x.shape[2]), (stride * by_place, by_head, by_place, by_dim)
    return x.as_strided(shape, strides, x.storage_offset() + start * by_place)
