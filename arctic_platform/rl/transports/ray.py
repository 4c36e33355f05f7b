"""The Ray transport: the client is a driver of the cluster, the server a named detached actor in it.

The actor is the one that `ray.server` names, or one of the client's own that ends with its last job. Another process
reaches the same job with `reconnect_config()`. Importing this module loads no Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np

from arctic_platform.errors import CallTimeoutError, ConfigError, NotFoundError, TransportError
from arctic_platform.rl.config import ArcticRLClientConfig
from arctic_platform.rl.protocol import Request, Response
from arctic_platform.rl.server.ray_server import (
    ANSWER_SECONDS,
    Reply,
    import_ray,
    join_cluster,
    reason_of,
    start_actor,
    to_bytes,
    value_of,
)
from arctic_platform.rl.server.states import CallState, JobInfo
from arctic_platform.rl.wire import decode

POLL_SECONDS = 10.0
NOTICE_SECONDS = 1.0
UNAVAILABLE_SECONDS = 20.0

Listener = Callable[[str], None]


class RayTransport:
    """Carries requests to one job of an actor. `server_id` is the actor's name and the job's id."""

    def __init__(self, actor: Any, name: str, job_id: str, on_wait: Listener | None) -> None:
        self.server_id = f"{name}/{job_id}"
        self.on_wait = on_wait
        self._ray = import_ray()
        self._actor = actor
        self._name = name
        self._job_id = job_id
        self._client_id = uuid.uuid4().hex
        self._sequence = itertools.count()
        self._is_open = True

    async def call(self, request: Request) -> Response:
        """One request, one response; raises what the server raised, TransportError when the actor is gone."""
        if not self._is_open:
            raise ConfigError("this client was shut down; create a new one with create_arctic_rl_client(config)")
        number = next(self._sequence)
        try:
            return await self._send(request, number)
        except asyncio.CancelledError:
            self._actor.cancel.remote(self._job_id, request.request_id, number, self._client_id, request.method)
            raise

    async def _send(self, request: Request, number: int) -> Response:
        frame = await asyncio.to_thread(to_bytes, request)
        await self._ask(request.method, "submit", self._job_id, frame, number, self._client_id)
        while True:
            wait = POLL_SECONDS if self.on_wait is None else NOTICE_SECONDS
            reply = await self._ask(request.method, "poll", self._job_id, request.request_id, wait)
            state = CallState(**value_of(reply))
            if state.error is not None:
                raise state.error.to_error()
            if not state.is_pending:
                return await asyncio.to_thread(_response, reply[1])
            if self.on_wait is not None:
                self.on_wait(state.line)

    async def _ask(self, method: str, what: str, *arguments: Any) -> Reply:
        """One message to the actor. A node that is out of reach for a moment is asked again: nothing runs twice."""
        deadline = time.monotonic() + UNAVAILABLE_SECONDS
        errors = self._ray.exceptions
        while True:
            try:
                reference = getattr(self._actor, what).remote(*arguments)
                return await asyncio.wait_for(reference, POLL_SECONDS + ANSWER_SECONDS)
            except TimeoutError:
                raise CallTimeoutError(
                    f"{method}: Ray server {self._name!r} has not answered for {POLL_SECONDS + ANSWER_SECONDS:.0f} s, "
                    "though Ray does not know it as dead; `ray list actors` shows its node"
                ) from None
            except errors.ActorUnavailableError as error:
                if time.monotonic() > deadline:
                    raise self._gone(method, error) from error
                await asyncio.sleep(0.5)
            except errors.RayError as error:
                raise self._gone(method, error) from error

    def _gone(self, method: str, error: Exception) -> TransportError:
        return TransportError(
            f"{method}: Ray server {self._name!r} is gone ({reason_of(error)}), and with it what was not saved; create "
            "a new client and load_checkpoint()"
        )

    def close(self) -> None:
        """End the job after the training call that runs, and the actor with its last job. Closing twice is fine."""
        if not self._is_open:
            return
        self._is_open = False
        if not self._ray.is_initialized():
            return
        with contextlib.suppress(self._ray.exceptions.RayError, NotFoundError):
            if value_of(self._ray.get(self._actor.close_job.remote(self._job_id))):
                self._ray.kill(self._actor)


def connect(config: ArcticRLClientConfig, on_wait: Listener | None = None) -> RayTransport:
    """A job on a server that is there or is started, or the running one that `config.server_id` names.

    Raises ConfigError for a config that is wrong or a job that is gone, TransportError when the cluster cannot be
    reached, has no place or the server dies.
    """
    ray = join_cluster(config.ray)
    try:
        if config.server_id is not None:
            return _rejoin(config, ray, *_split(config.server_id), on_wait)
        return _begin(config, ray, on_wait)
    except ray.exceptions.RayError as error:
        raise TransportError(f"the Ray server died while the model was loaded: {reason_of(error)}") from error


def _begin(config: ArcticRLClientConfig, ray: Any, on_wait: Listener | None) -> RayTransport:
    name = config.ray.server or f"arctic-{uuid.uuid4().hex[:12]}"
    if on_wait is not None:
        on_wait("the Ray server gets its place")
    actor = start_actor(config.ray, name, device=config.device, options={}, is_kept=False)
    text, request_id = json.dumps(config.for_server()), uuid.uuid4().hex
    job = JobInfo(**value_of(ray.get(actor.create_job.remote(text, request_id))))
    try:
        _await_loaded(ray, actor, job, on_wait)
    except BaseException:
        if value_of(ray.get(actor.close_job.remote(job.job_id))):
            ray.kill(actor)
        raise
    return RayTransport(actor, name, job.job_id, on_wait)


def _rejoin(config: ArcticRLClientConfig, ray: Any, name: str, job_id: str, on_wait: Listener | None) -> RayTransport:
    try:
        actor = ray.get_actor(name, namespace=config.ray.namespace)
    except ValueError as error:
        raise ConfigError(
            f"server_id={config.server_id!r}: no actor {name!r} is alive in namespace {config.ray.namespace!r}; leave "
            "server_id out to start a new server"
        ) from error
    try:
        value_of(ray.get(actor.job_info.remote(job_id, 0.0), timeout=ANSWER_SECONDS))
    except NotFoundError as error:
        raise ConfigError(f"server_id={config.server_id!r}: {error}") from error
    return RayTransport(actor, name, job_id, on_wait)


def _await_loaded(ray: Any, actor: Any, job: JobInfo, on_wait: Listener | None) -> None:
    while job.state == "loading":
        job = JobInfo(**value_of(ray.get(actor.job_info.remote(job.job_id, NOTICE_SECONDS))))
        if on_wait is not None and job.state == "loading":
            on_wait(f"the server loads {job.model} since {job.seconds:.0f} s")
    if job.error is not None:
        raise job.error.to_error()


def _split(server_id: str) -> tuple[str, str]:
    name, slash, job_id = server_id.rpartition("/")
    if not slash:
        raise ConfigError(f"server_id={server_id!r} is none of transport='ray'; take it from reconnect_config()")
    return name, job_id


def _response(frame: np.ndarray | None) -> Response:
    assert frame is not None
    return decode(frame.data, Response)
