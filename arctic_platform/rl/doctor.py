"""What `arctic-rl doctor` looks at: whether this machine and this installation can do what they are asked to.

Every check is a function that returns what it found and never raises; each says what to do where something is amiss.
This module runs on the base install. What needs torch is in doctor_torch.py and is left out where torch is absent.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.version import Version
from rich.console import Console
from rich.table import Table
from rich.text import Text

from arctic_platform.rl.fetch import KNOWN_MODELS, MODELS_FOLDER, is_model_folder

Level = Literal["ok", "absent", "warning", "problem"]

DISTRIBUTION = "zorro-rl"
GATHERING_EXTRAS = ("all", "dev")
GIB = 2**30
SMALL_SHARED_MEMORY = GIB
SMALL_DISK = 5 * GIB
RUNS_FOLDER = Path("runs")
MARKS = {"ok": ("ok", "green"), "absent": ("-", "dim"), "warning": ("warning", "yellow"), "problem": ("problem", "red")}


@dataclass(frozen=True)
class Check:
    """One finding. `absent` is an optional part that is not installed; `advice` says what to do, where something is."""

    area: str
    name: str
    level: Level
    found: str
    advice: str = ""


def examine(*, port: int, folder: Path | None = None) -> list[Check]:
    """Every check, in the order of the report. `folder` holds runs/ and models/; `port` is where a server would go."""
    folder = Path() if folder is None else folder
    return [
        check_python(),
        check_memory(),
        *check_packages(),
        *check_torch(),
        check_port(port),
        check_ephemeral_port(),
        *check_folders(folder),
        *check_models(folder),
    ]


def exit_code(checks: Iterable[Check]) -> int:
    """1 when a check found a problem, else 0."""
    return int(any(check.level == "problem" for check in checks))


def check_python() -> Check:
    """Interpreter and machine."""
    version, supported = platform.python_version(), _supported_python()
    found = f"{version}, {platform.system()} {platform.machine()}, {usable_cpus()} usable CPU cores"
    if supported and not Requirement(f"python{supported}").specifier.contains(version, prereleases=True):
        return Check("machine", "python", "problem", found, f"use Python {supported}: make setup PYTHON=python3.12")
    return Check("machine", "python", "ok", found)


def usable_cpus() -> int:
    """Cores that this process may use, which a container may limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_packages() -> list[Check]:
    """The base packages and those of each extra, against the ranges that this distribution declares."""
    try:
        requirements = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError:
        advice = f"install it: pip install {DISTRIBUTION}, or pip install -e . in a checkout"
        return [Check("packages", DISTRIBUTION, "problem", "not installed, only importable", advice)]
    version = metadata.version(DISTRIBUTION)
    checks = [_check_base(version, [one for one in requirements if one.marker is None])]
    extras = metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    for extra in extras:
        if extra not in GATHERING_EXTRAS:
            checks.append(_check_extra(extra, _requirements_of(extra, requirements)))
    return checks


def _check_base(version: str, requirements: Sequence[Requirement]) -> Check:
    faults = [fault for fault in map(_fault_of, requirements) if fault]
    if faults:
        return Check(
            "packages", DISTRIBUTION, "problem", "; ".join(faults), f"pip install --upgrade {DISTRIBUTION}=={version}"
        )
    return Check("packages", DISTRIBUTION, "ok", f"{version}, {len(requirements)} base packages in their ranges")


def _check_extra(extra: str, requirements: Sequence[Requirement]) -> Check:
    """An extra that is not whole was not asked for: what is there of it may belong to another package."""
    advice = f"pip install '{DISTRIBUTION}[{extra}]'"
    missing = [one.name for one in requirements if _version_of(one.name) is None]
    if missing:
        return Check("packages", f"extra {extra}", "absent", f"not installed: {', '.join(missing)}", advice)
    faults = [fault for fault in map(_fault_of, requirements) if fault]
    if faults:
        return Check("packages", f"extra {extra}", "problem", "; ".join(faults), advice)
    present = ", ".join(f"{one.name} {_version_of(one.name)}" for one in requirements)
    return Check("packages", f"extra {extra}", "ok", present)


def _requirements_of(extra: str, requirements: Iterable[Requirement]) -> list[Requirement]:
    """What an extra brings by itself; the extras that it builds on have lines of their own."""
    return [
        one
        for one in requirements
        if one.marker is not None and one.name != DISTRIBUTION and one.marker.evaluate({"extra": extra})
    ]


def _fault_of(requirement: Requirement) -> str:
    version = _version_of(requirement.name)
    if version is None:
        return f"{requirement.name} is missing"
    if not requirement.specifier.contains(Version(version), prereleases=True):
        return f"{requirement.name} {version} is not {requirement.specifier}"
    return ""


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _supported_python() -> str | None:
    try:
        return metadata.metadata(DISTRIBUTION)["Requires-Python"]
    except metadata.PackageNotFoundError:
        return None


def check_torch() -> list[Check]:
    """The build of torch, its devices, threads and kernels, and a tiny model; one line where torch is absent."""
    try:
        from arctic_platform.rl.doctor_torch import examine_torch
    except (ImportError, OSError) as error:
        advice = f"pip install '{DISTRIBUTION}[torch]'"
        if _version_of("torch") and _version_of("transformers"):
            found = f"installed, but the import fails: {error}"
            return [Check("torch", "torch", "problem", found, f"pip install --force-reinstall '{DISTRIBUTION}[torch]'")]
        found = "not installed: this installation is a client, it loads no model itself"
        return [Check("torch", "torch", "absent", found, advice)]
    return examine_torch()


