"""Backends with vLLM as the sampler, one after the other: a process holds one vLLM at a time."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np

from arctic_platform.rl.config import ArcticRLClientConfig
from arctic_platform.rl.protocol import (
    GenerateRequest,
    GenerateResponse,
    LogProbsRequest,
    Processing,
    RolloutBatch,
    SamplingParams,
)
from arctic_platform.rl.server.backend import Backend, create_backend

BLOCK = 32
SMALL = {"max_model_len": 512, "kv_cache_memory_bytes": 64 << 20, "block_size": BLOCK}
PROMPTS = [list(range(10, 90)), list(range(10, 80)), [200, 3, 77]]


def vllm_config(**settings: Any) -> ArcticRLClientConfig:
    """The built-in tiny model, sampled by vLLM."""
    vllm = {**SMALL, **settings.pop("vllm", {})}
    given = {"model": "tiny-random", "optimizer": {"lr": 1e-2}, "sampling_engine": "vllm", "vllm": vllm, **settings}
    return ArcticRLClientConfig(**given)


@contextmanager
def vllm_backend(**settings: Any) -> Generator[Backend]:
    """A backend whose vLLM is gone afterwards."""
    backend = create_backend(vllm_config(**settings))
    try:
        yield backend
    finally:
        backend.sample.close()


def generate(backend: Backend, prompts: list[list[int]] = PROMPTS, **params: Any) -> GenerateResponse:
    """Four rollouts of up to 12 tokens per prompt, unless said otherwise."""
    given = {"n": 4, "max_tokens": 12, "seed": 3, "ignore_eos": True, **params}
    return backend.handle(GenerateRequest(prompts=prompts, sampling_params=SamplingParams(**given)))


def distance_to_trainer(backend: Backend, response: GenerateResponse, temperature: float = 1.0) -> float:
    """Largest difference between the sampler's log-probs and the trainer's."""
    rows = {
        "prompts": [PROMPTS[rollout.prompt_index] for rollout in response.rollouts],
        "responses": [rollout.token_ids for rollout in response.rollouts],
    }
    request = LogProbsRequest(batch=RolloutBatch(**rows), processing=Processing(temperature=temperature))
    scored = backend.handle(request).logprobs
    pairs = zip(scored, response.rollouts, strict=True)
    return max(float(np.abs(np.array(own) - np.array(rollout.logprobs)).max()) for own, rollout in pairs)


def ids(response: GenerateResponse) -> list[list[int]]:
    """The tokens of all rollouts."""
    return [list(rollout.token_ids) for rollout in response.rollouts]
