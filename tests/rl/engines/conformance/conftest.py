"""Every engine in turn, each with the ranks that it runs on."""

from collections.abc import Callable

import pytest

from tests.rl.engines.conformance.fleet import CASES, Fleet
from tests.rl.engines.conformance.ranks import Ranks


@pytest.fixture(scope="module", params=[pytest.param(case, marks=case.marks, id=str(case)) for case in CASES])
def fleet(request: pytest.FixtureRequest, rank_groups: Callable[[int], Ranks]) -> Fleet:
    """One of the engines; a test calls `start` before anything else."""
    return Fleet.of(request.param, rank_groups)
