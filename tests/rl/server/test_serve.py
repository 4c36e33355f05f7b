"""The command: where it says it is, what it refuses, how it stops, what its log holds and what it never holds."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from arctic_platform.cli import main
from arctic_platform.errors import ConfigError
from arctic_platform.rl import SamplingParams, create_arctic_rl_client
from arctic_platform.rl.server.settings import ServerSettings, parse_bytes, read_api_key
from tests.faults.servers import serving as forked_serving
from tests.rl.engines import builders
from tests.rl.engines.builders import grouped_batch

ROOT = Path(__file__).parent.parent.parent.parent
KEY = "a-key-that-nobody-else-knows"
LONG = SamplingParams(n=4, max_tokens=400, ignore_eos=True)
ENDLESS = SamplingParams(n=64, max_tokens=4000, ignore_eos=True)


@contextmanager
def serving(*options: str, **environment: str) -> Generator[tuple[subprocess.Popen[str], str]]:
    """`python -m arctic_platform.rl.server` on a free port, and its address."""
    command = [sys.executable, "-m", "arctic_platform.rl.server", "--port", "0", *options]
    process = subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        yield process, first.rpartition(" ")[2].strip()
    finally:
        process.kill()
        process.communicate()


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code  # ty: ignore[invalid-return-type]


async def train_and_stop(process: subprocess.Popen[str], url: str) -> None:
    """A few calls, then the first signal while one runs: its answer still arrives."""
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {KEY}"}) as other:
        client = create_arctic_rl_client(builders.config(server_url=url, api_key=KEY))
        await client.generate([[211, 222, 233]], SamplingParams(max_tokens=4, seed=1))
        await client.fwd_bwd(grouped_batch())
        await client.step()
        refused = await other.get(f"{url}/status", headers={"authorization": f"Bearer {KEY}x"})
        assert refused.status_code == 401
        sampling = asyncio.create_task(client.generate([[5, 6, 7]], LONG))
        for _ in range(500):
            if (await other.get(f"{url}/status")).json()["jobs"][0]["running"]:
                break
            await asyncio.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert len((await sampling).rollouts) == 4


def test_it_says_where_it_is_drains_on_the_first_signal_and_its_log_keeps_secrets() -> None:
    with serving("--log-format", "json", ARCTIC_RL_API_KEY=KEY) as (process, url):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", url)
        assert process.stdout is not None
        client_line, train_line = process.stdout.readline(), process.stdout.readline()
        assert f'ArcticRLClientConfig(model=..., server_url="{url}")' in client_line
        assert train_line.strip() == f"train:  arctic-rl train recipes/tiny.yaml --server-url {url}"
        asyncio.run(train_and_stop(process, url))
        _, log = process.communicate(timeout=60)
        assert process.returncode == 0
    lines = [json.loads(line) for line in log.splitlines()]
    ended = [line for line in lines if line["message"] == "call ended"]
    assert [line["call"] for line in ended] == ["generate", "fwd_bwd", "step", "generate"]
    assert all(re.fullmatch("[0-9a-f]{32}", line["request_id"]) for line in ended)
    submitted = [line["request_id"] for line in lines if line["message"] == "request" and "request_id" in line]
    assert submitted == [line["request_id"] for line in ended]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    assert any("no new work is taken" in line["message"] for line in lines)
    assert KEY not in log
    assert "211" not in re.sub(r'"(time|request_id|job_id|path|milliseconds|seconds)": ("[^"]*"|[\d.]+)', "", log)


def test_calls_beyond_the_drain_time_are_given_up(tmp_path: Path) -> None:
    with forked_serving(tmp_path, "--drain-seconds", "0.2") as server:

        async def work() -> None:
            client = create_arctic_rl_client(builders.config(server_url=server.url, retry_timeout=0.5))
            sampling = asyncio.create_task(client.generate([[5, 6, 7]], ENDLESS))
            await asyncio.sleep(0.5)
            server.send(signal.SIGTERM)
            await asyncio.gather(sampling, return_exceptions=True)
            server.wait(30)

        asyncio.run(work())
        assert "they are given up" in server.log


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "needs an API key"),
        (["--host", "::"], "ARCTIC_RL_API_KEY"),
        (["--host", "no.such.host.invalid", "--api-key-file", "key"], "cannot listen on no.such.host.invalid"),
        (["--host", "a..b", "--api-key-file", "key"], "cannot listen on a..b"),
        (["--api-key-file", "nowhere"], 'API key file "nowhere" cannot be read'),
        (["--api-key-file", "short"], "shorter than 16 characters"),
        (["--api-key-file", "spaces"], "printable ASCII without spaces"),
        (["--sample-only", "--model", "m", "--max-jobs", "2"], "--max-jobs has no effect with --sample-only"),
        (["--sample-only", "--model", "m", "--idle-seconds", "2"], "--idle-seconds has no effect with --sample-only"),
        (["--max-body", "lots"], '"lots" is no size'),
        (["--port", "70000"], "port"),
        (["--prot", "1"], "prot"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("key").write_text(KEY)
    Path("short").write_text("short-secret")
    Path("spaces").write_text("two secret words here")
    assert call("serve", *options) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not [key for key in ("short-secret", "two secret", KEY) if key in err]


def test_a_port_that_is_taken_is_named_with_the_fix(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert call("serve", "--port", str(taken.getsockname()[1])) == 2
    assert "--port 0" in capsys.readouterr().err


def test_sizes_are_read_as_people_write_them() -> None:
    assert [parse_bytes(text) for text in ("7", "2K", "512M", "2G", "1GiB", "3mb")] == [
        7, 2048, 512 << 20, 2 << 30, 1 << 30, 3 << 20,
    ]  # fmt: skip


def test_a_key_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARCTIC_RL_API_KEY", raising=False)
    assert read_api_key(None) is None
    monkeypatch.setenv("ARCTIC_RL_API_KEY", f" {KEY}\n")
    (tmp_path / "key").write_text(f"{KEY}-of-the-file\n")
    from_environment, from_file = read_api_key(None), read_api_key(tmp_path / "key")
    assert from_environment is not None
    assert from_file is not None
    assert from_environment.get_secret_value() == KEY
    assert from_file.get_secret_value() == f"{KEY}-of-the-file"
    assert KEY not in repr(ServerSettings(api_key=from_file)) + ServerSettings(api_key=from_file).model_dump_json()


def test_a_key_of_the_environment_that_cannot_travel_is_refused_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCTIC_RL_API_KEY", f"{KEY}\n{KEY}")
    with pytest.raises(ConfigError, match="ARCTIC_RL_API_KEY must be printable ASCII without spaces") as refused:
        read_api_key(None)
    assert KEY not in str(refused.value)


@pytest.mark.parametrize(("host", "is_safe"), [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True),
                                              ("localhost", True), ("10.0.0.1", False), ("myhost", False)])  # fmt: skip
def test_only_loopback_needs_no_key(host: str, is_safe: bool) -> None:
    if is_safe:
        assert ServerSettings(host=host).api_key is None
    else:
        with pytest.raises(ConfigError, match="needs an API key"):
            ServerSettings(host=host)
    assert ServerSettings(host=host, api_key=KEY).host == host
