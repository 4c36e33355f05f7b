"""The KV forest: the tokens of all requests as one prefix forest, each of its keys and values kept once.

A segment is a run of tokens under its parent, in consecutive places of the pool. A path of segments from a root is a
prompt, or a prompt and the answer to it. Who needs a path holds its last segment; a segment that nobody holds and
nothing lies below is idle, and goes when room is needed, the longest unused first.

    root of weights 3
      |-- s s s s (ready) --|-- a a (ready)             idle: may be evicted
      |                     `-- b b b (not computed)    held by two requests
      `-- z z z (ready)                                 held by one

Each version of the weights has a root of its own, and only segments below the present one are found. A branch point
inside a segment cuts it in two views of the same places.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from torch import Tensor

from arctic_platform.rl.zorro_inference.pool import KvPool, Span

CachePolicy = Literal["reset", "keep", "version"]
"""What a weight update does to the cache: forget it, go on using it, or keep it for the version that computed it."""


@dataclass(eq=False)
class Segment:
    """A run of tokens, `ids [L] int64`, at positions `[depth, depth + L)` of every row below it.

    `is_ready`: its keys and values are stored. `is_listed`: a new prompt may find it. `num_holders` count those who
    need the path that ends here. `states`: what recurrent layers know behind the last token, None if not kept.
    `is_chunk`: it ends where a prefill pass did, at no branch and no end of a prompt.
    """

    ids: np.ndarray
    span: Span
    depth: int
    parent: Segment | None
    is_ready: bool = False
    is_listed: bool = True
    num_holders: int = 0
    num_children: int = 0
    last_used: int = 0
    states: list[Tensor] | None = None
    is_chunk: bool = False
    children: dict[int, Segment] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """Tokens of the path that ends here."""
        return self.depth + len(self.ids)

    def path(self) -> list[Segment]:
        """The segments from below the root to this one."""
        segments, segment = [], self
        while segment.parent is not None:
            segments.append(segment)
            segment = segment.parent
        return segments[::-1]


class KvForest:
    """Finds, adds, holds and evicts segments.

    `needs_states`: a path may only branch where states are kept; each of them counts as `places_per_state` places.
    """

    def __init__(self, pool: KvPool, *, needs_states: bool = False) -> None:
        self.pool = pool
        self.needs_states = needs_states
        self.places_per_state = 0
        self.num_states = 0
        self.version = 0
        self.num_held = 0
        self._roots: dict[int, Segment] = {}
        self._segments: set[Segment] = set()
        self._idle: list[tuple[int, int, Segment]] = []
        self._clock = itertools.count(1)

    @property
    def num_tokens(self) -> int:
        """Tokens of all segments."""
        return self.pool.num_used

    @property
    def segments(self) -> Collection[Segment]:
        """All of them, of all versions, in no order."""
        return self._segments

    @property
    def num_segments(self) -> int:
        """Segments of all versions."""
        return len(self._segments)

    def num_found(self, ids: np.ndarray) -> int:
        """How many of the first tokens of `ids` need no place any more."""
        return sum(length for _, length in self._found(self._root, ids))

    def hold(self, ids: np.ndarray, *, limit: int, is_private: bool = False) -> Segment | None:
        """Hold the path of `ids [P]`, with places for what is new of it; None where `limit` places do not allow it.

        is_private: nobody else finds it, and it finds nothing.
        """
        above = Segment(ids[:0], Span(0, 0), 0, None, is_listed=False) if is_private else self._root
        return self.hold_below(above, ids, limit=limit)

    def hold_below(self, above: Segment, ids: np.ndarray, *, limit: int) -> Segment | None:
        """The same for the path that goes on with `ids` behind a segment that is held."""
        start = above.end
        for segment, length in self._found(above, ids):
            above = segment if length == len(segment.ids) else self.cut(segment, length)
        new = ids[above.end - start :]
        self.hold_again(above)
        held = None
        if self.make_room(len(new), limit):
            held = self.hold_again(self._extend(above, new))
        self.release(above)
        return held

    def append(self, above: Segment, ids: np.ndarray, *, limit: int) -> Segment | None:
        """As `hold_below`; None too where somebody else is about to compute a part of it."""
        if all(segment.is_ready for segment, _ in self._found(above, ids)):
            return self.hold_below(above, ids, limit=limit)
        return None

    def hold_again(self, segment: Segment) -> Segment:
        """One holder more of a path."""
        segment.num_holders += 1
        self.num_held += 1
        return segment

    def release(self, segment: Segment, *, forget: bool = False) -> None:
        """One holder less. forget: drop what nobody else holds, its values may not be finite."""
        assert segment.num_holders > 0
        segment.num_holders -= 1
        self.num_held -= 1
        used = next(self._clock)
        for above in segment.path():
            above.last_used = used
        self._settle(segment, forget=forget)

    def make_room(self, num_places: int, limit: int) -> bool:
        """Evict idle segments until `num_places` more fit below `limit` places in use; False where they cannot."""
        while self.pool.num_used + self.num_states * self.places_per_state + num_places > limit:
            if not self._evict_one():
                return False
        return True

    def keep_states(self, segment: Segment, states: list[Tensor] | None) -> None:
        """What is known behind a segment; None forgets it."""
        self.num_states += (states is not None) - (segment.states is not None)
        segment.states = states

    def update(self, version: int, policy: CachePolicy) -> None:
        """The weights changed. What is held stays with its holders under every policy."""
        if policy == "reset":
            self.reset()
        if policy == "keep" and version != self.version:
            self._drop_root(version)
            self._roots[version] = self._roots.pop(self.version, _new_root())
        self.version = version

    def reset(self) -> None:
        """Forget everything that nobody holds, of every version; what is held is not found any more."""
        for version in list(self._roots):
            self._drop_root(version)

    @property
    def _root(self) -> Segment:
        return self._roots.setdefault(self.version, _new_root())

    def _found(self, above: Segment, ids: np.ndarray) -> list[tuple[Segment, int]]:
        """The path along `ids` below a segment, and how many tokens of each agree: all of them but in the last.

        With states it ends where they are kept, and before the last of `ids`.
        """
        found, at = [], 0
        while at < len(ids):
            child = above.children.get(int(ids[at]))
            if child is None:
                break
            length = _common_len(child.ids, ids[at:])
            found.append((child, length))
            if length < len(child.ids):
                break
            above, at = child, at + length
        while self.needs_states and found and not self._can_go_on(*found[-1], found[-1][0].depth, len(ids)):
            found.pop()
        return found

    def _can_go_on(self, segment: Segment, length: int, depth: int, num_ids: int) -> bool:
        is_whole = length == len(segment.ids)
        return not segment.is_ready or (is_whole and segment.states is not None and depth + length < num_ids)

    def _extend(self, above: Segment, ids: np.ndarray) -> Segment:
        """New segments for `ids` under `above`, one per span that the pool gives."""
        for span in self.pool.allocate(len(ids)) if len(ids) else ():
            own, ids = ids[: span.num_places], ids[span.num_places :]
            is_listed = above.is_listed and int(own[0]) not in above.children
            segment = Segment(own, span, above.end, above, is_listed=is_listed, last_used=next(self._clock))
            if is_listed:
                above.children[int(own[0])] = segment
            above.num_children += 1
            self._segments.add(segment)
            above = segment
        return above

    def cut(self, segment: Segment, at: int) -> Segment:
        """Cut a segment before its token `at`; returns the upper part, the given one becomes the lower."""
        above = segment.parent
        assert above is not None and 0 < at < len(segment.ids)
        upper = Segment(
            segment.ids[:at],
            Span(segment.span.start, segment.span.start + at),
            segment.depth,
            above,
            is_ready=segment.is_ready,
            is_listed=segment.is_listed,
            num_children=1,
            last_used=segment.last_used,
        )
        segment.ids, segment.depth, segment.parent = segment.ids[at:], segment.depth + at, upper
        segment.span = Span(upper.span.end, segment.span.end)
        if segment.is_listed:
            above.children[int(upper.ids[0])] = upper
            upper.children[int(segment.ids[0])] = segment
        self._segments.add(upper)
        return upper

    def _settle(self, segment: Segment, *, forget: bool = False) -> None:
        """Nobody holds it: idle if it may be found again, else gone, and so upwards."""
        while segment.parent is not None and not segment.num_holders and not segment.num_children:
            if segment.is_ready and segment.is_listed and not forget:
                heapq.heappush(self._idle, (segment.last_used, next(self._clock), segment))
                return
            if forget:
                self.pool.clear_places(segment.span)
            segment = self._remove(segment)

    def _evict_one(self) -> bool:
        while self._idle:
            used, _, segment = heapq.heappop(self._idle)
            is_gone = segment not in self._segments
            if is_gone or segment.num_holders or segment.num_children or segment.last_used != used:
                continue
            self._settle(self._remove(segment))
            return True
        return False

    def _remove(self, segment: Segment) -> Segment:
        """Free a leaf; returns what was above it."""
        above = segment.parent
        assert above is not None
        if segment.is_listed:
            del above.children[int(segment.ids[0])]
        above.num_children -= 1
        self.keep_states(segment, None)
        self._segments.discard(segment)
        self.pool.release(segment.span)
        return above

    def _drop_root(self, version: int) -> None:
        root = self._roots.pop(version, None)
        if root is None:
            return
        below = [root]
        for segment in below:
            below += segment.children.values()
        for segment in reversed(below[1:]):
            self._unlist(segment)
            if segment in self._segments:
                self._settle(segment)

    def _unlist(self, segment: Segment) -> None:
        if segment.is_listed and segment.parent is not None:
            del segment.parent.children[int(segment.ids[0])]
            segment.is_listed = False


def branches(paths: Collection[Segment]) -> tuple[dict[Segment, list[Segment]], list[Segment]]:
    """Of every segment on the paths those below it on them, and the topmost ones; in the order of their places."""
    children: dict[Segment, list[Segment]] = {}
    tops = []
    for segment in paths:
        is_known = segment in children
        children.setdefault(segment, [])
        while not is_known:
            above = segment.parent
            assert above is not None
            if above.parent is None:
                tops.append(segment)
                break
            is_known = above in children
            children.setdefault(above, []).append(segment)
            segment = above
    for below in [tops, *children.values()]:
        below.sort(key=lambda segment: segment.span.start)
    return children, tops


def _new_root() -> Segment:
    return Segment(np.empty(0, np.int64), Span(0, 0), 0, None, is_ready=True)


def _common_len(a: np.ndarray, b: np.ndarray) -> int:
    """Tokens that both begin with."""
    limit = min(len(a), len(b))
    differs = a[:limit] != b[:limit]
    first = int(differs.argmax()) if limit else 0
    return first if limit and differs[first] else limit
