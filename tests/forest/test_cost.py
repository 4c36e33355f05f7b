from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from arctic_platform.errors import InputError
from arctic_platform.forest import build_forest, find_targets
from arctic_platform.forest.cost import ModelShape, forest_cost, peak_bytes, segment_flops
from tests.forest.strategies import batches

SHAPE = ModelShape(num_layers=2, num_heads=4, head_dim=8, hidden_size=32, vocab_size=100, layer_params=1000)


def cost(rows, num_predicting=0, num_targets=0):
    return forest_cost(build_forest(rows), SHAPE, num_predicting=num_predicting, num_targets=num_targets)


def test_rows_that_share_nothing_cost_the_same_shared_and_alone():
    result = cost([[1, 2, 3], [4, 5]], num_predicting=2, num_targets=2)
    assert result.tokens == result.tokens_unshared == 5
    assert result.flops == result.flops_unshared
    assert (result.saving, result.bound) == (0.0, 1.0)


def test_flops_are_linear_tokens_plus_attended_pairs_plus_logits():
    result = cost([[1, 2, 3], [1, 2, 4]], num_predicting=1, num_targets=2)
    pair, logit = 12 * 2 * 4 * 8, 6 * 32 * 100
    assert result.flops == 6 * 1000 * 4 + pair * (1 + 2 + 3 + 3) + logit
    assert result.flops_unshared == 6 * 1000 * 6 + pair * 2 * (1 + 2 + 3) + 2 * logit


def test_the_bound_approaches_the_group_size_for_long_prompts():
    prompt = list(range(1000))
    result = cost([[*prompt, 1000 + b] for b in range(8)], num_predicting=1, num_targets=8)
    assert result.bound == pytest.approx(8, rel=0.02)


def test_an_empty_batch_costs_nothing():
    result = cost([])
    assert (result.flops, result.saving, result.bound) == (0.0, 0.0, 1.0)


# --- segments, windows, bytes


@given(batches())
def test_segments_cost_what_the_forest_costs(rows):
    forest = build_forest(rows)
    masks = [np.arange(len(row)) > 0 for row in rows]
    parents = find_targets(forest, masks).parents
    whole = forest_cost(forest, SHAPE, num_predicting=len(parents), num_targets=sum(map(np.sum, masks)))
    assert segment_flops(forest, SHAPE, parents).sum() == pytest.approx(whole.flops)
    assert segment_flops(forest, SHAPE).sum() == pytest.approx(whole.flops - SHAPE.logit_flops * len(parents))


@given(st.integers(0, 40), st.integers(1, 20))
def test_a_window_counts_the_pairs_that_a_mask_lets_through(depth, window):
    shape = replace(SHAPE, num_window_layers=1, window=window)
    q, k = np.indices((depth, depth))
    pairs = (k <= q).sum() + ((k <= q) & (k > q - window)).sum()
    assert shape.path_flops(depth) == pytest.approx(6 * 1000 * depth + shape.pair_flops * pairs)


def test_recurrent_layers_attend_no_pairs():
    shape = replace(SHAPE, num_linear_layers=2)
    assert shape.path_flops(100) == 6 * 1000 * 100


def test_pairs_with_value_heads_of_another_size_cost_by_both():
    assert replace(SHAPE, value_dim=4).pair_flops == 6 * 4 * (8 + 4)


def test_eager_flops_that_torch_counts_are_those_of_the_model():
    """A row alone in eager attention, which computes the full square: the pairs above the diagonal come on top."""
    config = AutoConfig.for_model("llama", **SIZES)
    config._attn_implementation = "eager"
    model, length = AutoModelForCausalLM.from_config(config), 48
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(length)[None], use_cache=False).logits.sum().backward()
    shape = ModelShape.of(config)
    hidden = shape.pair_flops * shape.num_layers * length * (length - 1) / 2
    ours = float(shape.path_flops(length)) + hidden + shape.logit_flops * length
    assert counter.get_total_flops() == pytest.approx(ours, rel=0.02)


SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 128,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
FAMILIES = {
    "llama": {},
    "qwen3": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "sliding_window": 16},
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4},
    "starcoder2": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 8, "shared_expert_intermediate_size": 96, **EXPERTS},
    "qwen3_moe": {"num_experts": 8, "head_dim": 16, "mlp_only_layers": [1], **EXPERTS},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 16, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    "qwen3_next": {
        **EXPERTS,
        "num_experts": 8,
        "shared_expert_intermediate_size": 48,
        "head_dim": 16,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
}


def active_params(model, config):
    """Parameters of the layers that a token meets, counted in the built model."""
    total = 0.0
    for name, param in model.base_model.named_parameters():
        if any(part in name for part in ("embed", "wte", "wpe")):
            continue
        num_experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0
        is_routed = ".experts." in name
        total += param.numel() * (config.num_experts_per_tok / num_experts if is_routed else 1)
    return total


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_params_of_a_config_are_those_of_the_built_model(family):
    sizes = {"vocab_size": 128} if family == "gpt2" else SIZES
    config = AutoConfig.for_model(family, **{**sizes, **FAMILIES[family]})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.num_experts = getattr(config, "num_experts", None) or getattr(config, "n_routed_experts", None)
    assert ModelShape.of(config).layer_params == pytest.approx(active_params(model, config), rel=0.025)


def test_sizes_of_special_layers_are_read_from_a_config():
    gemma = ModelShape.of(AutoConfig.for_model("gemma2", **SIZES, head_dim=32, sliding_window=16))
    assert (gemma.num_window_layers, gemma.window, gemma.head_dim) == (2, 16, 32)
    deepseek = ModelShape.of(AutoConfig.for_model("deepseek_v3", **{**SIZES, **FAMILIES["deepseek_v3"]}))
    assert (deepseek.head_dim, deepseek.value_dim) == (24, 16)
    hybrid = ModelShape.of(AutoConfig.for_model("qwen3_next", **{**SIZES, **FAMILIES["qwen3_next"]}))
    assert hybrid.num_linear_layers == 3
    assert ModelShape.of(AutoConfig.for_model("llama", **SIZES), layer_params=7).layer_params == 7


def test_a_config_without_layers_is_refused():
    with pytest.raises(InputError, match="has no num_hidden_layers"):
        ModelShape.of(object())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bytes_kept_for_backward_are_near_those_that_torch_keeps(family):
    config = AutoConfig.for_model(family, **{**SIZES, "hidden_size": 128, "intermediate_size": 384}, head_dim=32)
    model, kept, length = AutoModelForCausalLM.from_config(config), {}, 256
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}

    def keep(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        hidden = model.base_model(input_ids=torch.zeros(1, length, dtype=torch.long), use_cache=False).last_hidden_state
    assert hidden.requires_grad
    assert peak_bytes(ModelShape.of(config), length, 0) == pytest.approx(sum(kept.values()), rel=0.25)


def test_logits_take_what_their_mode_keeps():
    big = replace(SHAPE, vocab_size=150_000)
    none, compute, memory = (peak_bytes(big, 100, 1000, logits=mode) for mode in ("none", "compute", "memory"))
    assert none > compute > memory
    assert none - peak_bytes(big, 100, 0) == 4 * 4 * 1000 * 150_000
    assert peak_bytes(big, 1000, 0, checkpointing=True) < peak_bytes(big, 1000, 0)
    assert peak_bytes(big, 1000, 0, dtype_bytes=2) * 2 == peak_bytes(big, 1000, 0)
