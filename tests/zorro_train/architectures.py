"""The families of the sweep: a tiny model of each, built from its config, and what sharing does to its values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from arctic_platform.errors import UnsupportedModelError
from arctic_platform.rl.zorro_train import ModuleReconstructionPatcher
from tests.zorro_train.twins import gradients, random_rows, relative, rows_alone

HAS_BATCHED_EXPERTS = "set_experts_implementation" in vars(PreTrainedModel)  # since transformers 5

VOCAB = 128
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}
MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MLA: dict[str, Any] = {
    "head_dim": 16,
    "num_key_value_heads": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 32,
}
WINDOWS: dict[str, Any] = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
GPT: dict[str, Any] = {
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 512,
    "vocab_size": VOCAB,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}


@dataclass(frozen=True)
class Family:
    """A line of the sweep.

    `kind`: what is special about it; `model_type`: of transformers, the name by default; `attn`: the stock attention to
    compare with, transformers' choice by default.
    """

    kind: str
    config: dict[str, Any] = field(default_factory=lambda: SIZES)
    model_type: str | None = None
    attn: str | None = None


FAMILIES: dict[str, Family] = {
    "llama": Family("grouped queries"),
    "qwen2": Family("biases"),
    "qwen3": Family("normed queries and keys"),
    "qwen3_moe": Family("mixture of experts", SIZES | MOE),
    "qwen3_next": Family("Gated DeltaNet, mixture of experts", SIZES | MOE | DELTA),
    "qwen3_5": Family("Gated DeltaNet", SIZES | DELTA, "qwen3_5_text"),
    "qwen3_5_moe": Family("Gated DeltaNet, mixture of experts", SIZES | MOE | DELTA, "qwen3_5_moe_text"),
    "mistral": Family("sliding window", SIZES | {"sliding_window": 4}),
    "mixtral": Family("mixture of experts, sliding window", SIZES | MOE | {"sliding_window": 4}),
    "gemma2": Family(
        "soft-cap, sliding window", SIZES | WINDOWS | {"attn_logit_softcapping": 5.0}, attn="eager"
    ),  # older sdpa drops the cap
    "gemma3": Family("sliding window", SIZES | WINDOWS, "gemma3_text"),
    "gpt_oss": Family("sinks, sliding window, mixture of experts", SIZES | MOE | WINDOWS),
    "olmo": Family("norms without weights"),
    "olmo2": Family("norms behind the layers"),
    "olmo3": Family("sliding window", SIZES | WINDOWS),
    "olmo_hybrid": Family("Gated DeltaNet", SIZES | DELTA),
    "phi": Family("partial rotary embedding"),
    "phi3": Family("fused projections, sliding window", SIZES | {"sliding_window": 4}),
    "smollm3": Family("layers without positions", SIZES | {"no_rope_layers": [0, 1]}),
    "granite": Family("multipliers", SIZES | {"logits_scaling": 2.0, "residual_multiplier": 0.5}),
    "granitemoe": Family("mixture of experts, multipliers", SIZES | MOE),
    "cohere": Family("parallel layers, scaled logits"),
    "cohere2": Family("sliding window, scaled logits", SIZES | WINDOWS),
    "glm4": Family("norms behind the layers, interleaved rotary embedding"),
    "glm4_moe": Family("mixture of experts", SIZES | MOE),
    "starcoder2": Family("sliding window, biases", SIZES | {"sliding_window": 4}),
    "nanochat": Family("capped logits", SIZES | {"num_key_value_heads": 2}),
    "gptj": Family("parallel layers", GPT | {"rotary_dim": 16}),
    "gpt_neox": Family("parallel layers", SIZES | {"hidden_dropout": 0.0}),
    "gpt2": Family("absolute positions", GPT),
    "minimax_m2": Family("mixture of experts", SIZES | MOE),
    "deepseek_v3": Family("multi-head latent attention, mixture of experts", SIZES | MOE | MLA),
    "llama4": Family(
        "mixture of experts, attention in chunks",
        SIZES | MOE | {"intermediate_size_mlp": 96, "interleave_moe_layer_step": 1, "attention_chunk_size": 512},
        "llama4_text",
    ),
    "lfm2": Family(
        "short convolutions",
        SIZES | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_ff_dim": 96},
    ),
    "kimi_linear": Family(
        "Kimi Delta Attention, multi-head latent attention, mixture of experts",
        SIZES | MOE | MLA | {"linear_num_heads": 2, "linear_head_dim": 16, "layer_types": DELTA["layer_types"]},
    ),
    "falcon_h1": Family("Mamba-2 beside attention", SIZES | MAMBA),
    "nemotron_h": Family(
        "Mamba-2, mixture of experts",
        SIZES
        | MOE
        | {
            "layers_block_type": ["mamba", "attention", "moe"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "chunk_size": 32,
            "moe_shared_expert_intermediate_size": 48,
        },
    ),
    "bamba": Family("Mamba-2", SIZES | MAMBA | {"attn_layer_indices": [1]}),
    "granitemoehybrid": Family(
        "Mamba-2, mixture of experts", SIZES | MOE | MAMBA | {"layer_types": ["mamba", "attention"]}
    ),
    "zamba2": Family(
        "Mamba-2, shared attention",
        SIZES
        | {
            "layers_block_type": ["mamba", "hybrid"],
            "mamba_d_state": 16,
            "n_mamba_heads": 4,
            "mamba_ngroups": 1,
            "chunk_size": 32,
            "hybrid_layer_ids": [1],
        },
    ),
    "mamba": Family("Mamba", SIZES | {"state_size": 8}),
    "jamba": Family("Mamba, mixture of experts", SIZES | MOE | {"mamba_d_state": 8, "use_mamba_kernels": False}),
    "rwkv": Family("RWKV", SIZES | {"attention_hidden_size": 64}),
    "recurrent_gemma": Family("gated linear recurrence", SIZES),
    "bloom": Family("ALiBi", {"hidden_size": 64, "n_layer": 2, "n_head": 2, "vocab_size": VOCAB}),
    "mpt": Family("ALiBi", {"d_model": 64, "n_layers": 2, "n_heads": 2, "vocab_size": VOCAB, "max_seq_len": 512}),
    "falcon": Family(
        "ALiBi",
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": VOCAB, "alibi": True},
    ),
}


VALUE_LIMIT = {torch.float32: 1e-6, torch.float64: 1e-7}
GRADIENT_LIMIT = {torch.float32: 1e-5, torch.float64: 1e-6}
STATE_LIMIT = 1e-6
"""Of log-probs in fp64 where a recurrent state is kept in fp32 inside: the state is rounded where a segment ends."""


@dataclass(frozen=True)
class Errors:
    """Of the log-probs (largest, relative where they are above 1) and of all gradients (norm, relative)."""

    logprobs: float
    gradients: float


@dataclass(frozen=True)
class Verdict:
    """What the sweep found for a family: `word` is exact, refused, absent (unknown to this transformers) or WRONG.

    `errors`: by dtype, the largest over the ways of running; empty unless it ran. `reason`: the refusal, or what was
    wrong.
    """

    word: str
    errors: dict[torch.dtype, Errors] = field(default_factory=dict)
    reason: str = ""


def is_recurrent(name: str) -> bool:
    """Whether the family keeps a state beside keys and values."""
    return any(word in FAMILIES[name].kind for word in ("Delta", "Mamba", "RWKV", "recurrence"))


def is_known(name: str) -> bool:
    """Whether this transformers has the family."""
    return (FAMILIES[name].model_type or name) in CONFIG_MAPPING


def has_fp64(name: str) -> bool:
    """Whether the stock model runs in fp64; experts of transformers 4 mix it with fp32."""
    try:
        build(name, torch.float64)(input_ids=torch.arange(4).unsqueeze(0), use_cache=False)
    except RuntimeError:
        return False
    return True


def build(name: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> PreTrainedModel:
    """The tiny model of a family; two calls with the same arguments give equal weights, larger than initial ones.

    In fp64 experts run one by one, since the batched ones know no fp64.
    """
    family = FAMILIES[name]
    config = AutoConfig.for_model(family.model_type or name, **family.config | overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=family.attn).to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(4.0)
    if dtype == torch.float64 and "experts" in family.kind and HAS_BATCHED_EXPERTS:
        model.set_experts_implementation("eager")
    return model.eval()


def judge(name: str) -> Verdict:
    """Prepare the family's model and compare it, in fp32 and fp64, every way it can run, with rows run alone."""
    if not is_known(name):
        return Verdict("absent")
    errors = {}
    for dtype in (torch.float32, torch.float64):
        if dtype == torch.float64 and not has_fp64(name):
            continue
        try:
            errors[dtype] = measure(name, dtype)
        except UnsupportedModelError as refusal:
            own = type(build(name)).__name__
            return Verdict("refused" if own in str(refusal) else "WRONG", reason=str(refusal))
        value_limit = STATE_LIMIT if is_recurrent(name) else VALUE_LIMIT[dtype]
        if not (errors[dtype].logprobs <= value_limit and errors[dtype].gradients <= GRADIENT_LIMIT[dtype]):
            return Verdict("WRONG", errors, f"{dtype}: {errors[dtype]}")
    return Verdict("exact", errors)


