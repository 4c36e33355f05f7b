"""A real server on a loopback socket, in a thread of the test's process."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from arctic_platform.rl.config import ArcticRLClientConfig
from arctic_platform.rl.server.app import build_app
from arctic_platform.rl.server.run import Server, listen, url_of
from arctic_platform.rl.server.service import Service
from arctic_platform.rl.server.settings import ServerSettings
from tests.rl.engines import builders

SERVICES: dict[str, Service] = {}
"""What is behind each server that runs, by its address."""


@dataclass(frozen=True)
class Running:
    """A server that runs, and what is behind it."""

    url: str
    service: Service
    server: Server

    def config(self, **settings: Any) -> ArcticRLClientConfig:
        """The tiny model, over HTTP."""
        return builders.config(transport="http", server_url=self.url, **settings)


@contextmanager
def running_server(**settings: Any) -> Generator[Running]:
    """Serve while open."""
    given = ServerSettings(**{"port": 0, **settings})
    service = Service(max_jobs=given.max_jobs, idle_seconds=given.idle_seconds)
    with listen(given) as listener:
        server = Server(build_app(service, given), service, given)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        SERVICES[url_of(listener)] = service
        try:
            yield Running(url_of(listener), service, server)
        finally:
            del SERVICES[url_of(listener)]
            server.should_exit = True
            thread.join(10)
            service.close()
