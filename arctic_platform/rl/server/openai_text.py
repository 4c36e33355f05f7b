"""Text and chats to token ids, and token ids to text, with the tokenizer and the chat template of the model.

The ids that were sampled are never encoded again: text is made of ids for the reader, and ids of text for prompts only.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from arctic_platform.errors import ConfigError, RequestError
from arctic_platform.rl.engines.models import TINY_RANDOM, quiet_transformers

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
TOKENS_KEPT = 65_536
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class TokenText:
    """One token by itself: its bytes, and what of them can be read (U+FFFD for part of a character)."""

    text: str
    raw: bytes


@dataclass(frozen=True)
class Chat:
    """A conversation and what the template is told beside it; names are those of the request."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class Texts:
    """A model's tokenizer, one of transformers. Encoding keeps state in it: call an instance from one thread only."""

    def __init__(self, tokenizer: Any, *, chat_template: str | None = None) -> None:
        self.tokenizer: Any = tokenizer
        self._template = chat_template
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._byte_of = _byte_alphabet() if _is_byte_level(tokenizer) else {}
        self.token = lru_cache(TOKENS_KEPT)(self._token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids, without any tidying."""
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def render(self, chat: Chat) -> str:
        """The chat as the model is to read it.

        Raises:
            RequestError: there is no template, it does not read something that was given, or it refuses the messages.
        """
        template = self._chat_template(chat)
        self._refuse_unread(chat, template)
        kwargs = chat.template_kwargs or {}
        try:
            return self.tokenizer.apply_chat_template(
                chat.messages,
                tools=chat.tools,
                documents=chat.documents,
                chat_template=template,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                tokenize=False,
                **kwargs,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise RequestError(f"the chat template does not take these messages: {error}", param="messages") from error

    def _chat_template(self, chat: Chat) -> str:
        if self._template is not None:
            return self._template
        if self.tokenizer.chat_template is None:
            raise RequestError(
                "this model has no chat template; use /v1/completions, or start the server with --chat-template FILE",
                code="no_chat_template",
            )
        return self.tokenizer.get_chat_template(tools=chat.tools)

    def _refuse_unread(self, chat: Chat, template: str) -> None:
        given = {"tools": chat.tools, "documents": chat.documents, **(chat.template_kwargs or {})}
        for name, value in given.items():
            if value is not None and re.search(rf"\b{re.escape(name)}\b", template) is None:
                raise RequestError(
                    f"{name} would have no effect: this model's chat template does not read it; leave it out",
                    param=name,
                    code="unsupported_parameter",
                )

    def _token(self, token_id: int) -> TokenText:
        piece = self.tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:
            return TokenText("", b"")
        raw = self._bytes(token_id, piece)
        return TokenText(raw.decode("utf-8", errors="replace"), raw)

    def _bytes(self, token_id: int, piece: str) -> bytes:
        if token_id in self._special_ids:
            return piece.encode()
        if self._byte_of:
            return b"".join(self._byte_of.get(char, char.encode()) for char in piece)
        byte = _BYTE_TOKEN.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace("\u2581", " ").encode()


def load_texts(folder: str, *, chat_template: Path | None = None) -> Texts | None:
    """The tokenizer that lies beside a model, or None where there is none.

    Raises:
        ConfigError: its files, or the template's, cannot be read.
    """
    is_bare = Path(folder).is_dir() and not any((Path(folder) / name).is_file() for name in TOKENIZER_FILES)
    if is_bare or folder == TINY_RANDOM:
        return None
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the tokenizer of {folder!r} cannot be loaded: {error}") from error
    try:
        template = chat_template.read_text(encoding="utf-8") if chat_template else None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template={str(chat_template)!r} cannot be read: {error}; give a Jinja file") from error
    return Texts(tokenizer, chat_template=template)


def _is_byte_level(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = json.loads(backend.to_str()).get("decoder") if backend is not None else None
    return "ByteLevel" in json.dumps(decoder)


def _byte_alphabet() -> dict[str, bytes]:
    """The printable character that byte-level tokenizers write for each byte (GPT-2's table), inverted."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    chars = {chr(byte): bytes([byte]) for byte in printable}
    return chars | {chr(256 + place): bytes([byte]) for place, byte in enumerate(others)}
