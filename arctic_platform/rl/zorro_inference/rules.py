"""What a request asks of its rollouts beyond a temperature and filters: penalties, biases, bans, ends.

`RequestRules` is worked out once per request, `RowRules` follows one rollout, `LogitEdits` applies the rules of many
rollouts to their logits in a few calls. A rollout that asks for none of it costs nothing here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from arctic_platform.errors import InputError
from arctic_platform.rl.protocol import SamplingParams
from arctic_platform.rl.zorro_inference.stop_strings import Tokenizer, encode_bad_words

LOGIT_LIMIT = 1e30
"""Penalties cannot take a logit beyond this, so that only a ban makes one infinite."""


@dataclass(frozen=True, eq=False)
class RequestRules:
    """A request's parameters against a model's vocabulary.

    `stop_ids` end a rollout, `eos_ids` among them unless they are ignored; `bad_words`: token ids of the request's.
    """

    params: SamplingParams
    vocab_size: int
    eos_ids: frozenset[int]
    bad_words: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(
        cls, params: SamplingParams, *, vocab_size: int, eos_token_ids: Collection[int], tokenizer: Tokenizer | None
    ) -> RequestRules:
        """Check and work out. Raises InputError for ids out of range, texts without a tokenizer, nothing left to draw.

        tokenizer: of `tokenizers` or transformers; None where the sampler has none.
        """
        _check_ids(params, vocab_size)
        for name in ("stop", "bad_words"):
            if getattr(params, name) and tokenizer is None:
                raise InputError(
                    f"{name} needs a tokenizer and this sampler has none; give stop_token_ids or logit_bias instead, "
                    "or make the sampler with tokenizer="
                )
        words = encode_bad_words(tokenizer, params.bad_words) if params.bad_words and tokenizer is not None else ()
        rules = cls(params, vocab_size, frozenset(map(int, eos_token_ids)), words)
        rules._check_something_is_left()
        return rules

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a rollout."""
        return frozenset(self.params.stop_token_ids) | (frozenset() if self.params.ignore_eos else self.eos_ids)

    @cached_property
    def banned_at_first(self) -> np.ndarray:
        """`int64`: tokens that are not drawn before `min_tokens`: what ends, and end tokens also where ignored."""
        return np.array(sorted({*self.params.stop_token_ids, *self.eos_ids}), np.int64)

    @cached_property
    def bias(self) -> tuple[np.ndarray, np.ndarray]:
        """`logit_bias` as ids `int64` and values `fp32`."""
        ids, values = list(self.params.logit_bias), list(self.params.logit_bias.values())
        with np.errstate(over="ignore"):
            return np.array(ids, np.int64), np.array(values, np.float64).astype(np.float32)

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that occurred weigh less or more."""
        params = self.params
        return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0

    @property
    def edits_logits(self) -> bool:
        """Whether logits are changed before anything is drawn."""
        return self.has_penalties or bool(self.params.logit_bias or self.bad_words or self.params.min_tokens)

    def max_new_tokens(self, prompt_len: int, max_row_len: int | None, *, name: str = "the prompt") -> int:
        """Most tokens of a rollout; max_row_len: of the model, None if it names none. Raises InputError."""
        wanted = self.params.max_tokens
        if max_row_len is None:
            if wanted is None:
                raise InputError("max_tokens=None needs a model that names its context; give max_tokens")
            return wanted
        left = max_row_len - prompt_len
        if left < (1 if wanted is None else wanted):
            remedy = f"shorten the prompt or lower max_tokens to {left}" if left > 0 else "shorten the prompt"
            raise InputError(
                f"{name} has {prompt_len} tokens and max_tokens={wanted}, the model takes {max_row_len} in all; "
                f"{remedy}"
            )
        return left if wanted is None else wanted

    def stop_reason(self, token: int) -> int | None:
        """What a rollout that ended with this token reports: the request's own stop token; None for an end token."""
        return token if token in self.params.stop_token_ids else None

    def _check_something_is_left(self) -> None:
        ids, values = self.bias
        banned = {*ids[values == -np.inf].tolist(), *(word[-1] for word in self.bad_words)}
        if self.params.min_tokens:
            banned |= set(self.banned_at_first.tolist())
        if len(banned) >= self.vocab_size:
            raise InputError(
                f"logit_bias, bad_words and min_tokens may together ban all {self.vocab_size} tokens; leave one to draw"
            )


