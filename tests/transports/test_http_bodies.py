"""Large bodies over HTTP: from memory to memory, never half, and refused before they travel."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from arctic_platform.rl import wire
from arctic_platform.rl.protocol import GenerateRequest, GenerateResponse, Request, SamplingParams
from arctic_platform.rl.server.states import FRAME_TYPE
from arctic_platform.rl.transports import http_sockets
from arctic_platform.rl.transports.http_sockets import READ_BYTES, SocketTransport
from tests.rl.engines import builders
from tests.transports.serving import Running, running_server

HEAD = f"POST /v1/jobs/JOB/calls?wait=30 HTTP/1.1\r\nhost: localhost\r\ncontent-type: {FRAME_TYPE}\r\n"


@pytest.fixture(scope="module")
def running() -> Generator[Running]:
    """One server for the tests of this file; a body may be silent for a second."""
    with running_server(body_seconds=1.0, max_body_bytes=2**24) as server:
        yield server


@pytest.fixture(scope="module")
def job(running: Running) -> str:
    """A loaded job on it."""
    job_id = running.service.create_job(builders.config()).job_id
    assert running.service.job_info(job_id, None).state == "ready"
    return job_id


def frame_of(request: Request) -> bytes:
    return b"".join(wire.encode(request))


def large_request(num_bytes: int = 3_000_000) -> GenerateRequest:
    params = SamplingParams(max_tokens=3, temperature=0.0)
    return GenerateRequest(prompts=[[5, 6, 7]], sampling_params=params, routing_key="k" * num_bytes)


async def post(client: httpx.AsyncClient, job: str, frame: bytes) -> httpx.Response:
    headers = {"content-type": FRAME_TYPE, "content-length": str(len(frame))}
    return await client.post(f"/v1/jobs/{job}/calls", params={"wait": 30}, content=pieces(frame), headers=headers)


async def pieces(frame: bytes, size: int = 2**19) -> AsyncIterator[bytes]:
    for at in range(0, len(frame), size):
        yield frame[at : at + size]


def raw(running: Running) -> socket.socket:
    host, _, port = running.url.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def read_answer(connection: socket.socket) -> tuple[int, bytes]:
    """Status and body of the next answer."""
    (answer,) = read_answers(connection, 1)
    return answer


def read_answers(connection: socket.socket, num: int) -> list[tuple[int, bytes]]:
    """Statuses and bodies of answers that name their lengths."""
    answers = []
    with connection.makefile("rb") as file:
        for _ in range(num):
            status = int(file.readline().split()[1])
            lines = iter(file.readline, b"\r\n")
            length = next(int(line.split()[1]) for line in list(lines) if line.lower().startswith(b"content-length"))
            answers.append((status, file.read(length)))
    return answers


def large_head(job: str, length: int) -> bytes:
    return (HEAD.replace("JOB", job) + f"content-length: {length}\r\n\r\n").encode()


@pytest.mark.parametrize("num_bytes", [0, READ_BYTES - 500, READ_BYTES, 2 * READ_BYTES + 1, 3_000_000])
def test_bodies_of_any_size_arrive_as_over_httpx_and_its_connection_is_kept(
    running: Running, job: str, num_bytes: int
) -> None:
    async def both() -> list[GenerateResponse]:
        answers = []
        for transport in (SocketTransport(), httpx.AsyncHTTPTransport()):
            async with httpx.AsyncClient(base_url=running.url, transport=transport, timeout=30) as client:
                for _ in range(3):
                    answer = await post(client, job, frame_of(large_request(num_bytes)))
                    answers.append(wire.decode(answer.content, GenerateResponse))
                if isinstance(transport, SocketTransport):
                    assert [len(kept) for kept in transport._idle.values()] == [1]
        return answers

    answers = asyncio.run(both())
    assert all(answer.rollouts == answers[0].rollouts for answer in answers)


def test_many_large_bodies_at_once_do_not_mix(running: Running, job: str) -> None:
    async def all_of_them() -> list[GenerateResponse]:
        async with httpx.AsyncClient(base_url=running.url, transport=SocketTransport(), timeout=60) as client:
            params = SamplingParams(max_tokens=2, temperature=0.0)
            requests = [
                GenerateRequest(prompts=[[at + 3]] * (at + 1), sampling_params=params, routing_key=str(at) * 200_000)
                for at in range(8)
            ]
            answers = await asyncio.gather(*(post(client, job, frame_of(request)) for request in requests))
            return [wire.decode(answer.content, GenerateResponse) for answer in answers]

    assert [len(answer.rollouts) for answer in asyncio.run(all_of_them())] == list(range(1, 9))


def test_a_body_too_large_is_refused_before_it_travels(running: Running, job: str) -> None:
    sent = []

    async def counted() -> AsyncIterator[bytes]:
        for _ in range(32):
            sent.append(1)
            yield bytes(2**20)

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(base_url=running.url, transport=SocketTransport()) as client:
            headers = {"content-type": FRAME_TYPE, "content-length": str(2**25)}
            return await client.post(f"/v1/jobs/{job}/calls", content=counted(), headers=headers)

    answer = asyncio.run(ask())
    assert answer.status_code == 413
    assert "33554432 bytes, this server takes 16777216" in answer.json()["error"]["message"]
    assert not sent


def test_a_body_that_stops_coming_is_refused_and_the_next_one_is_taken(running: Running, job: str) -> None:
    frame = frame_of(large_request())
    with raw(running) as connection:
        connection.sendall(large_head(job, len(frame)) + frame[: len(frame) // 2])
        status, body = read_answer(connection)
    assert status == 400
    assert "no byte of the body came for 1 s" in json.loads(body)["error"]["message"]
    with raw(running) as connection:
        connection.sendall(large_head(job, len(frame)) + frame)
        assert read_answer(connection)[0] == 200


def test_a_body_that_comes_slowly_is_taken(running: Running, job: str) -> None:
    frame = frame_of(large_request(400_000))
    with raw(running) as connection:
        connection.sendall(large_head(job, len(frame)))
        for at in range(0, len(frame), 100_000):
            time.sleep(0.4)
            connection.sendall(frame[at : at + 100_000])
        assert read_answer(connection)[0] == 200


@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.999])
def test_a_client_that_leaves_within_a_body_leaves_nothing_behind(running: Running, job: str, part: float) -> None:
    frame = frame_of(large_request())
    with raw(running) as connection:
        connection.sendall(large_head(job, len(frame)) + frame[: int(len(frame) * part)])
        time.sleep(0.05)
    for _ in range(100):
        if not running.server.server_state.tasks:
            break
        time.sleep(0.05)
    assert not running.server.server_state.tasks


def test_requests_behind_a_large_body_in_one_go_are_answered_in_order(running: Running, job: str) -> None:
    frame = frame_of(large_request())
    health = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with raw(running) as connection:
        threading.Thread(
            target=connection.sendall, args=(large_head(job, len(frame)) + frame + health + health,), daemon=True
        ).start()
        answers = read_answers(connection, 3)
    assert [status for status, _ in answers] == [200, 200, 200]
    assert wire.decode(answers[0][1], GenerateResponse).rollouts
    assert [json.loads(body)["status"] for _, body in answers[1:]] == ["ok", "ok"]


@contextmanager
def scripted(*turns: Callable[[socket.socket], Any]) -> Generator[str]:
    """A server that does one of `turns` on each connection, one after the other, and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            for turn in turns:
                connection, _ = listener.accept()
                with connection:
                    turn(connection)

        threading.Thread(target=run, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def get(url: str, times: int = 1, **options: Any) -> list[httpx.Response]:
    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, transport=SocketTransport(), timeout=5) as client:
            return [await client.request(**{"method": "GET", "url": "/x", **options}) for _ in range(times)]

    return asyncio.run(ask())


