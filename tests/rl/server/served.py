"""A model behind a real server on loopback, for tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import openai

from arctic_platform.rl.server.openai_run import serving_in_thread
from arctic_platform.rl.server.openai_serving import Serving, load_serving
from arctic_platform.rl.server.openai_settings import SamplingSettings
from arctic_platform.rl.server.settings import ServerSettings
from arctic_platform.rl.zorro_inference.sampler import Sampler

T = TypeVar("T")
MODEL_NAME = "tiny-chat"
WAIT_SECONDS = 20.0


def serving_of(folder: Path, **options: Any) -> Serving:
    """A model folder, ready to be served."""
    return load_serving(SamplingSettings(model=str(folder), served_name=MODEL_NAME, **options))


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

    @property
    def num_begun(self) -> int:
        """Rollouts that got their first token so far."""
        return self._count("arctic_time_to_first_token_seconds_count")

    @property
    def num_tokens(self) -> int:
        """Tokens that reached an answer so far."""
        return self.num_begun + self._count("arctic_inter_token_seconds_count")

    @property
    def num_aborted(self) -> int:
        """Rollouts that were aborted so far."""
        return self._count("arctic_rollouts_finished_total", {"reason": "abort"})

    def _count(self, name: str, labels: dict[str, str] | None = None) -> int:
        return int(self.serving.metrics.registry.get_sample_value(name, labels) or 0)

    def client(self) -> openai.OpenAI:
        """The stock client."""
        return openai.OpenAI(base_url=self.base_url, api_key="none", max_retries=0, timeout=WAIT_SECONDS)

    def async_client(self) -> openai.AsyncOpenAI:
        """The stock asynchronous client."""
        return openai.AsyncOpenAI(base_url=self.base_url, api_key="none", max_retries=0, timeout=WAIT_SECONDS)

    def expect_nothing_left(self) -> None:
        """No rollout runs or waits, no request is remembered, and nobody holds a cached segment."""
        wait_until(lambda: not self.serving.in_flight and not self.sampler.has_work)
        assert self.in_its_thread(lambda sampler: sampler.num_held) == 0
        assert (self.sampler.stats.running, self.sampler.stats.waiting) == (0, 0)

    def in_its_thread(self, work: Callable[[Sampler], T]) -> T:
        """The result of `work`, done between two steps."""
        return self.serving.engine.submit(work).result(WAIT_SECONDS)


def wait_until(holds: Callable[[], bool]) -> None:
    """Come back when `holds()`; fail when it does not come true."""
    end = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


@contextmanager
def served(
    serving: Serving, *, settings: ServerSettings | None = None, weights_root: Path | None = None
) -> Generator[Served]:
    """Serve a model for the length of a test."""
    with serving_in_thread(serving, settings, weights_root=weights_root) as url:
        yield Served(url, serving)
