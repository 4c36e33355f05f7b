"""The embedded sampler: token ids in, token ids and log-probs out, every shared prompt token computed and stored once.

`plan_prompts` lays the prompts out as a forest. Prefill is one pass of the unmodified model over it, with the attention
of training; keys and values go to the PrefixCache, and each rollout draws its first token. Then every step is one pass
over the last tokens of the active rollouts with a DecodePlan as its attention; rollouts leave when they finish and
others join in their places.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import torch
import transformers
from numpy.typing import ArrayLike
from torch import Tensor
from transformers import PreTrainedModel

from arctic_platform.errors import ConfigError, InputError, UnsupportedModelError
from arctic_platform.forest import ATTENTION_NAME, ForestPlan, forest_attention_forward
from arctic_platform.forest.kernels import Kernel
from arctic_platform.rl.protocol import GenerateResponse, Rollout, SamplingParams
from arctic_platform.rl.zorro_inference.attention import DecodePlan, Readers
from arctic_platform.rl.zorro_inference.cache import CapturePlan, PrefixCache, SuffixCache
from arctic_platform.rl.zorro_inference.packed import PACK_AFTER_STEPS, packed_linears
from arctic_platform.rl.zorro_inference.plan import PromptForest, plan_prompts
from arctic_platform.rl.zorro_inference.probe import NEW_TOKENS, attention_of, check_rollouts, probe_prompts
from arctic_platform.rl.zorro_inference.requests import SampleRequest, SamplerStats, TokenDelta
from arctic_platform.rl.zorro_inference.sampling import draw_tokens, row_generators

transformers.AttentionInterface.register(ATTENTION_NAME, forest_attention_forward)

InFlight = Literal["keep", "recompute", "abort"]
"""What a weight update does to running rollouts: they go on over the keys and values that they have, compute them anew
with the new weights, or end."""

Progress = Callable[[int, int], None]
"""Called after every step with the number of finished rollouts and of all rollouts."""


class Sampler:
    """Samples from a Hugging Face causal LM with every shared prompt token prefilled once and stored once.

    model: its forward must be its own (not one that the trainer patched); it is put into eval mode, and onto the
    forest's attention, for the length of a call. eos_token_ids end a rollout unless a request ignores them.
    share=False decodes with the same code and kernels and every rollout as a root of its own: the fair comparison.
    max_batch_rows: rollouts that decode at once; the others wait for a place. attn_kernel: `flash`, or `math`.
    probe: sample three short rows at once, and refuse the model (UnsupportedModelError) unless they come out exactly.
    Raises ConfigError for a setting that is not one of these.

    Nothing is kept between calls: each one prefills anew, so new weights count from the next call on.
    `weight_version` is only reported; whoever updates the weights sets it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_ids: Sequence[int],
        share: bool = True,
        max_batch_rows: int = 64,
        attn_kernel: Kernel = "flash",
        probe: bool = True,
    ) -> None:
        if max_batch_rows < 1:
            raise ConfigError(f"max_batch_rows={max_batch_rows} must be 1 or more; 64 is the default")
        if attn_kernel not in get_args(Kernel):
            raise ConfigError(f"attn_kernel={attn_kernel!r} is not known; choose one of {', '.join(get_args(Kernel))}")
        self.model = model
        self.eos_token_ids = frozenset(int(token) for token in eos_token_ids)
        self.share = share
        self.max_batch_rows = max_batch_rows
        self.attn_kernel = attn_kernel
        self.weight_version = 0
        self.stats = SamplerStats()
        self._waiting: list[SampleRequest] = []
        self._outbox: list[TokenDelta] = []
        self._running: _Run | None = None
        self._is_paused = False
        if probe:
            self._probe()

    @property
    def vocab_size(self) -> int:
        """Ids that the model knows, 0 .. vocab_size - 1."""
        return self.model.config.get_text_config().vocab_size

    @property
    def max_row_len(self) -> int | None:
        """Tokens that a row may have, prompt and response; None where the model names no bound."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    @property
    def has_work(self) -> bool:
        """A step would do something."""
        return bool(self._outbox) or (not self._is_paused and bool(self._waiting or self._running))

    def add(self, request: SampleRequest) -> None:
        """Queue a request. Raises InputError, and leaves everything else as it is."""
        if any(request.request_id == other.request_id for other in self._waiting + self._in_flight):
            raise InputError(f"request_id={request.request_id!r} is in work already; give every request its own")
        self._checked([request.prompt_ids], request.params)
        self._waiting.append(request)

    def step(self) -> list[TokenDelta]:
        """Prefill what waits, or decode one token of every running rollout; the deltas since the last step."""
        if not self._is_paused and (self._waiting or self._running):
            with torch.no_grad(), _eval_mode(self.model), attention_of(self.model, ATTENTION_NAME):
                self._advance()
        deltas, self._outbox = self._outbox, []
        return deltas

    def abort(self, request_id: str) -> None:
        """End a request in any phase; the next step reports it. One that is not known is left alone."""
        for request in [other for other in self._waiting if other.request_id == request_id]:
            self._waiting.remove(request)
            self._outbox += [self._end_delta(request, j) for j in range(request.params.n)]
        if self._running is not None:
            self._running.abort(request_id)
            self._running = None if self._running.is_done else self._running

    def pause(self) -> None:
        """Stop decoding; running rollouts keep their places until `resume`."""
        self._is_paused = True

    def resume(self) -> None:
        """Go on after `pause`."""
        self._is_paused = False

    def update_weights(self, version: int, *, in_flight: InFlight = "keep") -> None:
        """The model's weights are now those of `version`; what becomes of running rollouts is `in_flight`."""
        for request in self._in_flight if in_flight == "abort" else ():
            self.abort(request.request_id)
        self.weight_version = version

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""

    def generate(
        self, prompts: Sequence[ArrayLike], params: SamplingParams | None = None, progress: Progress | None = None
    ) -> GenerateResponse:
        """Sample `params.n` rollouts of every prompt, a non-empty list of token ids.

        Rollouts come prompt-major. A stop token is the last of `token_ids`, with its log-prob, and the finish reason
        is "stop". Raises InputError for what cannot be sampled, UnsupportedModelError for a model whose layers keep a
        state beside keys and values, NonFiniteError where logits are.
        """
        params = SamplingParams() if params is None else params
        ids = self._checked(prompts, params)
        plan = plan_prompts(ids, n=params.n, share=self.share)
        uniforms = _draw_uniforms(ids, params)[plan.rollout]
        with torch.no_grad(), _eval_mode(self.model), attention_of(self.model, ATTENTION_NAME):
            generation = _Generation(self, plan, params, uniforms, progress)
            generation.prefill()
            generation.decode()
        return generation.response()

    @property
    def _in_flight(self) -> list[SampleRequest]:
        return [] if self._running is None else self._running.requests

    def _advance(self) -> None:
        """Simple batching: requests of equal parameters start together when the ones before have finished."""
        if self._running is None:
            params = self._waiting[0].params
            chosen = [request for request in self._waiting if request.params == params]
            self._running = _Run(self, chosen)
            self._waiting = [request for request in self._waiting if request.params != params]
        deltas = self._running.step()
        self._outbox += deltas
        if self._running.is_done:
            self._running = None

    def _end_delta(self, request: SampleRequest, rollout: int) -> TokenDelta:
        return TokenDelta(request.request_id, rollout, [], [], "abort", self.weight_version)

    def _probe(self) -> None:
        prompts = probe_prompts(self.vocab_size)
        params = SamplingParams(max_tokens=NEW_TOKENS, seed=0, ignore_eos=True)
        with _eval_mode(self.model):
            check_rollouts(self.model, prompts, self.generate(prompts, params).rollouts)

    def _checked(self, prompts: Sequence[ArrayLike], params: SamplingParams) -> list[np.ndarray]:
        if not len(prompts):
            raise InputError("prompts is empty; give at least one list of token ids")
        limit = self.max_row_len
        ids = [_as_prompt(prompt, i, self.vocab_size) for i, prompt in enumerate(prompts)]
        for i, prompt in enumerate(ids):
            if limit is not None and len(prompt) + params.max_tokens > limit:
                raise InputError(
                    f"prompts[{i}] has {len(prompt)} tokens and max_tokens={params.max_tokens}, the model takes "
                    f"{limit} in all; shorten the prompt or lower max_tokens to {max(limit - len(prompt), 0)}"
                )
        for token in params.stop_token_ids:
            if not 0 <= token < self.vocab_size:
                raise InputError(f"stop_token_ids has {token}; the model's ids are 0..{self.vocab_size - 1}")
        return ids