@dataclass(eq=False)
class RowRules:
    """One rollout under its request's rules; `append` tells it what was drawn.

    `name`: how errors call the rollout. `prompt_ids [P] int64`. `tokens`: drawn so far; kept only where a rule reads
    them.
    """

    request: RequestRules
    prompt_ids: np.ndarray
    name: str = ""
    tokens: list[int] = field(default_factory=list)
    _place: dict[int, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        needs_prompt = self.request.params.repetition_penalty != 1
        self._seen = np.unique(self.prompt_ids) if needs_prompt else np.empty(0, np.int64)
        self._counts = np.zeros(len(self._seen), np.float32)
        if self.request.has_penalties:
            self._place = {token: at for at, token in enumerate(self._seen.tolist())}
        drawn, self.tokens = self.tokens, []
        for token in drawn:
            self.append(token)

    @property
    def params(self) -> SamplingParams:
        """The request's parameters."""
        return self.request.params

    def append(self, token: int) -> None:
        """Count a token that was drawn."""
        if not self.request.edits_logits:
            return
        self.tokens.append(token)
        if not self.request.has_penalties:
            return
        at = self._place.setdefault(token, len(self._seen))
        if at == len(self._seen):
            self._seen, self._counts = np.append(self._seen, token), np.append(self._counts, np.float32(0))
        self._counts[at] += 1

    @property
    def seen(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens that penalties weigh, `int64`, and how often each was drawn, `fp32`; 0: in the prompt only."""
        return self._seen, self._counts

    def banned(self) -> list[int]:
        """Tokens that must not be drawn now: ends before min_tokens, and what would complete a bad word."""
        ids = self.request.banned_at_first.tolist() if len(self.tokens) < self.params.min_tokens else []
        for *start, last in self.request.bad_words:
            if not start or self.tokens[-len(start) :] == start:
                ids.append(last)
        return ids


class LogitEdits:
    """The rules of several rollouts, applied together; row r of the logits belongs to `rows[r]`."""

    def __init__(self, rows: Sequence[RowRules], device: torch.device) -> None:
        self.rows = rows
        self._device = device
        self._penalised = [r for r, row in enumerate(rows) if row.request.has_penalties]
        params = [rows[r].params for r in self._penalised]
        self._penalties = np.array(
            [[p.repetition_penalty, p.presence_penalty, p.frequency_penalty] for p in params], np.float32
        ).reshape(-1, 3)
        biases = [row.request.bias for row in rows]
        self._bias = (
            self._to_device(np.repeat(np.arange(len(rows)), [len(ids) for ids, _ in biases])),
            self._to_device(np.concatenate([ids for ids, _ in biases])),
            self._to_device(np.concatenate([values for _, values in biases])),
        )

    def apply(self, logits: Tensor) -> Tensor:
        """Edited copy of `logits [R, V]`."""
        logits = logits.clone()
        at, ids, values = self._bias
        if len(ids):
            logits[at, ids] += values.to(logits.dtype)
        if self._penalised:
            self._penalise(logits)
        bans = [(r, token) for r, row in enumerate(self.rows) for token in row.banned()]
        if bans:
            at, ids = self._to_device(np.array(bans, np.int64).T)
            logits[at, ids] = -torch.inf
        return logits

    def _penalise(self, logits: Tensor) -> None:
        """Repetition first, then what is subtracted; only tokens that occurred are touched."""
        seen = [self.rows[r].seen for r in self._penalised]
        lens = [len(ids) for ids, _ in seen]
        at = self._to_device(np.repeat(self._penalised, lens))
        ids = self._to_device(np.concatenate([ids for ids, _ in seen]))
        counts = np.concatenate([counts for _, counts in seen])
        repetition, presence, frequency = np.repeat(self._penalties, lens, axis=0).T
        factor, less = self._to_device(repetition), self._to_device(frequency * counts + presence * (counts > 0))
        before = logits[at, ids]
        after = torch.where(before > 0, before / factor, before * factor) - less
        logits[at, ids] = torch.where(before.isinf(), before, after.clamp(-LOGIT_LIMIT, LOGIT_LIMIT))

    def _to_device(self, x: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(self._device)


def _check_ids(params: SamplingParams, vocab_size: int) -> None:
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise InputError(f"{name} has {token}; the model's ids are 0..{vocab_size - 1}")
    for name in ("logprobs", "prompt_logprobs"):
        num = getattr(params, name)
        if num is not None and num > vocab_size:
            raise InputError(f"{name}={num} is above the model's {vocab_size} tokens; -1 asks for all of them")
