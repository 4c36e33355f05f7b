"""The HTTP face on a real socket: what each path says, and what it refuses."""

import json
import socket
import struct
import time
from collections.abc import Generator
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from arctic_platform.rl import wire
from arctic_platform.rl.protocol import (
    FwdBwdRequest,
    GenerateRequest,
    LogProbsRequest,
    LogProbsResponse,
    Request,
    Response,
    SamplingParams,
    StatusRequest,
    StepRequest,
)
from arctic_platform.rl.server import calls
from arctic_platform.rl.server.calls import num_bytes
from arctic_platform.rl.server.states import FRAME_TYPE
from tests.rl.engines.builders import config, grouped_batch
from tests.transports.serving import Running, running_server

LONG = SamplingParams(n=8, max_tokens=3000, ignore_eos=True)
KEY = "a-key-that-nobody-else-knows"


@pytest.fixture(scope="module")
def running() -> Generator[Running]:
    """A server with one loaded job."""
    with running_server(max_body_bytes=50_000, body_seconds=0.5) as server:
        server.service.job_info(server.service.create_job(config()).job_id, None)
        yield server


def job_path(running: Running) -> str:
    return f"{running.url}/v1/jobs/{running.service.jobs()[0].job_id}"


def frame(request: Request) -> bytes:
    return b"".join(bytes(part) for part in wire.encode(request))


def post(running: Running, request: Request | bytes, **params: Any) -> httpx.Response:
    body = request if isinstance(request, bytes) else frame(request)
    headers = {"content-type": FRAME_TYPE}
    return httpx.post(f"{job_path(running)}/calls", content=body, headers=headers, params={"wait": 20} | params)


