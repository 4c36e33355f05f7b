"""What clients may send to the OpenAI-shaped endpoints, and the sampling parameters that it stands for.

Names and defaults are OpenAI's; what OpenAI does not have (top_k, min_p, return_token_ids, ...) has vLLM's name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from arctic_platform.errors import RequestError
from arctic_platform.rl.protocol import SamplingParams
from arctic_platform.rl.server.openai_body import Body

MAX_TOP_LOGPROBS = 20
MAX_ROLLOUTS = 4096
"""Most rollouts (prompts times n) of one request."""

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of /v1/completions; the other endpoints go on to the end of the context."""

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
NumTop = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
Prompts = list[str] | list[list[int]]
"""Texts, or rows of token ids."""


class StreamOptions(Body):
    """`include_usage`: a last event with the numbers of tokens. `continuous_usage_stats`: numbers in every event."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Sampling(Body):
    """The sampling parameters that every endpoint takes."""

    n: int = Field(1, ge=1, le=MAX_ROLLOUTS, description="Answers per prompt.")
    temperature: float = Field(1.0, ge=0.0, allow_inf_nan=False, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=-1, description="0 or -1: all tokens.")
    min_p: Probability = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: float = Field(1.0, gt=0.0, le=2.0)
    logit_bias: dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = Field(
        None, description="Token id (as text) to what is added to its logit."
    )
    bad_words: list[str] = Field([], description="Texts that must not occur in an answer.")
    min_tokens: int = Field(0, ge=0)
    stop: Annotated[
        list[str], WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})
    ] = Field([], description="Texts that end an answer.")
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = Field(True, description="Leave special tokens out of the text.")
    logprobs_mode: Literal["processed", "raw"] = Field(
        "processed", description="Log-probs at the request's temperature, or at temperature 1."
    )
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    prompt_logprobs: NumTop | None = Field(None, description="Log-probs of the prompt's tokens, with so many others.")

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_or_many(cls, value: Any) -> Any:
        stops = [value] if isinstance(value, str) else value
        if isinstance(stops, list) and "" in stops:
            raise RequestError("stop has an empty text; give texts of at least one character", param="stop")
        return stops

    @field_validator("logit_bias")
    @classmethod
    def _ids_are_numbers(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        wrong = [key for key in value or {} if not (key.isascii() and key.isdigit())]
        if wrong:
            raise RequestError(f"logit_bias has the key {wrong[0]!r}; keys are token ids", param="logit_bias")
        return value

    def params(self, *, max_tokens: int | None, logprobs: int | None, **more: Any) -> SamplingParams:
        """The sampler's parameters; those that were not given stay at the sampler's defaults."""
        given = self.model_dump(include=self.model_fields_set & set(Sampling.model_fields))
        given |= {"max_tokens": max_tokens} | more | ({"logprobs": logprobs} if logprobs is not None else {})
        given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        if self.logit_bias:
            given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        if self.seed is not None:
            given["seed"] = self.seed % 2**63
        return SamplingParams(**given)


class Request(Sampling):
    """What completions and chat completions have in common."""

    model: str | None = Field(None, description="The served model's name; none: the one there is.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    return_token_ids: bool = Field(False, description="Add token_ids of answers and prompt_token_ids.")
    return_tokens_as_token_ids: bool = Field(False, description="Name tokens in log-probs as token_id:N.")
    add_special_tokens: bool | None = Field(None, description="Let the tokenizer add BOS and the like.")
    request_id: str | None = Field(None, min_length=1, max_length=256, pattern=r"^[\w.:-]+$")

    @field_validator("stream_options", mode="before")
    @classmethod
    def _read_options(cls, value: Any) -> Any:
        return StreamOptions.from_object(value, "stream_options")

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Request:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream=true; leave it out", param="stream_options")
        return self


class CompletionRequest(Request):
    """POST /v1/completions."""

    prompt: Annotated[
        Prompts,
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "string"}},
                    {"type": "array", "items": {"type": "integer", "minimum": 0}},
                    {"type": "array", "items": {"type": "array", "items": {"type": "integer", "minimum": 0}}},
                ],
                "examples": ["Once upon a time"],
            }
        ),
    ] = Field(description="A text, several texts, token ids, or several lists of token ids.")
    max_tokens: int | None = Field(COMPLETION_MAX_TOKENS, ge=0, description="0 only with echo.")
    logprobs: NumTop | None = Field(None, description="Log-probs of the tokens, with so many others.")
    echo: bool = Field(False, description="Put the prompt before each answer.")

    @field_validator("prompt", mode="before")
    @classmethod
    def _read_prompt(cls, value: Any) -> Prompts:
        return read_prompts(value)

    @model_validator(mode="after")
    def _check_budget(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens is 0; give 1 or more, or echo=true to score the prompt", param="max_tokens")
        if self.n * len(self.prompt) > MAX_ROLLOUTS:
            raise RequestError(
                f"{len(self.prompt)} prompts times n={self.n} is above {MAX_ROLLOUTS} answers", param="n"
            )
        return self


class ChatMessage(Body):
    """One turn of a chat; `content` is text."""

    role: str = Field(min_length=1)
    content: str | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        for part in value:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise RequestError(
                    f"messages have content of type {kind!r}; only text is supported",
                    param="messages",
                    code="unsupported_content",
                )
        return "\n".join(part["text"] for part in value)

    @model_validator(mode="after")
    def _check_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise RequestError(f"a message of role {self.role!r} has no content; give it a text", param="messages")
        return self


class ChatRequest(Request):
    """POST /v1/chat/completions."""

    messages: Annotated[
        list[ChatMessage],
        WithJsonSchema(
            {
                "type": "array",
                "minItems": 1,
                "items": {"type": "object", "required": ["role"]},
                "examples": [[{"role": "user", "content": "Hello"}]],
            }
        ),
    ]
    max_tokens: int | None = Field(None, ge=1, description="The older name of max_completion_tokens.")
    max_completion_tokens: int | None = Field(None, ge=1, description="None: to the end of the context.")
    logprobs: bool = False
    top_logprobs: NumTop = Field(0, description="So many others per token; needs logprobs.")
    tools: list[dict[str, Any]] | None = Field(None, description="Given to the chat template.")
    tool_choice: Literal["none", "auto"] = Field("auto", description="none: tools are not shown to the model.")
    reasoning_effort: str | None = Field(None, description="Given to the chat template.")
    chat_template_kwargs: dict[str, Any] = Field({}, description="Given to the chat template.")
    documents: list[dict[str, Any]] | None = Field(None, description="Given to the chat template.")
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    echo: bool = Field(False, description="Put the last message before the answer, when the answer continues it.")

    @field_validator("messages", mode="before")
    @classmethod
    def _read_messages(cls, value: Any) -> Any:
        if not isinstance(value, list) or not value:
            raise RequestError("messages must be a list of at least one message", param="messages")
        return [ChatMessage.from_object(one, f"messages.{place}") for place, one in enumerate(value)]

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _refuse_forced_tools(cls, value: Any) -> Any:
        if value == "required" or isinstance(value, dict):
            raise RequestError(
                "tool_choice that forces a call is not supported: answers cannot be constrained here; use auto or none",
                param="tool_choice",
                code="unsupported_parameter",
            )
        return value

    @model_validator(mode="after")
    def _check_together(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
        if (
            self.continue_final_message
            and "add_generation_prompt" in self.model_fields_set
            and self.add_generation_prompt
        ):
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other; send one",
                param="continue_final_message",
            )
        if self.echo and not self.continue_final_message:
            raise RequestError("echo needs continue_final_message=true here", param="echo")
        return self

    @property
    def budget(self) -> int | None:
        """Most tokens of an answer: the smaller one where both names are given, none where neither is."""
        given = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return min(given, default=None)


class GenerateSampling(Sampling):
    """`sampling_params` of /inference/v1/generate, with vLLM's names."""

    max_tokens: int | None = Field(None, ge=1, description="None: to the end of the context.")
    logprobs: NumTop | None = None


