"""From a parsed request to its answers: prompts to ids, ids through the sampler, deltas into replies. No HTTP in it."""

from __future__ import annotations

import asyncio
import copy
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from pydantic_core import from_json

from arctic_platform.errors import RequestError
from arctic_platform.rl.engines.models import eos_token_ids, load_model
from arctic_platform.rl.protocol import SamplingParams
from arctic_platform.rl.server.openai_metrics import SamplerMetrics
from arctic_platform.rl.server.openai_replies import (
    Answer,
    ChatReply,
    CompletionReply,
    GenerateReply,
    Prompt,
    Reply,
    usage_of,
)
from arctic_platform.rl.server.openai_schema import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    StreamOptions,
    TokenizeRequest,
)
from arctic_platform.rl.server.openai_settings import SamplingSettings
from arctic_platform.rl.server.openai_text import Chat, Texts, load_texts
from arctic_platform.rl.zorro_inference.requests import SampleRequest, TokenDelta
from arctic_platform.rl.zorro_inference.sampler import Sampler
from arctic_platform.rl.zorro_inference.stream import AsyncSampler

T = TypeVar("T")
PATIENCE_SECONDS = 0.01


@dataclass(frozen=True, eq=False)
class Plan:
    """A request that was understood: what goes to the sampler, and how the answer looks."""

    reply: Reply
    prompts: list[Prompt]
    params: SamplingParams
    options: StreamOptions


