"""What only HTTP can do wrong: lost answers, silent servers, wrong versions, wrong keys."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from arctic_platform.errors import (
    AccessError,
    CallTimeoutError,
    ConfigError,
    InputError,
    NotFoundError,
    TransportError,
    WireError,
)
from arctic_platform.rl import SamplingParams, create_arctic_rl_client
from arctic_platform.rl.protocol import FwdBwdRequest, StepRequest, WeightNormRequest
from arctic_platform.rl.transports import http
from tests.rl.engines import builders
from tests.rl.engines.builders import grouped_batch
from tests.transports.serving import Running, running_server

ROOT = Path(__file__).parent.parent.parent
LONG = SamplingParams(n=8, max_tokens=3000, ignore_eos=True)
KEY = "a-key-that-nobody-else-knows"


@pytest.fixture(scope="module")
def running() -> Generator[Running]:
    """One server for the tests of this file."""
    with running_server() as server:
        yield server


@contextmanager
def listening(answer: bytes | None) -> Generator[str]:
    """A server of another kind: it reads what comes and says `answer`, or nothing at all."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kept = []

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                kept.append(connection)
                if answer is not None:
                    connection.recv(65536)
                    connection.sendall(answer)
                    connection.close()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        for connection in kept:
            connection.close()


class Losing(httpx.AsyncBaseTransport):
    """Lets requests through and loses some answers on the way back."""

    def __init__(self, method: str, times: int) -> None:
        self.inner = httpx.AsyncHTTPTransport()
        self.method = method
        self.left = times
        self.seen: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self.inner.handle_async_request(request)
        self.seen.append(f"{request.method} {response.status_code}")
        if request.method == self.method and self.left > 0:
            self.left -= 1
            await response.aread()
            raise httpx.ReadError("the connection was lost")
        return response

    async def aclose(self) -> None:
        await self.inner.aclose()


def lose_answers(client: Any, method: str, times: int) -> Losing:
    losing = Losing(method, times)
    link = client._transport._link
    link._loop = asyncio.get_running_loop()
    link._client = httpx.AsyncClient(base_url=link.url, headers=link._headers, transport=losing)
    return losing


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_a_lost_answer_never_steps_twice(running: Running, method: str) -> None:
    async def main() -> None:
        async with create_arctic_rl_client(running.config(), on_progress=lambda state: None) as client:
            losing = lose_answers(client, method, 3)
            for expected in (1.0, 2.0):
                await client.fwd_bwd(grouped_batch())
                assert (await client.step()).metrics["step"] == expected
            assert (await client.status()).step == 2
            if method == "POST":
                assert losing.left == 0

    asyncio.run(main())


def test_a_connection_lost_within_a_body_applies_nothing(running: Running) -> None:
    from arctic_platform.rl import wire

    async def main() -> None:
        async with create_arctic_rl_client(running.config()) as client:
            body = b"".join(bytes(part) for part in wire.encode(FwdBwdRequest(batch=grouped_batch())))
            host, port = running.url.removeprefix("http://").split(":")
            path = f"/v1/jobs/{client._transport.server_id}/calls"
            head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {http.FRAME_TYPE}\r\n"
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[: len(body) // 2])
            assert not (await client.status()).has_pending_gradients
            await client.fwd_bwd(grouped_batch())

    asyncio.run(main())


def test_a_server_that_never_answers_is_given_up_with_the_call_s_name() -> None:
    with listening(None) as url:
        started = time.monotonic()
        with pytest.raises(TransportError, match=r"create_arctic_rl_client: no answer from .* is the server running"):
            create_arctic_rl_client(builders.config(transport="http", server_url=url, retry_timeout=0.3))
        assert time.monotonic() - started < 20


def test_a_silent_server_is_spoken_of_while_it_is_sought(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http, "NOTICE_SECONDS", 0.2)
    monkeypatch.setattr(http, "FIRST_CONTACT_SECONDS", 1.0)
    with pytest.raises(TransportError):
        create_arctic_rl_client(builders.config(server_url="http://127.0.0.1:1"))
    assert [record.message.count("it is tried for 1 s more") for record in caplog.records] == [1]


def test_no_server_at_all_is_said_soon() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(TransportError, match="is the server running there"):
        create_arctic_rl_client(builders.config(transport="http", server_url=url))


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 5\r\nConnection: close\r\n\r\n<html",
        b"HTTP/1.1 404 Not Found\r\nContent-Type: text/html\r\nContent-Length: 4\r\nConnection: close\r\n\r\nnope",
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1\r\nConnection: close\r\n\r\n{",
        b"SSH-2.0-OpenSSH_9.6\r\n",
    ],
    ids=["page", "refusal", "object", "half", "ssh"],
)
def test_a_server_of_another_kind_is_named_as_such(answer: bytes) -> None:
    with listening(answer) as url, pytest.raises(TransportError, match=url):
        create_arctic_rl_client(builders.config(transport="http", server_url=url, retry_timeout=0.3))


