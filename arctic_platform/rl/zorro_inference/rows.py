"""What the sampler knows of a request and of each of its rollouts while they are in work."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import numpy as np

from arctic_platform.errors import InputError
from arctic_platform.rl.protocol import SamplingParams
from arctic_platform.rl.zorro_inference.cache import Segment
from arctic_platform.rl.zorro_inference.requests import SampleRequest
from arctic_platform.rl.zorro_inference.rollout import OpenRollout
from arctic_platform.rl.zorro_inference.rules import RequestRules, RowRules
from arctic_platform.rl.zorro_inference.sampling import row_generators
from arctic_platform.rl.zorro_inference.stop_strings import RolloutText, Tokenizer


@dataclass(eq=False)
class Job:
    """A request in work: `prompt [P] int64` and its rows. `streams`: tokens are reported as they come.

    `error`: what was wrong with a row that had to be aborted.
    """

    request: SampleRequest
    prompt: np.ndarray
    streams: bool
    rows: list[Row] = field(default_factory=list)
    error: InputError | None = None

    @property
    def params(self) -> SamplingParams:
        """How its tokens are drawn."""
        return self.request.params

    @property
    def is_over(self) -> bool:
        """Every row has finished."""
        return all(row.rollout.is_finished for row in self.rows)


@dataclass(eq=False)
class Row:
    """One rollout in the forest. `path`: the end of its cached part, held; None before and after its work.

    `is_pure`: all its keys and values are of the weights under which its path was found.
    """

    job: Job
    number: int
    rollout: OpenRollout
    path: Segment | None = None
    is_pure: bool = True

    @property
    def context(self) -> np.ndarray:
        """The tokens whose keys and values the next step needs: all but the newest."""
        return np.concatenate([self.job.prompt, np.array(self.rollout.token_ids[:-1], np.int64)])


@dataclass(eq=False)
class Prefill:
    """Tokens whose keys and values some rows need: a prompt, or all that a row had when its own were given up.

    `ids [P] int64`; `path`: held while it is computed. Rows that have no token yet draw their first behind it.
    `reports`: log-probs of the prompt are asked for, so nothing of it is taken from the cache.
    """

    ids: np.ndarray
    rows: list[Row]
    reports: bool = False
    path: Segment | None = None

    @property
    def draws(self) -> bool:
        """Logits of the last token are needed."""
        return not self.rows[0].rollout.token_ids


def open_job(
    request: SampleRequest,
    prompt: np.ndarray,
    rules: RequestRules,
    *,
    max_tokens: int,
    tokenizer: Tokenizer | None,
    name: str,
    streams: bool,
) -> Job:
    """A job with its rows, each with its own random numbers; name: how errors call it."""
    job, params = Job(request, prompt, streams), request.params
    for number, generator in enumerate(_generators(request, prompt)):
        text = None if tokenizer is None else RolloutText(tokenizer, params, prompt)
        rollout = OpenRollout(RowRules(rules, prompt, name), generator, max_tokens, text)
        job.rows.append(Row(job, number, rollout))
    return job


def _generators(request: SampleRequest, prompt: np.ndarray) -> list[np.random.Generator | None]:
    params, first = request.params, request.first_rollout
    if params.temperature == 0:
        return [None] * params.n
    seed = secrets.randbits(63) if params.seed is None else params.seed
    return [*row_generators([prompt], n=first + params.n, seed=seed)[first:]]
