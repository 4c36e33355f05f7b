"""Forest attention as one opaque operator, `arctic_platform::attend`, for models under torch.compile.

A compiler must not see a batch: segment bounds as Python numbers would be baked into the graph, and every step would
compile anew. Here they travel as tensors on the CPU, the operator lays the forest out by itself, and the graph knows
lengths only. Importing this module registers the operator.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arctic_platform.forest.attention import ForestPlan, differentiate_sinks, with_sinks
from arctic_platform.forest.backends import plan_of
from arctic_platform.forest.kernels import acc_dtype
from arctic_platform.forest.trie import Forest

_LIBRARY = torch.library.Library("arctic_platform", "DEF")
_FOREST = "Tensor bounds, Tensor positions, str implementation, float scale, int window, float softcap"
_LIBRARY.define(f"attend(Tensor q, Tensor k, Tensor v, Tensor? sinks, {_FOREST}) -> (Tensor, Tensor)")
_LIBRARY.define(
    f"attend_backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? sinks, {_FOREST}) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)


def _plan(bounds: Tensor, positions: Tensor, implementation: str, device: torch.device) -> ForestPlan:
    return _layout(bounds.numpy().tobytes(), positions.numpy().tobytes(), implementation, device)


@lru_cache(maxsize=16)
def _layout(bounds: bytes, positions: bytes, implementation: str, device: torch.device) -> ForestPlan:
    """A plan from its bounds and positions alone; it is a function of their values, so it cannot be a stale one."""
    start, end, subtree_end, segment_parent = np.frombuffer(bytearray(bounds), np.int64).reshape(4, -1)
    depths = np.frombuffer(bytearray(positions), np.int64)
    nothing = np.empty(0, np.int64)
    forest = Forest(
        input_ids=depths,
        position_ids=depths,
        parent=nothing,
        start=start,
        end=end,
        subtree_end=subtree_end,
        segment_parent=segment_parent,
        row_index=nothing,
        row_offsets=nothing,
    )
    return plan_of(implementation, forest, device)


@torch.library.impl(_LIBRARY, "attend", "CompositeExplicitAutograd")
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    bounds: Tensor,
    positions: Tensor,
    implementation: str,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """`(out [1, H, T, Dv], lse [1, H, T])`; window and softcap 0: none."""
    plan = _plan(bounds, positions, implementation, q.device)
    rule = plan.rule(q, v, scale=scale, sliding_window=window or None, softcap=softcap or None)
    out, lse = with_sinks(*plan.run(q, k, v, rule), sinks)
    return out.to(q.dtype).contiguous(), lse.contiguous()


@torch.library.impl(_LIBRARY, "attend_backward", "CompositeExplicitAutograd")
def _attend_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    bounds: Tensor,
    positions: Tensor,
    implementation: str,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`(dq, dk, dv, dsinks)`, the last empty without sinks."""
    plan = _plan(bounds, positions, implementation, q.device)
    rule = plan.rule(q, v, scale=scale, sliding_window=window or None, softcap=softcap or None)
    d_q, d_k, d_v = plan.differentiate(do.contiguous(), q, k, v, out, lse, rule)
    d_sinks = q.new_empty(0) if sinks is None else differentiate_sinks(do, out, lse, sinks)
    d_q, d_k, d_v = (d.to(x.dtype).contiguous() for d, x in ((d_q, q), (d_k, k), (d_v, v)))
    return d_q, d_k, d_v, d_sinks


@torch.library.register_fake("arctic_platform::attend")
def _attend_fake(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *_: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=acc_dtype(q.dtype))


@torch.library.register_fake("arctic_platform::attend_backward")
def _attend_backward_fake(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_sinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_sinks


def _keep(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, bounds, positions, *options = inputs
    ctx.save_for_backward(q, k, v, *output, sinks, bounds, positions)
    ctx.options = options


def _differentiate(ctx: Any, do: Tensor, _d_lse: Tensor | None):
    *tensors, sinks, bounds, positions = ctx.saved_tensors
    grads = torch.ops.arctic_platform.attend_backward(do, *tensors, sinks, bounds, positions, *ctx.options)
    return (*grads[:3], None if sinks is None else grads[3], *[None] * 6)


torch.library.register_autograd("arctic_platform::attend", _differentiate, setup_context=_keep)
