"""A model behind a real server on loopback, for tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import openai
import uvicorn
from fastapi import FastAPI

from arctic_platform.rl.server.openai_app import create_app
from arctic_platform.rl.server.openai_serving import Serving, load_serving
from arctic_platform.rl.zorro_inference.sampler import Sampler

MODEL_NAME = "tiny-chat"
WAIT_SECONDS = 20.0


def serving_of(folder: Path) -> Serving:
    """A model folder, ready to be served."""
    return load_serving(str(folder), model_name=MODEL_NAME)


@dataclass(frozen=True)
class Served:
    """Where the server listens, and what it serves."""

    url: str
    serving: Serving

    @property
    def base_url(self) -> str:
        """What OpenAI's client wants."""
        return f"{self.url}/v1"

    @property
    def sampler(self) -> Sampler:
        """The sampler behind it."""
        return self.serving.engine.sampler

    def client(self) -> openai.OpenAI:
        """The stock client."""
        return openai.OpenAI(base_url=self.base_url, api_key="none", max_retries=0, timeout=WAIT_SECONDS)

    def async_client(self) -> openai.AsyncOpenAI:
        """The stock asynchronous client."""
        return openai.AsyncOpenAI(base_url=self.base_url, api_key="none", max_retries=0, timeout=WAIT_SECONDS)

    def expect_nothing_left(self) -> None:
        """No rollout runs or waits, and no request is remembered."""
        wait_until(lambda: not self.serving.in_flight and not self.sampler.has_work)
        stats = self.serving.engine.submit(lambda sampler: sampler.stats).result(WAIT_SECONDS)
        assert (stats.running, stats.waiting) == (0, 0)


def wait_until(holds: Callable[[], bool]) -> None:
    """Come back when `holds()`; fail when it does not come true."""
    end = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


@contextmanager
def listening(app: FastAPI) -> Generator[str]:
    """Run an application on a free port of loopback in a thread; its address."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, name="uvicorn")
    thread.start()
    try:
        while not server.started and thread.is_alive():
            thread.join(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)


@contextmanager
def served(serving: Serving, *, weights_root: Path | None = None) -> Generator[Served]:
    """Serve a model for the length of a test."""
    with listening(create_app(serving, weights_root=weights_root)) as url:
        yield Served(url, serving)
