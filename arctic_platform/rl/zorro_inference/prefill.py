"""Prefill: the new tokens of any number of prompts in one pass, under what is cached.

The new tokens of a pass are a forest of their own and attend to it as in training. Cached segments above them are held
rectangles: the queries below a segment, a contiguous run of the pass, against its stored keys, without causality; the
parts are merged by log-sum-exp like those of the forest itself. A prompt that is cached to its end computes its last
token once more, for the logits, and stores nothing.

    cached  s s s s - a a              pass   x x x   below a      rectangles  s: queries x x x y y
                    `                         y y     below s                  a: queries x x x
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from arctic_platform.forest import Forest, ForestPlan
from arctic_platform.forest.attention import Rule, equal_widths, with_sinks
from arctic_platform.forest.states import ResumedRecurrence
from arctic_platform.rl.zorro_inference.cache import Segment, branches
from arctic_platform.rl.zorro_inference.pool import KvPool, Span
from arctic_platform.rl.zorro_inference.states import initial_states


@dataclass(frozen=True)
class Held:
    """The queries `[start, end)` of a pass see the tokens of `span` whole; the first of them is at position `depth`."""

    span: Span
    depth: int
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class PrefillPass:
    """One pass over `forest`, the new tokens. `places [T] int64` in the pool, -1 for tokens that are not stored.

    `segments`: of the cache, in the order of the forest's; None for a last token that is computed again. `first_token`
    and `last_token`: packed tokens of each segment that is computed; of one that is not, its last token only.
    """

    forest: Forest
    places: np.ndarray
    held: list[Held]
    segments: list[Segment | None]
    first_token: dict[Segment, int]
    last_token: dict[Segment, int]

    @property
    def roots(self) -> list[Segment | None]:
        """The segments that begin below what is cached, or below nothing."""
        return [self.segments[n] for n in np.flatnonzero(self.forest.segment_parent < 0)]


def plan_pass(new: Collection[Segment], again: Collection[Segment] = ()) -> PrefillPass:
    """new: segments to compute; what is above each is ready, or new too. again: ready ones, whose last token is run."""
    return _Layout(set(new), set(again)).finish()


@dataclass(frozen=True, eq=False, kw_only=True)
class PrefillPlan(ForestPlan):
    """What `model(input_ids=[1, T], position_ids=[1, T], forest=plan)` carries to every layer of a prefill pass.

    ends: filled by recurrent layers, per call `[N, ...]`, the states behind the segments of the pass.
    """

    step: PrefillPass
    pool: KvPool
    ends: list[Tensor] = field(default_factory=list)
    _masks: dict[tuple[int, int], Tensor | None] = field(default_factory=dict)

    @cached_property
    def recurrence(self) -> ResumedRecurrence:
        """Goes on from the states above the pass, and keeps those behind each of its segments."""
        roots = [segment for segment in self.step.roots if segment is not None]
        assert len(roots) == len(self.step.roots), "a state cannot run its last token again"
        return ResumedRecurrence(self.forest, self.device, initial_states(roots), self.ends)

    def attend(
        self,
        layer_idx: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Store k and v, then attend to the pass itself and to what is held; see AttendPlan."""
        places, tokens = self._stored
        if len(places):
            kept = (k, v) if tokens is None else (k.index_select(2, tokens), v.index_select(2, tokens))
            self.pool.store(layer_idx, *kept, places)
        rule, v_width = self.rule(q, v, scale=scale, sliding_window=sliding_window, softcap=softcap), v.shape[-1]
        if rule.kernel == "flash":
            q, k, v = equal_widths(q, k, v)
        out, lse = self.run(q, k, v, rule)
        for n, held in enumerate(self.step.held):
            self._merge_held(out, lse, q, n, held, layer_idx, rule)
        return with_sinks(out, lse, sinks)[0].to(q.dtype)[..., :v_width]

    def _merge_held(self, out: Tensor, lse: Tensor, q: Tensor, n: int, held: Held, layer_idx: int, rule: Rule) -> None:
        seen = slice(held.start, held.end)
        mask = self._held_mask(n, rule.sliding_window) if rule.sliding_window else None
        pair = self.pool.view(layer_idx, held.span)
        if rule.kernel == "flash":
            pair = equal_widths(q, *pair)[1:]
        rule.merge_(out[:, :, seen], lse[:, :, seen], q[:, :, seen], *pair, mask, causal=False)

    def _held_mask(self, n: int, sliding_window: int) -> Tensor | None:
        """`[Lq, Lk] bool`: the held keys within the window of each query; None where all are."""
        if (n, sliding_window) not in self._masks:
            held = self.step.held[n]
            queries = self.position_ids[0, held.start : held.end, None]
            near = queries - torch.arange(held.depth, held.depth + held.span.num_places, device=queries.device)
            near = near < sliding_window
            self._masks[n, sliding_window] = None if bool(near.all()) else near
        return self._masks[n, sliding_window]

    @cached_property
    def _stored(self) -> tuple[Tensor, Tensor | None]:
        """Places, and the packed tokens that go there; None for all of them."""
        tokens = np.flatnonzero(self.step.places >= 0)
        places = torch.from_numpy(self.step.places[tokens]).to(self.device)
        is_all = len(tokens) == self.forest.num_tokens
        return places, None if is_all else torch.from_numpy(tokens).to(self.device)


