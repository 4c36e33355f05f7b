"""How a JSON body of the OpenAI-shaped endpoints is read, and what is refused in it.

A parameter that nothing here could give effect to is refused by its name, unless it is given the value that asks for
nothing; one that nobody knows is refused with the nearest known name.
"""

from __future__ import annotations

import difflib
from typing import Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from arctic_platform.errors import RequestError


class _Refusal(NamedTuple):
    """Values of a parameter that ask for nothing, and why any other is refused."""

    harmless: tuple[Any, ...]
    why: str


_TEXT_ONLY = "this server reads and writes text only"
_NO_CONSTRAINT = "answers cannot be constrained to a form here; ask for it in the prompt"
_REFUSED = {
    "suffix": _Refusal(("",), "insertion before a suffix is not offered; send the text before it only"),
    "best_of": _Refusal((1,), "answers are not ranked here; use n and rank them yourself"),
    "response_format": _Refusal(({"type": "text"},), _NO_CONSTRAINT),
    "structured_outputs": _Refusal((), _NO_CONSTRAINT),
    "guided_json": _Refusal((), _NO_CONSTRAINT),
    "guided_regex": _Refusal((), _NO_CONSTRAINT),
    "guided_choice": _Refusal((), _NO_CONSTRAINT),
    "guided_grammar": _Refusal((), _NO_CONSTRAINT),
    "functions": _Refusal(([],), "it was replaced by tools; send tools"),
    "function_call": _Refusal(("none",), "it was replaced by tool_choice; send tools"),
    "parallel_tool_calls": _Refusal(
        (True,), "the number of tool calls cannot be limited here; ask for it in the prompt"
    ),
    "audio": _Refusal((), _TEXT_ONLY),
    "modalities": _Refusal((["text"],), _TEXT_ONLY),
    "mm_processor_kwargs": _Refusal(({},), _TEXT_ONLY),
    "features": _Refusal((), _TEXT_ONLY),
    "content_parts": _Refusal(([],), _TEXT_ONLY),
    "prediction": _Refusal((), "predicted outputs are not offered; leave it out"),
    "web_search_options": _Refusal((), "there is no web search here; leave it out"),
    "store": _Refusal((False,), "nothing is stored here; leave it out"),
    "service_tier": _Refusal(("auto", "default"), "there is one tier; leave it out"),
    "verbosity": _Refusal(("medium",), "no model here is told of it; ask for it in the prompt"),
    "use_beam_search": _Refusal((False,), "answers are sampled; use n"),
    "length_penalty": _Refusal((1.0, 1), "it belongs to beam search, which is not offered"),
    "early_stopping": _Refusal((False,), "it belongs to beam search, which is not offered"),
    "allowed_token_ids": _Refusal(([],), "use logit_bias, or bad_words"),
    "logits_processors": _Refusal(([],), "use logit_bias, or bad_words"),
    "truncate_prompt_tokens": _Refusal((), "a prompt is never shortened here; shorten it before it is sent"),
    "prompt_embeds": _Refusal((), "send text or token ids"),
    "priority": _Refusal((0,), "requests are served in their order of arrival"),
    "kv_transfer_params": _Refusal(({},), "keys and values stay on this server"),
    "vllm_xargs": _Refusal(({},), "no extension here reads it"),
    "chat_template": _Refusal((), "the server's operator chooses the template, with --chat-template"),
    "thinking_token_budget": _Refusal((-1,), "use max_completion_tokens"),
    "output_kind": _Refusal((), "use stream"),
}
_LABELS = (
    *("user", "metadata", "safety_identifier", "prompt_cache_key", "session_id", "cache_salt"),
    *("detokenize", "routed_experts_prompt_start", "spaces_between_special_tokens"),
)
"""Parameters that change no answer here: names of a caller or a cache, and details of what is never returned."""


class Body(BaseModel):
    """A JSON body. `parse` is the only way in."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """Raises RequestError, which names the parameter, for everything that is not understood."""
        try:
            data = from_json(raw, allow_inf_nan=False)
        except ValueError as error:
            raise RequestError(f"the body is not JSON: {error}; send one JSON object") from None
        return cls.from_object(data)

    @classmethod
    def from_object(cls, data: Any, where: str = "") -> Self:
        """The same for a body that is read already; `where` is put before the names of parameters."""
        if not isinstance(data, dict):
            raise RequestError(
                f"{where or 'the body'} must be a JSON object, not {type(data).__name__}", param=where or None
            )
        known = {
            name: value for name, value in data.items() if value is not None and not _is_harmless(cls, name, value)
        }
        try:
            return cls.model_validate(known)
        except ValidationError as error:
            raise _request_error(error, cls, where) from None


def _is_harmless(cls: type[Body], name: str, value: Any) -> bool:
    if name in cls.model_fields:
        return False
    if name in _LABELS:
        return True
    if name not in _REFUSED:
        return False
    refusal = _REFUSED[name]
    if value in refusal.harmless:
        return True
    raise RequestError(f"{name} is not supported: {refusal.why}", param=name, code="unsupported_parameter")


def _request_error(error: ValidationError, cls: type[Body], where: str) -> RequestError:
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, RequestError):
        return cause
    names = [str(part) for part in first["loc"]]
    path = ".".join([where, *names] if where else names)
    if first["type"] == "extra_forbidden" and len(names) == 1:
        known = [*cls.model_fields, *_REFUSED]
        nearest = difflib.get_close_matches(names[0], known, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(cls.model_fields)}"
        return RequestError(f"unknown parameter {path}; {hint}", param=path, code="unknown_parameter")
    if first["type"] == "missing":
        return RequestError(f"{path} is missing", param=path, code="missing_required_parameter")
    given = repr(first["input"])
    given = given if len(given) <= 60 else f"{given[:57]}..."
    return RequestError(f"{path}: {_lower_first(first['msg'])} (given: {given})", param=path, code="invalid_value")


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
