"""Forest cascade attention inside vLLM: what `vllm.general_plugins` calls in every process of an engine.

Off unless asked for: by the environment (`ARCTIC_RL_FCA=1`, for `vllm serve`), or by one engine's own
`additional_config={"arctic_rl_fca": True}`, which `sampling_engine: vllm` sets from `zorro_inference.vllm_fca`.
The attention classes that replace vLLM's are subclasses of the classes of one version, so other versions are refused.
"""

import os
from collections.abc import Mapping
from typing import Any

from arctic_platform.errors import ConfigError

KNOWN_VERSIONS = ("0.32.0",)
SWITCH = "ARCTIC_RL_FCA"
COST_SWITCH = "ARCTIC_RL_FCA_CALL_COST"
ENGINE_SWITCH = "arctic_rl_fca"
ENGINE_COST = "arctic_rl_fca_call_cost"

_PACKAGE = "arctic_platform.rl.zorro_inference"


def register() -> None:
    """The entry point: replace vLLM's attention where the environment asks for it."""
    if is_on_by_environment():
        install()


def install() -> None:
    """Replace vLLM's attention class for engines built from now on; those that are not switched on behave as before.

    Raises ConfigError for a vLLM version or a platform that this plugin does not know.
    """
    import vllm
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.attention.selector import _cached_get_attn_backend

    check_version(vllm.__version__)
    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{_PACKAGE}.vllm_cpu.ForestCPUBackend")
    elif current_platform.is_cuda():
        register_backend(AttentionBackendEnum.FLASH_ATTN, f"{_PACKAGE}.vllm_cuda.ForestFlashBackend")
    else:
        raise ConfigError(
            f"forest cascade attention in vLLM runs on CPU and CUDA, not on {current_platform.device_type!r}; "
            f"unset {SWITCH} and leave zorro_inference.vllm_fca false"
        )
    _cached_get_attn_backend.cache_clear()


def check_version(version: str) -> None:
    """Raise ConfigError for a version whose attention classes this plugin was not written against."""
    if version.split("+")[0] not in KNOWN_VERSIONS:
        raise ConfigError(
            f"forest cascade attention knows vLLM {', '.join(KNOWN_VERSIONS)}, installed is {version}; unset {SWITCH} "
            "and leave zorro_inference.vllm_fca false, or install a known version"
        )


def is_on_by_environment() -> bool:
    """Whether the environment switches the plugin on. Raises ConfigError for a value that is neither on nor off."""
    value = os.environ.get(SWITCH, "0")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{SWITCH}={value!r} is neither 1 (on) nor 0 (off)")
    return value == "1"


def is_on(additional_config: Mapping[str, Any]) -> bool:
    """Whether the engine with this `additional_config` uses forest cascade attention."""
    return bool(additional_config.get(ENGINE_SWITCH, is_on_by_environment()))


def call_cost(additional_config: Mapping[str, Any], default: int) -> int:
    """Tokens that a shared read must save: the engine's own setting, the environment's, or the default."""
    value = additional_config.get(ENGINE_COST, os.environ.get(COST_SWITCH, default))
    try:
        cost = int(value)
    except ValueError:
        cost = 0
    if cost < 1:
        raise ConfigError(f"{COST_SWITCH}={value!r} must be a number of tokens, 1 or more; {default} is the default")
    return cost
