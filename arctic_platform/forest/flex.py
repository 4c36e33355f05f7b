"""Forest attention as one FlexAttention call: the forest's mask is one line, windows and soft-caps another each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from arctic_platform.errors import ConfigError
from arctic_platform.forest.attention import ForestPlan, with_sinks
from arctic_platform.forest.kernels import acc_dtype


@dataclass(frozen=True, eq=False)
class FlexPlan(ForestPlan):
    """A forest for FlexAttention. On CPU it runs forward only: torch has no backward of it there."""

    @cached_property
    def subtree_end_of_token(self) -> Tensor:
        """`[T] int64`: where the subtree of each packed token's segment ends."""
        return torch.from_numpy(self.forest.subtree_end[self.forest.segment_of_token]).to(self.device)

    @cached_property
    def _block_masks(self) -> dict[int | None, BlockMask]:
        return {}

    def block_mask(self, sliding_window: int | None) -> BlockMask:
        """The forest's mask in blocks, built once for each window; positions, not packed indices, are counted."""
        if sliding_window not in self._block_masks:
            end, position, length = self.subtree_end_of_token, self.position_ids[0], self.forest.num_tokens
            window = sliding_window or length

            def sees(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return (k <= q) & (q < end[k]) & (position[q] - position[k] < window)

            self._block_masks[sliding_window] = create_block_mask(sees, None, None, length, length, device=self.device)
        return self._block_masks[sliding_window]

    def attend(
        self,
        layer_idx: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of the whole forest; see AttendPlan. Raises ConfigError for a backward on CPU."""
        if q.device.type == "cpu":
            if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
                raise ConfigError(
                    "attn_implementation=flex_attention has no backward on CPU in torch; use sdpa or eager there, or "
                    "score under torch.no_grad()"
                )
            q, k, v = (x.detach() for x in (q, k, v))
        out, lse = _flex(q.device.type)(
            q,
            k,
            v,
            score_mod=_softcapped(softcap) if softcap else None,
            block_mask=self.block_mask(sliding_window or None),
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
            return_lse=True,
        )
        if sinks is None:
            return out
        return with_sinks(out.to(acc_dtype(q.dtype)), lse, sinks)[0].to(q.dtype)


@cache
def _flex(device_type: str) -> Callable[..., Any]:
    """Fused by torch.compile on CUDA, lengths dynamic; plain on CPU, where it is a reference."""
    return flex_attention if device_type == "cpu" else torch.compile(flex_attention, dynamic=True)


@cache
def _softcapped(softcap: float) -> Callable[..., Tensor]:
    def score(score: Tensor, _b: Tensor, _h: Tensor, _q: Tensor, _k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return score