def saying(*answers: bytes) -> Callable[[socket.socket], None]:
    def turn(connection: socket.socket) -> None:
        for answer in answers:
            connection.recv(2**16)
            connection.sendall(answer)

    return turn


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
PLAIN = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabcde"


@pytest.mark.parametrize(
    "answer",
    [PLAIN, CHUNKED, b"HTTP/1.0 200 OK\r\n\r\nabcde", b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN],
    ids=["plain", "chunked", "old", "continued"],
)
def test_answers_of_other_servers_are_read(answer: bytes) -> None:
    with scripted(saying(answer)) as url:
        assert get(url)[0].content == b"abcde"


def test_connections_of_a_burst_are_not_kept_for_ever(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> int:
        transport = SocketTransport()
        async with httpx.AsyncClient(base_url=running.url, transport=transport) as client:
            await asyncio.gather(*[client.get("/health") for _ in range(8)])
            monkeypatch.setattr(http_sockets, "IDLE_SECONDS", 0.0)
            await client.get("/health")
            monkeypatch.setattr(http_sockets, "IDLE_SECONDS", 10.0)
            return sum(map(len, transport._idle.values()))

    assert asyncio.run(main()) == 1


def test_a_kept_connection_that_died_is_replaced() -> None:
    with scripted(saying(PLAIN), saying(PLAIN, PLAIN)) as url:
        assert [answer.content for answer in get(url, times=3)] == [b"abcde"] * 3


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (b"", httpx.RemoteProtocolError),
        (b"nonsense\r\n\r\n", httpx.RemoteProtocolError),
        (PLAIN[:-2], httpx.RemoteProtocolError),
        (CHUNKED[:-8], httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999\r\n\r\nabc", httpx.RemoteProtocolError),
    ],
    ids=["nothing", "nonsense", "cut off", "cut off chunks", "huge length"],
)
def test_answers_that_break_off_or_make_no_sense_are_httpx_errors(answer: bytes, fault: type[Exception]) -> None:
    with scripted(saying(answer)) as url, pytest.raises(fault):
        get(url)


def test_nobody_there_and_silence_are_httpx_errors() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(httpx.ReadTimeout):
            get(f"http://127.0.0.1:{port}", timeout=0.2)
    with pytest.raises(httpx.ConnectError):
        get(f"http://127.0.0.1:{port}")
    with pytest.raises(httpx.ConnectError):
        get("http://no-such-host.invalid")


def test_a_server_that_gives_no_leave_gets_the_body_after_a_second() -> None:
    received = []

    def turn(connection: socket.socket) -> None:
        data = b""
        while not data.endswith(b"END"):
            data += connection.recv(2**16)
        received.append(data)
        connection.sendall(PLAIN)

    body = bytes(2 * READ_BYTES) + b"END"
    with scripted(turn) as url:
        assert get(url, method="POST", content=body)[0].content == b"abcde"
    assert received[0].endswith(body)
    assert b"expect: 100-continue" in received[0].lower()
