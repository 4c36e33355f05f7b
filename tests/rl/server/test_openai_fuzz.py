"""Whatever is sent, the answer is an answer or a mistake of the caller; never a fault of the server."""

import math

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arctic_platform.rl.server.openai_schema import ChatRequest, CompletionRequest, GenerateSampling
from tests.rl.server.served import WAIT_SECONDS
from tests.schemas import CHECKS

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5),
    st.sampled_from([2**31, -(2**63), 2**64]),
    st.floats(-3, 3, allow_nan=False),
    st.sampled_from(["", "a", "\x00", "\U0001f600", "auto", "none"]),
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
IDS = st.lists(st.integers(0, 300), min_size=1, max_size=5)
VALID = {
    "n": st.integers(1, 3),
    "temperature": st.just(0) | st.floats(0.01, 2),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 400),
    "min_p": st.floats(0, 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.1, 2),
    "min_tokens": st.integers(0, 5),
    "stop": st.lists(st.text(min_size=1, max_size=3), max_size=2),
    "stop_token_ids": st.lists(st.integers(0, 400), max_size=2),
    "bad_words": st.lists(st.text(min_size=1, max_size=3).filter(str.strip), max_size=2),
    "logit_bias": st.dictionaries(st.integers(0, 400).map(str), st.floats(-100, 100), max_size=2),
    "seed": st.integers(-5, 5),
    "prompt_logprobs": st.integers(0, 5),
    "ignore_eos": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
}
sampled = st.fixed_dictionaries({"max_tokens": st.integers(1, 5)}, optional=VALID)
fuzz = settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])


def expect_no_fault(server, path: str, body) -> int:
    reply = httpx.post(f"{server.url}{path}", json=body, timeout=WAIT_SECONDS)
    assert reply.status_code == 200 or 400 <= reply.status_code < 500, (body, reply.text)
    if reply.status_code != 200:
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    elif reply.headers["content-type"] == "application/json":
        assert all(not isinstance(one, float) or math.isfinite(one) for one in leaves(reply.json()))
    return reply.status_code


def leaves(value):
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from leaves(one)
    else:
        yield value


def test_every_request_gets_a_documented_answer(server):
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in document.get_all_operations()]
    assert len(operations) == 13
    for operation in operations:

        @fuzz
        @given(case=operation.as_strategy())
        def sent(case):
            case.call_and_validate(base_url=server.url, checks=CHECKS, timeout=WAIT_SECONDS)

        if operation.path != "/pause":
            sent()


@fuzz
@given(body=ANYTHING)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/tokenize"])
def test_any_json_is_an_answer_or_a_mistake(server, path, body):
    expect_no_fault(server, path, body)


@fuzz
@given(
    body=sampled, prompt=IDS, more=st.dictionaries(st.sampled_from(sorted(CompletionRequest.model_fields)), ANYTHING)
)
def test_any_value_of_a_known_parameter_is_an_answer_or_a_mistake(server, body, prompt, more):
    expect_no_fault(server, "/v1/completions", {"prompt": prompt} | more | body)


@fuzz
@given(more=st.dictionaries(st.sampled_from(sorted(ChatRequest.model_fields)), ANYTHING, max_size=3))
def test_any_value_in_a_chat_is_an_answer_or_a_mistake(server, more):
    body = {"messages": [{"role": "user", "content": "a"}]} | more | {"max_tokens": 2}
    expect_no_fault(server, "/v1/chat/completions", body)


@fuzz
@given(
    sampling=sampled, more=st.dictionaries(st.sampled_from(sorted(GenerateSampling.model_fields)), ANYTHING, max_size=2)
)
def test_any_sampling_of_ids_is_an_answer_or_a_mistake(server, sampling, more):
    expect_no_fault(server, "/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": more | sampling})


@fuzz
@given(body=sampled, prompt=IDS, logprobs=st.integers(0, 20), stream=st.booleans())
def test_valid_parameters_are_answered(server, body, prompt, logprobs, stream):
    body = body | {"prompt": prompt, "logprobs": logprobs, "stream": stream}
    for name, top in (("stop_token_ids", 318), ("logit_bias", 318)):
        kept = body.get(name, [])
        body[name] = (
            [one for one in kept if one <= top]
            if name == "stop_token_ids"
            else {key: value for key, value in (kept or {}).items() if int(key) <= top}
        )
    body["min_tokens"] = min(body.get("min_tokens", 0), body["max_tokens"])
    assert expect_no_fault(server, "/v1/completions", body) == 200, body