@dataclass(eq=False)
class _Generation:
    """One call of `generate`. Rollouts are numbered in decode order; `plan.rollout` gives the caller's number."""

    sampler: Sampler
    plan: PromptForest
    params: SamplingParams
    uniforms: np.ndarray
    progress: Progress | None
    token_ids: np.ndarray = field(init=False)
    logprobs: np.ndarray = field(init=False)
    num_tokens: np.ndarray = field(init=False)
    is_stopped: np.ndarray = field(init=False)
    num_decoded: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def __post_init__(self) -> None:
        shape = (len(self.plan.rollout), self.params.max_tokens)
        self.token_ids, self.logprobs = np.zeros(shape, np.int64), np.zeros(shape, np.float64)
        self.num_tokens, self.is_stopped = np.zeros(shape[0], np.int64), np.zeros(shape[0], bool)
        self._stop_ids = np.array(sorted({*self.params.stop_token_ids, *self._eos_ids()}), np.int64)
        self._device = self.sampler.model.device
        self._prefix = PrefixCache(self.plan, self._device)

    @property
    def is_finished(self) -> np.ndarray:
        """`[N] bool`: stopped, or as long as asked for."""
        return self.is_stopped | (self.num_tokens == self.params.max_tokens)

    def prefill(self) -> None:
        """Run the prompt forest once, keep its keys and values, and draw every rollout's first token."""
        started = time.perf_counter()
        for step in self.plan.passes:
            plan = ForestPlan(step.forest, kernel=self.sampler.attn_kernel, device=self._device)
            rows = np.flatnonzero((self.plan.last >= step.start) & (self.plan.last < step.end))
            ends, which = np.unique(self.plan.last[rows] - step.start, return_inverse=True)
            capture = CapturePlan(plan, self._prefix, step)
            logits = self._logits(plan.input_ids, plan.position_ids, capture, keep=self._to_device(ends))
            for first in range(0, len(rows), self.sampler.max_batch_rows):
                some = slice(first, first + self.sampler.max_batch_rows)
                self._draw(rows[some], logits[self._to_device(which[some])])
        self._check_layers()
        self.prefill_seconds = time.perf_counter() - started

    def decode(self) -> None:
        """Step until every rollout has finished; they join in decode order as places become free."""
        started = time.perf_counter()
        waiting = np.flatnonzero(~self.is_finished)
        batch = _Batch.empty(min(self.sampler.max_batch_rows, len(waiting)))
        with ExitStack() as context:
            for step in itertools.count():
                waiting = batch.join(waiting)
                if not len(batch.active):
                    break
                if step == PACK_AFTER_STEPS:
                    context.enter_context(packed_linears(self.sampler.model, num_rows=len(batch.active)))
                self.step(batch)
                batch.leave(self.is_finished[batch.active])
        self.decode_seconds = time.perf_counter() - started

    def response(self) -> GenerateResponse:
        """The rollouts in the caller's order, and the metrics."""
        rollouts = [self._rollout(row) for row in np.argsort(self.plan.rollout)]
        return GenerateResponse(rollouts=rollouts, weight_version=self.sampler.weight_version, metrics=self._metrics())

    def _eos_ids(self) -> frozenset[int]:
        return frozenset() if self.params.ignore_eos else self.sampler.eos_token_ids

    def step(self, batch: _Batch) -> None:
        """One token for every active rollout."""
        active, suffix = batch.active, batch.suffix
        if batch.readers is None:
            batch.readers = Readers(self.plan, active, batch.slots, self._device)
        suffix.make_room()
        plan = DecodePlan(batch.readers, self._prefix, suffix, self.sampler.attn_kernel)
        last_tokens = self.token_ids[active, self.num_tokens[active] - 1]
        logits = self._logits(self._to_device(last_tokens)[None], self._to_device(plan.positions)[None], plan)
        suffix.lens[batch.slots] += 1
        self.num_decoded += len(active)
        self._draw(active, logits)

    def _logits(self, input_ids: Tensor, position_ids: Tensor, plan: object, keep: Tensor | int = 0) -> Tensor:
        """`[kept, V]`: all positions for keep=0, else those at packed indices `keep`."""
        out = self.sampler.model(
            input_ids=input_ids, position_ids=position_ids, forest=plan, use_cache=False, logits_to_keep=keep
        )
        return out.logits[0]

    def _draw(self, rows: np.ndarray, logits: Tensor) -> None:
        """Append one token to each of `rows` from `logits [len(rows), V]`."""
        uniforms = self._to_device(self.uniforms[rows, self.num_tokens[rows]])
        draws = draw_tokens(logits, uniforms, self.params)
        at = self.num_tokens[rows]
        self.token_ids[rows, at], self.logprobs[rows, at] = draws.ids.cpu().numpy(), draws.logprobs.cpu().numpy()
        self.num_tokens[rows] += 1
        self.is_stopped[rows] = np.isin(self.token_ids[rows, at], self._stop_ids)
        if self.progress is not None:
            self.progress(int(self.is_finished.sum()), len(self.is_finished))

    def _check_layers(self) -> None:
        config = self.sampler.model.config.get_text_config()
        if self._prefix.layers != list(range(config.num_hidden_layers)):
            raise UnsupportedModelError(
                f"{config.model_type} has {config.num_hidden_layers} layers, and {len(self._prefix.layers)} of them "
                "keep keys and values through transformers' attention registry; this sampler needs all of them to"
            )

    def _rollout(self, row: int) -> Rollout:
        num = self.num_tokens[row]
        return Rollout(
            prompt_index=int(self.plan.rollout[row]) // self.params.n,
            token_ids=self.token_ids[row, :num].tolist(),
            logprobs=self.logprobs[row, :num].tolist(),
            finish_reason="stop" if self.is_stopped[row] else "length",
        )

    def _metrics(self) -> dict[str, float]:
        prompt_tokens = int(self.plan.prompt_lens.sum())
        return {
            "tokens_computed": float(self._prefix.num_tokens + self.num_decoded),
            "tokens_naive": float(prompt_tokens + self.num_decoded),
            "kv_tokens_stored": float(self._prefix.num_tokens + self.num_decoded),
            "kv_tokens_naive": float(prompt_tokens + self.num_decoded),
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds,
        }

    def _to_device(self, x: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(self._device)


@dataclass(eq=False)
class _Batch:
    """The rollouts that decode now: `active [R] int64`, ascending, and their suffix slots `[R] int64`.

    `readers` plans their attention calls; it is None after somebody joined or left.
    """

    suffix: SuffixCache
    active: np.ndarray
    slots: np.ndarray
    readers: Readers | None = None

    @classmethod
    def empty(cls, num_slots: int) -> _Batch:
        """A batch with places and nobody in them."""
        return cls(SuffixCache(num_slots), np.empty(0, np.int64), np.empty(0, np.int64))

    def join(self, waiting: np.ndarray) -> np.ndarray:
        """Take the first of those who wait, as far as there are places; the rest is returned."""
        num = min(self.suffix.num_slots - len(self.active), len(waiting))
        if num:
            self.active = np.append(self.active, waiting[:num])
            self.slots = np.append(self.slots, [self.suffix.add() for _ in range(num)])
            self.readers = None
        return waiting[num:]

    def leave(self, is_done: np.ndarray) -> None:
        """Drop finished rollouts, `is_done [R] bool`; the last slots move into theirs."""
        if not is_done.any():
            return
        for slot in sorted(self.slots[is_done].tolist(), reverse=True):
            self.slots[self.slots == self.suffix.remove(slot)] = slot
        self.active, self.slots, self.readers = self.active[~is_done], self.slots[~is_done], None


class _Run:
    """Requests of equal parameters that started together."""

    def __init__(self, sampler: Sampler, requests: list[SampleRequest]) -> None:
        self.requests = requests
        params = requests[0].params
        prompts = [np.asarray(request.prompt_ids, np.int64) for request in requests]
        plan = plan_prompts(prompts, n=params.n, share=sampler.share)
        uniforms = _draw_uniforms(prompts, params)[plan.rollout]
        self._sampler = sampler
        self._generation = _Generation(sampler, plan, params, uniforms, None)
        self._batch: _Batch | None = None
        self._reported = np.zeros(len(plan.rollout), np.int64)
        self._is_over = np.zeros(len(plan.rollout), bool)

    @property
    def is_done(self) -> bool:
        """Every rollout has finished."""
        return bool(self._is_over.all())

    def step(self) -> list[TokenDelta]:
        """The prefill first, then a token for every active rollout."""
        generation = self._generation
        if self._batch is None:
            generation.prefill()
            self._batch = _Batch.empty(min(self._sampler.max_batch_rows, len(self._is_over)))
        else:
            self._batch.join(np.setdiff1d(np.flatnonzero(~self._is_over), self._batch.active))
            generation.step(self._batch)
        deltas = self._deltas()
        self._is_over |= generation.is_finished
        self._batch.leave(self._is_over[self._batch.active])
        return deltas

    def abort(self, request_id: str) -> None:
        """End the rollouts of one request."""
        generation, n = self._generation, self._generation.params.n
        for row in np.flatnonzero(~self._is_over):
            i, j = divmod(int(generation.plan.rollout[row]), n)
            if self.requests[i].request_id == request_id:
                self._sampler._outbox.append(self._sampler._end_delta(self.requests[i], j))
                self._is_over[row] = True
        if self._batch is not None:
            self._batch.leave(self._is_over[self._batch.active])

    def _deltas(self) -> list[TokenDelta]:
        generation, deltas = self._generation, []
        for row in np.flatnonzero((generation.num_tokens > self._reported) & ~self._is_over):
            i, j = divmod(int(generation.plan.rollout[row]), generation.params.n)
            new = slice(self._reported[row], generation.num_tokens[row])
            reason = None
            if generation.is_finished[row]:
                reason = "stop" if generation.is_stopped[row] else "length"
            deltas.append(
                TokenDelta(
                    self.requests[i].request_id,
                    j,
                    generation.token_ids[row, new].tolist(),
                    generation.logprobs[row, new].tolist(),
                    reason,
                    self._sampler.weight_version,
                )
            )
            self._reported[row] = generation.num_tokens[row]
        return deltas


@contextmanager
def _eval_mode(model: PreTrainedModel) -> Generator[None]:
    """The model in eval mode; afterwards every module as it was."""
    in_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in in_training:
            module.training = True


def _as_prompt(prompt: ArrayLike, i: int, vocab_size: int) -> np.ndarray:
    try:
        ids = np.asarray(prompt)
    except ValueError:
        raise InputError(f"prompts[{i}] must be a flat list of integer token ids, got a nested one") from None
    if ids.size == 0:
        raise InputError(f"prompts[{i}] is empty; give at least one token id (a BOS token, say)")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise InputError(f"prompts[{i}] must be a flat list of integer token ids, got {ids.dtype} of {ids.ndim} axes")
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise InputError(f"prompts[{i}] has token id {wrong}; the model's ids are 0..{vocab_size - 1}")
    return ids.astype(np.int64)


def _draw_uniforms(prompts: list[np.ndarray], params: SamplingParams) -> np.ndarray:
    """`[prompts * n, max_tokens] fp64` in [0, 1): one number per token that may be drawn, zeros at temperature 0."""
    if params.temperature == 0:
        return np.zeros((len(prompts) * params.n, params.max_tokens))
    seed = secrets.randbits(63) if params.seed is None else params.seed
    return np.stack(
        [generator.random(params.max_tokens) for generator in row_generators(prompts, n=params.n, seed=seed)]
    )
