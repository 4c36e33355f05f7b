from collections.abc import Generator

import hypothesis
import pytest

from tests.forks import forks

hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if config.getvalue("dist") != "load":
        return None
    from tests.scheduling import ByFile

    return ByFile(config, log)


def pytest_collection_finish(session):
    """Whichever test forks first, the process that is forked serves the others too; modules may have said otherwise."""
    forks()


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def ray_cluster() -> Generator[str]:
    """Address of a small Ray cluster of this test process."""
    from tests.ray_cluster import small_cluster

    with small_cluster() as address:
        yield address
