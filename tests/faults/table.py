"""Writes docs/faults.md from the fault tests: `python -m tests.faults.table` runs them and notes what they took.

The rows are the tests' own declarations, which each test holds against what the client really saw.
"""

import importlib
import sys
from pathlib import Path

import pytest

from tests.faults.record import RESUMED, ROWS, SECONDS, Row

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "faults.md"
HEAD = """# Faults

Each row is a test that injects the fault and holds what the client saw against the text here; `<...>` stands for what
differs from run to run. Written by `make test-faults`, which runs the tests in `tests/faults`.

Seconds are from the fault to the answer or error in the client, with the tests' own settings: a silent server is sought
for 1 s there, not for the default 60 s (`retry_timeout`).

A run of `arctic-rl train` goes on by itself after a lost process or server, at most `max_restarts` times (3; a loss
that comes no later than the one before counts twice). What is lost are the steps since the last checkpoint
(`checkpoint_every`), which are done again. `python examples/survive_faults.py` shows it: it runs two ranks and a
sampler twice, kills a rank and the sampler in the middle of the second run, and compares the losses.

A weight sync of a run that fails is made again, at most twice, each time with a warning that holds the reason; the
third error ends the run. The sampler keeps its old weights meanwhile, so that no step is lost, and it is no restart.

In a run, "0.4, at work after 1.0" means: noticed 0.4 s after the fault, and back at work, from the last checkpoint
where something was lost, 1.0 s after it. Each such run ended with the losses of an undisturbed one, bit for bit.
"""
COLUMNS = ("fault", "what the client saw", "seconds", "what was lost")
TITLES = {
    "run": "In a run of the reference loop",
    "http": "Over HTTP",
    "ray": "In a Ray cluster",
}


def load_rows() -> dict[str, Row]:
    """All declared rows, by the name of their test."""
    for file in sorted(FOLDER.glob("test_*.py")):
        importlib.import_module(f"tests.faults.{file.stem}")
    return ROWS


def page(rows: dict[str, Row], seconds: dict[str, float]) -> str:
    """The page as text."""
    parts = [HEAD]
    for transport, title in TITLES.items():
        parts.append(f"## {title}\n")
        parts.append(_line(COLUMNS) + "\n" + _line(["---"] * len(COLUMNS)))
        for name, row in rows.items():
            if row.transport == transport:
                parts.append(_line(cells_of(row, _seconds(name, seconds))))
        parts.append("")
    return "\n".join(parts)


def _seconds(name: str, seconds: dict[str, float]) -> str:
    resumed = f", at work after {RESUMED[name]:.1f}" if name in RESUMED else ""
    return f"{seconds[name]:.1f}{resumed}"


def cells_of(row: Row, seconds: str) -> tuple[str, str, str, str]:
    """One line of the table."""
    is_quoted = row.saw.partition(": ")[0].endswith("Error") or "<" in row.saw
    return row.fault, f"`{row.saw}`" if is_quoted else row.saw, seconds, row.lost


def _line(cells: "tuple[str, ...] | list[str]") -> str:
    return "| " + " | ".join(cells) + " |"


def rows_of(text: str) -> list[tuple[str, str, str]]:
    """The rows of a page without their seconds."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [(line[0], line[1], line[3]) for line in lines if line[0] not in (COLUMNS[0], "---")]


def main() -> int:
    """Run the fault tests and write the page; 1 when one fails."""
    options = ["-q", "-m", "not gpu", "-p", "no:cacheprovider", f"--ignore={FOLDER / 'test_table.py'}"]
    code = pytest.main([str(FOLDER), *options])
    rows = load_rows()
    missing = [name for name in rows if name not in SECONDS]
    if code or missing:
        print(f"nothing was written: pytest ended with {int(code)}, not run: {missing}")
        return 1
    PAGE.write_text(page(rows, SECONDS), encoding="utf-8")
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
