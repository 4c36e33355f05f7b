"""Rank processes, which take seconds to start and serve all tests."""

from collections.abc import Callable, Iterator

import pytest

from tests.rl.engines.conformance.ranks import Ranks


@pytest.fixture(scope="session")
def rank_groups() -> Iterator[Callable[[int], Ranks]]:
    """Rank processes by their number, started when a test first needs them."""
    groups: dict[int, Ranks] = {}

    def of(size: int) -> Ranks:
        if size not in groups:
            groups[size] = Ranks(size)
        return groups[size]

    yield of
    for group in groups.values():
        group.close()
