"""What the OpenAI-shaped endpoints answer: whole replies and the events of a stream.

One class per endpoint; each says what a choice and an event look like, `Reply` what they have in common. A body is
built as the dict that becomes its JSON, as late as possible.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from arctic_platform.rl.protocol import SamplingParams
from arctic_platform.rl.server.openai_text import Texts, TokenText
from arctic_platform.rl.zorro_inference.requests import TokenDelta

LEAST_LOGPROB = -9999.0
"""OpenAI's value for "very unlikely": JSON has no -inf."""

TopLogprobs = dict[int, float]


@dataclass(frozen=True)
class Prompt:
    """A prompt as ids; `text` where it came as text or was asked for."""

    ids: list[int]
    text: str | None = None


@dataclass(eq=False)
class Answer:
    """One rollout so far. `num_chars`: characters of its tokens, for offsets."""

    index: int
    prompt: Prompt
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_version: int = 0
    prompt_logprobs: list[TopLogprobs | None] | None = None
    num_chars: int = 0

    def add(self, delta: TokenDelta) -> None:
        """Take in what a step added."""
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.top_logprobs += delta.top_logprobs or []
        self.text += delta.text or ""
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.weight_version = delta.weight_version
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs


@dataclass(frozen=True, eq=False)
class Reply:
    """What a whole request has in common. `num_top`: how many other tokens log-probs list; None: no log-probs."""

    request_id: str
    model: str
    texts: Texts | None
    params: SamplingParams
    num_top: int | None
    adds_token_ids: bool = False
    names_token_ids: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def token(self, token_id: int) -> TokenText:
        """How a token is named in log-probs."""
        if self.texts is None or self.names_token_ids:
            name = f"token_id:{token_id}"
            return TokenText(name, name.encode())
        return self.texts.token(token_id)

    def head(self, kind: str) -> dict[str, Any]:
        """The first fields of a reply or an event."""
        return {"id": self.request_id, "object": kind, "created": self.created, "model": self.model}

    def whole(self, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> dict[str, Any]:
        """The reply to a request without a stream."""
        raise NotImplementedError

    def opening(self, answer: Answer) -> list[dict[str, Any]]:
        """Events before an answer's first token."""
        return []

    def event(self, answer: Answer, delta: TokenDelta, is_first: bool) -> dict[str, Any]:
        """The event of one delta, already taken into `answer`."""
        raise NotImplementedError

    def last_event(self, usage: dict[str, int]) -> dict[str, Any]:
        """The event with the numbers of tokens."""
        raise NotImplementedError

    def chat_logprobs(self, ids: Iterable[int], logprobs: Iterable[float], tops: Sequence[TopLogprobs]) -> dict | None:
        """OpenAI's log-probs of chat completions, one entry per token."""
        if self.num_top is None:
            return None
        entries = []
        for place, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            entry = self._named(token_id, logprob)
            others = _most_probable(tops[place], self.num_top) if tops else []
            entries.append(entry | {"top_logprobs": [self._named(*other) for other in others]})
        return {"content": entries}

    def prompt_logprobs(self, values: Sequence[TopLogprobs | None] | None) -> list[dict[str, Any] | None] | None:
        """vLLM's log-probs of a prompt: for each token its own and the most probable ones; none for the first."""
        if values is None or self.params.prompt_logprobs is None:
            return None
        return [None if tops is None else self._ranked(tops, self.params.prompt_logprobs) for tops in values]

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        token = self.token(token_id)
        return {"token": token.text, "logprob": finite(logprob), "bytes": list(token.raw)}

    def _ranked(self, tops: TopLogprobs, num_top: int) -> dict[str, Any]:
        ordered = _most_probable(tops, len(tops))
        return {
            str(token_id): {
                "logprob": finite(logprob),
                "rank": place + 1 if place < num_top else None,
                "decoded_token": self.token(token_id).text,
            }
            for place, (token_id, logprob) in enumerate(ordered)
        }


@dataclass(frozen=True, eq=False)
class ChatReply(Reply):
    """/v1/chat/completions. `prefix`: the message that the answer continues, for echo."""

    prefix: str = ""

    def whole(self, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> dict[str, Any]:
        body = self.head("chat.completion") | {
            "choices": [self._choice(answer) for answer in answers],
            "usage": usage_of(prompts, answers),
            "prompt_logprobs": self.prompt_logprobs(answers[0].prompt_logprobs),
        }
        return body | ({"prompt_token_ids": prompts[0].ids} if self.adds_token_ids else {})

    def opening(self, answer: Answer) -> list[dict[str, Any]]:
        more = {"prompt_token_ids": answer.prompt.ids} if self.adds_token_ids else {}
        return [self._event(answer, {"role": "assistant", "content": self.prefix}, None, {}) | more]

    def event(self, answer: Answer, delta: TokenDelta, is_first: bool) -> dict[str, Any]:
        logprobs = self.chat_logprobs(delta.token_ids, delta.logprobs, delta.top_logprobs or [])
        more = {"token_ids": delta.token_ids} if self.adds_token_ids else {}
        return self._event(answer, {"content": delta.text or ""}, logprobs, more)

    def last_event(self, usage: dict[str, int]) -> dict[str, Any]:
        return self.head("chat.completion.chunk") | {"choices": [], "usage": usage}

    def _choice(self, answer: Answer) -> dict[str, Any]:
        choice = {
            "index": answer.index,
            "message": {"role": "assistant", "content": self.prefix + answer.text, "refusal": None},
            "logprobs": self.chat_logprobs(answer.token_ids, answer.logprobs, answer.top_logprobs),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            "weight_version": answer.weight_version,
        }
        return choice | ({"token_ids": answer.token_ids} if self.adds_token_ids else {})

    def _event(self, answer: Answer, delta: dict[str, str], logprobs: dict | None, more: dict) -> dict[str, Any]:
        choice = {
            "index": answer.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        return self.head("chat.completion.chunk") | {"choices": [choice | more | _at_the_end(answer)]}


@dataclass(frozen=True, eq=False)
class CompletionReply(Reply):
    """/v1/completions. With `echo` the prompt comes first, with its log-probs; `is_prompt_only`: and nothing else."""

    echo: bool = False
    is_prompt_only: bool = False

    def whole(self, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [self._choice(answer) for answer in answers]
        usage = usage_of(prompts, () if self.is_prompt_only else answers)
        return self.head("text_completion") | {"choices": choices, "usage": usage}

    def event(self, answer: Answer, delta: TokenDelta, is_first: bool) -> dict[str, Any]:
        new = Answer(answer.index, answer.prompt, num_chars=answer.num_chars)
        new.add(delta)
        choice = self._body(new, with_prompt=self.echo and is_first)
        answer.num_chars = new.num_chars
        if self.adds_token_ids and is_first:
            choice["prompt_token_ids"] = answer.prompt.ids
        return self.head("text_completion") | {"choices": [choice | _at_the_end(answer)]}

    def last_event(self, usage: dict[str, int]) -> dict[str, Any]:
        return self.head("text_completion") | {"choices": [], "usage": usage}

    def _choice(self, answer: Answer) -> dict[str, Any]:
        more = {
            "prompt_logprobs": self.prompt_logprobs(answer.prompt_logprobs),
            "weight_version": answer.weight_version,
        }
        if self.adds_token_ids:
            more["prompt_token_ids"] = answer.prompt.ids
        return self._body(answer, with_prompt=self.echo) | more

    def _body(self, answer: Answer, *, with_prompt: bool) -> dict[str, Any]:
        ids = [] if self.is_prompt_only else answer.token_ids
        text = "" if self.is_prompt_only else answer.text
        choice = {
            "index": answer.index,
            "text": (answer.prompt.text or "") + text if with_prompt else text,
            "logprobs": self._logprobs(answer, with_prompt) if self.num_top is not None else None,
            "finish_reason": "length" if self.is_prompt_only and answer.finish_reason else answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        return choice | ({"token_ids": ids} if self.adds_token_ids else {})

    def _logprobs(self, answer: Answer, with_prompt: bool) -> dict[str, list]:
        table: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if with_prompt:
            tops = answer.prompt_logprobs or [None] * len(answer.prompt.ids)
            for token_id, others in zip(answer.prompt.ids, tops, strict=True):
                self._note(table, answer, token_id, others.get(token_id) if others else None, others)
        if not self.is_prompt_only:
            tops = answer.top_logprobs or [None] * len(answer.token_ids)
            for token_id, logprob, others in zip(answer.token_ids, answer.logprobs, tops, strict=True):
                self._note(table, answer, token_id, logprob, others or {})
        return table

    def _note(
        self, table: dict[str, list], answer: Answer, token_id: int, logprob: float | None, others: TopLogprobs | None
    ) -> None:
        name = self.token(token_id).text
        table["tokens"].append(name)
        table["text_offset"].append(answer.num_chars)
        answer.num_chars += len(name)
        table["token_logprobs"].append(None if logprob is None else finite(logprob))
        if logprob is None:
            table["top_logprobs"].append(None)
            return
        tops = _most_probable(others or {}, self.num_top or 0)
        named = {self.token(other).text: finite(value) for other, value in reversed(tops)}
        table["top_logprobs"].append({name: finite(logprob)} | named)


class GenerateReply(Reply):
    """/inference/v1/generate: ids only; tokens are named token_id:N, as vLLM names them."""

    def whole(self, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> dict[str, Any]:
        body = {
            "request_id": self.request_id,
            "created": self.created,
            "model": self.model,
            "choices": [self._choice(answer) for answer in answers],
            "usage": usage_of(prompts, answers),
            "prompt_logprobs": self.prompt_logprobs(answers[0].prompt_logprobs),
            "kv_transfer_params": None,
        }
        return body | ({"prompt_token_ids": prompts[0].ids} if self.adds_token_ids else {})

    def event(self, answer: Answer, delta: TokenDelta, is_first: bool) -> dict[str, Any]:
        choice = {
            "index": answer.index,
            "token_ids": delta.token_ids,
            "logprobs": self.chat_logprobs(delta.token_ids, delta.logprobs, delta.top_logprobs or []),
            "finish_reason": delta.finish_reason,
        }
        return {"request_id": self.request_id, "choices": [choice | _at_the_end(answer)]}

    def last_event(self, usage: dict[str, int]) -> dict[str, Any]:
        return {"request_id": self.request_id, "choices": [], "usage": usage}

    def _choice(self, answer: Answer) -> dict[str, Any]:
        return {
            "index": answer.index,
            "token_ids": answer.token_ids,
            "logprobs": self.chat_logprobs(answer.token_ids, answer.logprobs, answer.top_logprobs),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            "weight_version": answer.weight_version,
        }


def usage_of(prompts: Iterable[Prompt], answers: Iterable[Answer]) -> dict[str, int]:
    """OpenAI's `usage`: every prompt counts once, however many answers it gets."""
    num_prompt = sum(len(prompt.ids) for prompt in prompts)
    num_answer = sum(len(answer.token_ids) for answer in answers)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_answer, "total_tokens": num_prompt + num_answer}


def finite(logprob: float) -> float:
    """A log-prob as JSON can say it."""
    return max(logprob, LEAST_LOGPROB)


def _at_the_end(answer: Answer) -> dict[str, int]:
    """The last event of an answer says which weights drew its last token."""
    return {} if answer.finish_reason is None else {"weight_version": answer.weight_version}


def _most_probable(tops: TopLogprobs, num: int) -> list[tuple[int, float]]:
    return sorted(tops.items(), key=lambda item: -item[1])[:num]
