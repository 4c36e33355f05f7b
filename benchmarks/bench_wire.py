"""Speed and memory of the wire: a batch to the server and rollouts back, against copying as many bytes in memory.

    python benchmarks/bench_wire.py
    python benchmarks/bench_wire.py --num-rows 256 --repeats 3 --out benchmarks/results/wire.jsonl

The last line is one JSON object. Client and server are two processes on loopback HTTP, the real transport and the real
server; behind it a backend that answers at once. `send` is a log_probs call of the batch: encoded, sent, received,
decoded, checked and handed to the backend, and its small answer. `receive` is a generate call whose answer has as many
ids and log-probs. `memcpy` copies the same bytes into fresh memory, as a receiver has it; all are measured in turn
(A B C A B C), medians. Memory is the peak of each process above its level before a call, over the bytes that travelled.
"""

from __future__ import annotations

import asyncio
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cyclopts
import numpy as np

from arctic_platform.rl import wire
from arctic_platform.rl.config import ArcticRLClientConfig
from arctic_platform.rl.protocol import (
    EmptyResponse,
    GenerateRequest,
    GenerateResponse,
    LogProbsRequest,
    LogProbsResponse,
    Request,
    Response,
    Rollout,
    RolloutBatch,
    StatusResponse,
)

ROOT = Path(__file__).resolve().parents[1]

app = cyclopts.App(help=__doc__)


class InstantBackend:
    """Answers every call at once: what is measured is the way to it and back."""

    def __init__(self, response: GenerateResponse) -> None:
        self.response = response

    def handle(self, request: Request, progress: object = None) -> Response:
        """Rollouts for generate, nothing for the rest."""
        if isinstance(request, GenerateRequest):
            return self.response
        return LogProbsResponse(logprobs=[]) if isinstance(request, LogProbsRequest) else EmptyResponse()

    def status(self) -> StatusResponse:
        """Nothing to say."""
        return StatusResponse.model_construct()

    def close(self) -> None:
        """Nothing to free."""


