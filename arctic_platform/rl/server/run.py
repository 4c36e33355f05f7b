"""Start an app, say where it is, and stop it well: the first signal drains, the second one ends the process at once."""

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import uvicorn

from arctic_platform.errors import ConfigError
from arctic_platform.rl.server.app import build_app
from arctic_platform.rl.server.guard import App
from arctic_platform.rl.server.http_protocol import FillProtocol
from arctic_platform.rl.server.service import Service
from arctic_platform.rl.server.settings import ServerSettings

log = logging.getLogger(__name__)

FETCH_SECONDS = 2.0
BACKLOG = 2048


def serve(settings: ServerSettings) -> int:
    """Serve until a signal comes; returns the exit code. Raises ConfigError for a port that is taken."""
    with listen(settings) as listener:
        set_up_logging(settings.log_format)
        service = Service(max_jobs=settings.max_jobs, idle_seconds=settings.idle_seconds)
        url = url_of(listener)
        print(f"arctic-rl serves on {url}", flush=True)
        print(f'client: ArcticRLClientConfig(model=..., server_url="{url}")', flush=True)
        print(f"train:  arctic-rl train recipes/tiny.yaml --server-url {url}", flush=True)
        Server(build_app(service, settings), service, settings).run([listener])
        service.close()
    return 0


@dataclass(frozen=True)
class RunningServer:
    """A server in a thread of this process."""

    url: str
    service: Service
    server: "Server"


@contextmanager
def running_server(settings: ServerSettings | None = None) -> Generator[RunningServer]:
    """Serve while open, on a free port of this machine unless told otherwise; for notebooks and tests."""
    settings = ServerSettings(port=0) if settings is None else settings
    service = Service(max_jobs=settings.max_jobs, idle_seconds=settings.idle_seconds)
    with listen(settings) as listener:
        server = Server(build_app(service, settings), service, settings)
        thread = threading.Thread(target=server.run, args=([listener],), name="arctic-server", daemon=True)
        thread.start()
        try:
            yield RunningServer(url_of(listener), service, server)
        finally:
            server.should_exit = True
            thread.join()
            service.close()


def listen(settings: ServerSettings) -> socket.socket:
    """A bound socket, so that the port is known before anything else happens. Raises ConfigError."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot listen on {settings.host}:{settings.port} ({reason}); choose another --port, or "
            "--port 0 for any free one"
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Where clients find it; the addresses that mean 'everywhere' become this machine's name."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Drainable(Protocol):
    """What a server lets come to an end before it stops."""

    def drain(self, seconds: float, /) -> bool:
        """Take nothing new; whether all that ran has ended within `seconds`."""
        ...

    def num_unfetched(self) -> int:
        """Answers that clients are still to fetch."""
        ...


class Server(uvicorn.Server):
    """uvicorn that drains what it serves before it stops."""

    def __init__(self, app: App, service: Drainable, settings: ServerSettings) -> None:
        options: dict[str, Any] = {"http": FillProtocol, "ws": "none", "lifespan": "off", "log_config": None}
        options |= {"access_log": False, "server_header": False, "timeout_graceful_shutdown": 5}
        super().__init__(uvicorn.Config(app, **options))
        self._service = service
        self._drain_seconds = settings.drain_seconds
        self._is_stopping = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins to drain; the second one ends the process, whatever runs."""
        if self._is_stopping:
            os._exit(128 + sig)
        self._is_stopping = True
        threading.Thread(target=self.stop, name="arctic-drain").start()

    def stop(self) -> None:
        """Drain, leave clients a moment to fetch their answers, and stop serving."""
        log.warning("stopping: no new work is taken; a second signal ends at once")
        is_done = self._service.drain(self._drain_seconds)
        if not is_done:
            log.warning("calls are still running after %g s; they are given up", self._drain_seconds)
        deadline = time.monotonic() + FETCH_SECONDS
        while self._service.num_unfetched() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.should_exit = True
        if not is_done:
            time.sleep(self.config.timeout_graceful_shutdown or 0)
            os._exit(1)


class JsonLines(logging.Formatter):
    """One JSON object per line: time, level, logger, message, and what the record carries beside them."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging."""
        return json.dumps({"time": self.formatTime(record), **_said(record)} | _carried(record))


class PlainLines(logging.Formatter):
    """The same for people."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging."""
        said = _said(record)
        more = "".join(f" {name}={_quoted(value)}" for name, value in _carried(record).items())
        fault = f"\n{said['exception']}" if "exception" in said else ""
        return f"{self.formatTime(record)} {record.levelname.lower()} {said['message']}{more}{fault}"


def set_up_logging(log_format: str) -> None:
    """To stderr; libraries from warnings on, this package from info on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else PlainLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("arctic_platform").setLevel(logging.INFO)


_OWN_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


def _carried(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _OWN_ATTRIBUTES}


def _quoted(value: Any) -> str:
    """As it is, unless it could be taken for more than one value or line."""
    text = str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)


def _said(record: logging.LogRecord) -> dict[str, Any]:
    said = {"level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
    if record.exc_info:
        said["exception"] = logging.Formatter().formatException(record.exc_info)
    return said