class Serving:
    """One model, served. `texts` is None where the model has no tokenizer: then only ids are taken and given."""

    def __init__(
        self, engine: AsyncSampler, *, names: tuple[str, ...], texts: Texts | None, metrics: SamplerMetrics
    ) -> None:
        self.engine = engine
        self.model_name = names[0]
        self.metrics = metrics
        self.created = int(time.time())
        self.in_flight: set[str] = set()
        self.admits = asyncio.Event()
        self.admits.set()
        self.is_draining = False
        self._names = names
        self._texts = texts
        self._tokenizer_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    @property
    def max_model_len(self) -> int | None:
        """Tokens of prompt and answer together, where the model names a bound."""
        return self.engine.sampler.max_row_len

    def close(self) -> None:
        """End the threads."""
        self.engine.close()
        self._tokenizer_thread.shutdown()

    def drain(self, seconds: float) -> bool:
        """Refuse new requests and wait for those that run; whether they ended within `seconds`. For any thread."""
        self.is_draining = True
        deadline = time.monotonic() + seconds
        while self.in_flight and time.monotonic() < deadline:
            time.sleep(PATIENCE_SECONDS)
        return not self.in_flight

    def num_unfetched(self) -> int:
        """Answers that nobody fetched: none, they are sent as soon as they are there."""
        return 0

    async def between_steps(self, work: Callable[[Sampler], T]) -> T:
        """The result of `work`, done in the sampler's own thread."""
        return await asyncio.wrap_future(self.engine.submit(work))

    async def plan_completion(self, request: CompletionRequest) -> Plan:
        """Raises RequestError for what cannot be sampled."""
        self.check_model(request.model)
        is_text = isinstance(request.prompt[0], str)
        if self._texts is None and (is_text or not request.return_token_ids):
            self._need_texts("text; send token ids and return_token_ids=true, or use /inference/v1/generate")
        prompts = await self._encode(request)
        is_prompt_only = request.max_tokens == 0
        params = request.params(
            max_tokens=1 if is_prompt_only else request.max_tokens,
            logprobs=request.logprobs or None,
            **_echoed_logprobs(request),
        )
        reply = CompletionReply(
            _new_id("cmpl", request.request_id),
            self.model_name,
            self._texts,
            params,
            request.logprobs,
            adds_token_ids=request.return_token_ids,
            names_token_ids=request.return_tokens_as_token_ids,
            echo=request.echo,
            is_prompt_only=is_prompt_only,
        )
        return self._plan(reply, prompts, request.stream_options, "prompt", 0 if is_prompt_only else None)

    async def plan_chat(self, request: ChatRequest) -> Plan:
        """Raises RequestError for what cannot be sampled."""
        self.check_model(request.model)
        texts = self._need_texts("chats; use /inference/v1/generate")
        chat = _chat_of(request)

        def encode() -> list[int]:
            return texts.encode(texts.render(chat), add_special_tokens=bool(request.add_special_tokens))

        prompt = Prompt(await self._tokenize(encode))
        num_top = request.top_logprobs if request.logprobs else None
        params = request.params(max_tokens=request.budget, logprobs=num_top or None)
        reply = ChatReply(
            _new_id("chatcmpl", request.request_id),
            self.model_name,
            texts,
            params,
            num_top,
            adds_token_ids=request.return_token_ids,
            names_token_ids=request.return_tokens_as_token_ids,
            prefix=(request.messages[-1].content or "") if request.echo else "",
        )
        return self._plan(reply, [prompt], request.stream_options, "messages")

    async def plan_generate(self, request: GenerateRequest) -> Plan:
        """Raises RequestError for what cannot be sampled."""
        self.check_model(request.model)
        sampling = request.sampling_params
        params = sampling.params(max_tokens=sampling.max_tokens, logprobs=sampling.logprobs or None)
        reply = GenerateReply(
            request.request_id or uuid.uuid4().hex,
            self.model_name,
            None,
            params,
            sampling.logprobs,
            adds_token_ids=request.return_token_ids,
        )
        return self._plan(reply, [Prompt(request.token_ids)], request.stream_options, "token_ids")

    async def answer(self, plan: Plan) -> dict:
        """The whole reply; cancelling it aborts the request."""
        answers: dict[int, Answer] = {}
        async with aclosing(self.deltas(plan)) as deltas:
            async for answer, _ in deltas:
                answers[answer.index] = answer
        return plan.reply.whole(plan.prompts, [answers[index] for index in sorted(answers)])

    async def events(self, plan: Plan) -> AsyncGenerator[dict]:
        """The events of a stream; closing the iterator aborts the request."""
        answers: dict[int, Answer] = {}
        async with aclosing(self.deltas(plan)) as deltas:
            async for answer, delta in deltas:
                is_first = answer.index not in answers
                answers[answer.index] = answer
                for event in plan.reply.opening(answer) if is_first else ():
                    yield self._with_usage(event, plan, answer)
                yield self._with_usage(plan.reply.event(answer, delta, is_first), plan, answer)
        if plan.options.include_usage:
            yield plan.reply.last_event(usage_of(plan.prompts, answers.values()))

    async def deltas(self, plan: Plan) -> AsyncGenerator[tuple[Answer, TokenDelta]]:
        """What the sampler draws, as it comes, with the answer that it belongs to."""
        n = plan.params.n
        answers = [Answer(index, plan.prompts[index // n]) for index in range(n * len(plan.prompts))]
        clocks = [self.metrics.clock() for _ in answers]
        requests = [
            SampleRequest(f"{plan.reply.request_id}-{place}", np.array(prompt.ids, np.int64), plan.params)
            for place, prompt in enumerate(plan.prompts)
        ]
        ids = {request.request_id for request in requests}
        await self.admits.wait()
        if ids & self.in_flight:
            raise RequestError("a request with this request_id is in work; give each its own", param="request_id")
        self.in_flight |= ids
        try:
            async with aclosing(_merged([self.engine.stream(request) for request in requests])) as merged:
                async for place, delta in merged:
                    if delta.error is not None:
                        raise delta.error
                    index = place * n + delta.rollout
                    answers[index].add(delta)
                    clocks[index].note(delta)
                    yield answers[index], delta
        except (GeneratorExit, asyncio.CancelledError):
            for clock in clocks:
                clock.give_up()
            raise
        finally:
            self.in_flight -= ids

    async def tokenize(self, request: TokenizeRequest) -> dict:
        """The ids of a text or a chat, as the other endpoints would make them."""
        self.check_model(request.model)
        texts = self._need_texts("text")

        def encode() -> list[int]:
            if request.prompt is not None:
                return texts.encode(request.prompt, add_special_tokens=request.add_special_tokens is not False)
            return texts.encode(texts.render(_chat_of(request)), add_special_tokens=bool(request.add_special_tokens))

        ids = await self._tokenize(encode)
        names = [texts.token(token_id).text for token_id in ids] if request.return_token_strs else None
        return {"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids, "token_strs": names}

    async def detokenize(self, request: DetokenizeRequest) -> dict:
        """The text of ids, special tokens included."""
        self.check_model(request.model)
        texts = self._need_texts("text")
        self._check_ids(request.tokens, "tokens")
        return {"prompt": await self._tokenize(lambda: texts.decode(request.tokens))}

    def _plan(
        self, reply: Reply, prompts: list[Prompt], options: StreamOptions | None, param: str, budget: int | None = None
    ) -> Plan:
        if self.is_draining:
            raise RequestError("the server is stopping and takes no new requests", status=503, code="server_stopping")
        num_new = reply.params.max_tokens if budget is None else budget
        for prompt in prompts:
            self._check_context(len(prompt.ids), num_new, param)
            self._check_ids(prompt.ids, param)
        return Plan(reply, prompts, reply.params, options or StreamOptions())

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self._names:
            raise RequestError(
                f"the model {name!r} does not exist; this server has {self.model_name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    def _check_context(self, num_prompt: int, num_new: int | None, param: str) -> None:
        limit = self.max_model_len
        if num_prompt == 0:
            raise RequestError(f"{param} has no tokens; give at least one", param=param, code="empty_prompt")
        if limit is None or num_prompt + (1 if num_new is None else num_new) <= limit:
            return
        asked = f" and {num_new} new ones are asked for" if num_new else ""
        fewer = f" or ask for at most {limit - num_prompt} new tokens" if num_prompt < limit else ""
        raise RequestError(
            f"This model's maximum context length is {limit} tokens; {param} has {num_prompt} tokens{asked}. Shorten "
            f"it{fewer}",
            param=param,
            code="context_length_exceeded",
        )

    def _check_ids(self, ids: list[int], param: str) -> None:
        vocab_size = self.engine.sampler.vocab_size
        wrong = next((token_id for token_id in ids if not 0 <= token_id < vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"{param} has token id {wrong}; the model's ids are 0..{vocab_size - 1}",
                param=param,
                code="invalid_value",
            )

    def _need_texts(self, what: str) -> Texts:
        if self._texts is None:
            raise RequestError(f"this model has no tokenizer, so the server takes no {what}", code="no_tokenizer")
        return self._texts

    async def _encode(self, request: CompletionRequest) -> list[Prompt]:
        texts, adds_special = self._texts, request.add_special_tokens is not False

        def encode() -> list[Prompt]:
            prompts = []
            for given in request.prompt:
                if isinstance(given, str):
                    assert texts is not None
                    prompts.append(Prompt(texts.encode(given, add_special_tokens=adds_special), given))
                else:
                    prompts.append(Prompt(given, texts.decode(given) if request.echo and texts is not None else None))
            return prompts

        return await self._tokenize(encode)

    async def _tokenize(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._tokenizer_thread, work)

    def _with_usage(self, event: dict, plan: Plan, answer: Answer) -> dict:
        if plan.options.continuous_usage_stats:
            return event | {"usage": usage_of([answer.prompt], [answer])}
        return event | {"usage": None} if plan.options.include_usage else event


def load_serving(settings: SamplingSettings) -> Serving:
    """Load a model and its tokenizer, and start the sampler's thread.

    Raises:
        ConfigError: something of it cannot be loaded. UnsupportedModelError: the sampler would not be exact.
    """
    model = load_model(settings.model, getattr(torch, settings.dtype), settings.device).requires_grad_(False).eval()
    texts = load_texts(settings.model, chat_template=settings.chat_template)
    sampler = Sampler(
        model,
        eos_token_ids=eos_token_ids(model),
        max_batch_rows=settings.max_batch_rows,
        kv_cache_tokens=settings.kv_cache_tokens,
        prefix_cache_policy=settings.prefix_cache_policy,
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        tokenizer=None if texts is None else copy.deepcopy(texts.tokenizer),
    )
    return Serving(AsyncSampler(sampler), names=settings.names, texts=texts, metrics=SamplerMetrics(sampler))


def _echoed_logprobs(request: CompletionRequest) -> dict[str, int]:
    """An echo with log-probs has those of the prompt too."""
    if not request.echo or request.logprobs is None:
        return {}
    return {"prompt_logprobs": max(request.logprobs, request.prompt_logprobs or 0)}


def _chat_of(request: ChatRequest | TokenizeRequest) -> Chat:
    kwargs = dict(request.chat_template_kwargs)
    documents, tools = None, request.tools
    if isinstance(request, ChatRequest):
        documents = request.documents
        tools = None if request.tool_choice == "none" else request.tools
        if request.reasoning_effort is not None:
            kwargs["reasoning_effort"] = request.reasoning_effort
    return Chat(
        [_template_message(message) for message in request.messages or ()],
        tools=tools or None,
        documents=documents,
        template_kwargs=kwargs,
        add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
        continue_final_message=request.continue_final_message,
    )


def _template_message(message: ChatMessage) -> dict:
    """As templates want it: content a text, arguments of tool calls an object."""
    told = message.model_dump(exclude_none=True) | {"content": message.content or ""}
    if message.tool_calls is not None:
        told["tool_calls"] = [_with_parsed_arguments(call) for call in message.tool_calls]
    return told


async def _merged(streams: Sequence[AsyncIterator[TokenDelta]]) -> AsyncGenerator[tuple[int, TokenDelta]]:
    """The items of several streams as they come, each with its stream's place; closing it closes them all."""
    arrived: asyncio.Queue[tuple[int, TokenDelta] | BaseException | None] = asyncio.Queue()

    async def pump(place: int, stream: AsyncIterator[TokenDelta]) -> None:
        try:
            async for delta in stream:
                arrived.put_nowait((place, delta))
            arrived.put_nowait(None)
        except Exception as error:
            arrived.put_nowait(error)

    pumps = [asyncio.create_task(pump(place, stream)) for place, stream in enumerate(streams)]
    try:
        num_open = len(pumps)
        while num_open:
            item = await arrived.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


def _with_parsed_arguments(call: dict) -> dict:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return call | {"function": function | {"arguments": from_json(function["arguments"])}}
    except ValueError:
        return call


def _new_id(kind: str, given: str | None) -> str:
    return f"{kind}-{given or uuid.uuid4().hex}"
