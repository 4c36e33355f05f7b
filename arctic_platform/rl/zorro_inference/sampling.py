"""Logits -> one token per rollout and its log-prob.

A rollout draws by inverse CDF from one uniform number per token, out of a counter-based generator of its own, so that
its tokens depend on the seed, its prompt and its number among the rollouts of that prompt, not on the batch.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from arctic_platform.errors import NonFiniteError
from arctic_platform.rl.protocol import SamplingParams

CHUNK = 256
"""Vocabulary entries that are summed before the cumulative sum: two short searches instead of one long."""

FIRST_CANDIDATES = 256
"""Most probable tokens that top_p looks at first; eight times as many while they do not hold enough probability."""


@dataclass(frozen=True, eq=False)
class Draws:
    """`ids [R] int64` and `logprobs [R]`, fp32 (fp64 for fp64 logits)."""

    ids: Tensor
    logprobs: Tensor


def row_generators(prompts: Sequence[np.ndarray], *, n: int, seed: int) -> list[np.random.Generator]:
    """One generator per rollout, prompt-major, keyed by the seed, the prompt's ids and the rollout's number.

    Where a prompt occurs twice its rollouts are numbered on, so that they differ.
    """
    occurrences: Counter[bytes] = Counter()
    generators = []
    for prompt in prompts:
        digest = hashlib.blake2b(prompt.astype("<i8").tobytes(), digest_size=16).digest()
        key = int.from_bytes(digest, "little")
        for _ in range(n):
            sequence = np.random.SeedSequence((seed, key, occurrences[digest]))
            generators.append(np.random.Generator(np.random.Philox(sequence)))
            occurrences[digest] += 1
    return generators


def draw_tokens(logits: Tensor, uniforms: Tensor, params: SamplingParams) -> Draws:
    """Choose one token per row of `logits [R, V]`; uniforms: `[R] fp64` in [0, 1), unused at temperature 0.

    The log-prob is that of the token under the whole softmax of `logits / temperature` (`logits` at temperature 0),
    whatever top_k and top_p left to choose from; this is the trainer's definition. Raises NonFiniteError.
    """
    scaled = logits if logits.dtype == torch.float64 else logits.float()
    if params.temperature not in (0.0, 1.0):
        scaled = scaled / params.temperature
    weights, peak = _weights(scaled)
    chunk_sums = weights.sum(-1, dtype=torch.float64)
    total = chunk_sums.sum(-1)
    if not bool(torch.isfinite(total).all()):
        raise NonFiniteError("the model's logits are not finite; check the weights of the last update")
    if params.temperature == 0:
        ids = scaled.argmax(-1)
    elif params.top_p < 1 or params.top_k > 0:
        ids = _draw_filtered(scaled, total.log() + peak, uniforms, params)
    else:
        ids = _draw_any(weights, chunk_sums, uniforms)
    logprobs = scaled.gather(1, ids[:, None])[:, 0].double() - peak - total.log()
    return Draws(ids, logprobs.to(scaled.dtype))


def _weights(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """`exp(scaled - peak)` as `[R, chunks, CHUNK]`, padded with zeros, and `peak [R] fp64`, each row's maximum."""
    peak = scaled.amax(-1, keepdim=True)
    weights = torch.exp_(scaled - peak)
    missing = -weights.shape[1] % CHUNK
    weights = pad(weights, (0, missing)) if missing else weights
    return weights.unflatten(1, (-1, CHUNK)), peak[:, 0].double()


def _draw_any(weights: Tensor, chunk_sums: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse CDF over the whole vocabulary: first the chunk, then the token in it."""
    chunk, rest = _search(chunk_sums, uniforms * chunk_sums.sum(-1))
    inside = weights[torch.arange(len(chunk), device=chunk.device), chunk].double()
    return chunk * CHUNK + _search(inside, rest)[0]


def _search(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The first place whose cumulative weight exceeds target, and how far target reaches into it.

    `weights [R, C] fp64`, `target [R] fp64`. A place without weight is never chosen, whatever was rounded.
    """
    cumulative = weights.cumsum(-1)
    below_end = torch.nextafter(cumulative[:, -1], torch.zeros_like(target))
    target = torch.minimum(target, below_end)
    place = torch.searchsorted(cumulative, target[:, None], right=True)
    before = cumulative.gather(1, place) - weights.gather(1, place)
    return place[:, 0], (target - before[:, 0]).clamp_min_(0)


def _draw_filtered(scaled: Tensor, lse: Tensor, uniforms: Tensor, params: SamplingParams) -> Tensor:
    """The top_k most probable tokens, of these the fewest that hold top_p of their probability, then inverse CDF."""
    vocab_size = scaled.shape[1]
    is_top_k = 0 < params.top_k < vocab_size
    num = params.top_k if is_top_k else min(FIRST_CANDIDATES, vocab_size)
    while True:
        values, ids = scaled.topk(num, dim=-1)
        probs = torch.exp(values.double() - lse[:, None])
        if is_top_k:
            probs = probs / probs.sum(-1, keepdim=True)
        if is_top_k or num == vocab_size or bool((probs.sum(-1) >= params.top_p).all()):
            break
        num = min(8 * num, vocab_size)
    before = probs.cumsum(-1) - probs
    probs = probs * (before < params.top_p)
    place, _ = _search(probs, uniforms * probs.sum(-1))
    return ids.gather(1, place[:, None])[:, 0]
