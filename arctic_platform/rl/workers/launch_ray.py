"""Processes as actors of a Ray cluster: one CPU each, and one GPU where the device is one."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from typing import Any

from arctic_platform.errors import ConfigError
from arctic_platform.rl.config import ArcticRLClientConfig, RayConfig
from arctic_platform.rl.workers.launch import Process
from arctic_platform.rl.workers.ray_join import join_cluster, listed, reason_of

JOIN_SECONDS = 60.0


class RayLauncher:
    """Starts an actor for each process; Ray decides on which nodes."""

    def __init__(self, config: ArcticRLClientConfig) -> None:
        self._ray = join_cluster(RayConfig(), "ranks.launch='ray'")
        self.num_threads = config.ranks.num_threads or 1
        self._demand = {
            "num_cpus": self.num_threads,
            "num_gpus": 1 if config.device.startswith("cuda") else 0,
        }
        self._start_seconds = config.ranks.start_seconds
        self.listen = f"{self._ray.util.get_node_ip_address()}:0"

    def token(self) -> str:
        """A new one."""
        return secrets.token_hex(32)

    def start(self, names: Sequence[str], address: str, token: str) -> list[Process]:
        """One actor for each name. Raises ConfigError for resources that the cluster does not have at all."""
        demand = {"CPU": self._demand["num_cpus"] * len(names), "GPU": self._demand["num_gpus"] * len(names)}
        has = self._ray.cluster_resources()
        if any(has.get(kind, 0.0) < amount for kind, amount in demand.items()):
            raise ConfigError(
                f"{len(names)} process(es) ask for {listed(demand)}, the whole Ray cluster has "
                f"{listed({kind: has.get(kind, 0.0) for kind in demand})}; lower ranks.num_ranks, or add a node"
            )
        actor = self._ray.remote(WorkerActor)
        return [RayProcess(self._ray, actor.options(**self._demand).remote(), name, address, token) for name in names]

    def missing(self, names: Sequence[str], address: str) -> str:
        """They got no place."""
        free = self._ray.available_resources()
        return (
            f"each asks for {listed({'CPU': self._demand['num_cpus'], 'GPU': self._demand['num_gpus']})}, free are "
            f"{listed({kind: free.get(kind, 0.0) for kind in ('CPU', 'GPU')})}: end something, or raise "
            "ranks.start_seconds"
        )


class RayProcess:
    """One actor."""

    def __init__(self, ray: Any, actor: Any, name: str, address: str, token: str) -> None:
        self._ray = ray
        self._actor = actor
        self._work = actor.work.remote(name, address, token)

    def fate(self, wait_seconds: float) -> str | None:
        """Ray's reason."""
        done, _ = self._ray.wait([self._work], timeout=wait_seconds)
        if not done:
            return None
        try:
            return str(self._ray.get(self._work))
        except self._ray.exceptions.RayError as error:
            return reason_of(error)

    def kill(self) -> None:
        """At once."""
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(self._actor)

    def last_lines(self) -> str:
        """In Ray's own logs."""
        return ""


class WorkerActor:
    """Runs the loop of a working process; its end is the actor's."""

    def work(self, name: str, address: str, token: str) -> str:
        """Returns only where the server could not be joined."""
        from arctic_platform.rl.workers.channel import join
        from arctic_platform.rl.workers.serve import serve

        try:
            channel = join(address, token, wait_seconds=JOIN_SECONDS)
        except ConnectionError as error:
            return str(error)
        serve(channel, name)
        return "it ended"
