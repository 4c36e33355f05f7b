"""OpenAI-shaped HTTP over the embedded sampler: `arctic-rl serve --sample-only`.

Everything that can be wrong with a request is an error in OpenAI's shape with its status, found before the first byte
of an answer. A client that hangs up aborts its request, in prefill as in decode, streaming or not.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.types import Send

from arctic_platform.errors import ArcticError, InputError, RequestError
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

logger = logging.getLogger("arctic_platform.rl.server")
T = TypeVar("T")
CLIENT_GONE = 499
"""What is logged for a client that did not wait; nobody receives it."""


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


def create_app(serving: Serving, *, weights_root: Path | None = None) -> FastAPI:
    """The application; closing it (its lifespan) closes `serving`. weights_root: see WeightControl."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        yield
        await asyncio.to_thread(serving.close)

    app = FastAPI(title="Arctic Platform: sampling", lifespan=lifespan)
    _add_errors(app)
    _add_sampling(app, serving)
    _add_texts(app, serving)
    _add_state(app, serving)
    _add_weights(app, WeightControl(serving, weights_root))
    return app


def _add_sampling(app: FastAPI, serving: Serving) -> None:
    @app.post("/v1/completions", **_documented(CompletionRequest))
    async def completions(request: Request) -> Response:
        body = CompletionRequest.parse(await request.body())
        return await _reply(request, serving, await serving.plan_completion(body), stream=body.stream)

    @app.post("/v1/chat/completions", **_documented(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        body = ChatRequest.parse(await request.body())
        return await _reply(request, serving, await serving.plan_chat(body), stream=body.stream)

    @app.post("/inference/v1/generate", **_documented(GenerateRequest))
    async def generate(request: Request) -> Response:
        body = GenerateRequest.parse(await request.body())
        return await _reply(request, serving, await serving.plan_generate(body), stream=body.stream)


def _add_texts(app: FastAPI, serving: Serving) -> None:
    @app.post("/tokenize", **_documented(TokenizeRequest))
    async def tokenize(request: Request) -> JSONResponse:
        return JSONResponse(await serving.tokenize(TokenizeRequest.parse(await request.body())))

    @app.post("/detokenize", **_documented(DetokenizeRequest))
    async def detokenize(request: Request) -> JSONResponse:
        return JSONResponse(await serving.detokenize(DetokenizeRequest.parse(await request.body())))


def _add_state(app: FastAPI, serving: Serving) -> None:
    @app.get("/v1/models")
    async def models() -> dict:
        return {"object": "list", "data": [_card(serving)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict:
        serving.check_model(name)
        return _card(serving)

    @app.get("/health")
    async def health() -> dict:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(generate_latest(serving.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _add_weights(app: FastAPI, control: WeightControl) -> None:
    @app.post("/pause")
    async def pause(request: Request, mode: PauseMode = "abort", clear_cache: bool = True) -> Response:
        await _while_connected(request, control.pause(mode, clear_cache=clear_cache))
        return JSONResponse({"status": "paused"})

    @app.post("/resume")
    async def resume() -> dict:
        await control.resume()
        return {"status": "resumed"}

    @app.get("/is_paused")
    async def is_paused() -> dict:
        return {"is_paused": control.is_paused}

    @app.post("/update_weights", **_documented(UpdateWeightsRequest))
    async def update_weights(request: Request) -> dict:
        body = UpdateWeightsRequest.parse(await request.body())
        return {"status": "ok", "weight_version": await control.update(body)}


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


def _documented(body: type[Body]) -> dict[str, Any]:
    schema = body.model_json_schema()
    return {"openapi_extra": {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}}


def _add_errors(app: FastAPI) -> None:
    async def answer(_: Request, error: Exception) -> JSONResponse:
        status, body = _error_body(error)
        return JSONResponse(body, status)

    for kind in (ArcticError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _error_body(error: Exception) -> tuple[int, dict]:
    """Status and body in OpenAI's shape. What is no fault of the caller is logged, and not shown."""
    if isinstance(error, RequestError):
        return error.status, _body_of(str(error), "invalid_request_error", error.param, error.code)
    if isinstance(error, InputError):
        return 400, _body_of(str(error), "invalid_request_error", None, None)
    if isinstance(error, HTTPException):
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        return error.status_code, _body_of(str(error.detail), kind, None, None)
    if isinstance(error, ArcticError):
        return 500, _body_of(str(error), "server_error", None, type(error).__name__)
    logger.error("a request failed", exc_info=error)
    return 500, _body_of("the server failed; its log says why", "server_error", None, None)


def _body_of(message: str, kind: str, param: str | None, code: str | None) -> dict:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
