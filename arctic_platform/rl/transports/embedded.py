"""The in-process transport: a service with one job, whose worker thread leaves the event loop free.

A call that is cancelled (Ctrl-C, a time-out of the caller) is taken back if it has not begun; if it has, it runs to
its end, so that nothing is ever half applied, and later calls wait for it. Sampling changes nothing and stops at its
next token instead.
"""

import asyncio
import uuid
from weakref import WeakValueDictionary

from arctic_platform.errors import ConfigError
from arctic_platform.rl.config import ArcticRLClientConfig
from arctic_platform.rl.protocol import Request, Response
from arctic_platform.rl.server.service import Service
from arctic_platform.rl.server.states import OnProgress
from arctic_platform.rl.transports.faults import shut_down

LOADING_WAIT = 1.0

_SERVERS: WeakValueDictionary[str, "EmbeddedTransport"] = WeakValueDictionary()


class EmbeddedTransport:
    """Carries requests to a backend in this process. Raises what loading it raises."""

    def __init__(self, config: ArcticRLClientConfig, on_progress: OnProgress | None = None) -> None:
        self.service = Service(max_jobs=1)
        self.job_id = self.service.create_job(config).job_id
        self.server_id = uuid.uuid4().hex
        self._is_open = True
        try:
            while (info := self.service.job_info(self.job_id, LOADING_WAIT)).state == "loading":
                if on_progress is not None:
                    on_progress(info.as_call())
            self.service.backend(self.job_id)
        except BaseException:
            self.service.close()
            raise
        _SERVERS[self.server_id] = self

    async def call(self, request: Request, on_progress: OnProgress | None = None) -> Response:
        """Send one request and wait for its response. Raises an ArcticError, whatever went wrong."""
        if not self._is_open:
            raise shut_down()
        return await self.service.call(self.job_id, request, on_progress)

    async def close(self, *, stop: bool = True) -> None:
        """Wait for the training call that runs, stop sampling, then free the models. Closing twice is fine."""
        if not self._is_open or not stop:
            return
        self._is_open = False
        _SERVERS.pop(self.server_id, None)
        await asyncio.to_thread(self.service.close)


def connect(config: ArcticRLClientConfig, on_progress: OnProgress | None = None) -> EmbeddedTransport:
    """A new server, or the running one that `config.server_id` names. Raises ConfigError when that is gone."""
    if config.server_id is None:
        return EmbeddedTransport(config, on_progress)
    if config.server_id not in _SERVERS:
        raise ConfigError(
            f"server_id={config.server_id!r} is not running in this process; leave it out to start a new server"
        )
    return _SERVERS[config.server_id]
