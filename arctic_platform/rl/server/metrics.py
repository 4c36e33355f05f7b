"""The server's numbers for Prometheus, in a registry of its own. No label holds a token, a prompt, a path or a key."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from arctic_platform.rl.server.calls import Call
from arctic_platform.rl.server.service import Service

BUCKETS = (0.001, 0.01, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 1800)


class ServiceMetrics:
    """Counts what a service does; `registry` is what `/metrics` shows."""

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()
        self.calls = Counter("arctic_calls", "Calls that ended.", ["method", "outcome"], registry=self.registry)
        self.call_seconds = Histogram(
            "arctic_call_seconds", "How long calls ran.", ["method"], buckets=BUCKETS, registry=self.registry
        )
        self.wait_seconds = Histogram(
            "arctic_wait_seconds", "How long calls waited before.", ["method"], buckets=BUCKETS, registry=self.registry
        )
        self.tokens = Counter(
            "arctic_tokens", "Tokens computed, and what they would be without sharing.", ["method", "which"],
            registry=self.registry,
        )  # fmt: skip
        self.bytes = Counter("arctic_body_bytes", "Bytes of calls' bodies.", ["direction"], registry=self.registry)
        self.registry.register(_Gauges(service))
        service.observers.append(self._observe)

    def _observe(self, job_id: str, call: Call, seconds: float) -> None:
        """Called once for every call that ran."""
        error = call.error
        self.calls.labels(call.method, type(error).__name__ if error else "done").inc()
        self.call_seconds.labels(call.method).observe(seconds)
        if call.started_at is not None:
            self.wait_seconds.labels(call.method).observe(call.started_at - call.submitted_at)
        metrics = {} if error else getattr(call.future.result(), "metrics", {})
        for which in ("computed", "naive"):
            self.tokens.labels(call.method, which).inc(metrics.get(f"tokens_{which}", 0.0))


class _Gauges(Collector):
    """What is true at the moment of asking."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        status = self._service.status()
        jobs = GaugeMetricFamily("arctic_jobs", "Jobs by state.", labels=["state"])
        for state in ("loading", "ready", "failed"):
            jobs.add_metric([state], sum(job.info.state == state for job in status.jobs))
        yield jobs
        yield GaugeMetricFamily(
            "arctic_draining", "1 while no new work is taken.", value=float(status.state != "serving")
        )
        waiting = GaugeMetricFamily("arctic_waiting_calls", "Calls that wait.", labels=["job"])
        running = GaugeMetricFamily("arctic_running_calls", "Calls that run.", labels=["job"])
        versions = GaugeMetricFamily("arctic_weight_version", "Weights in use.", labels=["job", "side"])
        for job in status.jobs:
            name = job.info.job_id[:8]
            waiting.add_metric([name], job.num_waiting)
            running.add_metric([name], float(job.running is not None))
            if job.backend is not None:
                for side, version in (
                    ("trainer", job.backend.trainer_version),
                    ("sampler", job.backend.sampler_version),
                ):
                    if version is not None:
                        versions.add_metric([name, side], version)
        yield from (waiting, running, versions)