def measure(name: str, dtype: torch.dtype) -> Errors:
    """Largest errors over rectangles, rows rebuilt in every layer, and gradient checkpointing, on one branching batch.

    Raises UnsupportedModelError where the probe refuses.
    """
    rows, masks = random_rows(0)
    plain = build(name, dtype)
    patchers = [ModuleReconstructionPatcher(build(name, dtype), use_split_attention=split) for split in (True, False)]
    expected, _ = rows_alone(plain, rows, masks)
    weights = torch.randn(len(expected), dtype=dtype, generator=torch.Generator().manual_seed(1))
    expected_gradients = gradients(plain, (expected * weights).sum())
    errors = []
    for patcher, is_checkpointed in ((patchers[0], False), (patchers[0], True), (patchers[1], False)):
        if is_checkpointed:
            patcher.model.gradient_checkpointing_enable({"use_reentrant": False})
            patcher.model.train()
        logprobs = patcher.forward_rows(rows, masks).logprobs
        off = (logprobs - expected).detach().abs() / expected.detach().abs().clamp(min=1.0)
        ours = gradients(patcher.model, (logprobs * weights).sum())
        errors.append(Errors(float(off.max()), relative(ours, expected_gradients)))
    return Errors(max(e.logprobs for e in errors), max(e.gradients for e in errors))
