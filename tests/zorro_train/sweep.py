"""Every family of architectures.py, judged; the table in docs/architectures.md holds the outcome.

python -m tests.zorro_train.sweep                      # judge with the installed transformers, compare with the table
python -m tests.zorro_train.sweep --write              # ... and write what was found into the table
python -m tests.zorro_train.sweep --versions 5.17.0    # the same in a throwaway environment with that transformers
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "architectures.md"
ENVIRONMENTS = ROOT / ".venvs"
VERSIONS = ("5.24.0", "5.17.0", "5.10.4", "4.57.6")
"""Columns of the table: the pinned transformers, whose errors it shows, and those that other frameworks pin."""

SAMPLER = "sampler"
"""The last column: what tests/zorro_inference/architectures.py found."""

Cells = dict[str, dict[str, str]]
"""Per family, per column, what the table says."""


def read_table() -> Cells:
    """The committed table."""
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("|")]
    head, _, *body = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {cells[0]: dict(zip(head[1:], cells[1:], strict=True)) for cells in body}


def write_table(cells: Cells) -> None:
    """Replace the table between its text."""
    columns = ["family", "what is special", "log-probs", "gradients", *VERSIONS, SAMPLER]
    lines = [columns, ["---"] * len(columns)]
    lines += [[family, *(row.get(column, "not run") for column in columns[1:])] for family, row in cells.items()]
    text = TABLE.read_text().splitlines()
    inside = [at for at, line in enumerate(text) if line.startswith("|")]
    text[inside[0] : inside[-1] + 1] = ["| " + " | ".join(line) + " |" for line in lines]
    TABLE.write_text("\n".join(text) + "\n")


def judge_all() -> Cells:
    """Judge every family with the installed transformers, one printed line each."""
    import torch
    import transformers

    from tests.zorro_train.architectures import FAMILIES, judge

    transformers.logging.set_verbosity_error()
    cells: Cells = {}
    for name, family in FAMILIES.items():
        verdict = judge(name)
        cells[name] = {"what is special": family.kind, transformers.__version__: verdict.word}
        found = verdict.errors.get(torch.float32)
        if transformers.__version__ == VERSIONS[0]:
            cells[name]["log-probs"] = f"{found.logprobs:.0e}" if found else ""
            cells[name]["gradients"] = f"{found.gradients:.0e}" if found else ""
        errors = " ".join(f"{e.logprobs:.1e} {e.gradients:.1e}" for e in verdict.errors.values())
        print(f"{name:20s} {verdict.word:8s} {errors} {verdict.reason[:90]}".rstrip(), flush=True)
    return cells


def differences(found: Cells, version: str) -> list[str]:
    """What was found and the table does not say, one line each."""
    told = read_table()
    words = {name: (row[version], told.get(name, {}).get(version, "no line")) for name, row in found.items()}
    lines = [f"{name}: found {word}, the table says {said}" for name, (word, said) in words.items() if word != said]
    return lines + [
        f"{name}: the table has a line, the sweep has no such family" for name in told.keys() - found.keys()
    ]


def environment(version: str) -> Path:
    """The interpreter of an environment with that transformers, made when it is not there yet."""
    folder = ENVIRONMENTS / version
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        pins = (ROOT / "constraints.txt").read_text().split()
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *(pin for pin in pins if pin.startswith(("torch==", "numpy==")))], check=True)
        subprocess.run([*pip, f"transformers=={version}", "pydantic>=2.7,<3", "safetensors"], check=True)
        (folder / "complete").touch()
    return python


def run_elsewhere(version: str, *, write: bool = False) -> int:
    """Run this sweep with another transformers; returns its exit status."""
    command = [str(environment(version)), "-m", "tests.zorro_train.sweep", *(["--write"] if write else [])]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False).returncode


def main() -> int:
    """Judge, then compare with the table or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the outcome into the table")
    parser.add_argument("--versions", nargs="+", metavar="VERSION", help="run with these versions of transformers")
    options = parser.parse_args()
    if options.versions:
        return max(run_elsewhere(version, write=options.write) for version in options.versions)
    import transformers

    warnings.simplefilter("ignore")
    found = judge_all()
    if options.write:
        old = read_table()
        write_table({name: old.get(name, {}) | row for name, row in found.items()})
    lines = differences(found, transformers.__version__)
    print("\n".join(lines) if lines else f"transformers {transformers.__version__}: as the table says")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
