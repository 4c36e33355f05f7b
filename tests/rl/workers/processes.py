"""Which processes are there, for tests that end some."""

import time
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended; one that only waits for its parent has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def all_end(pids: list[int], seconds: float = 20.0) -> bool:
    """Whether all of them end within so long."""
    deadline = time.monotonic() + seconds
    while any(is_running(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def alive_of(pids: list[int]) -> list[int]:
    """Those that run."""
    return [pid for pid in pids if is_running(pid)]
