"""vLLM behind the sampling protocol, against the trainer and the embedded sampler."""

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from arctic_platform.errors import CallTimeoutError, ConfigError, InputError, WeightSyncError
from arctic_platform.rl.engines.models import load_model
from arctic_platform.rl.engines.torch_sample import TorchSampleEngine
from arctic_platform.rl.protocol import SamplingParams
from arctic_platform.rl.server.backend import create_backend
from tests.vllm.engines import PROMPTS, distance_to_trainer, generate, ids, vllm_backend, vllm_config


@pytest.fixture(scope="module")
def backend():
    with vllm_backend() as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(backend):
    yield
    assert backend.sample.num_blocks_in_use == 0


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 0.0},
        {"top_k": 5},
        {"temperature": 1.3, "top_p": 0.8},
    ],
)
def test_logprobs_are_the_trainers_at_the_requests_temperature(backend, params):
    response = generate(backend, **params)
    assert distance_to_trainer(backend, response, params.get("temperature", 1.0) or 1.0) < 1e-4


def test_rollouts_come_by_prompt_and_differ(backend):
    response = generate(backend)
    assert [rollout.prompt_index for rollout in response.rollouts] == [0] * 4 + [1] * 4 + [2] * 4
    assert len({tuple(row) for row in ids(response)}) == 12
    assert response.weight_version == 0


def test_greedy_tokens_are_those_of_the_embedded_sampler(backend):
    model = load_model("tiny-random", torch.float32, "cpu", seed=0)
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    embedded = TorchSampleEngine(vllm_config(), model).generate(PROMPTS, params)
    response = generate(backend, n=1, max_tokens=24, temperature=0.0)
    assert ids(response) == ids(embedded)
    for ours, theirs in zip(response.rollouts, embedded.rollouts, strict=True):
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)


def test_several_greedy_rollouts_of_a_prompt_are_equal(backend):
    rows = ids(generate(backend, n=3, temperature=0.0))
    assert rows[0] == rows[1] == rows[2]


def test_a_seed_gives_the_same_rollouts_whatever_else_is_in_the_batch(backend):
    together = ids(generate(backend))
    assert ids(generate(backend)) == together
    assert ids(generate(backend, [PROMPTS[1]])) == together[4:8]
    assert ids(generate(backend, seed=4)) != together


def test_a_stop_token_ends_a_rollout_and_is_its_last(backend):
    free = generate(backend, n=1, temperature=0.0).rollouts[0]
    tokens = list(free.token_ids)
    stopped = generate(backend, n=1, temperature=0.0, stop_token_ids=[tokens[4]]).rollouts[0]
    assert list(stopped.token_ids) == tokens[: tokens.index(tokens[4]) + 1]
    assert (free.finish_reason, stopped.finish_reason) == ("length", "stop")


def test_the_models_end_token_ends_a_rollout_unless_ignored(backend):
    token = generate(backend, n=1, temperature=0.0).rollouts[0].token_ids[3]
    own, backend.sample._eos = backend.sample._eos, [token]
    try:
        assert generate(backend, n=1, temperature=0.0, ignore_eos=False).rollouts[0].finish_reason == "stop"
        assert generate(backend, n=1, temperature=0.0).rollouts[0].finish_reason == "length"
    finally:
        backend.sample._eos = own


def test_rollouts_of_a_prompt_find_its_blocks_in_the_cache(backend):
    backend.sample.reset_prefix_cache()
    metrics = generate(backend).metrics
    assert metrics["tokens_naive"] - metrics["tokens_computed"] == 3 * 64 + 4 * 64
    engine, params = backend.sample, SamplingParams(n=4, max_tokens=4, seed=1)
    apart = engine.generate(PROMPTS, params, share=False).metrics
    assert apart["tokens_naive"] == apart["tokens_computed"]


@pytest.mark.parametrize("prompt", [[], [5, 256], [-1], [7] * 505])
def test_a_prompt_that_cannot_be_sampled_is_refused_and_disturbs_nothing(backend, prompt):
    before = ids(generate(backend))
    with pytest.raises(InputError, match=r"prompts\[1\]"):
        backend.sample.generate([PROMPTS[0], prompt], SamplingParams(max_tokens=8))
    assert ids(generate(backend)) == before


def test_a_caller_who_leaves_takes_his_requests_along(backend):
    class Gone(Exception):
        pass

    def leave(num_finished: int, num_rollouts: int) -> None:
        assert backend.sample.num_blocks_in_use > 0
        raise Gone

    before = ids(generate(backend))
    with pytest.raises(Gone):
        backend.sample.generate(PROMPTS, SamplingParams(n=2, max_tokens=50), progress=leave)
    assert backend.sample.num_blocks_in_use == 0
    assert ids(generate(backend)) == before


def test_progress_counts_finished_rollouts(backend):
    seen = []
    params = SamplingParams(n=2, max_tokens=3, seed=0, ignore_eos=True)
    backend.sample.generate(PROMPTS, params, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (6, 6)
    assert len(seen) >= 3


def test_a_call_that_takes_too_long_is_ended_and_says_how_far_it_came(backend):
    engine = backend.sample
    engine.config = vllm_config(vllm_timeout=1e-4)
    try:
        with pytest.raises(CallTimeoutError, match="of 12 rollouts finished"):
            engine.generate(PROMPTS, SamplingParams(n=4, max_tokens=60))
    finally:
        engine.config = vllm_config()
    assert engine.num_blocks_in_use == 0
    generate(backend)


def test_a_sleeping_sampler_refuses_and_wakes_as_it_was(backend):
    before = ids(generate(backend))
    backend.sample.sleep(1)
    with pytest.raises(InputError, match="asleep"):
        generate(backend)
    backend.sample.wake()
    assert ids(generate(backend)) == before


def test_after_deep_sleep_a_sync_must_come_first(backend):
    before = ids(generate(backend))
    backend.sample.sleep(2)
    backend.sample.wake()
    with pytest.raises(WeightSyncError, match="sync_weights"):
        generate(backend)
    backend._sync(low_memory=False, cuda_ipc=False)
    assert ids(generate(backend)) == before


def test_a_process_holds_one_vllm(backend):
    with pytest.raises(ConfigError, match="has a vLLM already"):
        create_backend(vllm_config())


def test_starting_left_the_process_as_it_was(backend):
    num_threads = torch.get_num_threads()
    torch.set_num_threads(num_threads + 1)
    assert torch.get_num_threads() == num_threads + 1
    torch.set_num_threads(num_threads)
