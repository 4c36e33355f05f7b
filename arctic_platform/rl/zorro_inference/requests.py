"""What goes into the sampler and what comes out of it: requests, and tokens as they are drawn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from arctic_platform.errors import ArcticError
from arctic_platform.rl.protocol import SamplingParams

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, eq=False)
class SampleRequest:
    """`params.n` rollouts of one prompt, `prompt_ids [P] int64`.

    request_id: the caller's, unique among the requests that are not finished. first_rollout: the number of the first
    rollout in the key of its random numbers; equal seed, prompt and number mean equal numbers.
    """

    request_id: str
    prompt_ids: np.ndarray
    params: SamplingParams = field(default_factory=SamplingParams)
    first_rollout: int = 0


@dataclass(frozen=True, eq=False)
class TokenDelta:
    """What one step added to one rollout.

    `token_ids` and `logprobs` have one entry per new token; both are empty where a rollout is aborted.
    `top_logprobs`: for each new token the most probable ids and their log-probs, where asked for. `text`: new text,
    where the sampler has a tokenizer. `finish_reason`: None while the rollout goes on. `weight_version`: of the
    weights that drew these tokens. `prompt_logprobs`: in the first delta of the first rollout, where asked for, one
    entry per prompt token, None for the first. `error`: why a rollout was aborted, where the sampler itself had to.
    `stop_reason`: as in `Rollout`.
    """

    request_id: str
    rollout: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason | None
    weight_version: int
    top_logprobs: list[dict[int, float]] | None = None
    text: str | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None
    error: ArcticError | None = None
    stop_reason: int | str | None = None


@dataclass
class SamplerStats:
    """Counters since the sampler was made, and how full it is now.

    `prompt_tokens`: tokens of all prompts that were prefilled, one count per rollout (what a pass without sharing
    computes). `prefix_hit_tokens`: tokens of prompts, one count per request, that a cached segment gave.
    `tokens_computed`: tokens that went through the model. `generated_tokens`: tokens drawn. `kv_tokens_read`: keys
    that decode steps read, each call's own count; `forest_tokens_read`: tokens that the forests of these steps held,
    the least that can be read. `prefill_seconds`, `decode_seconds`: time in passes of either kind.
    Now: `running` and `waiting` rollouts, `cached_tokens` in the forest.
    """

    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    tokens_computed: int = 0
    generated_tokens: int = 0
    kv_tokens_read: int = 0
    forest_tokens_read: int = 0
    decode_steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    running: int = 0
    waiting: int = 0
    cached_tokens: int = 0
