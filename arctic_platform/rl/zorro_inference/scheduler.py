"""Who is prefilled, who decodes, who waits, and what of it fits into memory.

    add --> waiting --admit--> prefilling --computed--> ready --join--> active --leave-->
               ^                                                           |
               `---------------- send back: its keys and values are given up

A request is admitted while there are seats, and its path is held from then on. The places of cached segments and of the
rows' own suffixes count against one budget. Where a step would exceed it, idle segments go first, the longest unused
before the others; then the row that joined last is sent back and computed again later. The oldest row always fits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from arctic_platform.rl.zorro_inference.cache import CachePolicy, KvForest, Segment
from arctic_platform.rl.zorro_inference.pool import KvPool
from arctic_platform.rl.zorro_inference.prefill import PrefillPass, plan_pass
from arctic_platform.rl.zorro_inference.requests import SamplerStats
from arctic_platform.rl.zorro_inference.rows import Job, Prefill, Row
from arctic_platform.rl.zorro_inference.states import RowStates, States
from arctic_platform.rl.zorro_inference.suffix import FIRST_CAPACITY, SuffixBank, SuffixCache

OVERRUN = 1.25
"""A pass may exceed its limit by this rather than leave a stub for the next one."""


class Scheduler:
    """Queues, seats and memory. `budget`: places of cached segments and suffixes together."""

    def __init__(self, *, budget: int, max_batch_rows: int, share: bool, stats: SamplerStats) -> None:
        self.budget = budget
        self.max_batch_rows = max_batch_rows
        self.share = share
        self.stats = stats
        self.pool = KvPool(budget)
        self.forest = KvForest(self.pool)
        self.suffix = SuffixCache()
        self.states = RowStates()
        self.jobs: dict[str, Job] = {}
        self.waiting: deque[Prefill] = deque()
        self.prefilling: list[Prefill] = []
        self.ready: deque[Row] = deque()
        self.active: list[Row] = []

    @property
    def num_row_places(self) -> int:
        """Places that the decoding rows take for what is theirs alone."""
        return self.suffix.num_places + len(self.states) * self.forest.places_per_state

    @property
    def num_seated(self) -> int:
        """Rows that decode or will as soon as their prompt is computed and a seat is free."""
        return len(self.active) + len(self.ready) + sum(len(prefill.rows) for prefill in self.prefilling)

    @property
    def num_waiting(self) -> int:
        """Rows that do not decode yet."""
        queued = [*self.waiting, *self.prefilling]
        return len(self.ready) + sum(len(prefill.rows) for prefill in queued)

    def set_budget(self, budget: int) -> None:
        """Change the budget while nothing is in work."""
        assert not self.jobs
        self.budget = self.pool.max_places = budget

    def add(self, job: Job) -> None:
        """Queue a request; without sharing every row is prefilled by itself."""
        self.jobs[job.request.request_id] = job
        groups = [job.rows] if self.share else [[row] for row in job.rows]
        reports = job.params.prompt_logprobs is not None
        self.waiting += [Prefill(job.prompt, rows, reports and rows[0].number == 0) for rows in groups]

    def admit(self) -> None:
        """Hold the paths of those who wait, in their order, while there are seats and room."""
        while self.waiting and self.num_seated < self.max_batch_rows:
            prefill = self.waiting[0]
            room = self.budget - self.num_row_places - (FIRST_CAPACITY if self.num_seated else 0)
            path = self.forest.hold(prefill.ids, limit=room, is_private=prefill.reports or not self.share)
            if path is None:
                assert self.num_seated, "a request that can never fit is refused when it is added"
                return
            prefill.path = path
            self.prefilling.append(self.waiting.popleft())
            num_ready = sum(len(segment.ids) for segment in path.path() if segment.is_ready)
            self.stats.prefix_hit_tokens += min(num_ready, len(prefill.ids) - prefill.draws)

    def next_pass(self, limit: int) -> PrefillPass | None:
        """About `limit` of the tokens that are to be computed, first come first served; None where there are none."""
        chosen: dict[Segment, None] = {}
        again: dict[Segment, None] = {}
        room = limit
        for prefill in self.prefilling:
            assert prefill.path is not None
            for segment in prefill.path.path():
                if segment.is_ready or segment in chosen or room <= 0:
                    continue
                if len(segment.ids) > OVERRUN * room:
                    segment = self.forest.cut(segment, room)
                    segment.is_chunk = True
                chosen[segment] = None
                room -= len(segment.ids)
            if prefill.path.is_ready and prefill.draws:
                again[prefill.path] = None
        return plan_pass(chosen, again) if chosen or again else None

    def computed(self, step: PrefillPass, ends: States) -> list[Prefill]:
        """A pass is done. Prefills that are complete are returned, for `seat`.

        ends: states behind the segments of the pass, per recurrent call `[N, ...]`.
        """
        for n, segment in enumerate(step.segments):
            if segment is not None:
                segment.is_ready = True
                self._keep_states(segment, [x[n].clone() for x in ends])
        done = [p for p in self.prefilling if p.path is not None and p.path.is_ready]
        return [p for p in done if not p.draws or p.path in step.last_token]

    def _keep_states(self, segment: Segment, states: States) -> None:
        """Those behind a chunk are needed until the next one is computed."""
        if states:
            self.forest.keep_states(segment, states)
            above = segment.parent
            if above is not None and above.is_chunk and above.num_children == 1 and not above.num_holders:
                self.forest.keep_states(above, None)

    def skip_computed(self) -> None:
        """Seat rows whose path is cached whole and who need no logits."""
        for prefill in [p for p in self.prefilling if not p.draws and p.path is not None and p.path.is_ready]:
            self.seat(prefill)

    def seat(self, prefill: Prefill, *, forget: bool = False) -> None:
        """Those of its rows that go on hold the path themselves. forget: its values may not be finite."""
        assert prefill.path is not None
        self.prefilling.remove(prefill)
        for row in prefill.rows:
            if not row.rollout.is_finished:
                row.path, row.is_pure = self.forest.hold_again(prefill.path), True
                self.ready.append(row)
        self.forest.release(prefill.path, forget=forget)
        prefill.path = None

    def join(self) -> bool:
        """Ready rows take free seats while there is room; True where any did."""
        joined = []
        while self.ready and len(self.active) < self.max_batch_rows:
            num_places = self.num_row_places + FIRST_CAPACITY * (len(joined) + 1)
            if not self.forest.make_room(0, self.budget - num_places) and (self.active or joined):
                break
            row = self.ready.popleft()
            joined.append(row)
            self.active.append(row)
        self.suffix.add(joined)
        for row in joined if self.forest.needs_states else ():
            assert row.path is not None and row.path.states is not None
            self.states.add(row, row.path.states)
        return bool(joined)

    def make_room(self) -> bool:
        """Room for one more token of every active row; True where rows moved or were sent back."""
        changed = False
        while not self.forest.make_room(self.suffix.num_missing, self.budget - self.num_row_places):
            if len(self.active) == 1:
                break
            self.send_back([self.active[-1]])
            changed = True
        return self.suffix.make_room() or changed

    def leave(self, rows: Sequence[Row], *, keep_answers: bool) -> None:
        """Active rows have finished; what they generated may join the cache."""
        if keep_answers and self.share:
            self._keep_answers([row for row in rows if row.is_pure and row.path is not None and row.path.is_listed])
        for row in rows:
            self._drop(row)

    def send_back(self, rows: Sequence[Row]) -> None:
        """Give up the keys and values of rows that have tokens; they wait in front, and nothing of them is lost."""
        for row in rows:
            self._drop(row)
        self.waiting.extendleft([Prefill(row.context, [row]) for row in reversed(rows)])

    def fail(self, rows: Sequence[Row]) -> None:
        """Rows whose values may not be finite: nothing of them is kept."""
        for row in rows:
            self._drop(row, forget=True)

    def abort(self, job: Job) -> None:
        """Take a request out, wherever its rows are."""
        self.waiting = deque(prefill for prefill in self.waiting if prefill.rows[0].job is not job)
        for prefill in [p for p in self.prefilling if p.rows[0].job is job]:
            self.prefilling.remove(prefill)
            self._release(prefill)
        for row in job.rows:
            self._drop(row)

    def restart_prefills(self) -> None:
        """The weights changed: what is being prefilled begins anew."""
        for prefill in self.prefilling:
            self._release(prefill)
        self.waiting.extendleft(reversed(self.prefilling))
        self.prefilling = []

    def update(self, version: int, policy: CachePolicy, *, recompute: bool) -> None:
        """New weights; rows that have tokens go on over what they hold, or are computed anew."""
        in_flight = [*self.active, *self.ready]
        self.forest.update(version, policy)
        if policy != "keep":
            self.restart_prefills()
            for row in in_flight:
                row.is_pure = False
        if recompute:
            self.send_back(in_flight)

    def _release(self, prefill: Prefill) -> None:
        if prefill.path is not None:
            self.forest.release(prefill.path)
            prefill.path = None

    def _drop(self, row: Row, *, forget: bool = False) -> None:
        if row in self.active:
            self.active.remove(row)
            self.suffix.remove(row, clear=forget)
            if self.forest.needs_states:
                self.states.remove(row)
        elif row in self.ready:
            self.ready.remove(row)
        if row.path is not None:
            self.forest.release(row.path, forget=forget)
            row.path = None

    def _keep_answers(self, rows: Sequence[Row]) -> None:
        """Copy what rows generated, but for the newest token, into segments below their paths."""
        sources: dict[SuffixBank, list[tuple[int, Segment, int]]] = {}
        held: list[Segment] = []
        for row in rows:
            assert row.path is not None
            bank, num_tokens = self.suffix.bank_of(row), self.suffix.length(row)
            ids = row.context[row.path.end :]
            path = self.forest.append(row.path, ids, limit=self.budget - self.num_row_places) if num_tokens else None
            if path is None:
                continue
            held.append(path)
            if self.forest.needs_states and not path.is_ready:
                self.forest.keep_states(path, self.states.of(row))
            slot = bank.rows.index(row)
            for segment in path.path():
                if not segment.is_ready:
                    sources.setdefault(bank, []).append((slot, segment, segment.depth - row.path.end))
                    segment.is_ready = True
        for bank, parts in sources.items():
            self._copy_answers(bank, parts)
        for path in held:
            self.forest.release(path)

    def _copy_answers(self, bank: SuffixBank, parts: list[tuple[int, Segment, int]]) -> None:
        """parts: slot, segment, and the suffix token that the segment begins with."""
        lens = np.array([len(segment.ids) for _, segment, _ in parts])
        slots = torch.from_numpy(np.repeat([slot for slot, _, _ in parts], lens))
        tokens = [np.arange(first, first + len(segment.ids)) for _, segment, first in parts]
        at = torch.from_numpy(np.concatenate(tokens))
        places = torch.from_numpy(np.concatenate([np.arange(*segment.span) for _, segment, _ in parts]))
        for layer_idx in bank.layers:
            self.pool.store(layer_idx, *bank.tokens(layer_idx, slots, at), places)
