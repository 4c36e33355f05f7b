"""The embedded sampling engine around weight syncs: nothing stale, nothing dropped in silence."""

import numpy as np
import pytest

from arctic_platform.errors import ConfigError, InputError
from arctic_platform.rl.protocol import (
    FwdBwdRequest,
    GenerateRequest,
    LoadCheckpointRequest,
    ResetPrefixCacheRequest,
    SamplingParams,
    SaveCheckpointRequest,
    SleepSamplingRequest,
    StepRequest,
    SyncWeightsRequest,
    WakeSamplingRequest,
)
from arctic_platform.rl.server.backend import Backend, create_backend
from tests.rl.engines.builders import config, grouped_batch

PARAMS = SamplingParams(n=2, max_tokens=8, seed=0)
PROMPTS = [[3, 4, 5, 6, 7, 8, 9, 10], [3, 4, 5, 6, 11, 12]]


def generate(backend: Backend, prompts=PROMPTS, params: SamplingParams = PARAMS):
    return backend.handle(GenerateRequest(prompts=prompts, sampling_params=params))


def train_and_sync(backend: Backend) -> None:
    """One update large enough to show in the samples."""
    backend.handle(FwdBwdRequest(batch=grouped_batch()))
    backend.handle(StepRequest())
    backend.handle(SyncWeightsRequest())


def drawn(response) -> list[tuple[list[int], list[float]]]:
    return [(list(rollout.token_ids), list(rollout.logprobs)) for rollout in response.rollouts]


@pytest.mark.parametrize("policy", ["reset", "version"])
@pytest.mark.parametrize("low_memory", [True, False])
def test_two_calls_around_a_sync_equal_a_fresh_engine(policy, low_memory):
    settings = {"low_memory_weight_sync": low_memory, "zorro_inference": {"prefix_cache_policy": policy}}
    used, fresh = create_backend(config(**settings)), create_backend(config(**settings))
    before = generate(used)
    train_and_sync(used)
    train_and_sync(fresh)
    after, expected = generate(used), generate(fresh)
    assert drawn(after) == drawn(expected) != drawn(before)
    assert after.metrics["prefix_hit_tokens"] == 0
    assert after.weight_version == used.sample.version > before.weight_version


@pytest.mark.parametrize("policy", ["reset", "keep", "version"])
def test_prefixes_of_a_run_that_was_left_are_not_found_after_a_checkpoint(policy, tmp_path):
    """Version 1 of the run that goes on from the checkpoint is another than version 1 of the one before."""
    settings = {"zorro_inference": {"prefix_cache_policy": policy}}
    used, fresh = create_backend(config(**settings)), create_backend(config(**settings))
    used.handle(SaveCheckpointRequest(path=str(tmp_path / "start")))
    train_and_sync(used)
    left = generate(used)
    used.handle(LoadCheckpointRequest(path=str(tmp_path / "start")))
    for backend in (used, fresh):
        backend.handle(FwdBwdRequest(batch=grouped_batch(seed=1)))
        backend.handle(StepRequest())
        backend.handle(SyncWeightsRequest())
    again, expected = generate(used), generate(fresh)
    assert left.weight_version == again.weight_version
    assert drawn(again) == drawn(expected) != drawn(left)


def test_keep_policy_is_the_callers_choice_and_shows_in_the_hits():
    backend = create_backend(config(zorro_inference={"prefix_cache_policy": "keep"}))
    generate(backend)
    train_and_sync(backend)
    assert generate(backend).metrics["prefix_hit_tokens"] > 0


def test_cached_prefixes_reach_the_metrics_until_they_are_reset():
    backend = create_backend(config())
    first = generate(backend)
    again = generate(backend)
    assert first.metrics["prefix_hit_tokens"] == 0
    assert again.metrics["prefix_hit_tokens"] == sum(map(len, PROMPTS)) - len(PROMPTS)
    assert again.metrics["tokens_computed"] < first.metrics["tokens_computed"]
    backend.handle(ResetPrefixCacheRequest())
    assert generate(backend).metrics["prefix_hit_tokens"] == 0


def test_eight_requests_of_one_prefix_agree_with_and_without_the_cache():
    backend = create_backend(config())
    prompts = [[*range(3, 103), 110 + i] for i in range(8)]
    greedy = SamplingParams(temperature=0, max_tokens=12)
    cold, warm = generate(backend, prompts, greedy), generate(backend, prompts, greedy)
    unshared = backend.sample.generate(prompts, greedy, share=False, progress=None)
    assert warm.metrics["prefix_hit_tokens"] > 8 * 99
    for other in (warm, unshared):
        for (ids, logprobs), (cold_ids, cold_logprobs) in zip(drawn(other), drawn(cold), strict=True):
            assert ids == cold_ids
            assert np.abs(np.array(logprobs) - cold_logprobs).max() < 1e-5


def test_ids_are_carried_and_never_spelled_anew():
    """Two ids whose text another tokenizing would merge: the next turn finds the very ids of the answer."""
    backend = create_backend(config())
    answer = list(generate(backend).rollouts[0].token_ids)
    turn = generate(backend, [[*PROMPTS[0], *answer, 20]])
    assert turn.metrics["prefix_hit_tokens"] == len(PROMPTS[0]) + len(answer) - 1


def test_sleep_frees_the_cache_and_waking_brings_the_same_answers():
    backend = create_backend(config())
    before = generate(backend)
    backend.handle(SleepSamplingRequest())
    with pytest.raises(InputError, match="asleep"):
        generate(backend)
    backend.handle(WakeSamplingRequest())
    after = generate(backend)
    assert drawn(after) == drawn(before)
    assert after.metrics["prefix_hit_tokens"] == 0


def test_weights_of_a_level_two_sleep_are_not_mixed_with_old_keys():
    backend = create_backend(config())
    before = generate(backend)
    backend.handle(SleepSamplingRequest(level=2))
    backend.handle(WakeSamplingRequest())
    backend.handle(SyncWeightsRequest())
    assert drawn(generate(backend)) == drawn(before)


def test_measured_call_begins_with_an_empty_cache():
    backend = create_backend(config())
    for share in (True, False, True):
        measured = backend.sample.generate(PROMPTS, PARAMS, share=share, progress=None)
        assert measured.metrics["prefix_hit_tokens"] == 0


def test_small_cache_is_a_setting_that_takes_effect():
    backend = create_backend(config(zorro_inference={"kv_cache_tokens": 40}))
    assert len(generate(backend).rollouts) == 4
    with pytest.raises(InputError, match="kv_cache_tokens=40"):
        generate(backend, [list(range(3, 50))])
    with pytest.raises(ConfigError, match="kv_cache_tokens has no effect"):
        config(sampling_engine="vllm", zorro_inference={"kv_cache_tokens": 40})
