"""One rollout while it is drawn: what it holds, and when it ends."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from arctic_platform.rl.protocol import Rollout
from arctic_platform.rl.zorro_inference.requests import FinishReason
from arctic_platform.rl.zorro_inference.rules import RowRules
from arctic_platform.rl.zorro_inference.stop_strings import RolloutText

TopLogprobs = dict[int, float]


@dataclass(eq=False)
class OpenRollout:
    """Tokens drawn so far, and the end once it has come.

    `generator` gives one uniform number per token, None where greedy. `max_tokens`: at which it ends. `text`: None
    where the sampler has no tokenizer.
    """

    rules: RowRules
    generator: np.random.Generator | None
    max_tokens: int
    text: RolloutText | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] | None = None
    prompt_logprobs: list[TopLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def is_finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None

    def uniform(self) -> float:
        """The number that the next token is drawn by, in [0, 1)."""
        return 0.0 if self.generator is None else self.generator.random()

    def append(self, token: int, logprob: float, top: TopLogprobs | None) -> None:
        """Take a token in, and end where a stop token, a stop text or the length says so."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if top is not None:
            self.top_logprobs = self.top_logprobs or []
            self.top_logprobs.append(top)
        self.rules.append(token)
        is_stop = token in self.rules.request.stop_ids
        if self.text is not None:
            self.text.append(token, is_stop=is_stop)
        if is_stop:
            self.end("stop", self.rules.request.stop_reason(token))
        elif self.text is not None and self.text.stop_string is not None:
            self.end("stop", self.text.stop_string)
        elif len(self.token_ids) == self.max_tokens:
            self.end("length")

    def end(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """No token follows; the last character may complete a stop text."""
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self.text is not None:
            self.text.finish()
            if reason == "length" and self.text.stop_string is not None:
                self.finish_reason, self.stop_reason = "stop", self.text.stop_string

    def new_text(self) -> str | None:
        """Text that can be given out since the last call; None where there is no text at all."""
        return None if self.text is None else self.text.release()

    def as_rollout(self, prompt_index: int) -> Rollout:
        """The finished rollout as a message."""
        assert self.finish_reason is not None
        return Rollout(
            prompt_index=prompt_index,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            text=None if self.text is None else self.text.text,
            top_logprobs=self.top_logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )
