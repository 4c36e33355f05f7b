"""Whatever is sent to the server: an answer of the documented shape, soon, and never a 500."""

import itertools
import os
import random
from collections.abc import Generator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arctic_platform.rl import wire
from arctic_platform.rl.protocol import FwdBwdRequest, GenerateRequest, Request, StepRequest
from arctic_platform.rl.server.app import build_app
from arctic_platform.rl.server.service import Service
from arctic_platform.rl.server.settings import ServerSettings
from arctic_platform.rl.server.states import FRAME_TYPE
from tests.rl.engines.builders import config, grouped_batch
from tests.schemas import CHECKS
from tests.transports.serving import Running, running_server

SECONDS = 20.0
EXAMPLES = 8
QUICK = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
LONG = settings(QUICK, max_examples=400)


@pytest.fixture(scope="module")
def running() -> Generator[Running]:
    """A server with room for many jobs; models are looked for on this machine alone."""
    offline, os.environ["HF_HUB_OFFLINE"] = os.environ.get("HF_HUB_OFFLINE"), "1"
    with running_server(max_jobs=10_000, max_body_bytes=2**20) as server:
        server.service.job_info(server.service.create_job(config()).job_id, None)
        yield server
    if offline is None:
        del os.environ["HF_HUB_OFFLINE"]


DOCUMENT: Any = build_app(Service(), ServerSettings())._app.openapi()  # ty: ignore[unresolved-attribute]
schema = schemathesis.openapi.from_dict(DOCUMENT)
schemathesis.serializer.alias(FRAME_TYPE, "application/octet-stream")


def test_the_served_document_is_the_one_that_is_tested_here(running: Running) -> None:
    assert httpx.get(f"{running.url}/openapi.json").json() == DOCUMENT


def send(running: Running, case: Any, *, to_the_job: bool) -> None:
    if to_the_job and "job_id" in case.path_parameters and case.method != "DELETE":
        case.path_parameters["job_id"] = running.service.jobs()[0].job_id
    if case.query and isinstance(case.query.get("wait"), (int, float)):
        case.query["wait"] = min(case.query["wait"], 0.01)
    case.call_and_validate(base_url=running.url, checks=CHECKS, timeout=SECONDS)


@schema.parametrize()
@QUICK
def test_every_request_gets_a_documented_answer(running: Running, case: Any) -> None:
    send(running, case, to_the_job=False)


@schema.include(path_regex="job_id").parametrize()
@QUICK
def test_every_request_to_a_job_gets_a_documented_answer(running: Running, case: Any) -> None:
    send(running, case, to_the_job=True)


@pytest.mark.slow
@schema.parametrize()
@LONG
def test_every_one_of_many_requests_gets_a_documented_answer(running: Running, case: Any) -> None:
    send(running, case, to_the_job=True)


REQUESTS: list[Request] = [StepRequest(), GenerateRequest(prompts=[[5, 6]]), FwdBwdRequest(batch=grouped_batch())]
IDS = itertools.count()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(which=st.integers(0, len(REQUESTS) - 1), seed=st.integers(0, 2**32), num_changes=st.integers(0, 4))
def test_a_damaged_frame_is_refused_or_runs(running: Running, which: int, seed: int, num_changes: int) -> None:
    draw = random.Random(seed)
    request = REQUESTS[which].model_copy(update={"request_id": f"fuzz-{next(IDS)}"})
    body = bytearray(b"".join(bytes(part) for part in wire.encode(request)))
    for _ in range(num_changes):
        body[draw.randrange(len(body))] = draw.randrange(256)
    cut = len(body) - (draw.randrange(len(body)) if draw.random() < 0.3 else 0)
    job = running.service.jobs()[0].job_id
    path = f"{running.url}/v1/jobs/{job}/calls?wait=5"
    answer = httpx.post(path, content=bytes(body[:cut]), headers={"content-type": FRAME_TYPE}, timeout=SECONDS)
    assert answer.status_code in (200, 202, 400)
    if answer.status_code == 400:
        assert set(answer.json()["error"]) == {"kind", "message"}
