"""One job's calls: their futures, their order, and what is kept of their answers.

    submit 0, 2, 1  -->  held until its turn  -->  one worker thread  -->  answer, kept until delivered and longer

Bookkeeping only: no model, no thread, and no lock of its own (`Job` holds one around every method).
"""

import threading
import time
from collections import OrderedDict
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from arctic_platform.errors import ArcticError, CallCancelledError, InputError, NotFoundError, TransportError
from arctic_platform.rl.protocol import Request, Response
from arctic_platform.rl.ragged import Ragged, Row
from arctic_platform.rl.server.states import ErrorInfo

ANSWERS_KEPT = 256
ANSWER_BYTES_KEPT = 256 << 20
UNFETCHED_KEPT = 1024
UNFETCHED_BYTES_KEPT = 4 << 30
IDS_KEPT = 4096
MAX_OPEN = 4096
MAX_CLIENTS = 1024


class Stopped(Exception):
    """Ends a sampling call that nobody waits for any more."""


@dataclass(eq=False)
class Call:
    """A request on its way. `future` holds its Response, or what it raised; the request is dropped once it ran."""

    call_id: str
    method: str
    request: Request | None
    client_id: str = ""
    sequence: int | None = None
    future: "Future[Response]" = field(default_factory=Future)
    stop: threading.Event = field(default_factory=threading.Event)
    submitted_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None
    num_finished: int = 0
    num_total: int = 0
    is_delivered: bool = False
    is_forgotten: bool = False

    def note_progress(self, num_finished: int, num_total: int) -> None:
        """Called by the sampler between steps. Raises Stopped when nobody wants the answer any more."""
        self.num_finished, self.num_total = num_finished, num_total
        if self.stop.is_set():
            raise Stopped

    @property
    def error(self) -> ArcticError | None:
        """Why it failed; none where it runs, waits or is answered."""
        if not self.future.done():
            return None
        try:
            error = self.future.exception()
        except CancelledError:
            return CallCancelledError(f"{self.method} was cancelled before it began; nothing was changed")
        return error if error is None or isinstance(error, ArcticError) else ErrorInfo.of(error).to_error()

    def forget_answer(self) -> None:
        """Keep the id alone, so that the call never runs twice."""
        self.is_forgotten = True
        self.future = Future()
        self.future.set_exception(
            InputError(f"{self.method} {self.call_id[:64]!r} was answered before and its answer is no longer kept")
        )

    def is_retried_by(self, other: "Call") -> bool:
        """Whether `other` is this very call sent again; one that failed may also be made anew, at a later place."""
        is_new = other.sequence is None or (other.client_id, other.sequence) != (self.client_id, self.sequence)
        return self.error is None or self.is_forgotten or not is_new


@dataclass(eq=False)
class Order:
    """The sequence numbers of one client: those before `next` are known, those in `held` came too early."""

    next: int = 0
    held: dict[int, Call] = field(default_factory=dict)

    def take(self, call: Call) -> list[Call]:
        """The calls whose turn it now is. Raises InputError for a number that was used."""
        if call.sequence is None:
            return [call]
        if call.sequence < self.next or call.sequence in self.held:
            raise InputError(
                f"sequence number {call.sequence} of this client was used by another call; the next is {self.next}"
            )
        self.held[call.sequence] = call
        return self._due()

    def pass_over(self, call: Call) -> list[Call]:
        """The number of a call that is not executed again, if it has one of its own, is used up."""
        if call.sequence is None or call.sequence < self.next or call.sequence in self.held:
            return []
        call.future.cancel()
        return self.take(call)

    def skip_to(self, call: Call) -> list[Call]:
        """Take `call` out although its predecessors are missing; those after it need not wait for them either."""
        assert call.sequence is not None
        del self.held[call.sequence]
        earlier = [self.held.pop(number) for number in sorted(self.held) if number < call.sequence]
        self.next = call.sequence + 1
        return earlier + self._due()

    def _due(self) -> list[Call]:
        due = []
        while self.next in self.held:
            due.append(self.held.pop(self.next))
            self.next += 1
        return due


