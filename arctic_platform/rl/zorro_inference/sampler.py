"""The embedded sampler: token ids in, token ids and log-probs out, every shared prompt token computed and stored once.

    prompts --plan_prompts--> PromptForest --prefill (training attention)--> PrefixCache, first tokens
    then, step by step: DecodePlan over the active rollouts -> logits -> one token each; rollouts leave and join
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
import transformers
from numpy.typing import ArrayLike
from torch import Tensor, nn

from arctic_platform.errors import InputError, UnsupportedModelError
from arctic_platform.forest import ATTENTION_NAME, ForestPlan, forest_attention_forward
from arctic_platform.forest.kernels import Kernel
from arctic_platform.rl.protocol import GenerateResponse, Rollout, SamplingParams
from arctic_platform.rl.zorro_inference.attention import DecodePlan, Readers
from arctic_platform.rl.zorro_inference.cache import CapturePlan, PrefixCache, SuffixCache
from arctic_platform.rl.zorro_inference.plan import PromptForest, plan_prompts
from arctic_platform.rl.zorro_inference.sampling import draw_tokens, row_generators

transformers.AttentionInterface.register(ATTENTION_NAME, forest_attention_forward)

Progress = Callable[[int, int], None]
"""Called after every step with the number of finished rollouts and of all rollouts."""


class Sampler:
    """Samples from a Hugging Face causal LM with every shared prompt token prefilled once and stored once.

    model: its forward must be its own (not one that the trainer patched); it is put into eval mode, and onto the
    forest's attention, for the length of a call. eos_token_ids end a rollout unless a request ignores them.
    share=False decodes with the same code and kernels and every rollout as a root of its own: the fair comparison.
    max_batch_rows: rollouts that decode at once; the others wait for a place. attn_kernel: `flash`, or `math`.

    Nothing is kept between calls: each one prefills anew, so new weights count from the next call on.
    `weight_version` is only reported; whoever updates the weights sets it.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        eos_token_ids: Sequence[int],
        share: bool = True,
        max_batch_rows: int = 64,
        attn_kernel: Kernel = "flash",
    ) -> None:
        if max_batch_rows < 1:
            raise InputError(f"max_batch_rows={max_batch_rows} must be 1 or more")
        self.model = model
        self.eos_token_ids = frozenset(int(token) for token in eos_token_ids)
        self.share = share
        self.max_batch_rows = max_batch_rows
        self.attn_kernel = attn_kernel
        self.weight_version = 0

    @property
    def vocab_size(self) -> int:
        """Ids that the model can embed."""
        return self.model.get_input_embeddings().num_embeddings

    @property
    def max_row_len(self) -> int | None:
        """Tokens that a row may have, prompt and response; None where the model names no bound."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    @torch.no_grad()
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
        with self._prepared():
            generation = _Generation(self, plan, params, uniforms, progress)
            generation.prefill()
            generation.decode()
        return generation.response()

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

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        """The model in eval mode and on the forest's attention; afterwards as it was."""
        model = self.model
        was_training, attention = model.training, model.config._attn_implementation
        with ExitStack() as restore:
            if was_training:
                restore.callback(model.train)
                model.eval()
            if attention != ATTENTION_NAME:
                restore.callback(model.set_attn_implementation, attention)
                model.set_attn_implementation(ATTENTION_NAME)
            yield


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
        self._device = self.sampler.model.get_input_embeddings().weight.device
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
        suffix = SuffixCache(min(self.sampler.max_batch_rows, len(waiting)))
        active = slots = np.empty(0, np.int64)
        readers = None
        while len(waiting) or len(active):
            num_joining = min(suffix.num_slots - len(active), len(waiting))
            if num_joining:
                slots = np.append(slots, [suffix.add() for _ in range(num_joining)])
                active, waiting, readers = np.append(active, waiting[:num_joining]), waiting[num_joining:], None
            if readers is None:
                readers = Readers(self.plan, active, slots, self._device)
            self._step(readers, suffix)
            is_done = self.is_finished[active]
            if is_done.any():
                active, slots, readers = active[~is_done], _leave(suffix, slots, is_done), None
        self.decode_seconds = time.perf_counter() - started

    def response(self) -> GenerateResponse:
        """The rollouts in the caller's order, and the metrics."""
        rollouts = [self._rollout(row) for row in np.argsort(self.plan.rollout)]
        return GenerateResponse(
            rollouts=rollouts, weight_version=self.sampler.weight_version, metrics=self._metrics()
        )

    def _eos_ids(self) -> frozenset[int]:
        return frozenset() if self.params.ignore_eos else self.sampler.eos_token_ids

    def _step(self, readers: Readers, suffix: SuffixCache) -> None:
        """One token for every active rollout."""
        active = readers.active
        suffix.make_room()
        plan = DecodePlan(readers, self._prefix, suffix, self.sampler.attn_kernel)
        last_tokens = self.token_ids[active, self.num_tokens[active] - 1]
        logits = self._logits(self._to_device(last_tokens)[None], self._to_device(plan.positions)[None], plan)
        suffix.lens[readers.slots] += 1
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


def _leave(suffix: SuffixCache, slots: np.ndarray, is_done: np.ndarray) -> np.ndarray:
    """Free the slots of finished rollouts; the slots of those that stay, after the moves that keep them dense."""
    slots = slots.copy()
    for slot in sorted(slots[is_done].tolist(), reverse=True):
        slots[slots == suffix.remove(slot)] = slot
    return slots[~is_done]


def _as_prompt(prompt: ArrayLike, i: int, vocab_size: int) -> np.ndarray:
    ids = np.asarray(prompt)
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
    return np.stack([generator.random(params.max_tokens) for generator in row_generators(prompts, n=params.n, seed=seed)])
