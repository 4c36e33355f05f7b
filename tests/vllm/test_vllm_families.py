"""Other architectures: vLLM's log-probs are the trainer's at the start and after a sync, for fused and tied weights."""

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from transformers import AutoConfig, AutoModelForCausalLM

from arctic_platform.errors import UnsupportedModelError
from arctic_platform.rl.protocol import FwdBwdRequest, Processing, StepRequest, SyncWeightsRequest
from tests.rl.engines.builders import grouped_batch
from tests.vllm.engines import distance_to_trainer, generate, vllm_backend

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False},
    "gemma2": {"sliding_window": 16},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_the_trainers_before_and_after_a_sync(family, tmp_path, caplog):
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with vllm_backend(model=str(tmp_path)) as backend:
        assert distance_to_trainer(backend, generate(backend)) < 1e-4
        backend.handle(FwdBwdRequest(batch=grouped_batch(), processing=Processing()))
        backend.handle(StepRequest())
        with caplog.at_level("INFO"):
            backend.handle(SyncWeightsRequest())
        assert distance_to_trainer(backend, generate(backend)) < 1e-4
    assert "not_compared=0" in caplog.text


def test_experts_that_vllm_does_not_take_up_on_cpu_are_refused_by_name(tmp_path):
    config = AutoConfig.for_model("qwen3_moe", **SIZES, **EXPERTS)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="qwen3_moe"), vllm_backend(model=str(tmp_path)):
        pass