class CallBook:
    """Every call that a job knows, by its id and by its client's sequence numbers."""

    def __init__(self) -> None:
        self.open: dict[str, Call] = {}
        self._calls: OrderedDict[str, Call] = OrderedDict()
        self._kept: OrderedDict[str, int] = OrderedDict()
        self._unfetched: OrderedDict[str, int | None] = OrderedDict()
        self._orders: OrderedDict[str, Order] = OrderedDict()

    @property
    def num_clients(self) -> int:
        """Clients that numbered their calls here."""
        return len(self._orders)

    @property
    def num_unfetched(self) -> int:
        """Calls that ended and were not asked about since."""
        return len(self._unfetched)

    def known(self, call_id: str) -> Call | None:
        """The call of this id, if it is kept."""
        return self._calls.get(call_id)

    def find(self, call_id: str) -> Call:
        """Raises NotFoundError."""
        if call_id not in self._calls:
            raise NotFoundError(f"there is no call {call_id[:64]!r} here; it was never submitted, or answered long ago")
        return self._calls[call_id]

    def admit(self, call: Call) -> tuple[Call, list[Call]]:
        """The call to wait for (the earlier one, if this is a retry), and those whose turn it now is, in order.

        Raises InputError for an id or a number that another call has, TransportError when too many wait.
        """
        known = self._calls.get(call.call_id)
        if known is not None and known.method != call.method:
            raise InputError(f"request_id {call.call_id[:64]!r} belongs to a {known.method} call; give each its own")
        if known is not None and known.is_retried_by(call):
            return known, self.pass_over(call)
        if len(self.open) >= MAX_OPEN:
            raise TransportError(f"{MAX_OPEN} calls of this job wait already; let some of them finish first")
        due = self._order_of(call.client_id).take(call)
        self._remove(call.call_id)
        self._calls[call.call_id] = self.open[call.call_id] = call
        self._forget_unfetched()
        while len(self._calls) - len(self.open) > IDS_KEPT:
            self._remove(next(name for name in self._calls if name not in self.open))
        return call, due

    def pass_over(self, call: Call) -> list[Call]:
        """Use up the number of a call that is not executed; returns those whose turn it now is."""
        return self._order_of(call.client_id).pass_over(call)

    def is_held(self, call: Call) -> bool:
        """Whether calls that its client numbered before it have not arrived."""
        order = self._orders.get(call.client_id)
        return order is not None and call.sequence is not None and order.held.get(call.sequence) is call

    def give_up(self, call: Call) -> list[Call]:
        """Fail a held call whose predecessors do not come; returns those whose turn it now is."""
        order = self._orders[call.client_id]
        fault = InputError(
            f"{call.method} is call {call.sequence} of its client, call {order.next} never arrived; nothing was done"
        )
        due = order.skip_to(call)
        self.finish(call)
        call.future.set_exception(fault)
        return due

    def finish(self, call: Call) -> None:
        """It ran, failed or was cancelled."""
        call.request = None
        if self.open.pop(call.call_id, None) is not None:
            self._unfetched[call.call_id] = None

    def deliver(self, call: Call) -> None:
        """Its answer was handed over; the oldest such answers go when they are too many or too large."""
        if call.is_delivered or call.is_forgotten:
            return
        call.is_delivered = True
        self._unfetched.pop(call.call_id, None)
        self._kept[call.call_id] = _answer_bytes(call)
        while len(self._kept) > ANSWERS_KEPT or (len(self._kept) > 1 and sum(self._kept.values()) > ANSWER_BYTES_KEPT):
            old, _ = self._kept.popitem(last=False)
            self._calls[old].forget_answer()

    def _forget_unfetched(self) -> None:
        """Answers that nobody came for: the oldest go when they are too many or too large."""
        for name, size in self._unfetched.items():
            if size is None and self._calls[name].future.done():
                self._unfetched[name] = _answer_bytes(self._calls[name])
        sizes = self._unfetched
        while len(sizes) > UNFETCHED_KEPT or (
            len(sizes) > 1 and sum(size or 0 for size in sizes.values()) > UNFETCHED_BYTES_KEPT
        ):
            if not self._calls[next(iter(sizes))].future.done():
                return
            old, _ = sizes.popitem(last=False)
            self._calls[old].forget_answer()

    def _remove(self, call_id: str) -> None:
        for book in (self._calls, self._kept, self._unfetched):
            book.pop(call_id, None)

    def _order_of(self, client_id: str) -> Order:
        order = self._orders.setdefault(client_id, Order())
        self._orders.move_to_end(client_id)
        if len(self._orders) > MAX_CLIENTS:
            quiet = next(name for name, one in self._orders.items() if not one.held or one is order)
            if self._orders[quiet] is not order:
                del self._orders[quiet]
        return order


def _answer_bytes(call: Call) -> int:
    return 0 if call.error else num_bytes(call.future.result())


def num_bytes(value: Any) -> int:
    """About how much memory a response holds: its arrays; anything else counts a little."""
    if isinstance(value, BaseModel):
        return sum(num_bytes(item) for _, item in value)
    if isinstance(value, Ragged):
        return value.values.nbytes + value.offsets.nbytes
    if isinstance(value, Row):
        return 8 * len(value)
    if isinstance(value, dict):
        return sum(num_bytes(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(num_bytes(item) for item in value)
    return 64
