"""The witness of a fault, and one server for the faults that leave it alive."""

from collections.abc import Generator

import pytest

from tests.faults.record import Witness, name_of
from tests.transports.serving import Running, running_server


@pytest.fixture
def witness(request: pytest.FixtureRequest) -> Generator[Witness]:
    """Checks that the client saw what the test declares."""
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    found = Witness(name_of(request.node.originalname, params.get("case")))
    yield found
    assert found.has_seen, "a declared fault was never looked at"


@pytest.fixture(scope="module")
def server() -> Generator[Running]:
    """A server in a thread; every test has a job of its own."""
    with running_server() as running:
        yield running
