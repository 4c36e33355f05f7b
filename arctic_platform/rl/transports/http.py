"""The HTTP transport: every call is a future on the server, submitted once and asked for until it is answered.

    POST .../calls?client_id&sequence  --lost? sent again, same request id-->  200 answer | 202 pending
    GET  .../calls/{id}?wait=10        --lost? asked again---------------->    200 answer | 202 pending, again

No connection is open for longer than one wait, so no proxy's time-out cuts long work. Calls carry numbers, so the
server runs them in the order in which they were made. A call that is cancelled here is cancelled there.
Importing this module loads httpx and nothing heavier.
"""

import asyncio
import ipaddress
import json
import logging
import time
import uuid
import warnings
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

import httpx

from arctic_platform.errors import (
    ArcticError,
    ConfigError,
    NotFoundError,
    TransportError,
)
from arctic_platform.rl import wire
from arctic_platform.rl.config import ArcticRLClientConfig
from arctic_platform.rl.frames import Part, chunks
from arctic_platform.rl.protocol import Request, Response
from arctic_platform.rl.server.settings import api_key_of_environment
from arctic_platform.rl.server.states import FRAME_TYPE, CallState, ErrorInfo, JobInfo, OnProgress
from arctic_platform.rl.transports.faults import NOBODY_SAYS, beyond_time, server_says, shut_down
from arctic_platform.rl.transports.http_sockets import SocketTransport

log = logging.getLogger(__name__)
T = TypeVar("T")
S = TypeVar("S", CallState, JobInfo)

CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 20.0
RETRY_SECONDS = 60.0
NOTICE_SECONDS = 5.0
FIRST_CONTACT_SECONDS = 3.0
CANCEL_SECONDS = 5.0
SUBMIT_WAIT, POLL_WAIT, PROGRESS_WAIT = 1.0, 10.0, 0.5
LARGE_BYTES = 2**16


@dataclass(eq=False)
class Numbers:
    """The sequence numbers of one client; a new one begins when the server may have missed a number."""

    client_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    next: int = 0

    def take(self) -> dict[str, Any]:
        """The next number, as query parameters."""
        taken = {"client_id": self.client_id, "sequence": self.next}
        self.next += 1
        return taken


@dataclass(eq=False)
class Answer:
    """An HTTP answer, read whole."""

    status: int
    content_type: str
    body: memoryview

    @property
    def is_frame(self) -> bool:
        """Whether it is a response."""
        return self.content_type.startswith(FRAME_TYPE)

    def json(self) -> Any:
        """Its JSON value; none for anything else."""
        if not self.content_type.startswith("application/json"):
            return None
        try:
            return json.loads(bytes(self.body))
        except ValueError:
            return None

    def error(self, url: str) -> ArcticError | None:
        """What a refusal says; none for an answer that is none."""
        if self.status < 400:
            return None
        data = self.json()
        if isinstance(data, dict) and isinstance(data.get("error"), dict):
            return ErrorInfo(**data["error"]).to_error()
        return self._is_foreign(url)

    def state(self, kind: type[S], url: str) -> S:
        """Its JSON as a CallState or a JobInfo. Raises TransportError for anything else."""
        try:
            return kind(**self.json())
        except (TypeError, ConfigError):
            raise self._is_foreign(url) from None

    def _is_foreign(self, url: str) -> TransportError:
        text = bytes(self.body[:200]).decode("utf-8", "replace").partition("\n")[0]
        return TransportError(f"{url} answered {self.status} {text!r}; is it an arctic-rl server of this version?")


