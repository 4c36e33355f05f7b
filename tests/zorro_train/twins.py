"""Tiny models and the slow, obvious twin of everything: each row alone through the unpatched model."""

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

VOCAB = 128
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
}
CONFIGS = {
    "qwen3": lambda: Qwen3Config(**SIZES, tie_word_embeddings=False),
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2-window": lambda: Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=0, layer_types=["sliding_attention"] * 2
    ),
    "gpt2": lambda: GPT2Config(
        n_embd=64,
        n_layer=2,
        n_head=2,
        vocab_size=VOCAB,
        n_positions=512,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    ),
}


def build_model(family: str = "qwen3", dtype: torch.dtype = torch.float32, attn: str = "sdpa") -> PreTrainedModel:
    """A tiny model; two calls with the same arguments give equal weights, larger than the usual initial ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS[family](), attn_implementation=attn).to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(4.0)
    return model.eval()


def rows_alone(
    model: PreTrainedModel, rows: list[np.ndarray], masks: list[np.ndarray], temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the masked tokens, flat, one unpadded stock forward per row."""
    logprobs, entropies = [torch.zeros(0, dtype=model.dtype)], [torch.zeros(0, dtype=model.dtype)]
    for row, mask in zip(rows, masks, strict=True):
        if not mask.any():
            continue
        ids = torch.from_numpy(row)[None]
        logp = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0] / temperature, dim=-1)
        at = torch.from_numpy(np.flatnonzero(mask))
        logprobs.append(logp[at - 1, ids[0, at]])
        entropies.append(-(logp.exp() * logp).sum(-1)[at - 1])
    return torch.cat(logprobs), torch.cat(entropies)


def gradients(model: PreTrainedModel, loss: Tensor) -> Tensor:
    """All gradients of a loss as one flat vector, zeros where a parameter has no part in it."""
    parameters = list(model.parameters())
    if not loss.requires_grad:
        return torch.cat([torch.zeros_like(p).flatten() for p in parameters])
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    pairs = zip(grads, parameters, strict=True)
    return torch.cat([(torch.zeros_like(p) if grad is None else grad).flatten() for grad, p in pairs])


def relative(value: Tensor, reference: Tensor) -> float:
    """Norm of the difference over the norm of the reference."""
    return float((value - reference).norm() / reference.norm().clamp(min=1e-30))


def split(rows: list[str]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Rows written as "1 2 3 | 7 8" -> token arrays, and masks that are True on the response."""
    ids, masks = [], []
    for row in rows:
        prompt, response = (part.split() for part in row.split("|"))
        ids.append(np.array([int(token) for token in prompt + response], dtype=np.int64))
        masks.append(np.arange(len(ids[-1])) >= len(prompt))
    return ids, masks


def pad(rows: list[np.ndarray], masks: list[np.ndarray], extra: int = 0, pad_id: int = 0) -> dict:
    """A padded batch `[left pad][prompt][response][right pad]` of these rows, with `extra` more pads on both sides."""
    response_lens = [int(mask.sum()) for mask in masks]
    prompt_lens = [len(row) - num for row, num in zip(rows, response_lens, strict=True)]
    prompt_len, response_len = max(prompt_lens) + extra, max(*response_lens, 1) + extra
    input_ids = torch.full((len(rows), prompt_len + response_len), pad_id)
    live = torch.zeros_like(input_ids)
    for b, row in enumerate(rows):
        start = prompt_len - prompt_lens[b]
        input_ids[b, start : start + len(row)] = torch.from_numpy(row)
        live[b, start : start + len(row)] = 1
    return {
        "input_ids": input_ids,
        "attention_mask": live,
        "position_ids": (live.cumsum(1) - 1).clamp(min=0),
        "responses": input_ids[:, prompt_len:],
        "response_length": response_len,
    }


def random_rows(seed: int, vocab: int = VOCAB) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """A branching batch in random order: shared prompts and answers, duplicates, a row that is a prefix of another,
    an empty response, single-token prompts, a row that shares nothing, id 0 among the tokens."""
    rng = np.random.default_rng(seed)
    rows, prompt_lens = [], []
    for prompt_len in (1, int(rng.integers(2, 30)), int(rng.integers(2, 30))):
        prompt = rng.integers(0, vocab, prompt_len)
        answer = rng.integers(0, vocab, int(rng.integers(2, 12)))
        tails = [rng.integers(0, vocab, int(rng.integers(1, 9))) for _ in range(3)]
        responses = [answer, *(np.concatenate([answer[: len(answer) // 2], tail]) for tail in tails)]
        responses += [answer[:1], answer, tails[0][:0], np.concatenate([answer, tails[1]])]
        rows += [np.concatenate([prompt, response]) for response in responses]
        prompt_lens += [prompt_len] * len(responses)
    rows.append(rng.integers(0, vocab, 17))
    prompt_lens.append(5)
    order = rng.permutation(len(rows))
    return [rows[i] for i in order], [np.arange(len(rows[i])) >= prompt_lens[i] for i in order]
