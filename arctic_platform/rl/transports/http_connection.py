"""Connections to an HTTP server that neither copy nor cut what they carry.

httpx reads 64 KiB at a time and copies each piece several times. Here a body is sent from the arrays' own memory and
received into one buffer of the announced length. Heads are written and read by h11, answers without a length too.
For plain HTTP without a proxy; httpx does the rest. Errors are httpx's, so that callers know one kind.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import h11
import httpx
import numpy as np

T = TypeVar("T")

PIECE_BYTES = 2**22
READ_BYTES = 2**16
IDLE_SECONDS = 4.0
CONTINUE_SECONDS = 1.0

Views = Sequence[memoryview]


@dataclass(eq=False)
class RawAnswer:
    """An answer, read whole; header names in lower case."""

    status: int
    headers: dict[str, str]
    body: memoryview


class ConnectionPool:
    """Idle connections to one server, of one event loop. Times are seconds: to connect, and of silence."""

    def __init__(self, host: str, port: int, *, connect: float, silence: float) -> None:
        self._host = host
        self._port = port
        self._connect = connect
        self._silence = silence
        self._idle: list[tuple[float, socket.socket]] = []

    async def exchange(self, method: str, target: str, headers: dict[str, str], views: Views = ()) -> RawAnswer:
        """One request and its answer. A kept connection that turns out to be dead is replaced by a new one.

        Raises httpx.TransportError.
        """
        head = h11.Request(method=method, target=target, headers=[("host", self._authority()), *headers.items()])
        while (kept := self._take()) is not None:
            try:
                return await self._exchange_on(kept, head, views)
            except (httpx.NetworkError, httpx.RemoteProtocolError):
                continue
        return await self._exchange_on(await self._open(), head, views)

    def close(self) -> None:
        """Close what is idle."""
        while self._idle:
            self._idle.pop()[1].close()

    async def _exchange_on(self, sock: socket.socket, head: h11.Request, views: Views) -> RawAnswer:
        """The connection is kept only after a whole answer."""
        is_reusable = False
        try:
            answer, is_reusable = await self._talk(sock, head, views)
            return answer
        except OSError as error:
            raise httpx.ReadError(f"{error}") from error
        except h11.ProtocolError as error:
            raise httpx.RemoteProtocolError(str(error)) from error
        finally:
            if is_reusable:
                self._idle.append((time.monotonic(), sock))
            else:
                sock.close()

    async def _talk(self, sock: socket.socket, head: h11.Request, views: Views) -> tuple[RawAnswer, bool]:
        parser = h11.Connection(h11.CLIENT)
        response = await self._send(parser, sock, head, views)
        while response is None or isinstance(response, h11.InformationalResponse):
            response = await self._next(parser, sock)
        assert isinstance(response, h11.Response)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in response.headers}
        length = headers.get("content-length", "")
        if length.isdecimal() and head.method != b"HEAD":
            body, is_whole = await self._read_known(parser, sock, int(length))
        else:
            body, is_whole = await self._read_all(parser, sock)
        is_reusable = is_whole and headers.get("connection", "").lower() != "close" and response.http_version == b"1.1"
        return RawAnswer(response.status_code, headers, body), is_reusable

    async def _send(self, parser: h11.Connection, sock: socket.socket, head: h11.Request, views: Views) -> Any:
        """Send a request. Before a large body the server is asked whether it takes it; its refusal is returned."""
        loop = asyncio.get_running_loop()
        if sum(len(view) for view in views) < READ_BYTES:
            whole = b"".join([parser.send(head) or b"", *views])
            await self._within(loop.sock_sendall(sock, whole), httpx.WriteTimeout)
            return None
        headers = [*head.headers, (b"expect", b"100-continue")]
        asking = parser.send(h11.Request(method=head.method, target=head.target, headers=headers))
        await self._within(loop.sock_sendall(sock, asking or b""), httpx.WriteTimeout)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CONTINUE_SECONDS):
                event = await self._next(parser, sock)
                if isinstance(event, h11.Response):
                    return event
        for view in views:
            for at in range(0, len(view), PIECE_BYTES):
                await self._within(loop.sock_sendall(sock, view[at : at + PIECE_BYTES]), httpx.WriteTimeout)
        return None

    async def _read_known(self, parser: h11.Connection, sock: socket.socket, length: int) -> tuple[memoryview, bool]:
        loop = asyncio.get_running_loop()
        body = np.empty(length, np.uint8).data
        early = parser.trailing_data[0]
        body[: len(early)] = early
        at = len(early)
        while at < length:
            num = await self._within(loop.sock_recv_into(sock, body[at:]), httpx.ReadTimeout)
            if not num:
                raise httpx.RemoteProtocolError(f"the answer ended after {at} of {length} bytes")
            at += num
        return body, True

    async def _read_all(self, parser: h11.Connection, sock: socket.socket) -> tuple[memoryview, bool]:
        body = bytearray()
        while isinstance(event := await self._next(parser, sock), h11.Data):
            body += event.data
        return memoryview(body), parser.their_state is h11.DONE

    async def _next(self, parser: h11.Connection, sock: socket.socket) -> Any:
        loop = asyncio.get_running_loop()
        while (event := parser.next_event()) is h11.NEED_DATA:
            parser.receive_data(await self._within(loop.sock_recv(sock, READ_BYTES), httpx.ReadTimeout))
        if isinstance(event, h11.ConnectionClosed):
            raise httpx.RemoteProtocolError("the server closed the connection without an answer")
        return event

    async def _open(self) -> socket.socket:
        loop = asyncio.get_running_loop()
        failed: Exception = OSError("the name has no address")
        try:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        for family, kind, protocol, _, address in found:
            sock = socket.socket(family, kind, protocol)
            sock.setblocking(False)
            try:
                async with asyncio.timeout(self._connect):
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

    async def _within(self, work: Awaitable[T], late: type[httpx.TimeoutException]) -> T:
        try:
            async with asyncio.timeout(self._silence):
                return await work
        except TimeoutError:
            raise late(f"silence for {self._silence:g} s") from None

    def _take(self) -> socket.socket | None:
        while self._idle:
            since, sock = self._idle.pop()
            if time.monotonic() - since < IDLE_SECONDS:
                return sock
            sock.close()
        return None

    def _authority(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._port}"