def make_arrays(num_rows: int, row_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids `[B, S] int64`, and the log-probs `[B, S - S // 8] float32` of a response behind a prompt of an eighth."""
    rng = np.random.default_rng(0)
    prompt_len = row_len // 8
    return rng.integers(0, 150_000, (num_rows, row_len)), -rng.random((num_rows, row_len - prompt_len), np.float32)


def make_batch(ids: np.ndarray, logprobs: np.ndarray) -> RolloutBatch:
    """The rows as a trainer gets them."""
    prompt_len = ids.shape[1] - logprobs.shape[1]
    return RolloutBatch(prompts=ids[:, :prompt_len], responses=ids[:, prompt_len:], rollout_logprobs=logprobs)


def make_rollouts(ids: np.ndarray, logprobs: np.ndarray) -> GenerateResponse:
    """The same rows as a sampler's answer."""
    prompt_len = ids.shape[1] - logprobs.shape[1]
    rollouts = [
        Rollout(prompt_index=row, token_ids=ids[row, prompt_len:], logprobs=logprobs[row], finish_reason="stop")
        for row in range(len(ids))
    ]
    return GenerateResponse(rollouts=rollouts, weight_version=1)


@app.command
def serve(*, num_rows: int, row_len: int) -> None:
    """The server's process: prints its address and serves until it is ended."""
    from arctic_platform.rl.server import backend, run
    from arctic_platform.rl.server.app import build_app
    from arctic_platform.rl.server.service import Service
    from arctic_platform.rl.server.settings import ServerSettings

    instant = InstantBackend(make_rollouts(*make_arrays(num_rows, row_len)))
    setattr(backend, "create_backend", lambda config, kinds, on_wait: instant)  # noqa: B010
    settings = ServerSettings(port=0)
    service = Service()
    with run.listen(settings) as listener:
        print(run.url_of(listener), flush=True)
        run.Server(build_app(service, settings), service, settings).run([listener])


@app.default
def bench(
    *,
    num_rows: int = 1024,
    row_len: int = 8192,
    repeats: int = 7,
    num_calls: int = 500,
    out: Path | None = None,
) -> None:
    """Measure both directions, the parts, and small calls.

    Parameters
    ----------
    num_rows: Rows of the batch.
    row_len: Tokens of each row, an eighth of them prompt.
    repeats: Rounds; medians are reported.
    num_calls: Small calls, one after the other.
    out: File that the JSON line is appended to.
    """
    command = [sys.executable, __file__, "serve", f"--num-rows={num_rows}", f"--row-len={row_len}"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        results = asyncio.run(_measure(url, server.pid, make_arrays(num_rows, row_len), repeats, num_calls))
    finally:
        server.terminate()
        server.wait()
    record = {"bench": "wire", "num_rows": num_rows, "row_len": row_len, "repeats": repeats, **results, **_versions()}
    _print(record)
    line = json.dumps(record)
    print(line)
    if out is not None:
        with out.open("a") as file:
            file.write(line + "\n")


async def _measure(
    url: str, server: int, arrays: tuple[np.ndarray, np.ndarray], repeats: int, num_calls: int
) -> dict[str, Any]:
    from arctic_platform.rl.transports.http import HttpTransport

    transport = HttpTransport(ArcticRLClientConfig(model="tiny-random", transport="http", server_url=url))
    batch = make_batch(*arrays)
    frame = np.frombuffer(b"".join(wire.encode(LogProbsRequest(batch=batch))), np.uint8)
    sizes = {"send": frame.nbytes, "receive": sum(map(len, map(memoryview, wire.encode(make_rollouts(*arrays)))))}
    runs: dict[str, list[float]] = {}
    peaks: dict[str, list[float]] = {}
    for _ in range(repeats + 1):
        _note(runs, "memcpy", frame.nbytes / _seconds(lambda: np.empty_like(frame).__setitem__(slice(None), frame)))
        _note(runs, "build", frame.nbytes / _seconds(lambda: make_batch(*arrays)))
        _note(runs, "encode", frame.nbytes / _seconds(lambda: wire.encode(LogProbsRequest(batch=batch))))
        _note(runs, "decode", frame.nbytes / _seconds(lambda: wire.decode(frame.data, Request)))
        for name, request in (("send", LogProbsRequest(batch=batch)), ("receive", GenerateRequest(prompts=[[1]]))):
            before = {pid: _reset_peak(pid) for pid in ("self", server)}
            started = time.perf_counter()
            response = await transport.call(request)
            _note(runs, name, sizes[name] / (time.perf_counter() - started))
            for side, pid in (("client", "self"), ("server", server)):
                _note(peaks, f"{name}_{side}", (_memory(pid, "VmHWM") - before[pid]) / sizes[name])
            del response
    calls = [LogProbsRequest(batch=batch_of_one()) for _ in range(num_calls)]
    started = time.perf_counter()
    for call in calls:
        await transport.call(call)
    seconds = time.perf_counter() - started
    await transport.close()
    speeds = {name: statistics.median(values[1:]) for name, values in runs.items()}
    return {
        "megabytes": {name: round(size / 1e6, 1) for name, size in sizes.items()},
        "gb_per_s": {name: round(speed / 1e9, 3) for name, speed in speeds.items()},
        "part_of_memcpy": {name: round(speeds[name] / speeds["memcpy"], 3) for name in ("send", "receive")},
        "peak_over_payload": {name: round(max(values[1:]), 2) for name, values in peaks.items()},
        "small_calls_per_s": round(num_calls / seconds),
    }


def batch_of_one() -> RolloutBatch:
    """The smallest batch."""
    return RolloutBatch(prompts=[[1]], responses=[[2]])


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _note(runs: dict[str, list[float]], name: str, value: float) -> None:
    runs.setdefault(name, []).append(value)


def _reset_peak(pid: int | str) -> int:
    """Let the peak begin at the memory in use, and return that, in bytes."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _memory(pid, "VmRSS")


def _memory(pid: int | str, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def _print(record: dict[str, Any]) -> None:
    for name, speed in record["gb_per_s"].items():
        part = record["part_of_memcpy"].get(name)
        print(f"{name:8} {speed:7.2f} GB/s" + (f"  {part:.2f} of memcpy" if part else ""))
    peaks = ", ".join(f"{name.replace('_', ' at the ')} {value}" for name, value in record["peak_over_payload"].items())
    print(f"peak memory over payload: {peaks}")
    print(f"small calls: {record['small_calls_per_s']} a second")


def _versions() -> dict[str, object]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "commit": commit,
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "command": " ".join(["python", *sys.argv]),
    }


if __name__ == "__main__":
    app()