class GenerateRequest(Body):
    """POST /inference/v1/generate: token ids in, token ids out; no tokenizer takes part."""

    token_ids: list[int] = Field(json_schema_extra={"examples": [[1, 2, 3]]})
    sampling_params: GenerateSampling
    model: str | None = None
    request_id: str | None = Field(None, min_length=1, max_length=256, pattern=r"^[\w.:-]+$")
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = Field(False, description="Add prompt_token_ids.")

    @field_validator("token_ids", mode="before")
    @classmethod
    def _read_ids(cls, value: Any) -> Any:
        return read_prompts(value, param="token_ids", kinds=(int,))[0]

    @field_validator("sampling_params", mode="before")
    @classmethod
    def _read_sampling(cls, value: Any) -> Any:
        return GenerateSampling.from_object(value, "sampling_params")

    @field_validator("stream_options", mode="before")
    @classmethod
    def _read_options(cls, value: Any) -> Any:
        return StreamOptions.from_object(value, "stream_options")


class TokenizeRequest(Body):
    """POST /tokenize: a text, or messages as the chat endpoint would show them to the model."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False

    @field_validator("messages", mode="before")
    @classmethod
    def _read_messages(cls, value: Any) -> Any:
        return ChatRequest._read_messages(value)

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("give either prompt or messages", param="prompt")
        return self


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


def read_prompts(value: Any, *, param: str = "prompt", kinds: tuple[type, ...] = (str, int)) -> Prompts:
    """Every accepted spelling as a list of texts or a list of rows of token ids.

    Raises:
        RequestError: nothing is in it, kinds are mixed, or it is something else.
    """
    rows = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    if kinds == (int,) and isinstance(value, list):
        rows = [value]
    for place, row in enumerate(rows):
        where = param if len(rows) == 1 else f"{param}[{place}]"
        if row == "" or row == []:
            raise RequestError(f"{where} is empty; give at least one token", param=param, code="empty_prompt")
        is_text = isinstance(row, str) and str in kinds
        if not is_text and not (isinstance(row, list) and all(type(token) is int for token in row)):
            accepted = "a text or a list of token ids" if str in kinds else "a list of token ids"
            raise RequestError(f"{where} is neither empty nor {accepted}", param=param, code="invalid_value")
    if len({isinstance(row, str) for row in rows}) > 1:
        raise RequestError(f"{param} mixes texts and token ids; send two requests", param=param)
    return rows
