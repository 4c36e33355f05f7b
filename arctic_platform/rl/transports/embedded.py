"""The in-process transport: the backend runs in one worker thread, so that the event loop stays free.

A call that is cancelled (Ctrl-C, a time-out of the caller) is taken back if it has not begun; if it has, it runs to
its end, so that nothing is ever half applied, and later calls wait for it. Sampling changes nothing and stops at its
next token instead.
"""

import asyncio
import threading
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from weakref import WeakValueDictionary

from arctic_platform.errors import ConfigError, InputError, MissingDependencyError
from arctic_platform.rl.config import ArcticRLClientConfig
from arctic_platform.rl.protocol import GenerateRequest, Request, Response

_SERVERS: WeakValueDictionary[str, "EmbeddedTransport"] = WeakValueDictionary()


class _Cancelled(Exception):
    """Ends a sampling call that nobody waits for any more."""


class EmbeddedTransport:
    """Carries requests to a backend in this process."""

    def __init__(self, config: ArcticRLClientConfig) -> None:
        try:
            from arctic_platform.rl.server.backend import create_backend
        except ModuleNotFoundError as error:
            raise MissingDependencyError(
                f"the embedded transport needs {error.name}; install it with: pip install 'zorro-rl[torch]'"
            ) from error
        self.server_id = uuid.uuid4().hex
        self._backend = create_backend(config)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="arctic-backend")
        self._is_open = True
        _SERVERS[self.server_id] = self

    async def call(self, request: Request) -> Response:
        """Send one request and wait for its response. Raises what the backend raises."""
        is_cancelled = threading.Event()
        future = self._submit(request, is_cancelled)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            is_cancelled.set()
            raise

    def close(self) -> None:
        """Wait for the call that runs, then free the models. Closing twice is fine."""
        if not self._is_open:
            return
        self._is_open = False
        _SERVERS.pop(self.server_id, None)
        self._worker.shutdown(wait=True, cancel_futures=True)
        del self._backend

    def _submit(self, request: Request, is_cancelled: threading.Event) -> "Future[Response]":
        if not self._is_open:
            raise InputError("this client was shut down; create a new one with create_arctic_rl_client(config)")
        if not isinstance(request, GenerateRequest):
            return self._worker.submit(self._backend.handle, request)

        def stop_if_cancelled(num_finished: int, num_rollouts: int) -> None:
            if is_cancelled.is_set():
                raise _Cancelled(f"cancelled after {num_finished} of {num_rollouts} rollouts")

        return self._worker.submit(self._backend.handle, request, stop_if_cancelled)


def connect(config: ArcticRLClientConfig) -> EmbeddedTransport:
    """A new server, or the running one that `config.server_id` names. Raises ConfigError when that is gone."""
    if config.server_id is None:
        return EmbeddedTransport(config)
    if config.server_id not in _SERVERS:
        raise ConfigError(
            f"server_id={config.server_id!r} is not running in this process; leave it out to start a new server"
        )
    return _SERVERS[config.server_id]
