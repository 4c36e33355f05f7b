"""Prometheus metrics of a served sampler: its own counters, and how long clients wait."""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from arctic_platform.rl.zorro_inference.requests import FinishReason, TokenDelta
from arctic_platform.rl.zorro_inference.sampler import Sampler

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

COUNTERS = {
    "prompt_tokens": "Prompt tokens, counted once per rollout: what would be computed without sharing.",
    "prefix_hit_tokens": "Prompt tokens, counted once per request, that the prefix cache gave.",
    "tokens_computed": "Tokens that went through the model.",
    "generated_tokens": "Tokens drawn.",
    "kv_tokens_read": "Keys that decode steps read.",
    "forest_tokens_read": "Tokens that the forests of these steps held: the least that can be read.",
    "decode_steps": "Decode steps.",
}
GAUGES = {
    "running": "Rollouts that decode.",
    "waiting": "Rollouts that wait for a place.",
    "cached_tokens": "Tokens whose keys and values are held.",
}


class SamplerMetrics:
    """What /metrics shows of a sampler; each has its own registry, so that several servers fit in one process."""

    def __init__(self, sampler: Sampler) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Stats(sampler))
        self.first_token = Histogram(
            "arctic_time_to_first_token_seconds",
            "From a request's arrival to a rollout's first token.",
            registry=self.registry,
            buckets=SECONDS,
        )
        self.inter_token = Histogram(
            "arctic_inter_token_seconds",
            "Between two tokens of a rollout.",
            registry=self.registry,
            buckets=SECONDS,
        )
        self.finished = Counter(
            "arctic_rollouts_finished", "Rollouts that ended, by reason.", ["reason"], registry=self.registry
        )

    def clock(self) -> Clock:
        """Times one rollout from now on."""
        return Clock(self)


class Clock:
    """Times of one rollout."""

    def __init__(self, metrics: SamplerMetrics) -> None:
        self._metrics = metrics
        self._last = time.perf_counter()
        self._has_begun = False
        self._has_ended = False

    def note(self, delta: TokenDelta) -> None:
        """Something came."""
        now = time.perf_counter()
        if delta.token_ids:
            histogram = self._metrics.inter_token if self._has_begun else self._metrics.first_token
            histogram.observe(now - self._last)
            self._last, self._has_begun = now, True
        if delta.finish_reason is not None:
            self._end(delta.finish_reason)

    def give_up(self) -> None:
        """Nobody reads on; a rollout that has not ended is aborted."""
        if not self._has_ended:
            self._end("abort")

    def _end(self, reason: FinishReason) -> None:
        self._has_ended = True
        self._metrics.finished.labels(reason).inc()


class _Stats(Collector):
    """The sampler's counters, read when asked."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def collect(self) -> Iterable[Metric]:
        stats = self._sampler.stats
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"arctic_{name}", text, value=getattr(stats, name))
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"arctic_{name}", text, value=getattr(stats, name))
        yield GaugeMetricFamily(
            "arctic_weight_version", "Version of the weights that draw.", value=self._sampler.weight_version
        )
