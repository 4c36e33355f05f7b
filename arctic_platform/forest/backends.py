"""What each documented `attn_implementation` is: the plan that lays a forest out, and where it can run."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from arctic_platform.errors import ConfigError
from arctic_platform.forest.attention import ForestPlan
from arctic_platform.forest.flex import FlexPlan
from arctic_platform.forest.kernels import Kernel
from arctic_platform.forest.trie import Forest
from arctic_platform.forest.varlen import VarlenPlan

AttnImplementation = Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"]
ATTN_IMPLEMENTATIONS: tuple[str, ...] = get_args(AttnImplementation)

KERNELS: dict[str, Kernel] = {name: "math" if name == "eager" else "flash" for name in ATTN_IMPLEMENTATIONS}
"""What each of them prefers for a single rectangle."""

PLANS: dict[str, type[ForestPlan]] = {
    "eager": ForestPlan,
    "sdpa": ForestPlan,
    "flash_attention_2": VarlenPlan,
    "flash_attention_3": VarlenPlan,
    "flex_attention": FlexPlan,
}


def plan_of(attn_implementation: str, forest: Forest, device: torch.device | str) -> ForestPlan:
    """The forest, laid out for an implementation that `check_implementation` accepts."""
    return PLANS[attn_implementation](forest, kernel=KERNELS[attn_implementation], device=device)


def check_implementation(name: str, device: torch.device | str, dtype: torch.dtype | None = None) -> None:
    """Raise ConfigError unless the implementation is known and can run on this device in this dtype.

    flash_attention_3 activates it in torch, for the process; it needs the package flash-attn-3 and a Hopper GPU.
    """
    if name not in ATTN_IMPLEMENTATIONS:
        raise ConfigError(
            f"attn_implementation={name!r} is not registered; choose one of {', '.join(ATTN_IMPLEMENTATIONS)}"
        )
    if not name.startswith("flash_attention"):
        return
    if torch.device(device).type != "cuda":
        raise ConfigError(f"attn_implementation={name} needs CUDA, the device is {device}; use sdpa or eager")
    if dtype in (torch.float32, torch.float64):
        raise ConfigError(f"attn_implementation={name} computes in bf16 or fp16, not {dtype}; use sdpa or eager")
    if name == "flash_attention_3":
        _activate_flash_attention_3()


def _activate_flash_attention_3() -> None:
    from torch.nn import attention

    try:
        if attention.current_flash_attention_impl() != "FA3":
            attention.activate_flash_attention_impl("FA3")
    except (AttributeError, ImportError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"attn_implementation=flash_attention_3 cannot be activated ({error}); install flash-attn-3 on a Hopper "
            "GPU, or use flash_attention_2"
        ) from error
