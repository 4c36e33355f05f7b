"""Record a long-tailed length distribution of real text: classes of Python's standard library and their methods.

    python benchmarks/record_lengths.py --tokenizer models/smollm2-135m/tokenizer.json

A class with four methods or more is a group: its first lines, down to its first method, are the prompt; the sources of
its methods are the responses. Writes `benchmarks/data/text_lengths.json`, token counts only; `bench_balance.py` reads
that file. These are lengths of text, not of rollouts.
"""

from __future__ import annotations

import ast
import json
import platform
import sys
import sysconfig
from pathlib import Path

import cyclopts
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("argparse.py", "asyncio", "collections", "concurrent", "email", "http", "logging", "unittest", "zipfile.py")


def record(*, tokenizer: Path, min_methods: int = 4, out: Path = ROOT / "benchmarks/data/text_lengths.json") -> None:
    """Count and write.

    Parameters
    ----------
    tokenizer: A tokenizer.json.
    min_methods: Fewest methods of a class that is a group.
    out: File to write.
    """
    encode = Tokenizer.from_file(str(tokenizer)).encode
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [path for name in PACKAGES for path in sorted([library / name, *(library / name).rglob("*.py")])]
    groups = []
    for path in files:
        source = path.read_text(encoding="utf-8") if path.is_file() else ""
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.ClassDef):
                continue
            methods = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
            if len(methods) >= min_methods:
                head = source.splitlines()[node.lineno - 1 : methods[0].lineno - 1]
                bodies = [ast.get_source_segment(source, method) or "" for method in methods]
                groups.append(
                    {
                        "prompt_len": len(encode("\n".join(head)).ids),
                        "response_lens": [len(encode(body).ids) for body in bodies],
                    }
                )
    recorded = {
        "source": f"methods of classes of the standard library of Python {platform.python_version()}",
        "command": " ".join(["python", *sys.argv]),
        "groups": groups,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(recorded) + "\n")


if __name__ == "__main__":
    cyclopts.run(record)
