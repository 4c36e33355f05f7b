"""In front of every app: who may come in, what is said in the log, and errors in one shape.

A request is refused before its body is read when it bears no valid key, when it is too large, or when it comes from a
web page although no key is asked for (a page in a browser on this machine could reach a loopback server, DNS rebinding
included: the names in `Host` and `Origin` tell). Nothing here prints a body, a query string or a key.
"""

import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from pydantic import SecretStr

from arctic_platform.errors import (
    AccessError,
    ArcticError,
    InputError,
    NotFoundError,
    ServerError,
    TransportError,
)
from arctic_platform.rl.server.settings import ServerSettings
from arctic_platform.rl.server.states import ErrorInfo

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/health",)
LOG_SCOPE = "arctic.log"
"""Where an app leaves in the scope what its line in the log shall hold beside the usual."""
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


class TooLargeError(InputError):
    """The body is larger than the server takes."""


class WebPageError(AccessError):
    """A browser asks, and no key protects the server from the page that it shows."""


def status_of(error: BaseException) -> int:
    """The HTTP status of an error."""
    statuses = (
        (TooLargeError, 413), (WebPageError, 403), (AccessError, 401), (NotFoundError, 404), (TransportError, 503),
        (ServerError, 500), (ArcticError, 400),
    )  # fmt: skip
    return next((status for kind, status in statuses if isinstance(error, kind)), 500)


def error_body(error: BaseException) -> bytes:
    """`{"error": {"kind": ..., "message": ...}}`; kinds of this file travel as the class in errors.py above them."""
    known = InputError(str(error)) if isinstance(error, TooLargeError) else error
    known = AccessError(str(error)) if isinstance(error, WebPageError) else known
    return json.dumps({"error": ErrorInfo.of(known).model_dump()}).encode()


class Guard:
    """An ASGI app around an ASGI app.

    body_of: how an error looks that the guard itself answers with. limit_of: the largest body that a request may have,
    where it is less than the server's.
    """

    def __init__(
        self,
        app: App,
        settings: ServerSettings,
        *,
        body_of: Callable[[BaseException], bytes] = error_body,
        limit_of: Callable[[Scope], int] | None = None,
    ) -> None:
        self._app = app
        self._settings = settings
        self._body_of = body_of
        self._limit_of = limit_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the module."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, answered = time.perf_counter(), 500, False

        async def send_noting(message: MutableMapping[str, Any]) -> None:
            nonlocal status, answered
            if message["type"] == "http.response.start":
                status, answered = message["status"], True
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, self._counting(receive, scope), send_noting)
        except Exception as error:
            if not isinstance(error, ArcticError):
                log.exception("%s %s failed", scope["method"], scope["path"])
            if answered:
                raise
            await _answer(error, self._body_of(error), send_noting)
        finally:
            milliseconds = round(1000 * (time.perf_counter() - started), 1)
            where = {"method": scope["method"], "path": scope["path"], "status": status, "milliseconds": milliseconds}
            log.info("request", extra=where | scope.get(LOG_SCOPE, {}))

    def _limit(self, scope: Scope) -> int:
        limit = self._settings.max_body_bytes
        return limit if self._limit_of is None else min(limit, self._limit_of(scope))

    def _check_size(self, num_bytes: int, scope: Scope) -> None:
        limit, most = self._limit(scope), self._settings.max_body_bytes
        if num_bytes > limit:
            advice = "split the batch over several calls, or serve with a larger --max-body"
            advice = advice if limit == most else "this path takes short JSON only"
            raise TooLargeError(f"the request has {num_bytes} bytes, this server takes {limit}; {advice}")

    def _counting(self, receive: Receive, scope: Scope) -> Receive:
        """A body whose length was not announced must not grow beyond the limit either."""
        total = 0

        async def receive_counting() -> MutableMapping[str, Any]:
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            self._check_size(total, scope)
            return message

        return receive_counting

    def _check(self, scope: Scope) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        key = self._settings.api_key
        if key is None:
            _refuse_web_pages(headers, self._settings.host)
        elif scope["path"] not in OPEN_PATHS and not _bears(headers.get(b"authorization", ""), key):
            raise AccessError("no valid API key; send the header 'Authorization: Bearer KEY'")
        length = headers.get(b"content-length", "0")
        if length.isdecimal():
            self._check_size(int(length), scope)


def _bears(authorization: str, key: SecretStr) -> bool:
    scheme, _, given = authorization.partition(" ")
    same = hmac.compare_digest(given.strip().encode(), key.get_secret_value().encode())
    return same and scheme.lower() == "bearer"


def _refuse_web_pages(headers: dict[bytes, str], host: str) -> None:
    """Without a key, only requests by a local name and from no foreign page."""
    for name, given in ((b"host", f"//{headers.get(b'host', '')}"), (b"origin", headers.get(b"origin", ""))):
        try:
            named = urlsplit(given).hostname
        except ValueError:
            named = "?"
        if name in headers and named not in (*LOCAL_NAMES, host):
            raise WebPageError(
                f"{name.decode()} is {headers[name][:80]!r}, this server has no API key and answers on "
                f"{', '.join(LOCAL_NAMES)} only; use one of these, or serve with an API key"
            )


async def _answer(error: Exception, body: bytes, send: Send) -> None:
    status = status_of(error)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if status == 413:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
