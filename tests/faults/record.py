"""Rows of docs/faults.md: each is declared on the test that proves it.

    @fault("the server is killed between two calls", saw="TransportError: <anything> is not reachable", lost="nothing")
    def test_...(witness): ...; witness.saw(error)

A row of transport "run" tells what a run of the reference loop says before it goes on: `witness.heard(...)`.
`<...>` in `saw` stands for any text. The witness checks that the client saw just that, and keeps the seconds.
"""

import re
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


@dataclass(frozen=True)
class Row:
    """A fault, what the client of which transport sees of it, and what is lost by it."""

    fault: str
    transport: str
    saw: str
    lost: str

    @property
    def pattern(self) -> str:
        """`saw` as a regular expression."""
        return r".+".join(re.escape(part) for part in re.split(r"<[^<>]*>", self.saw))


ROWS: dict[str, Row] = {}
"""By the name of the test, with the case in brackets where the test has several."""

SECONDS: dict[str, float] = {}
"""How long it took, by the name of the test; filled when tests run."""

RESUMED: dict[str, float] = {}
"""When a run was at work again, by the name of the test; for rows about whole runs."""


def fault(
    what: str, *, saw: str, lost: str = "nothing", transport: str = "http", case: str | None = None
) -> Callable[[F], F]:
    """Declares the row that a test proves; the test takes the fixture `witness`.

    case: the row is what the test proves where its parameter `case` is this one.
    """

    def declare(test: F) -> F:
        ROWS[name_of(test.__name__, case)] = Row(what, transport, saw, lost)
        return test

    return declare


def name_of(test: str, case: str | None) -> str:
    """The key of a row."""
    return test if case is None else f"{test}[{case}]"


class Witness:
    """Holds what the client saw against the row that was declared."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.row = ROWS[name]
        self.has_seen = False

    @contextmanager
    def sees(self, kind: type[BaseException] | None = None) -> Generator[None]:
        """Times what is done inside; with `kind`, it must raise that, with the declared text."""
        started = time.perf_counter()
        try:
            yield
        except BaseException as error:
            if kind is None or not isinstance(error, kind):
                raise
            self._note(started, f"{type(error).__name__}: {error}")
        else:
            assert kind is None, f"{self.name}: nothing was raised; declared is {self.row.saw}"
            self._note(started, None)

    def heard(self, text: str, *, noticed: float, resumed: float) -> None:
        """A run said `text` so many seconds after the fault, and was at work again after `resumed`."""
        RESUMED[self.name] = max(RESUMED.get(self.name, 0.0), resumed)
        self._keep(noticed, text)

    def _note(self, started: float, text: str | None) -> None:
        self._keep(time.perf_counter() - started, text)

    def _keep(self, seconds: float, text: str | None) -> None:
        SECONDS[self.name] = max(SECONDS.get(self.name, 0.0), seconds)
        self.has_seen = True
        if text is not None:
            assert re.fullmatch(self.row.pattern, text), f"declared: {self.row.saw}\nseen:     {text}"
