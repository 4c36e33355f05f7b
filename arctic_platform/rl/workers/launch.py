"""Who starts the processes of a job: this machine's server, torchrun, or a Ray cluster (`launch_ray.py`).

    launcher.listen                      where the server awaits them
    launcher.start(names, address, ...)  -> one Process each, which joins `address` with the token

What torchrun started is not the server's to end: it ends by itself when its connection does.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any, ClassVar, Protocol

import arctic_platform
from arctic_platform.errors import ConfigError
from arctic_platform.rl.config import ArcticRLClientConfig
from arctic_platform.rl.workers.job import TOKEN_VARIABLE

LEAST_TOKEN_LEN = 16
NUM_LAST_LINES = 12
MAX_LAST_BYTES = 8192


class Process(Protocol):
    """One process, as who started it sees it."""

    def fate(self, wait_seconds: float) -> str | None:
        """How it ended, after waiting for that so long; none while it runs, or where that cannot be known."""

    def kill(self) -> None:
        """End it at once, even where it is stopped. Harmless for one that has ended."""

    def last_lines(self) -> str:
        """The end of what it printed; empty where others have that."""


class Launcher(Protocol):
    """Starts processes."""

    @property
    def listen(self) -> str:
        """Where they join: `unix`, or `host:port`."""

    @property
    def num_threads(self) -> int | None:
        """CPU threads of each; none: each takes its share of its own machine."""

    def token(self) -> str:
        """The secret that they share with the server."""

    def start(self, names: Sequence[str], address: str, token: str) -> list[Process]:
        """One for each name, which joins `address`."""

    def missing(self, names: Sequence[str], address: str) -> str:
        """What to do about processes that did not join."""


def launcher_of(config: ArcticRLClientConfig, *, is_sampler: bool = False) -> Launcher:
    """The launcher that a config asks for; torchrun starts ranks only, so a sampler is then started here.

    Raises ConfigError for more ranks than devices, or a token that is missing.
    """
    if config.ranks.launch == "ray":
        from arctic_platform.rl.workers.launch_ray import RayLauncher

        return RayLauncher(config)
    if config.ranks.launch == "torchrun" and not is_sampler:
        return TorchrunLauncher(config)
    return LocalLauncher(config, is_sampler=is_sampler)


class LocalLauncher:
    """Processes of this machine, each in a session of its own: Ctrl-C in a terminal reaches the server alone."""

    listen = "unix"
    module: ClassVar[str] = "arctic_platform.rl.workers.main"

    def __init__(self, config: ArcticRLClientConfig, *, is_sampler: bool) -> None:
        num_ranks = config.ranks.num_ranks
        self.num_threads = config.ranks.num_threads or max(num_cores() // (num_ranks + (not config.colocate)), 1)
        self._devices = _devices(config, is_sampler=is_sampler)

    def token(self) -> str:
        """A new one."""
        return secrets.token_hex(32)

    def start(self, names: Sequence[str], address: str, token: str) -> list[Process]:
        """One for each name."""
        started: list[Process] = []
        try:
            for name, device in zip(names, self._devices, strict=True):
                started.append(self._start(name, device, address, token))
        except BaseException:
            for process in started:
                process.kill()
            raise
        return started

    def missing(self, names: Sequence[str], address: str) -> str:
        """They run, and said nothing."""
        return "look at the load of this machine, or raise ranks.start_seconds"

    def _start(self, name: str, device: str | None, address: str, token: str) -> Process:
        command = [sys.executable, "-P", "-m", self.module, "--join", address, "--name", name]
        own = {TOKEN_VARIABLE: token, "OMP_NUM_THREADS": str(self.num_threads), "PYTHONPATH": _python_path()}
        if sys.platform == "linux":
            own["GLOO_SOCKET_IFNAME"] = "lo"
        if device is not None:
            own["CUDA_VISIBLE_DEVICES"] = device
        return LocalProcess([*command, "--parent", str(os.getpid())], os.environ | own)


class LocalProcess:
    """A child of this process; what it prints goes into a file without a name."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as this object is
        self._child = _STARTER.run(
            lambda: subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )

    def fate(self, wait_seconds: float) -> str | None:
        """`killed by SIGKILL`, `exit code 1`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._child.wait(wait_seconds)
            if code >= 0:
                return f"exit code {code}"
            return f"killed by {signal.Signals(-code).name}" if -code in set(signal.Signals) else f"signal {-code}"
        return None

    def kill(self) -> None:
        """SIGKILL, which a stopped process gets too."""
        self._child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(10.0)

    def last_lines(self) -> str:
        """Of standard output and error."""
        size = os.fstat(self._output.fileno()).st_size
        start = max(size - MAX_LAST_BYTES, 0)
        text = os.pread(self._output.fileno(), MAX_LAST_BYTES, start).decode(errors="replace")
        return "\n".join(text.splitlines()[-NUM_LAST_LINES:])


class TorchrunLauncher:
    """Awaits ranks that somebody starts with torchrun."""

    num_threads = None

    def __init__(self, config: ArcticRLClientConfig) -> None:
        assert config.ranks.listen is not None
        self.listen = config.ranks.listen
        self.num_threads = config.ranks.num_threads

    def token(self) -> str:
        """Of the environment, where torchrun's processes have it from as well. Raises ConfigError."""
        token = os.environ.get(TOKEN_VARIABLE, "")
        if len(token) < LEAST_TOKEN_LEN:
            raise ConfigError(
                f"ranks.launch='torchrun' needs {TOKEN_VARIABLE}, a secret of {LEAST_TOKEN_LEN} or more characters, in "
                "the environment of the server and of torchrun"
            )
        return token

    def start(self, names: Sequence[str], address: str, token: str) -> list[Process]:
        """Nothing is started."""
        return [ForeignProcess() for _ in names]

    def missing(self, names: Sequence[str], address: str) -> str:
        """The command that starts them."""
        return f"start them: torchrun --nproc-per-node {len(names)} -m arctic_platform.rl.workers.main --join {address}"