def test_a_call_beyond_its_time_says_which_and_what_the_server_was_doing(running: Running) -> None:
    async def main() -> None:
        async with create_arctic_rl_client(running.config(call_timeout=0.4)) as client:
            with pytest.raises(
                CallTimeoutError, match=r"generate was not finished within call_timeout=0.4 s"
            ) as caught:
                await client.generate([[5, 6, 7]], LONG)
            assert "the server says: it runs since" in str(caught.value)
            assert "of 8 rollouts finished" in str(caught.value)
            assert (await client.status()).step == 0

    asyncio.run(main())


def test_work_longer_than_every_wait_is_waited_for(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("SUBMIT_WAIT", 0.02), ("POLL_WAIT", 0.05), ("SILENCE_SECONDS", 1.0)):
        monkeypatch.setattr(http, name, seconds)

    async def main() -> None:
        async with create_arctic_rl_client(running.config()) as client:
            trainer: Any = running.service.backend(client._transport.server_id).train
            real = trainer.fwd_bwd

            def slow(*args: Any) -> Any:
                time.sleep(1.5)
                return real(*args)

            trainer.fwd_bwd = slow
            await asyncio.gather(client.fwd_bwd(grouped_batch()), client.step())
            assert (await client.status()).step == 1

    asyncio.run(main())


