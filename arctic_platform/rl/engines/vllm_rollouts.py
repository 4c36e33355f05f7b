"""What vLLM's requests bring, step by step, put together to the rollouts of one call."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from arctic_platform.errors import NonFiniteError
from arctic_platform.rl.protocol import GenerateResponse, Rollout, SamplingParams

Finish = Literal["stop", "length", "abort"]


@dataclass
class Part:
    """What has come of one rollout."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float] | None] | None = None
    text: str = ""
    finish: Finish | None = None
    stop_reason: int | str | None = None
    num_cached: int = 0

    def add(self, output: Any) -> None:
        """What one step brought."""
        new = output.outputs[0]
        if not self.token_ids:
            self.num_cached = output.num_cached_tokens or 0
        if output.prompt_logprobs and self.prompt_logprobs is None:
            self.prompt_logprobs = [None if by_id is None else _values(by_id) for by_id in output.prompt_logprobs]
        reported = [_values(by_id) for by_id in new.logprobs or ()]
        logprobs = [by_id[token] for token, by_id in zip(new.token_ids, reported, strict=True)]
        if not math.isfinite(sum(logprobs)):
            raise NonFiniteError("the model's logits are not finite; check the weights of the last update")
        self.token_ids += new.token_ids
        self.logprobs += logprobs
        self.top_logprobs += reported
        self.text += new.text
        self.finish, self.stop_reason = new.finish_reason, new.stop_reason


class Call:
    """The rollouts of one call of `generate`."""

    def __init__(self, prompts: list[list[int]], params: SamplingParams, *, version: int) -> None:
        self.rollouts = [Part() for _ in range(len(prompts) * params.n)]
        self.started = time.perf_counter()
        self._prompts, self._params, self._version = prompts, params, version
        self._prefill_seconds = 0.0

    @property
    def unfinished(self) -> list[str]:
        """Ids of the requests that are not done."""
        return [str(number) for number, part in enumerate(self.rollouts) if part.finish is None]

    @property
    def num_finished(self) -> int:
        """Rollouts that are done."""
        return len(self.rollouts) - len(self.unfinished)

    def take(self, output: Any) -> None:
        """Add what one step brought for one request."""
        part = self.rollouts[int(output.request_id)]
        if not part.token_ids:
            self._prefill_seconds = time.perf_counter() - self.started
        part.add(output)

    def response(self, *, has_text: bool) -> GenerateResponse:
        """The rollouts in the caller's order, and the metrics."""
        rollouts = [
            Rollout(
                prompt_index=number // self._params.n,
                token_ids=part.token_ids,
                logprobs=part.logprobs,
                finish_reason=part.finish or "abort",
                stop_reason=part.stop_reason if part.stop_reason in self._stops else None,
                text=part.text if has_text else None,
                top_logprobs=None if self._params.logprobs is None else part.top_logprobs,
                prompt_logprobs=part.prompt_logprobs,
            )
            for number, part in enumerate(self.rollouts)
        ]
        return GenerateResponse(rollouts=rollouts, weight_version=self._version, metrics=self._metrics())

    @property
    def _stops(self) -> tuple[int | str, ...]:
        """What a caller asked to stop at; the model's own end tokens are no reason to report."""
        return (*self._params.stop, *self._params.stop_token_ids)

    def _metrics(self) -> dict[str, float]:
        generated = sum(len(part.token_ids) - 1 for part in self.rollouts)
        naive = sum(len(prompt) for prompt in self._prompts) * self._params.n + generated
        cached = sum(part.num_cached for part in self.rollouts)
        return {
            "tokens_computed": float(naive - cached),
            "tokens_naive": float(naive),
            "kv_tokens_stored": float(naive - cached),
            "kv_tokens_naive": float(naive),
            "prefill_seconds": self._prefill_seconds,
            "decode_seconds": time.perf_counter() - self.started - self._prefill_seconds,
        }


def _values(by_id: Mapping[int, Any]) -> dict[int, float]:
    return {token: entry.logprob for token, entry in by_id.items()}
