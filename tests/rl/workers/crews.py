"""Crews of light processes."""

from typing import Any

from arctic_platform.rl.config import ArcticRLClientConfig
from arctic_platform.rl.workers.job import Job
from arctic_platform.rl.workers.launch import LocalLauncher
from arctic_platform.rl.workers.watch import Crew


class LightLauncher(LocalLauncher):
    """Starts `light.py`."""

    module = "tests.rl.workers.light"


def light_crew(num_ranks: int = 2, **ranks: Any) -> Crew:
    """Some light processes."""
    settings = {"num_ranks": max(num_ranks, 2), "heartbeat_seconds": 2.0, **ranks}
    config = ArcticRLClientConfig(model="tiny-random", ranks=settings)
    launcher = LightLauncher(config, is_sampler=num_ranks == 1)
    return Crew(
        [f"rank {rank}" for rank in range(num_ranks)],
        launcher,
        lambda rank, store: Job(role="train", rank=rank, size=num_ranks, config=config),
        start_seconds=60.0,
        heartbeat_seconds=config.ranks.heartbeat_seconds,
        needs_store=False,
        remedy="do something",
    )
