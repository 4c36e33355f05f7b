"""An httpx transport that neither copies nor cuts what it carries: plain HTTP on sockets of the event loop.

httpx's own reads 64 KiB at a time and copies each piece several times. Here a request is sent from the arrays' own
memory and an answer is received into one buffer of the announced length, which is the only chunk of its stream. Heads
are written and read by h11, answers without a length too. No TLS and no proxies: httpx's own transport does those.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import h11
import httpx
import numpy as np

T = TypeVar("T")

READ_BYTES = 2**16
IDLE_SECONDS = 4.0
CONTINUE_SECONDS = 1.0


class SocketTransport(httpx.AsyncBaseTransport):
    """Connections are kept for `IDLE_SECONDS`; they belong to the event loop in which they were opened."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, int], list[tuple[float, socket.socket]]] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """One exchange; the answer is read whole. A kept connection that turns out to be dead is replaced by a new one.

        Raises httpx.TransportError.
        """
        where = (request.url.host, request.url.port or 80)
        small = None if _is_large(request) else await request.aread()
        while (kept := self._take(where)) is not None:
            exchange = _Exchange(kept, request, small)
            with contextlib.suppress(httpx.NetworkError, httpx.RemoteProtocolError):
                return await self._run(exchange, where)
            if exchange.has_sent_large:
                raise httpx.ReadError("the connection broke in the middle of a request")
        return await self._run(_Exchange(await _open(where, request), request, small), where)

    async def aclose(self) -> None:
        """Close what is idle."""
        for kept in self._idle.values():
            for _, sock in kept:
                sock.close()
        self._idle.clear()

    async def _run(self, exchange: "_Exchange", where: tuple[str, int]) -> httpx.Response:
        try:
            return await exchange.run()
        except OSError as error:
            raise httpx.ReadError(str(error)) from error
        except h11.ProtocolError as error:
            raise httpx.RemoteProtocolError(str(error)) from error
        finally:
            if exchange.is_reusable:
                self._keep(where, exchange.sock)
            else:
                exchange.sock.close()

    def _keep(self, where: tuple[str, int], sock: socket.socket) -> None:
        """For the next request; those that were kept for too long, after many at once, are closed."""
        kept, now = self._idle.setdefault(where, []), time.monotonic()
        while kept and now - kept[0][0] >= IDLE_SECONDS:
            kept.pop(0)[1].close()
        kept.append((now, sock))

    def _take(self, where: tuple[str, int]) -> socket.socket | None:
        kept = self._idle.get(where, [])
        while kept:
            since, sock = kept.pop()
            if time.monotonic() - since < IDLE_SECONDS:
                return sock
            sock.close()
        return None


class _Exchange:
    """One request and its answer on one connection, which may carry another one only when `is_reusable`."""

    def __init__(self, sock: socket.socket, request: httpx.Request, small: bytes | None) -> None:
        self.sock = sock
        self.is_reusable = False
        self.has_sent_large = False
        self._request = request
        self._small = small
        self._loop = asyncio.get_running_loop()
        self._parser = h11.Connection(h11.CLIENT)

    async def run(self) -> httpx.Response:
        """Send, then read. The server may answer before the end of the request."""
        answer = await self._send()
        while answer is None or isinstance(answer, h11.InformationalResponse):
            answer = await self._next()
        headers = [(name, value) for name, value in answer.headers.raw_items()]
        length = httpx.Headers(headers).get("content-length", "")
        is_whole = True
        if length.isdecimal() and self._request.method != "HEAD":
            body = await self._read_known(int(length))
        else:
            body = await self._read_all()
            is_whole = self._parser.their_state is h11.DONE
        wants_close = httpx.Headers(headers).get("connection", "").lower() == "close"
        is_sent = self.has_sent_large or self._small is not None
        self.is_reusable = is_whole and is_sent and not wants_close and answer.http_version == b"1.1"
        return httpx.Response(answer.status_code, headers=headers, stream=_Whole(body))

    async def _send(self) -> Any:
        """Send the request. The server is asked whether it takes a large body; a refusal is returned."""
        headers = self._request.headers.raw
        if self._small is not None:
            await self._write(self._head(headers) + self._small)
            return None
        assert isinstance(self._request.stream, httpx.AsyncByteStream)
        await self._write(self._head([*headers, (b"expect", b"100-continue")]))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CONTINUE_SECONDS):
                if isinstance(event := await self._next(), h11.Response):
                    return event
        self.has_sent_large = True
        async for chunk in self._request.stream:
            await self._write(chunk)
        return None

    def _head(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        head = h11.Request(method=self._request.method, target=self._request.url.raw_path, headers=headers)
        return self._parser.send(head) or b""

    async def _write(self, data: bytes | memoryview) -> None:
        await self._within("write", self._loop.sock_sendall(self.sock, data), httpx.WriteTimeout)

    async def _read_known(self, length: int) -> memoryview:
        """Memory is touched as bytes arrive, so that a length alone costs nothing."""
        try:
            body = np.empty(length, np.uint8).data
        except (MemoryError, ValueError, OverflowError):
            raise httpx.RemoteProtocolError(f"an answer of {length} bytes was announced") from None
        early = self._parser.trailing_data[0][:length]
        body[: len(early)] = early
        at = len(early)
        while at < length:
            num = await self._within("read", self._loop.sock_recv_into(self.sock, body[at:]), httpx.ReadTimeout)
            if not num:
                raise httpx.RemoteProtocolError(f"the answer ended after {at} of {length} bytes")
            at += num
        return body

    async def _read_all(self) -> memoryview:
        body = bytearray()
        while isinstance(event := await self._next(), h11.Data):
            body += event.data
        return memoryview(body)

    async def _next(self) -> Any:
        while (event := self._parser.next_event()) is h11.NEED_DATA:
            data = await self._within("read", self._loop.sock_recv(self.sock, READ_BYTES), httpx.ReadTimeout)
            self._parser.receive_data(data)
        return event

    async def _within(self, name: str, work: Awaitable[T], late: type[httpx.TimeoutException]) -> T:
        silence = self._request.extensions.get("timeout", {}).get(name)
        try:
            async with asyncio.timeout(silence):
                return await work
        except TimeoutError:
            raise late(f"silence for {silence} s") from None


class _Whole(httpx.AsyncByteStream):
    """A body in one chunk."""

    def __init__(self, body: memoryview) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[Any]:
        if len(self._body):
            yield self._body


def _is_large(request: httpx.Request) -> bool:
    """Whether the question if the server takes the body is worth a round trip."""
    length = request.headers.get("content-length", "0" if "transfer-encoding" not in request.headers else "")
    return not length.isdecimal() or int(length) > READ_BYTES


async def _open(where: tuple[str, int], request: httpx.Request) -> socket.socket:
    loop = asyncio.get_running_loop()
    failed: Exception = OSError("the name has no address")
    try:
        found = await loop.getaddrinfo(*where, type=socket.SOCK_STREAM)
    except OSError as error:
        raise httpx.ConnectError(str(error)) from error
    for family, kind, protocol, _, address in found:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            async with asyncio.timeout(request.extensions.get("timeout", {}).get("connect")):
                await loop.sock_connect(sock, address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        except (OSError, TimeoutError) as error:
            failed = error
            sock.close()
        except BaseException:
            sock.close()
            raise
    raise httpx.ConnectError(str(failed) or "no answer while connecting") from failed
