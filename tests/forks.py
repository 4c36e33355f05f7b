"""Processes that have imported everything before they start: forks of one that did so once."""

import multiprocessing
from multiprocessing.context import ForkServerContext

PRELOADED = [
    "arctic_platform.rl.engines.fsdp_train",
    "arctic_platform.rl.server.backend",
    "arctic_platform.rl.server.run",
    "arctic_platform.rl.workers.engine_calls",
    "tests.rl.weight_sync.pairs",
]


def forks() -> ForkServerContext:
    """What makes such processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context