@pytest.mark.parametrize("version", [0, 2, 255])
def test_a_client_of_another_format_is_refused_by_number(
    running: Running, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """The format's version is the little-endian number behind the first four bytes."""

    async def main() -> None:
        async with create_arctic_rl_client(running.config()) as client:
            real = http.wire.encode

            def encode(message: Any) -> list[Any]:
                data = bytearray(b"".join(bytes(part) for part in real(message)))
                data[4:8] = version.to_bytes(4, "little")
                return [bytes(data)]

            with monkeypatch.context() as patched:
                patched.setattr(http.wire, "encode", encode)
                with pytest.raises(WireError, match=rf"frame format {version} arrived, this side reads 1"):
                    await client._transport.call(StepRequest())
            assert (await asyncio.wait_for(client.status(), 5)).step == 0

    asyncio.run(main())


def test_a_body_beyond_the_limit_is_refused_with_both_numbers() -> None:
    with running_server(max_body_bytes=20_000) as running:

        async def main() -> None:
            async with create_arctic_rl_client(running.config()) as client:
                big = {"prompts": [[5] * 3000] * 8, "responses": [[6]] * 8, "advantages": [1.0] * 8}
                with pytest.raises(InputError, match=r"the request has \d+ bytes, this server takes 20000"):
                    await client.fwd_bwd(big)
                assert (await asyncio.wait_for(client.status(), 5)).step == 0

        asyncio.run(main())


def test_a_key_is_asked_for_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_server(api_key=KEY) as running:
        assert httpx.get(f"{running.url}/health").status_code == 200
        for path in ("/status", "/metrics", "/openapi.json", "/v1/jobs", "/nothing"):
            refused = httpx.get(running.url + path)
            assert (refused.status_code, refused.json()["error"]["kind"]) == (401, "AccessError")
        for wrong in (None, "another-key-of-the-same-kind", KEY[:-1], f"{KEY}x"):
            with pytest.raises(AccessError, match="Authorization: Bearer"):
                create_arctic_rl_client(running.config(api_key=wrong))
        assert running.service.jobs() == []
        with create_arctic_rl_client(running.config(api_key=KEY), blocking_calls=True) as client:
            assert client.status().step == 0
            assert KEY not in repr(client.reconnect_config()) + client.reconnect_config().model_dump_json()
        monkeypatch.setenv("ARCTIC_RL_API_KEY", KEY)
        with create_arctic_rl_client(running.config(), blocking_calls=True) as client:
            assert client.status().step == 0


@pytest.mark.parametrize("key", [f"{KEY}\n{KEY}", f"{KEY} {KEY}", f"schl\u00fcssel-{KEY}"])
def test_a_key_of_the_environment_that_cannot_travel_is_refused_unseen(
    running: Running, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("ARCTIC_RL_API_KEY", key)
    with pytest.raises(ConfigError, match="ARCTIC_RL_API_KEY must be printable ASCII") as refused:
        create_arctic_rl_client(running.config())
    assert KEY not in str(refused.value)


def test_a_wrong_path_in_the_address_is_named(running: Running) -> None:
    with pytest.raises(NotFoundError, match="there is no POST /extra/v1/jobs; this server speaks /v1"):
        create_arctic_rl_client(builders.config(server_url=f"{running.url}/extra"))


def test_a_web_page_cannot_reach_a_server_without_a_key(running: Running) -> None:
    for headers in ({"origin": "http://evil.example"}, {"host": "evil.example"}, {"origin": "null"}):
        refused = httpx.get(f"{running.url}/v1/jobs", headers=headers)
        assert (refused.status_code, refused.json()["error"]["kind"]) == (403, "AccessError")
    assert httpx.get(f"{running.url}/v1/jobs", headers={"host": "localhost:1"}).status_code == 200


def test_another_process_takes_over(running: Running) -> None:
    script = (
        "import sys\n"
        "from arctic_platform.rl import ArcticRLClientConfig, create_arctic_rl_client\n"
        "config = ArcticRLClientConfig.model_validate_json(sys.argv[1])\n"
        "client = create_arctic_rl_client(config, blocking_calls=True)\n"
        "print(client.step().metrics['step'], client.sync_weights().weight_version)\n"
        "assert 'torch' not in sys.modules\n"
        "client.disconnect()\n"
    )
    with create_arctic_rl_client(running.config(), blocking_calls=True) as client:
        client.fwd_bwd(grouped_batch())
        again = client.reconnect_config().model_dump_json()
        command = [sys.executable, "-c", script, again]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout.split() == ["1.0", "1"]
        assert client.status().step == 1


def test_a_job_that_was_closed_meanwhile_is_named(running: Running) -> None:
    async def main() -> None:
        client = create_arctic_rl_client(running.config())
        running.service.close_job(client._transport.server_id)
        with pytest.raises(NotFoundError, match="no job"):
            await client.step()
        await client.shutdown()

    asyncio.run(main())


def test_a_client_works_in_one_event_loop_after_the_other(running: Running) -> None:
    client = create_arctic_rl_client(running.config())
    assert asyncio.run(client.status()).step == 0
    assert asyncio.run(client.status()).step == 0
    asyncio.run(client.shutdown())


def test_a_failed_job_takes_no_place(running: Running) -> None:
    before = len(running.service.jobs())
    with pytest.raises(ConfigError):
        create_arctic_rl_client(running.config(model="no/such/model"))
    assert len(running.service.jobs()) == before


def test_errors_of_a_server_that_is_stopping_name_it(running: Running) -> None:
    with running_server() as stopping:

        async def main() -> None:
            client = create_arctic_rl_client(stopping.config())
            stopping.service.drain(0)
            with pytest.raises(TransportError, match="is stopping"):
                await client.step()
            assert httpx.get(f"{stopping.url}/health").status_code == 503
            assert json.loads(httpx.get(f"{stopping.url}/status").text)["state"] == "draining"
            await client.shutdown()

        asyncio.run(main())


def test_hundreds_of_calls_at_once_are_answered_in_order(running: Running) -> None:
    async def main() -> None:
        async with create_arctic_rl_client(running.config()) as client:
            pairs = [call for _ in range(100) for call in (client.fwd_bwd(grouped_batch()), client.step())]
            results = await asyncio.gather(*pairs)
            assert [result.metrics["step"] for result in results[1::2]] == [float(step + 1) for step in range(100)]

    asyncio.run(main())


def test_a_key_that_would_travel_unencrypted_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="unencrypted"):
        http.Link(builders.config(server_url="http://trainer.example:8790", api_key=KEY))


def test_a_client_that_stops_waiting_for_its_model_leaves_no_job(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C during loading cancels the task that loads."""
    monkeypatch.setattr(http, "CANCEL_SECONDS", 2.0)
    gate = threading.Event()
    blocker = running.service.create_job(builders.config()).job_id
    trainer: Any = running.service.backend(blocker).train
    trainer.weight_norm = lambda: gate.wait(20) and 1.0
    running.service.submit(blocker, WeightNormRequest())
    before = len(running.service.jobs())

    async def main() -> None:
        transport = object.__new__(http.HttpTransport)
        transport._link = http.Link(running.config())
        is_known, wait = asyncio.Event(), transport._until_loaded

        async def until_loaded(*args: Any) -> None:
            is_known.set()
            await wait(*args)

        vars(transport)["_until_loaded"] = until_loaded
        loading = asyncio.create_task(transport._start(running.config(), None))
        await is_known.wait()
        assert len(running.service.jobs()) == before + 1
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)

    asyncio.run(main())
    gate.set()
    deadline = time.monotonic() + 20
    while len(running.service.jobs()) > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(running.service.jobs()) == before
    running.service.close_job(blocker)


@pytest.mark.parametrize("request_id", ["", "a/b", "..", "a b", "x" * 129, "\n"])
def test_an_id_that_has_no_place_in_an_address_is_refused(request_id: str) -> None:
    with pytest.raises(InputError, match="request_id"):
        StepRequest(request_id=request_id)
