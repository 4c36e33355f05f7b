"""The service over HTTP.

    POST   /v1/jobs                          a config -> a job        GET  /health   alive, without a key
    GET    /v1/jobs, /v1/jobs/{job}          where jobs stand         GET  /status   what is really in effect
    DELETE /v1/jobs/{job}                    end it                   GET  /metrics  Prometheus
    POST   /v1/jobs/{job}/calls              a call, as a frame       GET  /openapi.json
    GET    /v1/jobs/{job}/calls/{call}       its answer (long-poll)
    DELETE /v1/jobs/{job}/calls/{call}       take it back

An answer to a call is 200 with a frame when it is done, 200 with JSON when it failed, 202 with JSON while it runs or
waits. Errors of a request are 4xx with `{"error": {"kind", "message"}}`. docs/protocol.md has the rules.
"""

import asyncio
import json
from typing import Annotated, Any

from fastapi import Body, FastAPI, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import Response

import arctic_platform
from arctic_platform.errors import ArcticError, InputError, NotFoundError
from arctic_platform.rl import protocol, wire
from arctic_platform.rl.config import StrictModel
from arctic_platform.rl.frames import FRAME_VERSION
from arctic_platform.rl.server.bodies import FrameResponse, read_frame
from arctic_platform.rl.server.guard import LOG_SCOPE, Guard, Scope, error_body, status_of
from arctic_platform.rl.server.metrics import ServiceMetrics
from arctic_platform.rl.server.service import Service
from arctic_platform.rl.server.settings import ServerSettings
from arctic_platform.rl.server.states import FRAME_TYPE, CallState, ErrorInfo, JobInfo, JobRequest, ServiceStatus

MAX_WAIT_SECONDS = 60.0
SMALL_BODY_BYTES = 2**16
MAX_JSON_BYTES = 2**20
MAX_FRAME_BYTES = 2**62


class ErrorBody(StrictModel):
    """What every refused request gets."""

    error: ErrorInfo


class Health(StrictModel):
    """Whether the server is alive."""

    status: str
    version: str
    frame_version: int


REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "The request is not usable; the message says why."},
    401: {"model": ErrorBody, "description": "An API key is needed, and this is none."},
    403: {"model": ErrorBody, "description": "A server without an API key answers to local names only."},
    413: {"model": ErrorBody, "description": "The body is larger than the server takes; both numbers are named."},
    503: {"model": ErrorBody, "description": "The server is stopping, or full."},
}
MISSING: dict[int | str, dict[str, Any]] = {404: {"model": ErrorBody, "description": "No such job, or no such call."}}
FRAME = {FRAME_TYPE: {"schema": {"type": "string", "format": "binary"}}}
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "model": CallState,
        "content": FRAME,
        "description": "The response as a frame, when it is done; the state with its error, when it failed.",
    },
    202: {"model": CallState, "description": "It runs or waits; ask again at GET .../calls/{call_id}."},
}
JOB_EXAMPLES: Any = {
    "everything": {"value": {"config": {"model": "tiny-random", "optimizer": {"lr": 1e-3}}}},
    "sampler alone": {"value": {"config": {"model": "tiny-random"}, "kinds": ["sampling"]}},
}

JobId = Annotated[str, Path(min_length=1, max_length=128, examples=["5f0c1d"], description="From POST /v1/jobs.")]
CallId = Annotated[str, Path(min_length=1, max_length=128, examples=["a1b2"], description="The request's own id.")]
Wait = Annotated[
    float, Query(ge=0.0, le=MAX_WAIT_SECONDS, allow_inf_nan=False, description="Seconds to wait for an end.")
]
ClientId = Annotated[str, Query(max_length=128, description="Whose sequence numbers these are.")]
Sequence = Annotated[
    int | None, Query(ge=0, lt=2**53, description="0, 1, 2 ... of this client: calls run in this order.")
]


