"""Texts that end a rollout, and the text of a rollout while it grows.

Tokens are not characters: one character may take several tokens, one token may hold the end of a stop text and what
follows it, and some tokenizers spell a token by what stands before it. So the text is decoded in a window that starts
where it was whole the last time, and nothing is given out that could still change or still become a stop text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tokenizers
from transformers import PreTrainedTokenizerBase

from arctic_platform.errors import InputError
from arctic_platform.rl.protocol import SamplingParams

Tokenizer = tokenizers.Tokenizer | PreTrainedTokenizerBase

PROMPT_TOKENS = 5
"""Last tokens of the prompt that the first tokens of a rollout are decoded behind."""

UNFINISHED = "\ufffd"
"""What a decoder writes for the bytes of a character that is not complete."""


class RolloutText:
    """The text of one rollout. `stop_string` is the stop text that ended it, None so far.

    Special tokens have no text, unless the request keeps them. After the end, `text` lacks the stop text or the stop
    token, unless the request keeps those. Of several stop texts the one that is complete first ends the rollout, then
    the one named first; how the text was cut into tokens makes no difference.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_ids: Sequence[int] | np.ndarray) -> None:
        self.text = ""
        self.stop_string: str | None = None
        self._tokenizer = tokenizer
        self._params = params
        self._ids = [int(token) for token in prompt_ids[-PROMPT_TOKENS:]]
        self._window, self._read = 0, len(self._ids)
        self._num_tokens = 0
        self._num_released = 0
        self._is_finished = False

    def append(self, token: int, *, is_stop: bool = False) -> None:
        """Take a token in, and look for a stop text if there is one to look for. is_stop: a token that ends it."""
        if not (is_stop and not self._params.include_stop_str_in_output):
            self._ids.append(token)
        self._num_tokens += 1
        if self._params.stop:
            self._take(self._decoded())

    def finish(self) -> None:
        """No token follows: what was held back is text now, an unfinished character included."""
        self._is_finished = True
        self._take(self._decoded())

    def release(self) -> str:
        """Text that is certain by now and was not given out yet."""
        self._take(self._decoded())
        is_over = self._is_finished or self.stop_string is not None
        held = 0 if is_over or self._params.include_stop_str_in_output else held_back(self.text, self._params.stop)
        released = self.text[self._num_released : len(self.text) - held]
        self._num_released += len(released)
        return released

    def _decoded(self) -> str:
        """Text of the tokens that are new since it was whole the last time; empty while a character is unfinished."""
        if self._read == len(self._ids):
            return ""
        skip = self._params.skip_special_tokens
        known = decode(self._tokenizer, self._ids[self._window : self._read], skip_special_tokens=skip)
        text = decode(self._tokenizer, self._ids[self._window :], skip_special_tokens=skip)
        if text.endswith(UNFINISHED) and not self._is_finished:
            return ""
        self._window, self._read = self._read, len(self._ids)
        return text.removeprefix(known) if text.startswith(known) else text[len(known.rstrip(UNFINISHED)) :]

    def _take(self, new: str) -> None:
        """Add text and look for a stop text that ends in it; before min_tokens none counts."""
        if self.stop_string is not None:
            return
        start = len(self.text)
        self.text += new
        if not new or self._num_tokens <= self._params.min_tokens:
            return
        found = first_stop(self.text, self._params.stop, start)
        if found is not None:
            self.stop_string, begin = found
            keeps_it = self._params.include_stop_str_in_output
            self.text = self.text[: begin + len(self.stop_string) if keeps_it else begin]


def first_stop(text: str, stop: Sequence[str], start: int) -> tuple[str, int] | None:
    """The stop text that is complete first behind `text[:start]`, and where it begins; None if there is none."""
    best: tuple[int, str] | None = None
    for candidate in stop:
        begin = text.find(candidate, max(0, start + 1 - len(candidate)))
        if begin >= 0 and (best is None or begin + len(candidate) < best[0]):
            best = begin + len(candidate), candidate
    return None if best is None else (best[1], best[0] - len(best[1]))


def held_back(text: str, stop: Sequence[str]) -> int:
    """Characters at the end of `text` that may be the beginning of a stop text."""
    longest = max((len(candidate) for candidate in stop), default=0)
    for num in range(min(longest - 1, len(text)), 0, -1):
        if any(len(candidate) > num and text.endswith(candidate[:num]) for candidate in stop):
            return num
    return 0


def decode(tokenizer: Tokenizer, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """The text of token ids, without any tidying that depends on what follows."""
    if isinstance(tokenizer, tokenizers.Tokenizer):
        return tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
    text = tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def encode_bad_words(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Token ids of each word as it stands at the start of a text and, where that is one more spelling, behind a space.

    The second counts where it begins with another token and has as many, as in vLLM. Raises InputError for a word
    without tokens.
    """
    encoded: list[tuple[int, ...]] = []
    for word in dict.fromkeys(words):
        plain, spaced = (_encode(tokenizer, prefix + word.lstrip()) for prefix in ("", " "))
        if not plain:
            raise InputError(f"bad_words has {word!r}, which the tokenizer turns into no token; leave it out")
        encoded.append(plain)
        if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
            encoded.append(spaced)
    return tuple(encoded)


def _encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    found = tokenizer.encode(text, add_special_tokens=False)
    return tuple(found.ids if isinstance(found, tokenizers.Encoding) else found)