class ForeignProcess:
    """Somebody else's."""

    def fate(self, wait_seconds: float) -> str | None:
        """Only who started it knows."""
        return None

    def kill(self) -> None:
        """It ends with its connection."""

    def last_lines(self) -> str:
        """Where torchrun puts them."""
        return ""


class _Starter:
    """One thread, which never ends, starts all children: Linux ends them with the thread that started them."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pid = 0

    def run(self, function: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        """What the function returns or raises."""
        with self._lock:
            if self._pid != os.getpid():
                self._pid = os.getpid()
                threading.Thread(target=self._run, name="arctic-starter", daemon=True).start()
        done: Future[subprocess.Popen[bytes]] = Future()
        self._orders.put((function, done))
        return done.result()

    def _run(self) -> None:
        while True:
            function, done = self._orders.get()
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)


_STARTER = _Starter()


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _python_path() -> str:
    root = str(Path(arctic_platform.__file__).parent.parent)
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])


def _devices(config: ArcticRLClientConfig, *, is_sampler: bool) -> list[str | None]:
    """The device that each process sees alone. A sampler takes the one behind those of the ranks, if there is one."""
    count = 1 if is_sampler else config.ranks.num_ranks
    if not config.device.startswith("cuda"):
        return [None] * count
    visible = _visible_devices()
    first = int(config.device.partition(":")[2] or 0)
    if is_sampler:
        first = first + config.ranks.num_ranks if first + config.ranks.num_ranks < len(visible) else first
    if first + count > len(visible):
        raise ConfigError(
            f"ranks.num_ranks={count} from device={config.device!r} on, but this machine shows {len(visible)} CUDA "
            "devices, and each rank takes one of its own; lower ranks.num_ranks, or set device='cpu'"
        )
    return list(visible[first : first + count])


def _visible_devices() -> list[str]:
    given = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if given:
        return given
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]
