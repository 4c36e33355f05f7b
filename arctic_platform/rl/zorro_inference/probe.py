"""Is this architecture decoded exactly? Asked once, when a sampler is made.

A model whose attention is not routed through transformers' registry, or that keeps a state which the sampler does not
know (Mamba, RWKV), would decode without any error and wrongly.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from transformers import PreTrainedModel

from arctic_platform.errors import UnsupportedModelError
from arctic_platform.forest import ATTENTION_NAME
from arctic_platform.rl.protocol import Rollout

SHARED_LEN, ROW_LENS, NEW_TOKENS = 4, (4, 6, 9), 3
TOLERANCE = 1e-3
"""Largest error allowed, in standard deviations of the logits."""
HALF_TOLERANCE = 0.1
"""For half precision the median error counts: single tokens may be far off where an expert changes."""


def probe_prompts(vocab_size: int) -> list[list[int]]:
    """Three short prompts; each shares its start with the others, one is the start itself."""
    ids = np.random.default_rng(0).integers(0, vocab_size, (len(ROW_LENS), max(ROW_LENS)))
    ids[:, :SHARED_LEN] = ids[0, :SHARED_LEN]
    return [row[:length].tolist() for row, length in zip(ids, ROW_LENS, strict=True)]


def check_rollouts(model: PreTrainedModel, prompts: Sequence[list[int]], rollouts: Sequence[Rollout]) -> None:
    """Compare log-probs at temperature 1 with every row alone through the model's own attention.

    Raises UnsupportedModelError.
    """
    errors = np.concatenate([_row_errors(model, prompts[rollout.prompt_index], rollout) for rollout in rollouts])
    is_half = torch.finfo(model.dtype).bits < 32
    error, limit = (np.median(errors), HALF_TOLERANCE) if is_half else (errors.max(), TOLERANCE)
    if not error <= limit:
        raise UnsupportedModelError(
            f"{model.config.model_type} does not decode exactly over shared keys and values (its log-probs differ by "
            f"{error:.1e} standard deviations of the logits, {limit:g} is allowed); use another model or engine"
        )


@contextmanager
def attention_of(model: PreTrainedModel, name: str) -> Generator[None]:
    """The model on the attention registered under `name`; afterwards on its own again."""
    own = model.config._attn_implementation
    if own == name:
        yield
        return
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(own)


@torch.no_grad()
def _row_errors(model: PreTrainedModel, prompt: list[int], rollout: Rollout) -> np.ndarray:
    own = model.config._attn_implementation
    row = torch.tensor([[*prompt, *rollout.token_ids]], device=model.device)
    with attention_of(model, "sdpa" if own == ATTENTION_NAME else own):
        logits = model(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1].double()
    logprobs = torch.log_softmax(logits, -1).gather(1, row[0, len(prompt) :, None])[:, 0]
    spread = logits.std(-1).clamp_min(torch.finfo(model.dtype).eps)
    return np.abs(logprobs.cpu().numpy() - rollout.logprobs) / spread.cpu().numpy()