class HttpTransport:
    """Carries requests to a job on an HTTP server. Creating one loads the job's model there, or joins a running one."""

    def __init__(self, config: ArcticRLClientConfig, on_progress: OnProgress | None = None) -> None:
        assert config.server_url is not None
        self._link = Link(config)
        self._call_timeout = config.call_timeout
        self._numbers = Numbers()
        self._is_open = True
        self.server_id = _run_blocking(self._start(config, on_progress))

    async def call(self, request: Request, on_progress: OnProgress | None = None) -> Response:
        """Send one request and wait for its response, however long it takes.

        Raises what the server side raised; CallTimeoutError after `call_timeout`, TransportError for a lost server.
        """
        if not self._is_open:
            raise shut_down()
        numbers, number = self._numbers, self._numbers.take()
        try:
            async with asyncio.timeout(self._call_timeout):
                return await self._finish(request, number, on_progress)
        except TimeoutError as error:
            if isinstance(error, TransportError):
                raise
            reason = await self._take_back(request, number, numbers)
            raise beyond_time(request, self._call_timeout, reason) from None
        except _FailedCall as failed:
            raise failed.error from None
        except BaseException:
            await self._take_back(request, number, numbers)
            raise

    async def close(self, *, stop: bool = True) -> None:
        """Leave the server; `stop` ends the job there, after the training call that runs. Closing twice is fine."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            if stop:
                options: dict[str, Any] = {"params": {"wait": POLL_WAIT}, "limit": CANCEL_SECONDS}
                answer = await self._link.exchange("shutdown", "DELETE", self._job_path(), **options)
                if (error := answer.error(self._link.url)) and not isinstance(error, NotFoundError):
                    raise error
        except TransportError as error:
            log.warning("the job was not closed: %s", error)
        finally:
            await self._link.close()

    async def _start(self, config: ArcticRLClientConfig, on_progress: OnProgress | None) -> str:
        """The id of the job, loaded. One that failed, or that nobody waits for any more (Ctrl-C), is ended."""
        job_id = config.server_id
        try:
            job_id = job_id or await self._create(config)
            await self._until_loaded(job_id, on_progress)
            return job_id
        except (_FailedCall, asyncio.CancelledError) as error:
            if job_id is not None and config.server_id is None:
                ending: dict[str, Any] = {"params": {"wait": CANCEL_SECONDS}, "limit": CANCEL_SECONDS}
                await self._link.exchange("loading", "DELETE", f"/v1/jobs/{job_id}", **ending)
            raise error.error if isinstance(error, _FailedCall) else error from None
        except NotFoundError:
            if config.server_id is None:
                raise
            raise ConfigError(
                f"server_id={config.server_id!r} is not running at {self._link.url}; leave it out to start a new job"
            ) from None
        finally:
            await self._link.close()

    async def _until_loaded(self, job_id: str, on_progress: OnProgress | None) -> None:
        state, wait = "loading", PROGRESS_WAIT if on_progress else POLL_WAIT
        while state != "ready":
            answer = await self._link.ask("loading", "GET", f"/v1/jobs/{job_id}", params={"wait": wait})
            info = answer.state(JobInfo, self._link.url)
            if info.error is not None:
                raise _FailedCall(info.error.to_error())
            state = info.state
            if on_progress and state == "loading":
                on_progress(info.as_call())

    async def _create(self, config: ArcticRLClientConfig) -> str:
        job = {"config": config.for_server(), "request_id": uuid.uuid4().hex}
        answer = await self._link.ask(
            "create_arctic_rl_client",
            "POST",
            "/v1/jobs",
            parts=[json.dumps(job).encode()],
            content_type="application/json",
            limit=FIRST_CONTACT_SECONDS,
        )
        return answer.state(JobInfo, self._link.url).job_id

    async def _finish(self, request: Request, number: dict[str, Any], on_progress: OnProgress | None) -> Response:
        parts = wire.encode(request)
        wait = PROGRESS_WAIT if on_progress else SUBMIT_WAIT
        answer = await self._link.ask(
            request.method, "POST", f"{self._job_path()}/calls", params=number | {"wait": wait}, parts=parts
        )
        del parts
        while not answer.is_frame:
            state = answer.state(CallState, self._link.url)
            if state.error is not None:
                raise _FailedCall(state.error.to_error())
            if on_progress:
                on_progress(state)
            params = {"wait": PROGRESS_WAIT if on_progress else POLL_WAIT}
            answer = await self._link.ask(request.method, "GET", self._call_path(request), params=params)
        if len(answer.body) < LARGE_BYTES:
            return wire.decode(answer.body, Response)
        return await asyncio.to_thread(lambda: wire.decode(answer.body, Response))

    async def _take_back(self, request: Request, number: dict[str, Any], numbers: Numbers) -> str:
        """Cancel a call, arrived or not; returns what the server says of it.

        Where even that cannot be delivered, later calls are numbered anew, so that they do not wait for this one.
        """
        task = asyncio.ensure_future(self._cancel(request, number))
        await asyncio.wait([task], timeout=2 * CANCEL_SECONDS)
        if task.done() and not task.cancelled() and task.exception() is None:
            return task.result()
        task.cancel()
        if self._numbers is numbers:
            self._numbers = Numbers()
        return NOBODY_SAYS

    async def _cancel(self, request: Request, number: dict[str, Any]) -> str:
        answer = await self._link.ask(
            request.method, "DELETE", self._call_path(request), params=number, limit=CANCEL_SECONDS
        )
        state = answer.state(CallState, self._link.url)
        return server_says(state.reason)

    def _job_path(self) -> str:
        return f"/v1/jobs/{self.server_id}"

    def _call_path(self, request: Request) -> str:
        return f"{self._job_path()}/calls/{request.request_id}"


class Link:
    """Requests to one server, sent again while it is silent: each of them may arrive twice without harm."""

    def __init__(self, config: ArcticRLClientConfig) -> None:
        self.url = (config.server_url or "").rstrip("/")
        self._retry_seconds = config.retry_timeout or RETRY_SECONDS
        secret = config.api_key or api_key_of_environment()
        key = secret.get_secret_value() if secret else ""
        self._headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {key}"} if key else {})
        self._is_local = _is_local(self.url)
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        if key and not self._is_local and self.url.startswith("http:"):
            warnings.warn(f"the API key travels unencrypted to {self.url}; put TLS in front of it", UserWarning, 6)

    async def ask(self, call: str, method: str, path: str, **options: Any) -> Answer:
        """`exchange`, and raise what a refusal says."""
        answer = await self.exchange(call, method, path, **options)
        if (error := answer.error(self.url)) is not None:
            raise error
        return answer

    async def exchange(
        self,
        call: str,
        method: str,
        path: str,
        *,
        params: dict[str, Any] | None = None,
        parts: list[Part] | None = None,
        content_type: str = FRAME_TYPE,
        limit: float | None = None,
    ) -> Answer:
        """One request and its whole answer. Raises TransportError, with the call's name, after `limit` of silence."""
        deadline = time.monotonic() + min(self._retry_seconds, limit or self._retry_seconds)
        notice_at, pause = time.monotonic() + NOTICE_SECONDS, 0.05
        while True:
            try:
                answer = await self._once(method, path, params or {}, parts, content_type)
                if answer.status not in (502, 503, 504) or isinstance(answer.json(), dict):
                    return answer
                reason = f"it answered {answer.status}"
            except httpx.InvalidURL as error:
                raise ConfigError(f"server_url={self.url!r} cannot be used: {error}") from None
            except httpx.TransportError as error:
                reason = " ".join(f"{type(error).__name__} {error}".split())
            if time.monotonic() + pause > deadline:
                raise TransportError(f"{call}: no answer from {self.url} ({reason}); is the server running there?")
            if time.monotonic() > notice_at:
                left, notice_at = deadline - time.monotonic(), deadline
                log.warning("%s: no answer from %s (%s); it is tried for %.0f s more", call, self.url, reason, left)
            await asyncio.sleep(pause)
            pause = min(2.0, 2 * pause)

    async def close(self) -> None:
        """Close the connections of the loop that runs."""
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.aclose()

    async def _once(
        self, method: str, path: str, params: dict[str, Any], parts: list[Part] | None, content_type: str
    ) -> Answer:
        headers, content = {}, None
        if parts is not None:
            views = [memoryview(part).cast("B") for part in parts]
            headers = {"content-type": content_type, "content-length": str(sum(len(view) for view in views))}
            content = _chunks(views)
        silence = min(SILENCE_SECONDS, self._retry_seconds)
        timeout = httpx.Timeout(silence + params.get("wait", 0.0), connect=min(silence, CONNECT_SECONDS), pool=None)
        options: dict[str, Any] = {"params": params, "content": content, "headers": headers, "timeout": timeout}
        async with self._here().stream(method, path, **options) as response:
            body = await _read(response)
            return Answer(response.status_code, response.headers.get("content-type", ""), body)

    def _here(self) -> httpx.AsyncClient:
        """Connections belong to an event loop; a caller may use one after the other."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._loop = loop
            self._client = httpx.AsyncClient(
                base_url=self.url,
                headers=self._headers,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=4.0),
                trust_env=not self._is_local,
                transport=SocketTransport() if self._is_plain() else None,
            )
        return self._client

    def _is_plain(self) -> bool:
        """Whether nothing stands between the two sockets: no TLS, and no proxy of the environment."""
        is_direct = self._is_local or not {"http", "all"} & set(getproxies())
        return self.url.startswith("http:") and is_direct


def connect(config: ArcticRLClientConfig, on_progress: OnProgress | None = None) -> HttpTransport:
    """A new job on the server at `config.server_url`, or the running one that `config.server_id` names.

    Raises ConfigError when that is gone, TransportError when no server answers, AccessError for a wrong key.
    """
    return HttpTransport(config, on_progress)


class _FailedCall(Exception):
    """The server ran the call, and it failed there: nothing is to be taken back."""

    def __init__(self, error: ArcticError) -> None:
        super().__init__(str(error))
        self.error = error


async def _chunks(views: list[memoryview]) -> AsyncIterator[Any]:
    for chunk in chunks(views):
        yield chunk


async def _read(response: httpx.Response) -> memoryview:
    """The body; where it comes in one chunk, that one."""
    chunks = [memoryview(chunk) async for chunk in response.aiter_raw()]
    return chunks[0] if len(chunks) == 1 else memoryview(b"".join(chunks))


def _run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run it to its end, inside a running event loop too (in a thread of its own, then)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(work)).result()


def _is_local(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
