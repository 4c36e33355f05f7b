import weakref

import pytest

from arctic_platform.rl.zorro_inference.cache import KvForest


@pytest.fixture(autouse=True)
def nothing_is_held_afterwards(monkeypatch):
    """Whatever a test did, no forest that it used has a holder left, except those that it names in `is_holding`."""
    forests = weakref.WeakSet()
    plain_init = KvForest.__init__

    def recording_init(self, *args, **options):
        plain_init(self, *args, **options)
        forests.add(self)

    monkeypatch.setattr(KvForest, "__init__", recording_init)
    yield
    for forest in forests:
        assert forest.num_held == 0
        assert all(segment.num_holders == 0 and segment.is_ready for segment in forest.segments)
