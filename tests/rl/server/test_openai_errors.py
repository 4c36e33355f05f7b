"""Every mistake of a caller is one error in OpenAI's shape, found before an answer begins; nobody else notices."""

import asyncio
import json

import httpx
import openai
import pytest

from tests.rl.server.served import MODEL_NAME, WAIT_SECONDS, served, serving_of, wait_until

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
MISTAKES = [
    ("/v1/completions", {"prompt": ""}, 400, "prompt"),
    ("/v1/completions", {"prompt": []}, 400, "prompt"),
    ("/v1/completions", {"prompt": "a", "n": 0}, 400, "n"),
    ("/v1/completions", {"prompt": "a", "max_tokens": -5}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "a", "temprature": 1}, 400, "temprature"),
    ("/v1/completions", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
    ("/v1/completions", {"prompt": "a", "model": "gpt-4"}, 404, "model"),
    ("/v1/completions", {"prompt": [5] * 2048}, 400, "prompt"),
    ("/v1/completions", {"prompt": [5] * 2040, "max_tokens": 9}, 400, "prompt"),
    ("/v1/completions", {"prompt": [10**6]}, 400, "prompt"),
    ("/v1/completions", {"prompt": [-1]}, 400, "prompt"),
    ("/v1/completions", {"prompt": ["a"] * 100, "n": 100}, 400, "n"),
    ("/v1/completions", {"prompt": "a", "stop_token_ids": [10**6]}, 400, None),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"1000000": 1}}, 400, None),
    ("/v1/completions", {"prompt": "a", "min_tokens": 17}, 400, None),
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", CHAT | {"max_tokens": 0}, 400, "max_tokens"),
    ("/v1/chat/completions", CHAT | {"max_tokens": 10**6}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "7 " * 3000}]}, 400, "messages"),
    ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_object"}}, 400, "response_format"),
    ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"enable_thinking": False}}, 400, "enable_thinking"),
    ("/inference/v1/generate", {"token_ids": [], "sampling_params": {}}, 400, "token_ids"),
    ("/inference/v1/generate", {"token_ids": [5]}, 400, "sampling_params"),
    ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"n": 0}}, 400, "sampling_params.n"),
    ("/inference/v1/generate", {"token_ids": [5] * 4000, "sampling_params": {}}, 400, "token_ids"),
    ("/inference/v1/generate", {"token_ids": [10**6], "sampling_params": {}}, 400, "token_ids"),
    ("/tokenize", {}, 400, "prompt"),
    ("/detokenize", {"tokens": [10**9]}, 400, "tokens"),
    ("/v1/embeddings", {"input": "a"}, 404, None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "status", "param"), MISTAKES)
def test_a_mistake_is_an_error_before_the_answer_begins(server, path, body, status, param, stream):
    more = {"stream": True} if stream and "tokenize" not in path else {}
    reply = httpx.post(f"{server.url}{path}", json=body | more, timeout=WAIT_SECONDS)
    error = reply.json()["error"]
    assert reply.status_code == status
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"] and "\n" not in error["message"]


def test_a_prompt_above_the_context_says_so_by_code(server):
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048") as caught:
        server.client().completions.create(model=MODEL_NAME, prompt=[5] * 3000)
    assert caught.value.code == "context_length_exceeded"


def test_what_is_no_json_and_what_is_no_method_have_the_same_shape(server):
    for reply in (
        httpx.post(f"{server.url}/v1/completions", content=b"{"),
        httpx.get(f"{server.url}/v1/completions"),
        httpx.get(f"{server.url}/nowhere"),
    ):
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def test_other_requests_are_undisturbed_by_mistakes(server):
    prompts = [[7 + number, 8, 9] for number in range(4)]
    body = {"seed": 1, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}

    async def draw(client: httpx.AsyncClient, prompt: list[int]) -> list[int]:
        reply = await client.post("/v1/completions", json=body | {"prompt": prompt})
        return reply.json()["choices"][0]["token_ids"]

    async def everybody(with_mistakes: bool) -> list[list[int]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=WAIT_SECONDS) as client:
            wrong = [client.post(path, json=given) for path, given, _, _ in MISTAKES if with_mistakes]
            drawn, *_ = await asyncio.gather(asyncio.gather(*(draw(client, one) for one in prompts)), *wrong)
            return drawn

    assert asyncio.run(everybody(with_mistakes=True)) == asyncio.run(everybody(with_mistakes=False))


def test_a_request_id_that_is_in_work_is_refused_and_the_first_goes_on(server):
    body = {"prompt": [5, 6], "max_tokens": 20, "ignore_eos": True, "return_token_ids": True, "request_id": "mine"}

    async def both() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=WAIT_SECONDS) as client:
            await client.post("/pause?mode=keep")
            first = asyncio.create_task(client.post("/v1/completions", json=body))
            await asyncio.to_thread(wait_until, lambda: bool(server.serving.in_flight))
            second = await client.post("/v1/completions", json=body)
            assert server.serving.in_flight
            await client.post("/resume")
            return [await first, second]

    first, second = asyncio.run(both())
    assert len(first.json()["choices"][0]["token_ids"]) == 20
    assert (second.status_code, second.json()["error"]["param"]) == (400, "request_id")


def test_without_a_tokenizer_ids_are_served_and_text_is_refused_by_name(chat_model_folder, tmp_path):
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(chat_model_folder / name)
    with served(serving_of(tmp_path)) as bare:
        ids = {"prompt": [5, 6], "max_tokens": 2, "return_token_ids": True}
        reply = httpx.post(f"{bare.url}/v1/completions", json=ids, timeout=WAIT_SECONDS).json()
        assert len(reply["choices"][0]["token_ids"]) == 2
        generate = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}}
        reply = httpx.post(f"{bare.url}/inference/v1/generate", json=generate, timeout=WAIT_SECONDS).json()
        assert len(reply["choices"][0]["token_ids"]) == 2
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/completions", {"prompt": [5]}),
            ("/v1/completions", ids | {"stop": "a"}),
            ("/v1/chat/completions", CHAT),
            ("/tokenize", {"prompt": "a"}),
        ):
            reply = httpx.post(f"{bare.url}{path}", json=body, timeout=WAIT_SECONDS)
            assert reply.status_code == 400
            assert "tokenizer" in reply.json()["error"]["message"]


def test_the_document_of_the_server_describes_what_each_endpoint_takes(server):
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    schema = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "messages" in json.dumps(schema)
    assert {"/v1/completions", "/inference/v1/generate", "/v1/models", "/health", "/metrics"} <= set(paths)
