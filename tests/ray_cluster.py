"""A small Ray cluster on this machine, for the tests that need one. One per process: `xdist_group("ray")` keeps them
together."""

import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager

import pytest

IN_ONE_WORKER = pytest.mark.xdist_group("ray")


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