def build_app(service: Service, settings: ServerSettings) -> Guard:
    """The ASGI app: every route behind the guard."""
    app = FastAPI(
        title="arctic-rl",
        version=arctic_platform.__version__,
        summary="Five calls that train a policy, as futures.",
        description=(__doc__ or "").partition("\n")[2],
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    _add_state_routes(app, service)
    _add_job_routes(app, service)
    _add_call_routes(app, service, settings, ServiceMetrics(service))
    app.add_exception_handler(ArcticError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_error)
    describe_truly(app, settings)
    return Guard(app, settings, limit_of=_limit_of)


def _add_state_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health", responses={200: {"model": Health}, 503: {"model": Health}})
    async def health() -> Response:
        """Alive (200), or stopping (503)."""
        status = "draining" if service.is_draining else "ok"
        body = Health(status=status, version=arctic_platform.__version__, frame_version=FRAME_VERSION)
        return _json(body, 503 if service.is_draining else 200)

    @app.get("/status", responses=REFUSALS | {200: {"model": ServiceStatus}})
    async def status() -> Response:
        """What is really in effect: engines, versions, weights, whether tokens are shared and why not, queues."""
        return _json(service.status())


def _add_job_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/jobs", status_code=201, responses=REFUSALS | {201: {"model": JobInfo}})
    async def create_job(job: Annotated[JobRequest, Body(openapi_examples=JOB_EXAMPLES)]) -> Response:
        """Start loading a model; `GET /v1/jobs/{job_id}?wait=60` says when it is ready."""
        return _json(service.create_job(job.config, job.kinds, request_id=job.request_id), 201)

    @app.get("/v1/jobs", responses=REFUSALS | {200: {"model": list[JobInfo]}})
    async def list_jobs() -> Response:
        """All jobs, oldest first."""
        return _json(service.jobs())

    @app.get("/v1/jobs/{job_id}", responses=REFUSALS | MISSING | {200: {"model": JobInfo}})
    async def job_info(job_id: JobId, wait: Wait = 0.0) -> Response:
        """Where a job stands, at most `wait` seconds from now."""
        return _json(await service.job_info_async(job_id, wait))

    closing = {202: {"model": JobInfo, "description": "A training call runs to its end first."}}

    @app.delete("/v1/jobs/{job_id}", status_code=204, responses=REFUSALS | MISSING | closing)
    async def close_job(job_id: JobId, wait: Wait = 0.0) -> Response:
        """End a job: what waits is taken back, sampling stops, a training call that runs comes to its end first."""
        info = service.job_info(job_id)
        ending = asyncio.ensure_future(run_in_threadpool(service.close_job, job_id))
        await asyncio.wait([ending], timeout=wait)
        return Response(status_code=204) if ending.done() else _json(info.model_copy(update={"state": "closed"}), 202)


def _add_call_routes(app: FastAPI, service: Service, settings: ServerSettings, metrics: ServiceMetrics) -> None:
    async def answer(state: CallState) -> Response:
        if state.state != "done":
            return _json(state, 202 if state.is_pending else 200)
        response = FrameResponse(await _encode(state.response))
        metrics.bytes.labels("out").inc(response.num_bytes)
        return response

    @app.get("/metrics", responses=REFUSALS | {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
    async def show_metrics() -> Response:
        """Counters and gauges in Prometheus' text format."""
        return Response(generate_latest(metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    @app.post("/v1/jobs/{job_id}/calls", responses=REFUSALS | MISSING | ANSWERS, openapi_extra=_frame_body())
    async def submit(
        request: Request, job_id: JobId, client_id: ClientId = "", sequence: Sequence = None, wait: Wait = 0.0
    ) -> Response:
        """Queue a call. The same request id again is the same call again, executed once."""
        service.job_info(job_id)
        body = await read_frame(request, settings)
        metrics.bytes.labels("in").inc(len(body))
        call = await _decode(body)
        request.scope[LOG_SCOPE] = {"job_id": job_id, "request_id": call.request_id, "call": call.method}
        call_id = service.submit(job_id, call, sequence, client_id=client_id)
        del body, call
        return await answer(await service.poll_async(job_id, call_id, wait))

    @app.get("/v1/jobs/{job_id}/calls/{call_id}", responses=REFUSALS | MISSING | ANSWERS)
    async def poll(job_id: JobId, call_id: CallId, wait: Wait = 0.0) -> Response:
        """The call's answer, or how far it is at most `wait` seconds from now."""
        return await answer(await service.poll_async(job_id, call_id, wait))

    @app.delete("/v1/jobs/{job_id}/calls/{call_id}", responses=REFUSALS | MISSING | {200: {"model": CallState}})
    async def cancel(job_id: JobId, call_id: CallId, client_id: ClientId = "", sequence: Sequence = None) -> Response:
        """Take a call back if it waits, stop it if it samples; a training call that began runs to its end.

        With its number, also a call that has not arrived: those behind it need not wait for it.
        """
        return _json(service.cancel(job_id, call_id, sequence, client_id=client_id))


async def _encode(response: protocol.Response) -> list[Any]:
    return await run_in_threadpool(wire.encode, response)


async def _decode(body: memoryview) -> protocol.Request:
    if len(body) < SMALL_BODY_BYTES:
        return wire.decode(body, protocol.Request)
    return await run_in_threadpool(lambda: wire.decode(body, protocol.Request))


def _json(value: BaseModel | list[Any], status: int = 200) -> Response:
    data = [one.model_dump(mode="json") for one in value] if isinstance(value, list) else value.model_dump(mode="json")
    return Response(json.dumps(data), status, media_type="application/json")


def _limit_of(scope: Scope) -> int:
    """Only frames are large; JSON takes many times its size in memory."""
    return MAX_FRAME_BYTES if scope["path"].endswith("/calls") else MAX_JSON_BYTES


def _refusal(error: Exception, status: int, headers: Any = None) -> Response:
    return Response(error_body(error), status, headers, media_type="application/json")


async def _on_error(request: Request, error: Exception) -> Response:
    return _refusal(error, status_of(error), {"connection": "close"} if status_of(error) == 413 else None)


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    where = ".".join(str(part) for part in first["loc"])
    kind = type(cause) if isinstance(cause, ArcticError) else InputError
    return _refusal(kind(f"{where}: {cause or first['msg']}"), 400)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """No such path or method, or a body that FastAPI could not read."""
    assert isinstance(error, HTTPException)
    cause = error.__cause__
    if isinstance(cause, ArcticError):
        return await _on_error(request, cause)
    here = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 404:
        known = "this server speaks /v1, see /openapi.json; a client of another version must be of this server's"
        return _refusal(NotFoundError(f"there is no {here}; {known}"), 404)
    return _refusal(InputError(f"{here}: {error.detail}"), error.status_code, error.headers)


def _frame_body() -> dict[str, Any]:
    text = (
        "A request of arctic_platform.rl.protocol as a frame: 'ZoRR', the format's version, the length of a JSON "
        "control part, that part, and a safetensors body with the rows as flat arrays and offsets."
    )
    return {"requestBody": {"required": True, "description": text, "content": FRAME}}


def describe_truly(app: FastAPI, settings: ServerSettings) -> None:
    """The OpenAPI document without the answers that FastAPI assumes and this app never gives."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        document = plain()
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        schemas = document["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        if settings.api_key is not None:
            document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"key": []}]
            document["paths"]["/health"]["get"]["security"] = []
        return document

    app.openapi = openapi
