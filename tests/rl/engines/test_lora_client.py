"""A client that trains adapters: the sampler draws from base and adapters merged, and files hold one or the other."""

import logging
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from arctic_platform.errors import WeightSyncError
from arctic_platform.rl import create_arctic_rl_client
from arctic_platform.rl.engines.models import tiny_model
from arctic_platform.rl.engines.torch_train import TorchTrainEngine
from arctic_platform.rl.protocol import SamplingParams
from arctic_platform.rl.weight_sync.base import digest, weights_of
from tests.rl.engines.builders import config, grouped_batch
from tests.zorro_train.architectures import build

PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]
PARAMS = SamplingParams(n=2, max_tokens=6, seed=3, logprobs=0, ignore_eos=True)
LORA = {"rank": 4, "alpha": 8.0}
EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


def train(client, steps: int = 2) -> None:
    for seed in range(steps):
        client.fwd_bwd(grouped_batch(seed))
        client.step()


@pytest.mark.parametrize("low_memory", [False, True])
def test_after_a_sync_the_sampler_draws_from_base_and_adapters(low_memory: bool, caplog) -> None:
    with create_arctic_rl_client(config(lora=LORA), blocking_calls=True) as client:
        first = client.generate(PROMPTS, PARAMS)
        train(client)
        assert ids(client.generate(PROMPTS, PARAMS)) == ids(first)
        with caplog.at_level(logging.INFO, "arctic_platform.rl.weight_sync"):
            report = client.sync_weights(low_memory=low_memory)
        count = len(weights_of(tiny_model()))
        assert f"[weight-sync names validated] context=local sender={count} expected={count}" in caplog.messages
        assert report.num_tensors == count
        second = client.generate(PROMPTS, PARAMS)
        assert [rollout.logprobs for rollout in second.rollouts] != [rollout.logprobs for rollout in first.rollouts]
        rows = {
            "prompts": [PROMPTS[rollout.prompt_index] for rollout in second.rollouts],
            "responses": [rollout.token_ids for rollout in second.rollouts],
        }
        scored = client.log_probs(rows)
        for rollout, logprobs in zip(second.rollouts, scored.logprobs, strict=True):
            torch.testing.assert_close(torch.tensor(list(logprobs)), torch.tensor(rollout.logprobs), rtol=0, atol=1e-4)


def test_the_sampler_holds_the_plain_model_and_other_digests_after_each_step() -> None:
    with create_arctic_rl_client(config(lora=LORA), blocking_calls=True) as client:
        sampler = sampler_of(client)
        seen = [digests(sampler)]
        assert not any("lora" in name or "base_layer" in name for name in weights_of(sampler))
        for _ in range(2):
            train(client, 1)
            client.sync_weights()
            seen.append(digests(sampler))
        changed = [{name for name in seen[0] if one[name] != seen[0][name]} for one in seen[1:]]
        assert changed[0] == changed[1] == {name for name in seen[0] if "_proj" in name}
        assert seen[1] != seen[2]


def test_a_sync_that_would_push_the_base_for_ever_fails_and_keeps_the_sampler_whole() -> None:
    settings = {"lora": LORA, "dtype": "bfloat16", "optimizer": {"lr": 1e-30}}
    with create_arctic_rl_client(config(**settings), blocking_calls=True) as client:
        train(client, 1)
        with pytest.raises(WeightSyncError, match="draw from the base model for ever"):
            client.sync_weights()
        assert client.generate(PROMPTS, PARAMS).weight_version == 0


def test_an_exported_model_is_the_plain_one_with_merged_weights(tmp_path: Path) -> None:
    with create_arctic_rl_client(config(lora=LORA), blocking_calls=True) as client:
        train(client)
        client.sync_weights()
        client.export_model(str(tmp_path / "model"))
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        assert digests(exported) == digests(sampler_of(client))
        assert client.weight_norm() == pytest.approx(
            float(torch.cat([p.detach().double().flatten() for p in exported.parameters()]).norm()), rel=1e-9
        )


def test_an_exported_mixture_of_experts_has_its_published_names_and_merged_experts(tmp_path: Path) -> None:
    build("qwen3_moe").save_pretrained(tmp_path / "first")
    engine = TorchTrainEngine(config(model=str(tmp_path / "first"), lora=LORA))
    with torch.no_grad():
        for name, param in engine.model.named_parameters():
            if "lora_B" in name:
                param.fill_(0.01)
    engine.export_model(str(tmp_path / "merged"))
    exported = weights_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    for name, tensor in engine.gather_weights():
        assert torch.equal(exported[name], tensor)
    assert not torch.equal(exported[EXPERTS], weights_of(build("qwen3_moe"))[EXPERTS])


def test_a_run_with_adapters_resumes_exactly_from_files_that_peft_reads(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    with create_arctic_rl_client(config(lora=LORA), blocking_calls=True) as client:
        train(client)
        client.save_checkpoint(str(tmp_path / "saved"))
        train(client)
        client.sync_weights()
        expected, generated = digests(sampler_of(client)), ids(client.generate(PROMPTS, PARAMS))
    with create_arctic_rl_client(config(lora=LORA, seed=0), blocking_calls=True) as client:
        client.load_checkpoint(str(tmp_path / "saved"))
        saved = digests(sampler_of(client))
        train(client)
        client.sync_weights()
        assert digests(sampler_of(client)) == expected
        assert ids(client.generate(PROMPTS, PARAMS)) == generated
    adapted = peft.PeftModel.from_pretrained(tiny_model(), tmp_path / "saved").merge_and_unload()
    with create_arctic_rl_client(config(lora=LORA), blocking_calls=True) as client:
        client.load_checkpoint(str(tmp_path / "saved"))
        held = weights_of(sampler_of(client))
        for name, tensor in weights_of(adapted).items():
            torch.testing.assert_close(tensor, held[name], rtol=1e-6, atol=1e-7)
        assert digests(sampler_of(client)) == saved


def test_ranks_with_adapters_fill_a_sampler_in_its_own_process(forked_workers: None) -> None:
    settings = {"training_engine": "fsdp", "ranks": {"num_ranks": 2}, "colocate": False}
    found = []
    for given in ({}, settings):
        with create_arctic_rl_client(config(lora=LORA, **given), blocking_calls=True) as client:
            train(client)
            assert client.sync_weights().num_tensors == len(weights_of(tiny_model()))
            found.append((client.generate(PROMPTS, PARAMS), client.weight_norm()))
    (alone, norm), (ranks, other_norm) = found
    assert other_norm == pytest.approx(norm, rel=1e-6)
    assert ids(ranks) == ids(alone)
    for ours, theirs in zip(ranks.rollouts, alone.rollouts, strict=True):
        torch.testing.assert_close(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), rtol=0, atol=1e-4)


def ids(response) -> list[list[int]]:
    return [list(rollout.token_ids) for rollout in response.rollouts]


def sampler_of(client):
    transport = client._transport
    return transport.service.backend(transport.job_id).sample.model


def digests(model) -> dict[str, int]:
    return {name: digest(tensor) for name, tensor in weights_of(model).items()}
