"""What a reader can copy runs, what a reader can click exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPETS = [
    pytest.param(code, id=f"{document.name}-{number}")
    for document in DOCUMENTS
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", document.read_text(encoding="utf-8"), re.S))
]


@pytest.mark.parametrize("code", SNIPPETS)
def test_a_documented_snippet_runs(code, tmp_path):
    script = tmp_path / "snippet.py"
    script.write_text(code, encoding="utf-8")
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, script]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "a snippet shows something"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_to_a_file_leads_somewhere(document):
    targets = re.findall(r"\]\(([^)#\s]+)", document.read_text(encoding="utf-8"))
    missing = [target for target in targets if "://" not in target and not (document.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_recipe_and_script_that_is_named_exists(document):
    named = re.findall(
        r"(?:recipes|benchmarks|examples|arctic_platform|tests)/[\w/]+\.\w+", document.read_text(encoding="utf-8")
    )
    assert not [path for path in named if not (ROOT / path).exists()]


def test_the_forest_of_the_readme_has_the_tokens_it_says():
    from arctic_platform.forest import build_forest

    rows = ["sssaaxxx", "sssaayy", "sssbzzzz", "sssaayyw"]
    forest = build_forest([[ord(c) for c in row] for row in rows])
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"({forest.num_tokens} tokens instead of {forest.num_row_tokens})" in text


def test_the_readme_counts_the_architectures_as_the_table_does():
    table = (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8")
    newest = [cells[5].strip() for line in table.splitlines() if len(cells := line.split("|")) == 11]
    claim = f"[{newest.count('exact')} are exact and {newest.count('refused')} refused]"
    assert claim in (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_guide_can_be_reached_from_the_readme():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not [guide.name for guide in (ROOT / "docs").glob("*.md") if f"(docs/{guide.name})" not in text]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_no_figure_is_left_to_be_filled_in(document):
    assert not re.findall(r"\b[A-Z]+_(?:TABLE|TIMES|FIGURES?)\b", document.read_text(encoding="utf-8"))
