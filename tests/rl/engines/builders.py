"""Small configs and batches for the tests of the engines and of the client."""

import numpy as np

from arctic_platform.rl.config import ArcticRLClientConfig
from arctic_platform.rl.protocol import RolloutBatch

VOCAB = 256


def config(**settings: object) -> ArcticRLClientConfig:
    """The built-in tiny model, at a rate at which a step shows."""
    given = {"model": "tiny-random", "optimizer": {"lr": 1e-2}, **settings}
    return ArcticRLClientConfig(**given)


def grouped_batch(seed: int = 0, num_groups: int = 2, group_size: int = 4, prompt_len: int = 12) -> RolloutBatch:
    """Groups of rows with one prompt each, behind a common start; answers of 0 to 6 tokens that partly agree."""
    draw = np.random.default_rng(seed)
    common = draw.integers(3, VOCAB, prompt_len // 2).tolist()
    prompts, responses = [], []
    for _ in range(num_groups):
        prompt = common + draw.integers(3, VOCAB, prompt_len - len(common)).tolist()
        start = draw.integers(3, VOCAB, 2).tolist()
        for member in range(group_size):
            prompts.append(prompt)
            responses.append((start if member % 2 else []) + draw.integers(3, VOCAB, int(draw.integers(0, 5))).tolist())
    responses[0] = [5, 6, 7]
    return RolloutBatch(prompts=prompts, responses=responses, advantages=draw.normal(size=len(prompts)).tolist())


def part_of(batch: RolloutBatch, rows: list[int]) -> RolloutBatch:
    """Some rows of a batch."""
    fields = {name: value for name, value in batch if value is not None}
    return RolloutBatch(**{name: [value[row] for row in rows] for name, value in fields.items()})
