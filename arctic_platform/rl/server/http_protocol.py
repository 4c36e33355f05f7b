"""uvicorn's HTTP protocol with one way more: a large body goes from the socket straight into the app's own memory.

Small bodies travel as ASGI messages. An app that wants a large one allocates it, once it has decided to take it, and
awaits `scope["extensions"]["arctic.fill"]["into"](buffer, silence)`. What has arrived until then is copied; the rest is
received in place, and the parser, which never saw it, is replaced by a new one for the next request.
"""

import asyncio
import functools
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from arctic_platform.rl.server.bodies import FILL_EXTENSION

SCRATCH_BYTES = 2**16


class FillProtocol(asyncio.BufferedProtocol):
    """One connection: uvicorn's own protocol, and the way around it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._http = _Http(*args, **options)
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go; never further than the body's end."""
        return self._scratch if self._http.target is None else self._http.target

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have come."""
        if self._http.target is None:
            self._http.data_received(bytes(self._scratch[:nbytes]))
        else:
            self._http.advance(nbytes)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio, as below."""
        self._http.connection_made(cast(asyncio.Transport, transport))

    def connection_lost(self, exc: Exception | None) -> None:
        """A body that is being received stays as it is."""
        self._http.connection_lost(exc)
        self._http.end_fill()

    def eof_received(self) -> None:
        """The transport closes itself."""
        self._http.eof_received()

    def pause_writing(self) -> None:
        """The client reads more slowly than the app writes."""
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """It has caught up."""
        self._http.resume_writing()


class _Http(HttpToolsProtocol):
    """`target`: what is left of a body that is being received in place."""

    target: memoryview | None = None
    _filled: "asyncio.Future[None] | None" = None

    def on_headers_complete(self) -> None:
        """The app's task exists now and has not run yet."""
        super().on_headers_complete()
        self.scope["extensions"] = {FILL_EXTENSION: {"into": functools.partial(self._fill, self.cycle)}}

    def advance(self, num_bytes: int) -> None:
        """So many bytes of the body are in place. Behind its end the next request may follow at once."""
        assert self.target is not None
        self.target = self.target[num_bytes:] or None
        if self.target is None:
            self.parser = httptools.HttpRequestParser(self)
            self.end_fill()

    def end_fill(self) -> None:
        """The body is whole, or the client is gone."""
        if self._filled is not None and not self._filled.done():
            self._filled.set_result(None)

    async def _fill(self, cycle: RequestResponseCycle, buffer: memoryview, silence: float) -> int:
        """Fill `buffer`, as long as the announced body, and return the bytes that came before the client went away.

        Raises TimeoutError when nothing comes for `silence` seconds; the connection is then of no further use.
        """
        if cycle.waiting_for_100_continue:
            cycle.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            cycle.waiting_for_100_continue = False
        arrived = len(cycle.body)
        buffer[:arrived] = cycle.body
        cycle.body = bytearray()
        if arrived == len(buffer) or cycle.disconnected:
            return arrived
        cycle.keep_alive, keep_alive = False, cycle.keep_alive
        left = await self._receive_rest(buffer[arrived:], silence)
        if not left:
            cycle.keep_alive, cycle.more_body = keep_alive, False
        return len(buffer) - left

    async def _receive_rest(self, target: memoryview, silence: float) -> int:
        """Returns the number of bytes that are missing in the end."""
        self.target, self._filled = target, self.loop.create_future()
        self.flow.resume_reading()
        try:
            while not self._filled.done():
                left = self._num_left
                await asyncio.wait([self._filled], timeout=silence)
                if not self._filled.done() and self._num_left == left:
                    raise TimeoutError
            return self._num_left
        finally:
            self.target = self._filled = None

    @property
    def _num_left(self) -> int:
        return 0 if self.target is None else len(self.target)
