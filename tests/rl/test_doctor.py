"""The doctor finds what is there, says what to do about what is not, and needs nothing but the base install."""

import inspect
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from rich.console import Console

from arctic_platform import cli
from arctic_platform.cli import main
from arctic_platform.rl import doctor
from arctic_platform.rl.doctor import Check
from arctic_platform.rl.server.settings import ServerSettings

ROOT = Path(__file__).parents[2]
LEVELS = {"ok", "absent", "warning", "problem"}
# A finder in front of all others: what the base install does not bring cannot be imported.
WITHOUT_EXTRAS = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "transformers", "ray", "fastapi", "uvicorn", "prometheus_client"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
from importlib import metadata
if {absent}:
    real = metadata.version
    def version(name):
        if name in ("torch", "transformers", "ray", "fastapi"):
            raise metadata.PackageNotFoundError(name)
        return real(name)
    metadata.version = version
from arctic_platform import cli
from arctic_platform.cli import main
main(["doctor", "--json"])
"""


def run_main(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


def only(checks: list[Check], name: str) -> Check:
    (found,) = (check for check in checks if check.name == name)
    return found


def test_this_installation_is_examined_from_python_to_a_receipt(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_main("doctor", "--json", "--port", "0") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    by_name = {check["name"]: check for check in report["checks"]}
    assert {check["level"] for check in report["checks"]} <= LEVELS
    assert sum(report["counts"].values()) == len(report["checks"])
    for name in (
        "python",
        "shared memory",
        "extra torch",
        "extra ray",
        "build",
        "threads",
        "sdpa",
        "loopback",
        "runs/",
    ):
        assert name in by_name
    assert by_name["tiny model"]["level"] == "ok"
    assert "tokens computed for" in by_name["tiny model"]["found"]
    assert by_name["smollm2-135m"]["advice"] == "arctic-rl fetch smollm2-135m"


def examine_without_extras(folder: Path, *, absent: bool) -> tuple[int, dict[str, dict[str, str]]]:
    """The exit code and the checks of a process in which torch and its like cannot be imported."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WITHOUT_EXTRAS.replace("{absent}", str(absent))]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.returncode, {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def test_the_base_install_is_enough(tmp_path):
    code, checks = examine_without_extras(tmp_path, absent=True)
    assert code == 0
    for name, extra in (("torch", "torch"), ("extra torch", "torch"), ("extra server", "server"), ("extra ray", "ray")):
        assert checks[name]["level"] == "absent"
        assert checks[name]["advice"] == f"pip install 'zorro-rl[{extra}]'"


def test_a_torch_that_is_installed_and_cannot_be_imported_is_a_problem(tmp_path):
    code, checks = examine_without_extras(tmp_path, absent=False)
    assert code == 1
    assert checks["torch"]["level"] == "problem"
    assert "the import fails" in checks["torch"]["found"]


def test_the_terminal_report_says_what_to_do_and_ends_with_a_verdict(capsys):
    checks = [
        Check("machine", "python", "ok", "3.12"),
        Check("packages", "extra ray", "absent", "not installed: ray", "pip install 'zorro-rl[ray]'"),
        Check("disk", "runs/", "problem", "cannot be written: [brackets] stay", "make it writable"),
    ]
    doctor.show(checks, Console(width=100))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert "cannot be written: [brackets] stay" in lines[2]
    assert lines[3:] == [
        "problem: runs/: make it writable",
        "to add extra ray: pip install 'zorro-rl[ray]'",
        "1 problem: see above",
    ]
    assert doctor.exit_code(checks) == 1
    assert doctor.exit_code(checks[:2]) == 0


@pytest.mark.parametrize(
    ("device", "has_gloo", "has_nccl", "level", "found"),
    [
        ("cpu", True, False, "ok", "gloo on cpu"),
        ("cpu", False, False, "absent", "no gloo"),
        ("cuda", True, True, "ok", "NCCL and gloo on 4 CUDA devices"),
        ("cuda", True, False, "warning", "no NCCL"),
    ],
)
def test_what_ranks_speak_is_examined(monkeypatch, device, has_gloo, has_nccl, level, found):
    import torch

    from arctic_platform.rl.doctor_torch import _check_ranks

    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: has_gloo)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: has_nccl)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    check = _check_ranks(device)
    assert (check.area, check.name, check.level) == ("torch", "ranks", level)
    assert found in check.found
    assert bool(check.advice) == (level != "ok")


def test_an_installation_without_the_compiled_kernel_says_how_to_get_it(monkeypatch):
    from arctic_platform.forest import native
    from arctic_platform.rl.doctor_torch import _check_native

    monkeypatch.setattr(native, "LIBRARIES", dict.fromkeys(("AVX512", "AVX2", "DEFAULT"), ("_never_compiled",)))
    check = _check_native()
    assert (check.level, check.found) == ("absent", "the package was installed without a C++ compiler")
    assert "g++" in check.advice
    monkeypatch.setenv(native.VARIABLE, "0")
    assert _check_native().found == "switched off by ARCTIC_NATIVE_ATTENTION=0"


def test_a_port_in_use_is_a_warning_with_another_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check = doctor.check_port(port)
    assert check.level == "warning"
    assert f"--port {port + 1}" in check.advice
    assert doctor.check_port(port).level == "ok"


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path):
    (tmp_path / "runs").write_text("a file, not a folder")
    runs, models = doctor.check_folders(tmp_path)
    assert runs.level == "problem"
    assert "cannot be written" in runs.found
    assert models.level in {"ok", "warning"}
    assert not list(tmp_path.glob("models"))


def test_models_that_are_there_are_listed_and_known_ones_that_are_not_have_their_command(tmp_path):
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "models" / "mine" / "config.json").write_text("{}")
    (tmp_path / "models" / "half").mkdir()
    checks = doctor.check_models(tmp_path)
    assert only(checks, "mine").level == "ok"
    assert only(checks, "tiny-llama").advice == "arctic-rl fetch tiny-llama"
    assert "half" not in {check.name for check in checks}


@pytest.mark.parametrize(
    ("requirement", "fault"),
    [
        ("numpy>=1", ""),
        ("numpy<1", " is not <1"),
        ("no-such-package-at-all>=2", "no-such-package-at-all is missing"),
    ],
)
def test_a_package_outside_its_range_is_named_with_both(requirement, fault):
    assert doctor._fault_of(Requirement(requirement)).endswith(fault)


def test_an_extra_is_absent_when_a_package_of_it_is_missing_and_a_problem_when_one_is_out_of_range():
    missing = doctor._check_extra("server", [Requirement("numpy"), Requirement("no-such-package-at-all")])
    assert (missing.level, missing.advice) == ("absent", "pip install 'zorro-rl[server]'")
    outdated = doctor._check_extra("server", [Requirement("numpy"), Requirement("pydantic<1")])
    assert outdated.level == "problem"
    assert "pydantic" in outdated.found


def test_the_port_that_is_examined_is_the_servers_own():
    asked = inspect.signature(cli.doctor).parameters["port"].default
    assert asked == ServerSettings.model_fields["port"].default
