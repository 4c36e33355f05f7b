"""docs/faults.md says what the tests say."""

from tests.faults.record import Row
from tests.faults.table import PAGE, cells_of, load_rows, rows_of


def test_the_pages_rows_are_the_tests_rows() -> None:
    declared = [cells_of(row, "") for row in load_rows().values()]
    ours = [(fault, saw, lost) for fault, saw, _, lost in declared]
    assert sorted(rows_of(PAGE.read_text(encoding="utf-8"))) == sorted(ours), "run: make test-faults"


def test_a_row_matches_nothing_but_its_own_text() -> None:
    import re

    row = Row("a fault", "http", "TransportError: no answer from <url> (why?)", "nothing")
    assert re.fullmatch(row.pattern, "TransportError: no answer from http://x:1 (why?)")
    assert not re.fullmatch(row.pattern, "TransportError: no answer from http://x:1 (why)")
    assert not re.fullmatch(row.pattern, "TransportError: no answer from  (why?) and more")
