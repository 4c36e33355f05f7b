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
from typing import Any

import numpy as np

from arctic_platform.errors import ArcticError, ConfigError, InputError, NotFoundError, TransportError
from arctic_platform.rl.config import ArcticRLClientConfig
from arctic_platform.rl.protocol import Request, Response
from arctic_platform.rl.server.ray_cluster import ANSWER_SECONDS, start_actor
from arctic_platform.rl.server.ray_server import Reply, to_bytes, value_of
from arctic_platform.rl.server.states import CallState, JobInfo, OnProgress
from arctic_platform.rl.transports.faults import NOBODY_SAYS, beyond_time, server_says, shut_down
from arctic_platform.rl.wire import decode
from arctic_platform.rl.workers.ray_join import import_ray, join_cluster, reason_of

POLL_SECONDS = 10.0
PROGRESS_SECONDS = 0.5
RETRY_SECONDS = 60.0
CANCEL_SECONDS = 10.0
CLOSE_SECONDS = 600.0


class RayTransport:
    """Carries requests to one job of an actor. `server_id` is the actor's name and the job's id."""

    def __init__(self, config: ArcticRLClientConfig, actor: Any, name: str, job_id: str) -> None:
        self.server_id = f"{name}/{job_id}"
        self._ray = import_ray()
        self._actor = actor
        self._name = name
        self._job_id = job_id
        self._client_id = uuid.uuid4().hex
        self._sequence = itertools.count()
        self._call_timeout = config.call_timeout
        self._retry_seconds = config.retry_timeout or RETRY_SECONDS
        self._is_open = True

    async def call(self, request: Request, on_progress: OnProgress | None = None) -> Response:
        """Send one request and wait for its response, however long it takes.

        Raises what the server raised; CallTimeoutError after `call_timeout`, TransportError when the actor is gone.
        """
        if not self._is_open:
            raise shut_down()
        number = next(self._sequence)
        try:
            async with asyncio.timeout(self._call_timeout):
                return await self._finish(request, number, on_progress)
        except TimeoutError as error:
            if isinstance(error, TransportError):
                raise
            reason = await self._take_back(request, number)
            raise beyond_time(request, self._call_timeout, reason) from None
        except asyncio.CancelledError:
            await self._take_back(request, number)
            raise

    async def _finish(self, request: Request, number: int, on_progress: OnProgress | None) -> Response:
        try:
            frame = await asyncio.to_thread(to_bytes, request)
            value_of(await self._ask(request.method, "submit", self._job_id, frame, number, self._client_id))
        except InputError:
            await self._take_back(request, number)  # later calls must not wait for its number
            raise
        wait = POLL_SECONDS if on_progress is None else PROGRESS_SECONDS
        while True:
            reply = await self._ask(request.method, "poll", self._job_id, request.request_id, wait)
            state = CallState(**value_of(reply))
            if state.error is not None:
                raise state.error.to_error()
            if not state.is_pending:
                return await asyncio.to_thread(_response, reply[1])
            if on_progress is not None:
                on_progress(state)

    async def _take_back(self, request: Request, number: int) -> str:
        """Cancel a call, arrived or not; returns what the server says of it."""
        arguments = (self._job_id, request.request_id, number, self._client_id, request.method)
        try:
            reply = await asyncio.wait_for(self._actor.cancel.remote(*arguments), CANCEL_SECONDS)
            return server_says(value_of(reply)["reason"])
        except (TimeoutError, self._ray.exceptions.RayError, ArcticError):
            return NOBODY_SAYS

    async def _ask(self, method: str, what: str, *arguments: Any) -> Reply:
        """One message to the actor. A node that is out of reach for a moment is asked again: nothing runs twice."""
        deadline = time.monotonic() + self._retry_seconds
        errors = self._ray.exceptions
        while True:
            try:
                reference = getattr(self._actor, what).remote(*arguments)
                return await asyncio.wait_for(reference, POLL_SECONDS + self._retry_seconds)
            except TimeoutError:
                raise TransportError(
                    f"{method}: no answer from Ray server {self._name!r} for {POLL_SECONDS + self._retry_seconds:g} s, "
                    "though Ray knows of no fault; `ray list actors` shows its node"
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

    async def close(self, *, stop: bool = True) -> None:
        """Leave the server; `stop` ends the job after the training call that runs, and the actor with its last job.

        Closing twice is fine.
        """
        if not self._is_open:
            return
        self._is_open = False
        if stop and self._ray.is_initialized():
            await asyncio.to_thread(_close_job, self._ray, self._actor, self._job_id)


def connect(config: ArcticRLClientConfig, on_progress: OnProgress | None = None) -> RayTransport:
    """A job on a server that is there or is started, or the running one that `config.server_id` names.

    Raises ConfigError for a config that is wrong or a job that is gone, TransportError when the cluster cannot be
    reached, has no place or the server dies.
    """
    ray = join_cluster(config.ray)
    try:
        if config.server_id is not None:
            return _rejoin(config, ray, *_split(config.server_id))
        return _begin(config, ray, on_progress)
    except ray.exceptions.GetTimeoutError as error:
        raise TransportError(
            f"a Ray server has not answered for {ANSWER_SECONDS:.0f} s, though Ray knows of no fault; `ray list "
            "actors` shows its node"
        ) from error
    except ray.exceptions.RayError as error:
        raise TransportError(f"the Ray server died while the model was loaded: {reason_of(error)}") from error


def _begin(config: ArcticRLClientConfig, ray: Any, on_progress: OnProgress | None) -> RayTransport:
    name = config.ray.server or f"arctic-{uuid.uuid4().hex[:12]}"
    actor = start_actor(config.ray, name, device=config.device, options={}, is_kept=False)
    asked = actor.create_job.remote(json.dumps(config.for_server()), uuid.uuid4().hex)
    job = JobInfo(**value_of(ray.get(asked, timeout=ANSWER_SECONDS)))
    try:
        while job.state == "loading":
            if on_progress is not None:
                on_progress(job.as_call())
            wait = POLL_SECONDS if on_progress is None else PROGRESS_SECONDS
            job = JobInfo(**value_of(ray.get(actor.job_info.remote(job.job_id, wait), timeout=wait + ANSWER_SECONDS)))
        if job.error is not None:
            raise job.error.to_error()
    except BaseException:
        _close_job(ray, actor, job.job_id)
        raise
    return RayTransport(config, actor, name, job.job_id)


def _rejoin(config: ArcticRLClientConfig, ray: Any, name: str, job_id: str) -> RayTransport:
    try:
        actor = ray.get_actor(name, namespace=config.ray.namespace)
    except ValueError as error:
        raise ConfigError(
            f"server_id={config.server_id!r} is not running: no actor {name!r} is alive in namespace "
            f"{config.ray.namespace!r}; leave server_id out to start a new server"
        ) from error
    try:
        value_of(ray.get(actor.job_info.remote(job_id, 0.0), timeout=ANSWER_SECONDS))
    except NotFoundError as error:
        raise ConfigError(f"server_id={config.server_id!r} is not running: {error}") from error
    return RayTransport(config, actor, name, job_id)


def _close_job(ray: Any, actor: Any, job_id: str) -> None:
    """End a job, and the actor when it has nothing left to live for. One that is gone already has nothing to end."""
    with contextlib.suppress(ray.exceptions.RayError, NotFoundError):
        if value_of(ray.get(actor.close_job.remote(job_id), timeout=CLOSE_SECONDS)):
            ray.kill(actor)


def _split(server_id: str) -> tuple[str, str]:
    name, slash, job_id = server_id.rpartition("/")
    if not slash:
        raise ConfigError(f"server_id={server_id!r} is none of transport='ray'; take it from reconnect_config()")
    return name, job_id


def _response(frame: np.ndarray | None) -> Response:
    assert frame is not None
    return decode(frame.data, Response)