class _Layout:
    """Walks the segments of one pass and those above them depth-first, and packs what is computed."""

    def __init__(self, new: set[Segment], again: set[Segment]) -> None:
        self._new = new
        self._again = again
        self._num_tokens = 0
        self._pieces: list[tuple[np.ndarray, np.ndarray, int]] = []  # ids, places, position of the first
        self._parents: list[int] = []
        self._subtree_ends: list[int] = []
        self._held: list[Held] = []
        self._segments: list[Segment | None] = []
        self._first: dict[Segment, int] = {}
        self._last: dict[Segment, int] = {}
        self._number: dict[Segment, int] = {}

    def finish(self) -> PrefillPass:
        """Walk all of them."""
        children, tops = branches(self._new | self._again)
        todo: list[tuple[Segment, int]] = [(segment, -1) for segment in reversed(tops)]
        while todo:
            segment, entered_at = todo.pop()
            if entered_at >= 0:
                self._leave(segment, entered_at)
                continue
            self._enter(segment)
            todo.append((segment, self._num_tokens))
            todo += [(below, -1) for below in reversed(children[segment])]
        return PrefillPass(self._forest(), self._places(), self._held, self._segments, self._first, self._last)

    def _enter(self, segment: Segment) -> None:
        if segment in self._new:
            self._number[segment] = len(self._pieces)
            self._first[segment] = self._num_tokens
            above = -1 if segment.parent is None else self._number.get(segment.parent, -1)
            self._pack(segment.ids, np.arange(*segment.span), segment.depth, above)
            self._segments.append(segment)
        elif segment in self._again:
            start, end = segment.span
            self._pack(segment.ids[-1:], np.array([-1]), segment.end - 1, -1)
            self._segments.append(None)
            self._hold(Span(start, end - 1), segment.depth, self._num_tokens - 1)
        else:
            return
        self._last[segment] = self._num_tokens - 1

    def _leave(self, segment: Segment, entered_at: int) -> None:
        if segment in self._new:
            self._subtree_ends[self._number[segment]] = self._num_tokens
        else:
            self._hold(segment.span, segment.depth, entered_at)

    def _pack(self, ids: np.ndarray, places: np.ndarray, position: int, above: int) -> None:
        self._pieces.append((ids, places, position))
        self._parents.append(above)
        self._num_tokens += len(ids)
        self._subtree_ends.append(self._num_tokens)

    def _hold(self, span: Span, depth: int, start: int) -> None:
        """Queries from `start` on see the span; one call with the span behind it where the same queries see that."""
        if start == self._num_tokens or not span.num_places:
            return
        last = self._held[-1] if self._held else None
        if last is not None and (last.start, last.end) == (start, self._num_tokens) and last.span.start == span.end:
            self._held.pop()
            span = Span(span.start, last.span.end)
        self._held.append(Held(span, depth, start, self._num_tokens))

    def _places(self) -> np.ndarray:
        return np.concatenate([places for _, places, _ in self._pieces])

    def _forest(self) -> Forest:
        lens = np.array([len(ids) for ids, _, _ in self._pieces], np.int64)
        start, parents = np.cumsum(lens) - lens, np.array(self._parents, np.int64)
        parent = np.arange(lens.sum()) - 1
        parent[start] = np.where(parents < 0, -1, (start + lens - 1)[parents])
        return Forest(
            input_ids=np.concatenate([ids for ids, _, _ in self._pieces]),
            position_ids=np.concatenate([np.arange(at, at + len(ids)) for ids, _, at in self._pieces]),
            parent=parent,
            start=start,
            end=start + lens,
            subtree_end=np.array(self._subtree_ends, np.int64),
            segment_parent=parents,
            row_index=np.empty(0, np.int64),
            row_offsets=np.zeros(1, np.int64),
        )
