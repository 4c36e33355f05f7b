"""Weights into vLLM: what is drawn afterwards is the new model's, and never a mixture's."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from transformers import Qwen2Config, Qwen2ForCausalLM

from arctic_platform.errors import ConfigError, NonFiniteError, WeightSyncError
from arctic_platform.rl import create_arctic_rl_client
from arctic_platform.rl.engines.models import tiny_model
from arctic_platform.rl.engines.vllm_sample import VllmSampleEngine
from arctic_platform.rl.protocol import FwdBwdRequest, Processing, SamplingParams, StepRequest, SyncWeightsRequest
from arctic_platform.rl.weight_sync.base import manifest_of, weights_of
from arctic_platform.rl.weight_sync.vllm import load_weights
from tests.rl.engines.builders import grouped_batch
from tests.vllm.engines import PROMPTS, distance_to_trainer, generate, ids, vllm_backend, vllm_config


def train(backend: Any) -> None:
    backend.handle(FwdBwdRequest(batch=grouped_batch(), processing=Processing()))
    backend.handle(StepRequest())


class Breaking(dict):
    """Weights of which the connection breaks before the last third."""

    def items(self) -> Iterator[Any]:
        for number, item in enumerate(super().items()):
            if number > 2 * len(self) // 3:
                raise RuntimeError("connection lost")
            yield item


class Changing(dict):
    """Weights that a step changes while they are sent."""

    def items(self) -> Iterator[Any]:
        for name, tensor in super().items():
            copy = tensor.clone()
            yield name, copy
            if name.endswith("q_proj.weight"):
                copy.add_(1.0)


def test_the_five_calls_train_and_vllm_follows():
    with create_arctic_rl_client(vllm_config(), blocking_calls=True) as client:
        params = SamplingParams(n=3, max_tokens=8, seed=1, ignore_eos=True)
        for version in range(2):
            rollouts = client.generate(PROMPTS, params)
            assert rollouts.weight_version == version
            rows = {
                "prompts": [PROMPTS[rollout.prompt_index] for rollout in rollouts.rollouts],
                "responses": [rollout.token_ids for rollout in rollouts.rollouts],
                "rollout_logprobs": [rollout.logprobs for rollout in rollouts.rollouts],
                "advantages": [1.0, -1.0, 0.5] * 3,
            }
            scored = client.log_probs(rows)
            result = client.fwd_bwd({**rows, "old_logprobs": scored.logprobs})
            assert result.metrics["sampler_diff_max"] < 1e-4
            client.step()
            synced = client.sync_weights()
            assert (synced.weight_version, synced.mechanism) == (version + 1, "vllm")


@pytest.mark.parametrize("is_tied", [True, False])
def test_after_a_sync_vllm_equals_a_fresh_one_of_the_new_weights(is_tied, tmp_path, caplog):
    model = tiny_model(0)
    model.config.tie_word_embeddings = is_tied
    type(model)(model.config).save_pretrained(tmp_path / "first")
    with vllm_backend(model=str(tmp_path / "first")) as backend:
        before = ids(generate(backend))
        train(backend)
        assert ids(generate(backend)) == before
        with caplog.at_level("INFO"):
            backend.handle(SyncWeightsRequest())
        synced = generate(backend)
        assert distance_to_trainer(backend, synced) < 1e-4
        assert backend.sample.version == synced.weight_version == 1
        backend.train.export_model(str(tmp_path / "second"))
        train(backend)
        assert ids(generate(backend)) == ids(synced)
    num = 20 + (not is_tied)
    assert f"[weight-sync names validated] context=vllm sender={num} expected={num}" in caplog.text
    assert "[weight-sync digests compared] context=vllm not_compared=0" in caplog.text
    with vllm_backend(model=str(tmp_path / "second")) as fresh:
        found = generate(fresh)
    assert ids(found) == ids(synced) != before
    for ours, theirs in zip(synced.rollouts, found.rollouts, strict=True):
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)


def test_a_vllm_in_this_process_takes_weights_without_a_second_copy_asked_to_or_not():
    drawn = []
    for low_memory in (False, True):
        with vllm_backend(low_memory_weight_sync=low_memory) as backend:
            train(backend)
            assert backend.handle(SyncWeightsRequest()).mechanism == "vllm"
            drawn.append(generate(backend))
            assert distance_to_trainer(backend, drawn[-1]) < 1e-4
            assert backend.handle(SyncWeightsRequest(low_memory=not low_memory)).weight_version == 1
            assert ids(generate(backend)) == ids(drawn[-1])
    assert ids(drawn[0]) == ids(drawn[1])


def test_adapters_come_merged_and_vllm_draws_as_the_trainer_scores():
    pytest.importorskip("peft", reason="needs the extra 'lora'")
    with vllm_backend(lora={"rank": 4, "alpha": 8.0}) as backend:
        before = generate(backend)
        for version in (1, 2):
            train(backend)
            assert distance_to_trainer(backend, generate(backend)) > 1e-2
            backend.handle(SyncWeightsRequest())
            synced = generate(backend)
            assert distance_to_trainer(backend, synced) < 1e-4
            assert synced.weight_version == version
        assert ids(synced) != ids(before)


def test_a_sync_that_breaks_off_leaves_nothing_to_draw_from_and_the_next_one_mends_it():
    with vllm_backend() as backend:
        train(backend)
        backend.handle(SyncWeightsRequest())
        expected = ids(generate(backend))
        weights = dict(backend.train.model.named_parameters())
        other = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        for broken, message in ((Breaking(other), "connection lost"), (Changing(weights), "q_proj")):
            with pytest.raises(WeightSyncError, match=message):
                backend.sample.load(broken)
            with pytest.raises(WeightSyncError, match="not whole"):
                generate(backend)
        backend.handle(SyncWeightsRequest())
        assert ids(generate(backend)) == expected


def test_weights_that_are_no_numbers_are_an_error_and_the_next_sync_mends_it():
    with vllm_backend() as backend:
        before = ids(generate(backend))
        weights = dict(backend.train.model.named_parameters())
        backend.sample.load(weights | {"model.norm.weight": torch.full((64,), float("nan"))})
        backend.sample.adopt(1)
        with pytest.raises(NonFiniteError, match="not finite"):
            generate(backend)
        assert backend.sample.num_blocks_in_use == 0
        backend.handle(SyncWeightsRequest())
        assert ids(generate(backend)) == before


def test_another_model_is_refused_before_a_weight_moves():
    with vllm_backend() as backend:
        before = ids(generate(backend))
        config = tiny_model(0).config
        config.intermediate_size = 96
        with pytest.raises(WeightSyncError, match="both sides must hold the same model"):
            other = type(tiny_model(0))(config)
            load_weights(manifest_of(other), weights_of(other).items(), backend.sample)
        assert ids(generate(backend)) == before


def test_a_new_version_forgets_what_was_computed_with_the_old():
    with vllm_backend() as backend:
        first = generate(backend).metrics["tokens_computed"]
        assert generate(backend).metrics["tokens_computed"] < first
        backend.handle(SyncWeightsRequest())
        assert generate(backend).metrics["tokens_computed"] == first


def test_a_model_that_vllm_builds_otherwise_is_refused_and_the_process_is_free_for_another(tmp_path):
    config = Qwen2Config(**{**tiny_model(0).config.to_dict(), "model_type": "qwen2", "head_dim": 32})
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(WeightSyncError, match="q_proj"), vllm_backend(model=str(tmp_path)):
        pass
    with vllm_backend() as backend:
        generate(backend)


@pytest.mark.parametrize(
    "vllm, message",
    [
        ({"max_modle_len": 64}, "did you mean 'max_model_len'"),
        ({"quite_unknown": 1}, "EngineArgs"),
        ({"dtype": "float16"}, "follows from the rest"),
        ({"enable_chunked_prefill": True}, "seeds"),
        ({"max_model_len": 10**7}, "does not start"),
    ],
)
def test_engine_arguments_are_checked_by_name(vllm, message):
    with pytest.raises(ConfigError, match=message), vllm_backend(vllm=vllm):
        pass


def test_a_vllm_built_for_another_device_is_refused():
    with pytest.raises(ConfigError, match="runs on cpu"):
        VllmSampleEngine(vllm_config(device="cuda"), tiny_model(0))


def test_starting_vllm_changes_no_random_state_of_the_process():
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    expected = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    model = tiny_model(0)
    engine = VllmSampleEngine(vllm_config(), model)
    assert random.getstate() == expected[0]
    assert np.random.get_state()[1].tolist() == expected[1]
    assert torch.equal(torch.get_rng_state(), expected[2])
    engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize("num_gpus", [1, 2])
def test_on_gpus_rollouts_and_syncs_are_close_to_the_trainer(num_gpus):
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} CUDA devices")
    vllm = {"tensor_parallel_size": num_gpus, "gpu_memory_utilization": 0.2}
    with vllm_backend(device="cuda", dtype="bfloat16", vllm=vllm) as backend:
        assert distance_to_trainer(backend, generate(backend)) < 0.5
        backend.sample.sleep(2)
        train(backend)
        backend.sample.wake()
        backend.handle(SyncWeightsRequest())
        assert distance_to_trainer(backend, generate(backend)) < 0.5