def refusal(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    assert set(error) == {"kind", "message"}
    assert "\n" not in error["message"]
    return answer.status_code, error["kind"], error["message"]


def test_a_short_call_is_answered_at_once_with_a_frame(running: Running) -> None:
    answer = post(running, StatusRequest())
    assert (answer.status_code, answer.headers["content-type"]) == (200, FRAME_TYPE)
    assert wire.decode(answer.content, Response).model == "tiny-random"  # ty: ignore[unresolved-attribute]


def test_a_long_call_is_pending_with_its_progress_and_can_be_taken_back(running: Running) -> None:
    request = GenerateRequest(prompts=[[5, 6]], sampling_params=LONG)
    answer = post(running, request, wait=0)
    assert (answer.status_code, answer.json()["method"]) == (202, "generate")
    call = f"{job_path(running)}/calls/{request.request_id}"
    deadline = time.monotonic() + 20
    while not (state := httpx.get(call, params={"wait": 0.05}).json())["num_total"] and time.monotonic() < deadline:
        assert state["state"] in ("waiting", "running")
    assert state["num_total"] == 8
    assert httpx.delete(call).status_code == 200
    ended = httpx.get(call, params={"wait": 20})
    assert (ended.status_code, ended.json()["state"], ended.json()["error"]["kind"]) == (
        200, "failed", "CallCancelledError",
    )  # fmt: skip


def test_a_call_that_fails_is_an_answer_and_no_http_error(running: Running) -> None:
    answer = post(running, StepRequest())
    assert (answer.status_code, answer.json()["state"], answer.json()["error"]["kind"]) == (200, "failed", "InputError")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_json_lacks_arrive_as_they_are(running: Running, value: float) -> None:
    backend: Any = running.service.backend(running.service.jobs()[0].job_id)
    real, backend.train.log_probs = backend.train.log_probs, lambda *a, **k: LogProbsResponse(
        logprobs=[[value, -1.0]], metrics={"tokens_computed": 1.0, "tokens_naive": 1.0, "zorro_active": value}
    )  # fmt: skip
    answer = post(running, LogProbsRequest(batch=grouped_batch()))
    backend.train.log_probs = real
    response: Any = wire.decode(answer.content, Response)
    np.testing.assert_array_equal(list(response.logprobs[0]), [value, -1.0])
    np.testing.assert_array_equal(response.metrics["zorro_active"], value)
    assert httpx.get(f"{running.url}/status").status_code == 200


def test_the_status_says_what_is_in_effect_and_why(running: Running) -> None:
    post(running, FwdBwdRequest(batch=grouped_batch()))
    status = httpx.get(f"{running.url}/status").json()
    backend = status["jobs"][0]["backend"]
    assert backend["zorro_train_effect"].startswith("on: the last batch computed ")
    assert (backend["training_engine"], backend["has_pending_gradients"]) == ("TorchTrainEngine", True)
    assert {"python", "torch", "transformers"} <= set(status["versions"])
    assert status["state"] == "serving"


def test_the_metrics_count_calls_tokens_and_bytes(running: Running) -> None:
    post(running, LogProbsRequest(batch=grouped_batch()))
    found: dict[Any, float] = {}
    deadline = time.monotonic() + 5
    while ("arctic_calls_total", "log_probs", "done") not in found and time.monotonic() < deadline:
        text = httpx.get(f"{running.url}/metrics").text
        for family in text_string_to_metric_families(text):
            found |= {(one.name, *one.labels.values()): one.value for one in family.samples}
    assert found["arctic_calls_total", "log_probs", "done"] >= 1
    assert found["arctic_tokens_total", "log_probs", "computed"] < found["arctic_tokens_total", "log_probs", "naive"]
    assert found["arctic_body_bytes_total", "in"] > 0
    assert found["arctic_jobs", "ready"] == 1
    assert any(name[0] == "arctic_weight_version" and name[2] == "trainer" for name in found)


def test_every_example_of_the_openapi_document_works(running: Running) -> None:
    document = httpx.get(f"{running.url}/openapi.json").json()
    body = document["paths"]["/v1/jobs"]["post"]["requestBody"]["content"]["application/json"]
    for example in body["examples"].values():
        made = httpx.post(f"{running.url}/v1/jobs", json=example["value"])
        assert made.status_code == 201
        job = f"{running.url}/v1/jobs/{made.json()['job_id']}"
        assert httpx.get(job, params={"wait": 20}).json()["state"] == "ready"
        assert httpx.delete(job, params={"wait": 20}).status_code == 204
    call = document["paths"]["/v1/jobs/{job_id}/calls"]["post"]
    assert list(call["requestBody"]["content"]) == [FRAME_TYPE]
    assert set(call["responses"]["200"]["content"]) == {FRAME_TYPE, "application/json"}
    assert not [path for path in document["paths"].values() for one in path.values() if "422" in one["responses"]]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"config": {"model": "m"}, "kwargs": {}}, "unknown key 'kwargs'; accepted: config, kinds, request_id"),
        ({"config": {"model": "m", "batch": 1}}, "unknown key 'batch'"),
        ({"config": {"model": "m", "zorro_trian": {}}}, "did you mean 'zorro_train'?"),
        ({"config": {"model": "m"}, "kinds": ["trainer"]}, "kinds"),
        ({}, "config"),
        ([], "dictionary"),
        (None, "required"),
    ],
)
def test_a_wrong_job_is_refused_with_the_key_at_fault(running: Running, body: Any, message: str) -> None:
    status, kind, said = refusal(httpx.post(f"{running.url}/v1/jobs", json=body))
    assert (status, kind in ("ConfigError", "InputError")) == (400, True)
    assert message in said


def with_control(request: Request, change: Any) -> bytes:
    """A frame whose fields were changed."""
    body = frame(request)
    (length,) = struct.unpack_from("<Q", body, 8)
    control = json.loads(body[16 : 16 + length])
    change(control["fields"])
    text = json.dumps(control).encode()
    text += b" " * (-len(text) % 8)
    return body[:8] + struct.pack("<Q", len(text)) + text + body[16 + length :]


def test_another_envelope_is_refused_with_the_key_at_fault(running: Running) -> None:
    """CASES 108: `{batch, meta}` and `{kwargs}` are other servers' dialects."""
    request = FwdBwdRequest(batch=grouped_batch())
    for key in ("meta", "kwargs"):
        body = with_control(request, lambda fields, key=key: fields.update({key: {}}))
        status, kind, message = refusal(post(running, body))
        assert (status, kind) == (400, "InputError")
        assert f"FwdBwdRequest: unknown key '{key}'" in message
    status, kind, message = refusal(httpx.post(f"{job_path(running)}/calls", json={"batch": {}, "meta": {}}))
    assert (status, kind) == (400, "InputError")
    assert "application/json" in message
    assert FRAME_TYPE in message


