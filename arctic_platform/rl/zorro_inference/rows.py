"""What the sampler knows of a request and of each of its rollouts while they are in work."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import numpy as np

from arctic_platform.rl.protocol import SamplingParams
from arctic_platform.rl.zorro_inference.cache import Segment
from arctic_platform.rl.zorro_inference.requests import FinishReason, SampleRequest
from arctic_platform.rl.zorro_inference.sampling import row_generators


@dataclass(eq=False)
class Job:
    """A request in work: `prompt [P] int64`, its rows, and the ids that end a row."""

    request: SampleRequest
    prompt: np.ndarray
    stop_ids: frozenset[int]
    rows: list[Row] = field(default_factory=list)

    @property
    def params(self) -> SamplingParams:
        """How its tokens are drawn."""
        return self.request.params

    @property
    def is_over(self) -> bool:
        """Every row has finished."""
        return all(row.finish_reason is not None for row in self.rows)


@dataclass(eq=False)
class Row:
    """One rollout: what was drawn so far. `path`: the end of its cached part, held; None before and after its work.

    `is_pure`: all its keys and values are of the weights under which its path was found.
    """

    job: Job
    number: int
    generator: np.random.Generator | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    path: Segment | None = None
    is_pure: bool = True

    def uniform(self) -> float:
        """The next number of its own in [0, 1); 0 at temperature 0."""
        return self.generator.random() if self.generator is not None else 0.0

    @property
    def context(self) -> np.ndarray:
        """The tokens whose keys and values the next step needs: all but the newest."""
        return np.concatenate([self.job.prompt, np.array(self.token_ids[:-1], np.int64)])

    @property
    def num_left(self) -> int:
        """Tokens that may still come."""
        return self.job.params.max_tokens - len(self.token_ids)

    def take(self, token_id: int, logprob: float) -> None:
        """One more token; it may be the last."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if token_id in self.job.stop_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.job.params.max_tokens:
            self.finish_reason = "length"


@dataclass(eq=False)
class Prefill:
    """Tokens whose keys and values some rows need: a prompt, or all that a row had when its own were given up.

    `ids [P] int64`; `path`: held while it is computed. Rows that have no token yet draw their first behind it.
    """

    ids: np.ndarray
    rows: list[Row]
    path: Segment | None = None

    @property
    def draws(self) -> bool:
        """Logits of the last token are needed."""
        return not self.rows[0].token_ids


def open_job(request: SampleRequest, prompt: np.ndarray, stop_ids: frozenset[int]) -> Job:
    """A job with its rows and their random numbers."""
    job, params = Job(request, prompt, stop_ids), request.params
    generators: list[np.random.Generator | None] = [None] * params.n
    if params.temperature > 0:
        seed = secrets.randbits(63) if params.seed is None else params.seed
        generators[:] = row_generators([prompt], n=request.first_rollout + params.n, seed=seed)[request.first_rollout :]
    job.rows = [Row(job, i, generator) for i, generator in enumerate(generators)]
    return job
