"""What runs inside a Ray cluster: the service in a named, detached actor, with uvicorn in it for HTTP clients.

    driver's client --frames and JSON--> actor NAME in namespace "arctic" --> Service --> a thread for each job
    HTTP clients ----------------------> uvicorn in the same actor -------------^

What travels are strings, numbers and arrays of bytes; nothing of ours is pickled. Errors travel as JSON too, so that a
client raises the class that the server raised. Importing this module loads no Ray: the actor is a plain class here.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np

from arctic_platform.errors import ConfigError, TransportError
from arctic_platform.rl.config import ArcticRLClientConfig
from arctic_platform.rl.protocol import Message, Request
from arctic_platform.rl.server.service import Service
from arctic_platform.rl.server.settings import ServerSettings
from arctic_platform.rl.server.states import ErrorInfo
from arctic_platform.rl.wire import decode, encode

RAYS_OWN_PORTS = range(10002, 20000)
FETCH_SECONDS = 2.0
FLUSH_SECONDS = 0.5

Reply = tuple[str, "np.ndarray | None"]
"""JSON (`{"value": ...}` or `{"error": {kind, message}}`) and, beside a call's state, its answer as a frame."""


def to_bytes(message: Message) -> np.ndarray:
    """A message as one array of bytes, which Ray shares between processes of a node without a copy."""
    return np.frombuffer(b"".join(encode(message)), np.uint8)


class ServiceActor:
    """What runs in the actor. Every method answers with a Reply and raises nothing of ours.

    is_kept: whether it outlives its last job; one that a client started for itself does not.
    """

    def __init__(self, options: Mapping[str, Any], is_kept: bool) -> None:
        self._service = Service(**options)
        self._is_kept = is_kept
        self._is_ending = False
        self._num_polls = 0
        self._url: str | None = None
        self._http: asyncio.Task[None] | None = None

    async def create_job(self, config: str, request_id: str) -> Reply:
        """Start loading what the config (JSON) asks for. Refused when the last job just ended."""

        async def create() -> str:
            if self._is_ending:
                raise TransportError("this Ray server ended with its last job; connect again to start a new one")
            settings = ArcticRLClientConfig(**json.loads(config))
            return self._service.create_job(settings, request_id=request_id).model_dump_json()

        return await _replied(create)

    async def job_info(self, job_id: str, wait_seconds: float) -> Reply:
        """Where a job stands."""

        async def look() -> str:
            return (await self._service.job_info_async(job_id, wait_seconds)).model_dump_json()

        return await _replied(look)

    async def submit(self, job_id: str, frame: np.ndarray, sequence: int, client_id: str) -> Reply:
        """Queue the request in a frame; the value is its call's id."""

        async def queue() -> str:
            request = await asyncio.to_thread(lambda: decode(frame.data, Request))
            return json.dumps(self._service.submit(job_id, request, sequence, client_id=client_id))

        return await _replied(queue)

    async def poll(self, job_id: str, call_id: str, wait_seconds: float) -> Reply:
        """Where a call stands, with the answer as a frame when it is there."""
        frame: np.ndarray | None = None

        async def look() -> str:
            nonlocal frame
            state = await self._service.poll_async(job_id, call_id, wait_seconds)
            if state.response is not None:
                frame = await asyncio.to_thread(to_bytes, state.response)
            return state.model_dump_json()

        self._num_polls += 1
        try:
            text, _ = await _replied(look)
        finally:
            self._num_polls -= 1
        return text, frame

    async def cancel(self, job_id: str, call_id: str, sequence: int, client_id: str, method: str) -> Reply:
        """Take a call back, or stop it if it samples."""

        async def take_back() -> str:
            state = self._service.cancel(job_id, call_id, sequence, client_id=client_id, method=method)
            return state.model_dump_json()

        return await _replied(take_back)

    async def close_job(self, job_id: str) -> Reply:
        """End a job; the value says whether the actor has nothing left to live for."""

        async def close() -> str:
            await asyncio.to_thread(self._service.close_job, job_id)
            self._is_ending = not self._is_kept and not self._service.jobs()
            return json.dumps(self._is_ending)

        return await _replied(close)

    async def status(self) -> Reply:
        """Everything that the server can say of itself."""

        async def look() -> str:
            return self._service.status().model_dump_json()

        return await _replied(look)

    async def listen(self, settings: str, api_key: str | None) -> Reply:
        """Serve HTTP as well; the value is the address. Once only."""

        async def begin() -> str:
            from arctic_platform.rl.server.app import build_app
            from arctic_platform.rl.server.run import Server

            if self._url is not None:
                raise ConfigError(f"this Ray server listens on {self._url} already")
            given = ServerSettings(**json.loads(settings), api_key=api_key)
            listener, self._url = _listen_beside_ray(given)
            server = Server(build_app(self._service, given), self._service, given)
            self._http = asyncio.create_task(server.serve([listener]))
            return json.dumps(self._url)

        return await _replied(begin)

    async def drain(self, timeout: float) -> Reply:
        """Refuse new work, wait for what runs and for its answers to be fetched; the value: whether all of it ended."""

        async def end() -> str:
            is_done = await asyncio.to_thread(self._service.drain, timeout)
            deadline = time.monotonic() + FETCH_SECONDS
            while (self._service.num_unfetched() or self._num_polls) and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
            await asyncio.sleep(FLUSH_SECONDS)  # what a method returned is still on its way to its caller
            return json.dumps(is_done)

        return await _replied(end)


async def _replied(work: Callable[[], Awaitable[str]]) -> Reply:
    try:
        return f'{{"value": {await work()}}}', None
    except Exception as error:  # whatever it is, the client must hear of it as text and not as a pickled object
        return json.dumps({"error": ErrorInfo.of(error).model_dump()}), None


def _listen_beside_ray(settings: ServerSettings) -> tuple[socket.socket, str]:
    """A bound socket and its address by this node's name for itself, on a port that Ray does not take for workers."""
    from arctic_platform.rl.server.run import listen, url_of

    if settings.port in RAYS_OWN_PORTS:
        raise ConfigError(
            f"port {settings.port} is among those of Ray's workers (10002 to 19999); choose another --port"
        )
    tried = []
    while not tried or tried[-1].getsockname()[1] in RAYS_OWN_PORTS:
        tried.append(listen(settings))
    for unused in tried[:-1]:
        unused.close()
    url = url_of(tried[-1])
    if settings.host in ("0.0.0.0", "::"):
        import ray

        url = f"http://{ray.util.get_node_ip_address()}:{tried[-1].getsockname()[1]}"
    return tried[-1], url


def value_of(reply: Reply) -> Any:
    """The JSON value of a reply. Raises the error that the server sent instead."""
    content = json.loads(reply[0])
    if "error" in content:
        raise ErrorInfo(**content["error"]).to_error()
    return content["value"]
