"""OpenAI-shaped HTTP over the embedded sampler: `arctic-rl serve --sample-only`.

Everything that can be wrong with a request is an error in OpenAI's shape with its status, found before the first byte
of an answer. A client that hangs up aborts its request, in prefill as in decode, streaming or not.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import Send

import arctic_platform
from arctic_platform.errors import ArcticError, InputError, RequestError
from arctic_platform.rl.server.app import describe_truly
from arctic_platform.rl.server.bodies import read_body
from arctic_platform.rl.server.guard import Guard, status_of
from arctic_platform.rl.server.openai_body import Body
from arctic_platform.rl.server.openai_schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from arctic_platform.rl.server.openai_serving import Plan, Serving
from arctic_platform.rl.server.openai_weights import PauseMode, UpdateWeightsRequest, WeightControl
from arctic_platform.rl.server.settings import ServerSettings

logger = logging.getLogger("arctic_platform.rl.server")
T = TypeVar("T")
CLIENT_GONE = 499
"""What is logged for a client that did not wait; nobody receives it."""


class ErrorDetail(BaseModel):
    """What is wrong; `param` and `code` where there is one."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """What every refused request gets."""

    error: ErrorDetail


REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "The request is not usable; the message says why."},
    401: {"model": ErrorBody, "description": "An API key is needed, and this is none."},
    403: {"model": ErrorBody, "description": "Not from a web page, and no weights without a root to take them from."},
    404: {"model": ErrorBody, "description": "Another model's name."},
    413: {"model": ErrorBody, "description": "The body is larger than the server takes; both numbers are named."},
    503: {"model": ErrorBody, "description": "The server is stopping."},
}
JSON = {"application/json": {"schema": {"type": "object"}}}
EVENTS = {"text/event-stream": {"schema": {"type": "string"}}}
TEXT = {"text/plain": {"schema": {"type": "string"}}}


class ClientGone(Exception):
    """The client hung up."""


class EventStream(StreamingResponse):
    """Server-sent events; its iterator is closed as soon as the response ends, however it ends."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._events):
            await super().stream_response(send)


def build_openai_app(serving: Serving, settings: ServerSettings, *, weights_root: Path | None = None) -> Guard:
    """The ASGI app: every route behind the guard. weights_root: see WeightControl."""
    app = FastAPI(
        title="arctic-rl, sampling only",
        version=arctic_platform.__version__,
        summary="OpenAI-shaped endpoints over the embedded sampler.",
        description=(__doc__ or "").partition("\n")[2],
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=REFUSALS,
    )
    routes = _Routes(app, serving, settings)
    routes.add_sampling()
    routes.add_texts()
    routes.add_state()
    routes.add_weights(WeightControl(serving, weights_root))
    for kind in (ArcticError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _on_error)
    describe_truly(app, settings)
    return Guard(app, settings, body_of=_guard_body)


