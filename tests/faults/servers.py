"""Servers as processes of their own: `arctic-rl serve` in a fork of a process that has imported everything once."""

import os
import re
import resource
import signal
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.forks import forks


class ServerProcess:
    """One `arctic-rl serve`. `url` and `port` are what it printed; `log` is all that it said."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        environment: dict[str, str] | None = None,
        max_file_bytes: int | None = None,
        port: int = 0,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "log.txt"
        arguments = ("serve", "--port", str(port), *options)
        given = (arguments, str(self._log), environment or {}, max_file_bytes)
        self._process = forks().Process(target=_serve, args=given, daemon=True)
        self._process.start()
        self.url = self._await_url()
        self.port = int(self.url.rpartition(":")[2])

    @property
    def log(self) -> str:
        """Its stdout and stderr so far."""
        return self._log.read_text(encoding="utf-8") if self._log.exists() else ""

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process is still there."""
        return self._process.is_alive()

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def wait(self, seconds: float = 60.0) -> int | None:
        """Its exit code, once it ended."""
        self._process.join(seconds)
        return self._process.exitcode

    def await_log(self, pattern: str, seconds: float = 60.0) -> None:
        """Until its log matches."""
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.log):
            assert time.monotonic() < deadline, f"{pattern!r} is not in:\n{self.log}"
            time.sleep(0.02)

    def _await_url(self) -> str:
        self.await_log(r"serves on \S+\n")
        found = re.search(r"serves on (\S+)\n", self.log)
        assert found is not None
        return found[1]

    def end(self) -> None:
        """Kill what is left."""
        if self._process.is_alive():
            self.send(signal.SIGKILL)
        self._process.join(10)


@contextmanager
def serving(
    folder: Path, *options: str, environment: dict[str, str] | None = None, max_file_bytes: int | None = None
) -> Generator[ServerProcess]:
    """A server process that is gone afterwards. `max_file_bytes`: as if the disk were full beyond it."""
    server = ServerProcess(folder, *options, environment=environment, max_file_bytes=max_file_bytes)
    try:
        yield server
    finally:
        server.end()


def _serve(arguments: tuple[str, ...], log: str, environment: dict[str, str], max_file_bytes: int | None) -> None:
    with open(log, "w", buffering=1, encoding="utf-8") as file:  # noqa: PTH123
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    if max_file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    from arctic_platform.cli import main

    main(arguments)
