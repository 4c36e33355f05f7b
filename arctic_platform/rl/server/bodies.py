"""Bodies of calls without needless copies: in through one buffer, out from the arrays' own memory."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from arctic_platform.errors import InputError
from arctic_platform.rl.frames import Part, chunks
from arctic_platform.rl.server.settings import ServerSettings
from arctic_platform.rl.server.states import FRAME_TYPE

FILL_EXTENSION = "arctic.fill"


async def read_frame(request: Request, settings: ServerSettings) -> memoryview:
    """The body of a request. Raises InputError for one of another type, too large, cut off, or that stops coming."""
    given = request.headers.get("content-type", "none").partition(";")[0].strip().lower()
    if given != FRAME_TYPE:
        raise InputError(f"the body's content-type is {given[:80]!r}; calls travel as frames, {FRAME_TYPE}")
    return await read_body(request, settings)


async def read_body(request: Request, settings: ServerSettings) -> memoryview:
    """A body of any type. Raises InputError for one that is too large, cut off, or stops coming."""
    length = request.headers.get("content-length", "")
    return await (_read_known(request, settings, int(length)) if length.isdecimal() else _read_all(request, settings))


async def _read_known(request: Request, settings: ServerSettings, length: int) -> memoryview:
    """Memory is touched as bytes arrive, so that a length alone costs nothing."""
    buffer = np.empty(length, np.uint8).data
    fill = request.scope.get("extensions", {}).get(FILL_EXTENSION)
    at, more = 0, fill is None
    if fill is not None:
        at = await _fill(fill, buffer, settings)
    while more:
        chunk, more = await _next_chunk(request, settings)
        buffer[at : at + len(chunk)] = chunk
        at += len(chunk)
    if at != length:
        raise InputError(f"the body ended after {at} of {length} bytes; nothing was done")
    return buffer


async def _fill(fill: dict[str, Any], buffer: memoryview, settings: ServerSettings) -> int:
    """Straight from the socket, where the server's protocol can (`http_protocol.py`)."""
    try:
        return await fill["into"](buffer, settings.body_seconds)
    except TimeoutError:
        raise InputError(f"no byte of the body came for {settings.body_seconds:g} s; nothing was done") from None


async def _read_all(request: Request, settings: ServerSettings) -> memoryview:
    """A body whose length was not announced."""
    buffer, more = bytearray(), True
    while more:
        chunk, more = await _next_chunk(request, settings)
        buffer += chunk
    return memoryview(buffer)


async def _next_chunk(request: Request, settings: ServerSettings) -> tuple[bytes, bool]:
    try:
        async with asyncio.timeout(settings.body_seconds):
            message = await request.receive()
    except TimeoutError:
        raise InputError(f"no byte of the body came for {settings.body_seconds:g} s; nothing was done") from None
    if message["type"] == "http.disconnect":
        raise InputError("the client went away before the end of the body; nothing was done")
    return message.get("body", b""), message.get("more_body", False)


class FrameResponse(Response):
    """Parts of a frame, sent one after the other."""

    media_type = FRAME_TYPE
    charset = "latin-1"

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = [memoryview(part).cast("B") for part in parts]
        self.num_bytes = sum(len(part) for part in self.parts)
        super().__init__(headers={"content-length": str(self.num_bytes)})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See starlette."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for chunk in chunks(self.parts):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
