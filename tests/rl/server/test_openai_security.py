"""The sampling server is behind the same guard as the service; its refusals have OpenAI's shape."""

import httpx
import openai
import pytest
from pydantic import SecretStr

from arctic_platform.rl.server.settings import ServerSettings
from tests.rl.server.served import MODEL_NAME, Served, served, serving_of

KEY = "a-key-of-many-characters"
BODY = {"prompt": [5, 6], "max_tokens": 1, "return_token_ids": True}


@pytest.fixture(scope="module")
def guarded(chat_model_folder):
    settings = ServerSettings(port=0, api_key=SecretStr(KEY), max_body_bytes=1000)
    with served(serving_of(chat_model_folder), settings=settings) as running:
        yield running


def expect_error(reply: httpx.Response, status: int) -> None:
    assert reply.status_code == status
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/completions", "/update_weights", "/pause"])
def test_without_the_key_nothing_but_health_answers(guarded: Served, path):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
        expect_error(httpx.post(f"{guarded.url}{path}", json=BODY, headers=headers), 401)
    assert httpx.get(f"{guarded.url}/health").status_code == 200


def test_the_stock_client_bears_the_key(guarded: Served):
    with pytest.raises(openai.AuthenticationError):
        guarded.client().models.list()
    client = openai.OpenAI(base_url=guarded.base_url, api_key=KEY)
    assert client.models.list().data[0].id == MODEL_NAME


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_above_the_limit_is_refused(guarded: Served, announced):
    raw = b'{"prompt": "' + b"a" * 2000 + b'"}'
    content = raw if announced else iter([raw])
    headers = {"Authorization": f"Bearer {KEY}"}
    expect_error(httpx.post(f"{guarded.url}/v1/completions", content=content, headers=headers), 413)


def test_a_web_page_cannot_reach_a_server_without_a_key(server: Served):
    for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
        expect_error(httpx.post(f"{server.url}/v1/completions", json=BODY, headers=headers), 403)


def test_a_server_that_stops_refuses_new_requests(chat_model_folder):
    with served(serving_of(chat_model_folder)) as stopping:
        assert stopping.serving.drain(1.0)
        expect_error(httpx.post(f"{stopping.url}/v1/completions", json=BODY), 503)
        assert httpx.get(f"{stopping.url}/health").status_code == 503
