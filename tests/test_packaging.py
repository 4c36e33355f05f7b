"""`make setup` and `make test-vllm` install what was tested: every direct dependency has its version in their files."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def name_of(requirement: str) -> str:
    return re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def test_every_direct_dependency_has_a_pinned_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    files = ROOT / "constraints.txt", ROOT / "constraints-vllm.txt"
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    pinned = {name_of(line) for line in lines if "==" in line}
    assert not {name_of(one) for one in asked} - pinned - {project["name"]}
