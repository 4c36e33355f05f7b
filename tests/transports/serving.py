"""A real server on a loopback socket, in a thread of the test's process."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from arctic_platform.rl.config import ArcticRLClientConfig
from arctic_platform.rl.server import run
from arctic_platform.rl.server.service import Service
from arctic_platform.rl.server.settings import ServerSettings
from tests.rl.engines import builders

SERVICES: dict[str, Service] = {}
"""What is behind each server that runs, by its address."""


@dataclass(frozen=True)
class Running(run.RunningServer):
    """A server that runs, and what is behind it."""

    def config(self, **settings: Any) -> ArcticRLClientConfig:
        """The tiny model, over HTTP."""
        return builders.config(server_url=self.url, **settings)


@contextmanager
def running_server(**settings: Any) -> Generator[Running]:
    """Serve while open."""
    with run.running_server(ServerSettings(**{"port": 0, **settings})) as one:
        SERVICES[one.url] = one.service
        try:
            yield Running(one.url, one.service, one.server)
        finally:
            del SERVICES[one.url]
