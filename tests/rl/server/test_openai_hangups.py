"""A client that hangs up aborts its request, whatever phase it is in, and leaves nothing behind."""

import asyncio
import contextlib
import json
import socket
from urllib.parse import urlsplit

import httpx
import pytest

from arctic_platform.rl.zorro_inference.sampler import Sampler
from tests.rl.server.served import WAIT_SECONDS, served, serving_of, wait_until

LONG = {"prompt": [5, 6, 7], "max_tokens": 2000, "ignore_eos": True, "seed": 0}
PROMPT_LEN = 1900
SHORT = {"prompt": [5, 6, 7], "max_tokens": 30, "ignore_eos": True, "seed": 0, "return_token_ids": True}


def connected(server, path: str, body: dict) -> socket.socket:
    """A raw connection on which a request was sent."""
    at = urlsplit(server.url)
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {at.netloc}\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection = socket.create_connection((at.hostname, at.port))
    connection.sendall(head.encode() + raw)
    return connection


def draw(server, body: dict) -> list[int]:
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=WAIT_SECONDS)
    return reply.json()["choices"][0]["token_ids"]


@contextlib.contextmanager
def held(server):
    """The sampler paused between two steps."""
    server.in_its_thread(Sampler.pause)
    try:
        yield
    finally:
        server.in_its_thread(Sampler.resume)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "num_rollouts"),
    [
        ("/v1/completions", LONG, 1),
        ("/v1/completions", LONG | {"prompt": [[5, 6, 7], [8, 9]], "n": 3}, 6),
        (
            "/inference/v1/generate",
            {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2000, "ignore_eos": True}},
            1,
        ),
    ],
)
def test_a_hang_up_while_tokens_are_drawn_aborts_and_is_counted(server, path, body, num_rollouts, stream):
    begun, drawn, aborted = server.num_begun, server.num_tokens, server.num_aborted
    connection = connected(server, path, body | {"stream": stream})
    wait_until(lambda: server.num_begun > begun)
    connection.close()
    server.expect_nothing_left()
    assert server.num_tokens - drawn < 2000
    assert server.num_aborted - aborted == num_rollouts


@pytest.mark.parametrize("stream", [False, True])
def test_a_hang_up_before_the_first_token_aborts(server, stream):
    with held(server):
        drawn = server.num_tokens
        connection = connected(server, "/v1/completions", LONG | {"stream": stream})
        wait_until(lambda: bool(server.serving.in_flight))
        connection.close()
        wait_until(lambda: not server.serving.in_flight)
    server.expect_nothing_left()
    assert server.num_tokens == drawn


@pytest.mark.parametrize("stream", [False, True])
def test_a_hang_up_in_the_middle_of_a_prefill_aborts_and_others_go_on(chat_model_folder, stream):
    with served(serving_of(chat_model_folder, prefill_chunk_tokens=8)) as server:
        alone = draw(server, SHORT | {"max_tokens": 200})

        long = {"prompt": [9] * PROMPT_LEN, "max_tokens": 5}

        def prefilled() -> int:
            return server.sampler.stats.tokens_computed - server.sampler.stats.generated_tokens

        async def meanwhile() -> list[int]:
            other = asyncio.create_task(asyncio.to_thread(draw, server, SHORT | {"max_tokens": 200}))
            begun, before = server.num_begun + 1, prefilled()
            await asyncio.to_thread(wait_until, lambda: server.num_begun == begun)
            connection = connected(server, "/v1/completions", long | {"stream": stream})
            await asyncio.to_thread(wait_until, lambda: prefilled() > before + 40)
            connection.close()
            await asyncio.to_thread(wait_until, lambda: len(server.serving.in_flight) <= 1)
            assert prefilled() < before + PROMPT_LEN
            assert server.num_begun == begun
            return await other

        assert asyncio.run(meanwhile()) == alone
        server.expect_nothing_left()


def test_others_are_undisturbed_by_a_hang_up(server):
    alone = draw(server, SHORT)
    begun = server.num_begun
    others = [connected(server, "/v1/completions", LONG | {"stream": number % 2 == 0}) for number in range(4)]
    wait_until(lambda: server.num_begun >= begun + 4)

    async def meanwhile() -> list[int]:
        task = asyncio.create_task(asyncio.to_thread(draw, server, SHORT))
        for connection in others:
            await asyncio.sleep(0.01)
            connection.close()
        return await task

    assert asyncio.run(meanwhile()) == alone


def test_a_stream_that_is_closed_half_way_aborts(server):
    events = server.client().chat.completions.create(
        model="tiny-chat",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        max_tokens=1000,
        extra_body={"ignore_eos": True},
    )
    for _ in zip(range(3), events, strict=False):
        pass
    events.close()
    server.expect_nothing_left()


def test_half_a_request_is_no_request(server):
    at = urlsplit(server.url)
    with socket.create_connection((at.hostname, at.port)) as connection:
        connection.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{"prompt": ')
    assert draw(server, SHORT)
