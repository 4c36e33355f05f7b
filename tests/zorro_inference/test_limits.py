"""Models whose rules change at a distance: rows stay below it, and what is cached stays right for whatever follows."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Llama4TextConfig, LlamaConfig

from arctic_platform.errors import InputError
from arctic_platform.rl.protocol import SamplingParams
from arctic_platform.rl.zorro_inference import Sampler
from tests.zorro_inference.models import EOS_ID, SIZES, plain_greedy, random_prompt, token_lists

LIMIT = 25
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [3.0] * 16, "factor": 4.0}
PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def build(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind in ("longrope", "dynamic"):
        rope = LONGROPE if kind == "longrope" else {"rope_type": "dynamic", "factor": 2.0}
        rope = {**rope, "rope_theta": 10000.0, "original_max_position_embeddings": LIMIT}
        return AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | {"rope_parameters": rope})).eval()
    options = {"attention_chunk_size": LIMIT, "floor_scale": 8192, "attn_temperature_tuning": False}
    if kind == "tuned":
        options = {"attention_chunk_size": 512, "floor_scale": LIMIT + 1, "attn_temperature_tuning": True}
    layers = {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 96}
    return AutoModelForCausalLM.from_config(Llama4TextConfig(**SIZES, **options, **layers, **experts)).eval()


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "chunked", "tuned"])
def test_row_beyond_the_distance_is_refused_and_rows_up_to_it_are_exact(kind):
    model = build(kind)
    sampler = Sampler(model, eos_token_ids=[EOS_ID], max_batch_rows=4)
    assert sampler.max_row_len == LIMIT
    with pytest.raises(InputError, match="21 tokens and max_tokens=5, the model takes 25 in all"):
        sampler.generate([random_prompt(LIMIT - 4, seed=0)], PARAMS)
    prompts = [random_prompt(LIMIT - 5, seed=i) for i in range(6)]
    for _ in range(2):
        assert token_lists(sampler.generate(prompts, PARAMS)) == [
            plain_greedy(model, prompt, 5, eos_id=None) for prompt in prompts
        ]


def test_max_tokens_none_ends_at_the_distance():
    sampler = Sampler(build("longrope"), eos_token_ids=[EOS_ID])
    params = SamplingParams(max_tokens=None, ignore_eos=True, seed=0)
    (rollout,) = sampler.generate([np.arange(7, 17)], params).rollouts
    assert (len(rollout.token_ids), rollout.finish_reason) == (LIMIT - 10, "length")
