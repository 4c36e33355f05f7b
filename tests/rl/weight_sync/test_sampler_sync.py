"""A sampling engine that is synced from outside: it refuses to draw from weights that are not whole."""

import pytest
import torch

from arctic_platform.errors import WeightSyncError
from arctic_platform.rl.engines.models import tiny_model
from arctic_platform.rl.engines.torch_sample import TorchSampleEngine
from arctic_platform.rl.protocol import SamplingParams
from arctic_platform.rl.weight_sync.base import manifest_of, weights_of
from arctic_platform.rl.weight_sync.session import ModelSink, open_receiver, send_weights
from tests.rl.engines.builders import config
from tests.rl.weight_sync.pairs import Run, settings

MODES = [False, True]
PARAMS = SamplingParams(n=2, max_tokens=6, seed=0)


def drawn(engine: TorchSampleEngine) -> list[list[int]]:
    return [list(rollout.token_ids) for rollout in engine.generate([[3, 4, 5, 6]], PARAMS).rollouts]


def synced(engine: TorchSampleEngine, sender: torch.nn.Module, low_memory: bool, fail: bool = False) -> None:
    side = open_receiver(settings(), ModelSink(engine.model, engine.begin_overwrite), low_memory=low_memory)
    offer = side.offer
    receiving = Run(side.run)

    def items():
        for number, item in enumerate(weights_of(sender).items()):
            if fail and number == 3:
                raise RuntimeError("connection lost")
            yield item

    try:
        send_weights(offer, manifest_of(sender), items(), version=4)
        engine.adopt(receiving.outcome.version)
    finally:
        receiving.join(10)
        side.close()


@pytest.mark.parametrize("low_memory", MODES)
def test_samples_after_a_sync_are_those_of_the_new_weights_and_carry_their_version(low_memory: bool) -> None:
    sender, engine = tiny_model(1), TorchSampleEngine(config(), tiny_model(0))
    before, fresh = drawn(engine), drawn(TorchSampleEngine(config(), sender))
    synced(engine, sender, low_memory)
    assert drawn(engine) == fresh != before
    assert engine.generate([[3, 4]], PARAMS).weight_version == 4


@pytest.mark.parametrize("low_memory", MODES)
def test_failure_half_way_leaves_old_samples_or_none_at_all(low_memory: bool) -> None:
    sender, engine = tiny_model(1), TorchSampleEngine(config(), tiny_model(0))
    before, fresh = drawn(engine), drawn(TorchSampleEngine(config(), sender))
    with pytest.raises(WeightSyncError, match="connection lost"):
        synced(engine, sender, low_memory, fail=True)
    if low_memory:
        with pytest.raises(WeightSyncError, match="the sampler's weights are not whole"):
            drawn(engine)
    else:
        assert drawn(engine) == before
    synced(engine, sender, low_memory)
    assert drawn(engine) == fresh


@pytest.mark.parametrize("low_memory", MODES)
def test_weights_that_were_dropped_while_asleep_come_back_by_a_sync_only(low_memory: bool) -> None:
    sender, engine = tiny_model(1), TorchSampleEngine(config(), tiny_model(0))
    fresh = drawn(TorchSampleEngine(config(), sender))
    engine.sleep(level=2)
    with pytest.raises(WeightSyncError, match=r"\[0\] on the receiver"):
        synced(engine, sender, low_memory)
    engine.wake()
    with pytest.raises(WeightSyncError, match="call sync_weights"):
        drawn(engine)
    synced(engine, sender, low_memory)
    assert drawn(engine) == fresh
