"""The same processes on CUDA devices."""

import pytest

from arctic_platform.errors import ConfigError
from arctic_platform.rl import create_arctic_rl_client
from arctic_platform.rl.client import BlockingArcticRLClient
from arctic_platform.rl.protocol import SamplingParams
from arctic_platform.rl.workers.launch import LocalLauncher
from tests.rl.engines.builders import config, grouped_batch

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def one_iteration(**settings: object) -> tuple[str, list[int]]:
    """The mechanism of a sync after a step, and what is drawn then."""
    with BlockingArcticRLClient(create_arctic_rl_client(config(device="cuda", **settings))) as client:
        client.fwd_bwd(grouped_batch(0))
        client.step()
        synced = client.sync_weights()
        drawn = client.generate([[5, 6, 7]], GREEDY)
        assert drawn.weight_version == 1
        return synced.mechanism, list(drawn.rollouts[0].token_ids)


@pytest.mark.gpu
def test_a_sampler_apart_gets_the_weights_as_cuda_memory_handles():
    expected = one_iteration()[1]
    assert one_iteration(colocate=False, cuda_ipc_weight_sync=True) == ("cuda_ipc", expected)
    assert one_iteration(colocate=False, low_memory_weight_sync=True)[1] == expected


@pytest.mark.gpu
def test_ranks_over_nccl_train_as_one_process_does():
    import torch

    num_ranks = min(torch.cuda.device_count(), 2)
    expected = one_iteration()[1]
    ranks = {"num_ranks": num_ranks}
    assert one_iteration(training_engine="fsdp", ranks=ranks)[1] == expected
    assert one_iteration(training_engine="fsdp", ranks=ranks, colocate=False, cuda_ipc_weight_sync=True)[1] == expected


def test_each_rank_sees_one_device_and_the_sampler_the_next_one(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    settings = config(device="cuda", ranks={"num_ranks": 2}, colocate=False)
    assert LocalLauncher(settings, is_sampler=False)._devices == ["4", "5"]
    assert LocalLauncher(settings, is_sampler=True)._devices == ["7"]
    full = config(device="cuda", ranks={"num_ranks": 3}, colocate=False)
    assert LocalLauncher(full, is_sampler=True)._devices == ["4"], "none is left, so it shares one"
    one = config(device="cuda:1", training_engine="fsdp", colocate=False)
    assert LocalLauncher(one, is_sampler=False)._devices == ["5"]
    assert LocalLauncher(one, is_sampler=True)._devices == ["7"]
    with pytest.raises(ConfigError, match=r"shows 3 CUDA devices.*lower ranks.num_ranks"):
        LocalLauncher(config(device="cuda", ranks={"num_ranks": 4}), is_sampler=False)
