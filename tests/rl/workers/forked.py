"""Working processes as forks: all that `LocalProcess` does but the imports, for tests that are not about starting."""

import os
import subprocess
import tempfile
from collections.abc import Sequence
from multiprocessing.process import BaseProcess

from arctic_platform.rl.workers import main
from arctic_platform.rl.workers.launch import LocalProcess
from tests.forks import forks


class ForkedProcess(LocalProcess):
    """Runs `main` with the arguments of a command line of Python's, in the environment of that."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as this object is
        arguments = list(command[command.index("-m") + 2 :])
        output = f"/proc/{os.getpid()}/fd/{self._output.fileno()}"
        process = forks().Process(target=_work, args=(arguments, environment, output), daemon=True)
        process.start()
        self._child = _Child(process)


class _Child:
    """What is needed of a `Popen`."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process

    def wait(self, seconds: float) -> int:
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a fork", seconds)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _work(arguments: list[str], environment: dict[str, str], output: str) -> None:
    os.setsid()
    with open(output, "wb") as file:  # noqa: PTH123
        for target in (1, 2):
            os.dup2(file.fileno(), target)
    os.environ.update(environment)
    at = arguments.index("--parent") + 1
    main.main([*arguments[:at], str(os.getppid()), *arguments[at + 1 :]])
