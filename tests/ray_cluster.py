"""A small Ray cluster on this machine, for the tests that need one; each test process has its own."""

import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from arctic_platform.rl.config import RayConfig
from arctic_platform.rl.server.ray_cluster import start_actor


@contextmanager
def small_cluster() -> Generator[str]:
    """Two CPUs, 100 MB of object store, no dashboard; yields its address."""
    import ray

    folder = tempfile.mkdtemp(prefix="ray-")  # pytest's own folders are too long for Ray's sockets
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=100 << 20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        _temp_dir=folder,
    )
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def ray_server(name: str) -> Generator[dict[str, Any]]:
    """A server in the cluster that outlives its jobs; yields the config's `ray` settings that lead to it."""
    import ray

    settings = {"server": name, "num_cpus": 0.25}
    actor = start_actor(RayConfig(**settings), name, device="cpu", options={}, is_kept=True)
    try:
        yield settings
    finally:
        ray.kill(actor)