class _Routes:
    """The endpoints, group by group."""

    def __init__(self, app: FastAPI, serving: Serving, settings: ServerSettings) -> None:
        self._app = app
        self._serving = serving
        self._settings = settings

    def add_sampling(self) -> None:
        """Tokens."""
        serving = self._serving

        @self._app.post("/v1/completions", **_documented(CompletionRequest, streams=True))
        async def completions(request: Request) -> Response:
            """Continue texts or rows of token ids."""
            body = CompletionRequest.parse(await self._read(request))
            return await _reply(request, serving, await serving.plan_completion(body), stream=body.stream)

        @self._app.post("/v1/chat/completions", **_documented(ChatRequest, streams=True))
        async def chat_completions(request: Request) -> Response:
            """Answer a chat."""
            body = ChatRequest.parse(await self._read(request))
            return await _reply(request, serving, await serving.plan_chat(body), stream=body.stream)

        @self._app.post("/inference/v1/generate", **_documented(GenerateRequest, streams=True))
        async def generate(request: Request) -> Response:
            """Token ids in, token ids out."""
            body = GenerateRequest.parse(await self._read(request))
            return await _reply(request, serving, await serving.plan_generate(body), stream=body.stream)

    def add_texts(self) -> None:
        """The tokenizer."""

        @self._app.post("/tokenize", **_documented(TokenizeRequest))
        async def tokenize(request: Request) -> Response:
            """Ids of a text or a chat."""
            return JSONResponse(await self._serving.tokenize(TokenizeRequest.parse(await self._read(request))))

        @self._app.post("/detokenize", **_documented(DetokenizeRequest))
        async def detokenize(request: Request) -> Response:
            """Text of ids."""
            return JSONResponse(await self._serving.detokenize(DetokenizeRequest.parse(await self._read(request))))

    def add_state(self) -> None:
        """What is there and how it is."""
        serving = self._serving

        @self._app.get("/v1/models")
        async def models() -> dict:
            """The one model."""
            return {"object": "list", "data": [_card(serving)]}

        @self._app.get("/v1/models/{name:path}")
        async def model(name: str) -> dict:
            """The same by name."""
            serving.check_model(name)
            return _card(serving)

        @self._app.get("/health", responses={503: {"content": JSON}})
        async def health() -> Response:
            """Alive (200), or stopping (503)."""
            return JSONResponse(
                {"status": "draining" if serving.is_draining else "ok"}, 503 if serving.is_draining else 200
            )

        @self._app.get("/metrics", responses={200: {"content": TEXT}}, response_class=PlainTextResponse)
        async def metrics() -> Response:
            """Counters, gauges and latencies in Prometheus' text format."""
            return Response(generate_latest(serving.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    def add_weights(self, control: WeightControl) -> None:
        """What a trainer asks for."""

        @self._app.post("/pause")
        async def pause(request: Request, mode: PauseMode = "abort", clear_cache: bool = True) -> Response:
            """Stop drawing."""
            try:
                await _while_connected(request, control.pause(mode, clear_cache=clear_cache))
            except ClientGone:
                return Response(status_code=CLIENT_GONE)
            return JSONResponse({"status": "paused"})

        @self._app.post("/resume")
        async def resume() -> dict:
            """Go on."""
            await control.resume()
            return {"status": "resumed"}

        @self._app.get("/is_paused")
        async def is_paused() -> dict:
            """Whether it is paused."""
            return {"is_paused": control.is_paused}

        @self._app.post("/update_weights", **_documented(UpdateWeightsRequest))
        async def update_weights(request: Request) -> dict:
            """Weights from a folder."""
            body = UpdateWeightsRequest.parse(await self._read(request))
            return {"status": "ok", "weight_version": await control.update(body)}

    async def _read(self, request: Request) -> bytes:
        return bytes(await read_body(request, self._settings))


async def _reply(request: Request, serving: Serving, plan: Plan, *, stream: bool) -> Response:
    try:
        if not stream:
            return JSONResponse(await _while_connected(request, serving.answer(plan)))
        events = serving.events(plan)
        try:
            first = await _while_connected(request, anext(events))
        except BaseException:
            await events.aclose()
            raise
        return EventStream(_sent(first, events))
    except ClientGone:
        return Response(status_code=CLIENT_GONE)


async def _sent(first: dict, events: AsyncGenerator[dict]) -> AsyncGenerator[str]:
    """Events as bytes of the stream; an error after the first one is an event too."""
    async with aclosing(events):
        try:
            yield _event(first)
            async for event in events:
                yield _event(event)
        except Exception as error:
            yield _event(_error_body(error)[1])
        yield "data: [DONE]\n\n"


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client hangs up; then raises ClientGone."""

    async def hung_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(hung_up())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def _event(data: dict) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _card(serving: Serving) -> dict:
    return {
        "id": serving.model_name,
        "object": "model",
        "created": serving.created,
        "owned_by": "arctic-platform",
        "root": serving.model_name,
        "parent": None,
        "max_model_len": serving.max_model_len,
    }


def _documented(body: type[Body], *, streams: bool = False) -> dict[str, Any]:
    request = {"required": True, "content": {"application/json": {"schema": body.model_json_schema()}}}
    return {
        "openapi_extra": {"requestBody": request},
        "responses": {200: {"content": JSON | EVENTS if streams else JSON}},
    }


async def _on_error(_: Request, error: Exception) -> JSONResponse:
    status, body = _error_body(error)
    headers = error.headers if isinstance(error, HTTPException) else None
    return JSONResponse(body, status, {"connection": "close"} if status == 413 else headers)


def _guard_body(error: BaseException) -> bytes:
    return json.dumps(_error_body(error)[1]).encode()


def _error_body(error: BaseException) -> tuple[int, dict]:
    """Status and body in OpenAI's shape. What is no fault of the caller is logged, and not shown."""
    if isinstance(error, RequestError):
        return error.status, _shaped(str(error), error.status, error.param, error.code)
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        name = str(first["loc"][-1])
        return 400, _shaped(f"{name}: {first['msg']}", 400, name, "invalid_value")
    if isinstance(error, HTTPException):
        return error.status_code, _shaped(str(error.detail), error.status_code)
    if isinstance(error, ArcticError):
        code = None if isinstance(error, InputError) else type(error).__name__
        return status_of(error), _shaped(str(error), status_of(error), code=code)
    logger.error("a request failed", exc_info=error)
    return 500, _shaped("the server failed; its log says why", 500)


def _shaped(message: str, status: int, param: str | None = None, code: str | None = None) -> dict:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