def check_memory() -> Check:
    """Shared memory, which Ray and worker processes live in."""
    place = Path("/dev/shm")
    if not place.is_dir():
        return Check("machine", "shared memory", "ok", f"{platform.system()} has no {place}")
    usage = shutil.disk_usage(place)
    found = f"{_size(usage.free)} free of {_size(usage.total)} in {place}"
    if usage.total < SMALL_SHARED_MEMORY:
        advice = "containers: docker run --shm-size=8g (or --ipc=host); else: mount -o remount,size=8g /dev/shm"
        return Check("machine", "shared memory", "warning", found, advice)
    if usage.free < SMALL_SHARED_MEMORY // 4:
        return Check("machine", "shared memory", "warning", found, "remove what ended processes left in /dev/shm")
    return Check("machine", "shared memory", "ok", found)


def check_port(port: int) -> Check:
    """Whether `arctic-rl serve` could listen on its port of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                found, advice = "in use by another process", f"serve on another one: arctic-rl serve --port {port + 1}"
            else:
                found, advice = str(error.strerror), "choose a port of 1024 or more: arctic-rl serve --port 8790"
            return Check("network", f"port {port}", "warning", found, advice)
    return Check("network", f"port {port}", "ok", "free on 127.0.0.1")


def check_ephemeral_port() -> Check:
    """Whether this machine gives out a loopback port that reaches itself."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = server.getsockname()
            with socket.create_connection(address, timeout=2.0):
                pass
    except OSError as error:
        advice = "let processes of this machine connect to 127.0.0.1 (firewall, sandbox or container settings)"
        return Check("network", "loopback", "problem", f"a connection to itself fails: {error}", advice)
    return Check("network", "loopback", "ok", "connects to itself on a free port")


def check_folders(folder: Path) -> list[Check]:
    """Write access and space of the folders that runs and models go to."""
    return [_check_folder(folder / name) for name in (RUNS_FOLDER, MODELS_FOLDER)]


def _check_folder(folder: Path) -> Check:
    """Tries a real file, since permissions do not tell of read-only mounts and quotas."""
    name, place = f"{folder.name}/", folder
    while not place.exists():
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"arctic")
            file.flush()
    except OSError as error:
        advice = f"make it writable: chmod u+w {place}, or work in another folder"
        return Check("disk", name, "problem", f"{place.resolve()} cannot be written: {error.strerror}", advice)
    free = shutil.disk_usage(place).free
    found = f"writable, {_size(free)} free" + ("" if place == folder else " (made on first use)")
    if free < SMALL_DISK:
        return Check("disk", name, "warning", found, "free some space, or set keep_checkpoints in the recipe's client")
    return Check("disk", name, "ok", found)


def check_models(folder: Path) -> list[Check]:
    """The known models, and any other model folder under models/."""
    models = folder / MODELS_FOLDER
    there = sorted(path.name for path in models.iterdir() if is_model_folder(path)) if models.is_dir() else []
    checks = [Check("models", name, "ok", f"{MODELS_FOLDER / name}") for name in there]
    absent = [name for name in KNOWN_MODELS if name not in there]
    return checks + [Check("models", name, "absent", "not here", f"arctic-rl fetch {name}") for name in absent]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def as_json(checks: Sequence[Check]) -> str:
    """The report for a program: every check, and the counts of each level."""
    counts = {level: sum(check.level == level for check in checks) for level in MARKS}
    return json.dumps(
        {"ok": not exit_code(checks), "counts": counts, "checks": [asdict(check) for check in checks]}, indent=2
    )


def show(checks: Sequence[Check], console: Console) -> None:
    """The report for a person: a table, then what to do, worst first."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for column in ("area", "name", "level"):
        table.add_column(column, no_wrap=True)
    table.add_column("found", overflow="fold")
    area = ""
    for check in checks:
        mark, style = MARKS[check.level]
        if area and area != check.area:
            table.add_row()
        table.add_row(
            Text("" if check.area == area else check.area, style="bold"), check.name, Text(mark, style), check.found
        )
        area = check.area
    console.print(table, highlight=False, markup=False)
    console.print()
    for level in ("problem", "warning"):
        for check in checks:
            if check.level == level:
                mark, style = MARKS[level]
                console.print(Text(f"{mark}: ", style) + Text(f"{check.name}: {check.advice}"), soft_wrap=True)
    for check in checks:
        if check.level == "absent" and check.advice:
            console.print(Text(f"to add {check.name}: {check.advice}", "dim"), soft_wrap=True)
    console.print(_verdict(checks), soft_wrap=True, highlight=False)


def _verdict(checks: Sequence[Check]) -> Text:
    num_problems = sum(check.level == "problem" for check in checks)
    if num_problems:
        return Text(f"{num_problems} problem{'s' * (num_problems > 1)}: see above", "bold red")
    num_warnings = sum(check.level == "warning" for check in checks)
    if num_warnings:
        return Text(f"usable, with {num_warnings} warning{'s' * (num_warnings > 1)}", "bold yellow")
    return Text("all well", "bold green")
