"""Tiny models, built from their configs, and the plain ways that the sampler is held against."""

import numpy as np
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from arctic_platform.rl.protocol import GenerateResponse

VOCAB_SIZE = 128
EOS_ID = 5
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
MOE_SIZES = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {
    "llama": lambda **sizes: LlamaForCausalLM(LlamaConfig(**SIZES | sizes)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **MOE_SIZES)),
    "mistral_window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=6)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, sliding_window=6, query_pre_attn_scalar=32, attn_logit_softcapping=5.0)
    ),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(**SIZES, sliding_window=6, num_local_experts=4, num_experts_per_tok=2)
    ),
}


def build_model(
    family: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: int
) -> torch.nn.Module:
    """A random model in eval mode whose token probabilities differ clearly. sizes: of llama, other than SIZES."""
    torch.manual_seed(seed)
    model = FAMILIES[family](**sizes).to(dtype).eval()
    if dtype == torch.float64 and family in ("qwen3_moe", "gpt_oss"):
        model.set_experts_implementation("eager")  # the grouped kernel knows no fp64
    return model


def random_prompt(length: int, seed: int) -> list[int]:
    """Token ids that are never the end token."""
    ids = np.random.default_rng(seed).integers(0, VOCAB_SIZE - 1, length)
    return np.where(ids >= EOS_ID, ids + 1, ids).tolist()


def forest_prompts() -> list[list[int]]:
    """Prompts that share at several depths: prefixes of each other, a duplicate, one token, one that shares none."""
    base = random_prompt(20, seed=1)
    return [
        [*base, *random_prompt(5, seed=2), 7],
        base,
        [*base, *random_prompt(5, seed=2), 8, 9, 10],
        base[:1],
        random_prompt(9, seed=3),
        [*base, 11],
        [*base, *random_prompt(5, seed=2), 7],
        base[:12] + random_prompt(4, seed=4),
    ]


@torch.no_grad()
def plain_greedy(
    model: torch.nn.Module, prompt: list[int], max_tokens: int, *, eos_id: int | None = EOS_ID
) -> list[int]:
    """The twin of greedy sampling: the whole row again for every token, by the model's own attention."""
    row = list(prompt)
    while len(row) < len(prompt) + max_tokens and (len(row) == len(prompt) or row[-1] != eos_id):
        row.append(int(model(input_ids=torch.tensor([row])).logits[0, -1].argmax()))
    return row[len(prompt) :]


@torch.no_grad()
def teacher_forced(model: torch.nn.Module, prompt: list[int], response: list[int], temperature: float) -> np.ndarray:
    """Log-probs of a response, its row alone through the model's own attention, `[len(response)]`."""
    row = torch.tensor([[*prompt, *response]])
    logits = model(input_ids=row).logits[0, len(prompt) - 1 : -1].double()
    logprobs = torch.log_softmax(logits / (temperature or 1.0), -1)
    return logprobs.gather(1, row[0, len(prompt) :, None])[:, 0].numpy()


def token_lists(response: GenerateResponse) -> list[list[int]]:
    """The tokens of every rollout."""
    return [rollout.token_ids for rollout in response.rollouts]