def test_an_unknown_loss_setting_is_refused_by_its_nearest_name(running: Running) -> None:
    request = FwdBwdRequest(batch=grouped_batch())
    body = with_control(request, lambda fields: fields["processing"].update({"temprature": 1.0}))
    assert "did you mean 'temperature'" in refusal(post(running, body))[2]


def test_bytes_that_are_no_frame_are_refused(running: Running) -> None:
    for body in (b"", b"ZoRR", b"\x80\x04\x95", frame(StepRequest())[:-1], b"x" * 1000):
        assert refusal(post(running, body))[:2] == (400, "WireError")


def test_paths_and_methods_that_do_not_exist_are_named(running: Running) -> None:
    assert "speaks /v1" in refusal(httpx.get(f"{running.url}/v2/jobs"))[2]
    assert refusal(httpx.put(f"{running.url}/v1/jobs"))[0] == 405
    assert refusal(httpx.get(f"{running.url}/v1/jobs/x"))[:2] == (404, "NotFoundError")
    assert refusal(httpx.get(f"{job_path(running)}/calls/x"))[:2] == (404, "NotFoundError")
    for wait in ("-1", "61", "nan", "soon"):
        assert refusal(httpx.get(job_path(running), params={"wait": wait}))[0] == 400


def test_a_body_beyond_the_limit_is_refused_whether_announced_or_not(running: Running) -> None:
    def pieces() -> Generator[bytes]:
        yield from [b"x" * 20_000] * 5

    for content in (b"x" * 60_000, pieces()):
        headers = {"content-type": FRAME_TYPE}
        answer = httpx.post(f"{job_path(running)}/calls", content=content, headers=headers)
        status, kind, message = refusal(answer)
        assert (status, kind) == (413, "InputError")
        assert "50000" in message
    for content in (b" " * 60_000, pieces()):
        answer = httpx.post(f"{running.url}/v1/jobs", content=content, headers={"content-type": "application/json"})
        assert refusal(answer)[:2] == (413, "InputError")


def test_json_is_limited_far_below_frames() -> None:
    with running_server() as roomy:
        content = json.dumps({"config": {"model": "x" * 2**20}}).encode()
        answer = httpx.post(f"{roomy.url}/v1/jobs", content=content, headers={"content-type": "application/json"})
        status, _, message = refusal(answer)
        assert status == 413
        assert f"this server takes {2**20}; this path takes short JSON only" in message


def test_a_body_that_stops_coming_is_given_up(running: Running) -> None:
    host, port = running.url.removeprefix("http://").split(":")
    head = f"POST /v1/jobs/{running.service.jobs()[0].job_id}/calls HTTP/1.1\r\nHost: {host}\r\n"
    head += f"Content-Type: {FRAME_TYPE}\r\nContent-Length: 5000\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(head.encode() + b"x" * 100)
        said = connection.recv(65536)
    assert said.startswith(b"HTTP/1.1 400")
    assert b"no byte of the body came for 0.5 s" in said


def test_a_key_of_another_kind_is_refused_everywhere_but_for_health() -> None:
    with running_server(api_key=KEY) as running:
        for header in (f"Basic {KEY}", f"Bearer {KEY}x", KEY, "Bearer", "Bearer é"):
            answer = httpx.get(f"{running.url}/status", headers={"authorization": header.encode()})
            assert refusal(answer)[:2] == (401, "AccessError")
            assert answer.headers["www-authenticate"] == "Bearer"
            assert KEY not in answer.text
        assert httpx.get(f"{running.url}/status", headers={"authorization": f"bearer {KEY}"}).status_code == 200
        document = httpx.get(f"{running.url}/openapi.json", headers={"authorization": f"Bearer {KEY}"}).json()
        assert document["security"] == [{"key": []}]
        assert document["paths"]["/health"]["get"]["security"] == []


def test_answers_in_arrays_count_by_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [np.zeros(1000, np.float64)] * 10
    assert 80_000 <= num_bytes(LogProbsResponse(logprobs=rows)) < 90_000
    monkeypatch.setattr(calls, "ANSWER_BYTES_KEPT", 200_000)
    book = calls.CallBook()
    for number in range(5):
        call, _ = book.admit(calls.Call(str(number), "log_probs", StatusRequest()))
        book.finish(call)
        call.future.set_result(LogProbsResponse(logprobs=rows))
        book.deliver(call)
    assert [book.find(str(number)).is_forgotten for number in range(5)] == [True, True, True, False, False]
