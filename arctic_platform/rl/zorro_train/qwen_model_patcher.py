"""The documented entry point that prepares a model for deduplicated training."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from arctic_platform.rl.zorro_train.logprobs import LogitsMode
from arctic_platform.rl.zorro_train.module_patcher import ModuleReconstructionPatcher


class Qwen3ModelOncePatcher(ModuleReconstructionPatcher):
    """`ModuleReconstructionPatcher` under its documented name and argument order; not limited to Qwen3.

        Qwen3ModelOncePatcher(model, response_len=512, max_token_len=4096, rollout_n=8, temperature=1.0,
                              logits_optimization="none", world_size=1).patch_forward()
        output = model(input_ids, position_ids, attention_mask, use_cache=False, calculate_entropy=True)

    Args:
        model, response_len, max_token_len, rollout_n, temperature, logits_optimization, world_size: see the base.
        use_unpad: the packed pass never holds padding, so False changes no value and is warned about.
        options: the keywords of the base (attn_implementation, use_split_attention, granularity, ...).
    """

    def __init__(
        self,
        model: nn.Module,
        response_len: int | None = None,
        max_token_len: int | None = None,
        rollout_n: int | None = None,
        temperature: float = 1.0,
        logits_optimization: LogitsMode = "none",
        world_size: int = 1,
        *,
        use_unpad: bool = True,
        **options: Any,
    ) -> None:
        if not use_unpad:
            warnings.warn("use_unpad=False has no effect: the packed pass never holds padding", stacklevel=2)
        super().__init__(
            model,
            response_len,
            max_token_len,
            rollout_n,
            temperature,
            logits_optimization,
            world_size,
            **options,
        )
