"""Forest attention: one rectangle per segment, merged by log-sum-exp; exact forward and backward.

Depth-first packing makes every subtree one contiguous range. Query `q` sees key `k` exactly when
`k <= q < subtree_end[segment_of(k)]`, so segment n contributes one top-left-causal rectangle: the queries
`[start, subtree_end)` against the keys `[start, end)`. Its own tokens are causal, its descendants see it whole:

      keys  s s s  a a  x  y        rows s s s a a x  and  s s s a a y
    s       1
    s       1 1                     s: rectangle 7 x 3
    s       1 1 1
    a       1 1 1  1                a: rectangle 4 x 2
    a       1 1 1  1 1
    x       1 1 1  1 1  1           x: 1 x 1
    y       1 1 1  1 1     1        y: 1 x 1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from arctic_platform.errors import InputError
from arctic_platform.forest import native
from arctic_platform.forest.kernels import (
    Kernel,
    acc_dtype,
    merge_,
    pick_kernel,
    rectangle_backward,
    rectangle_forward,
    rectangle_merge_,
)
from arctic_platform.forest.packing import group_by_length, pad_rows
from arctic_platform.forest.recurrent import ForestRecurrence, RowsRecurrence, StatefulPlan
from arctic_platform.forest.trie import Forest

ATTENTION_NAME = "arctic_forest"
"""The name under which the attention below is registered with transformers."""

MAX_BATCHED_LEAF_LEN = 128
"""Leaves up to this length are attended in batches of similar length; longer ones gain nothing by it."""


class AttendPlan(Protocol):
    """What `model(..., forest=plan)` carries to every attention layer."""

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
        """`q [1, H, T, D]`, `k [1, K, T, D]`, `v [1, K, T, Dv]` -> `out [1, H, T, Dv]`."""
        ...


def forest_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    forest: AttendPlan | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function behind transformers' attention registry: `(out [1, T, H, Dv], None)`.

    The plan arrives as a keyword of the model call, so nothing global can go stale and checkpoint recomputation sees
    the plan of its own forward. Raises InputError where a call would be silently wrong: no plan, or dropout (a shared
    token would drop the same units for all its rows).
    """
    if attention_mask is not None:
        raise InputError(f"{type(module).__name__} builds a mask of its own, which the forest does not read")
    if forest is None:
        raise InputError(
            "this model is prepared for forest attention and was called without a plan; call it through its patcher, "
            "or undo the patch with unpatch_forward()"
        )
    if dropout:
        raise InputError(f"attention_dropout={dropout} cannot be shared between rows; set it to 0 or call model.eval()")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer_idx = int(getattr(module, "layer_idx", 0))
    out = forest.attend(
        layer_idx, query, key, value, scale=scale, sliding_window=sliding_window, softcap=softcap, sinks=s_aux
    )
    return out.transpose(1, 2).contiguous(), None


@dataclass(frozen=True, eq=False)
class ForestPlan(StatefulPlan):
    """A forest laid out for attention by rectangles on one device.

    kernel is what to prefer for a rectangle; tensors it cannot serve go to the math kernel.
    """

    forest: Forest
    kernel: Kernel = "flash"
    device: torch.device | str = "cpu"

    @cached_property
    def input_ids(self) -> Tensor:
        """`[1, T] int64`."""
        return torch.from_numpy(self.forest.input_ids).to(self.device).unsqueeze(0)

    @cached_property
    def position_ids(self) -> Tensor:
        """`[1, T] int64`: position in the row, not in the pack."""
        return torch.from_numpy(self.forest.position_ids).to(self.device).unsqueeze(0)

    @cached_property
    def rectangles(self) -> list[Rectangle]:
        """Every rectangle but those of batched leaves, in depth-first order."""
        forest = self.forest
        batched = set(np.concatenate([np.empty(0, np.int64), *self._leaf_groups]).tolist())
        bounds = zip(forest.start.tolist(), forest.end.tolist(), forest.subtree_end.tolist(), strict=True)
        return [Rectangle(*bound) for n, bound in enumerate(bounds) if n not in batched]

    @cached_property
    def leaf_batches(self) -> list[LeafBatch]:
        """Short leaves, stacked; the padding lies behind every real query, so causality hides it."""
        forest = self.forest
        batches = []
        for group in self._leaf_groups:
            runs = [np.arange(forest.start[n], forest.end[n]) for n in group]
            index, is_live = pad_rows(runs, pad_value=0)
            batches.append(LeafBatch(*(torch.from_numpy(x).to(self.device) for x in (index, is_live))))
        return batches

    @cached_property
    def _leaf_groups(self) -> list[np.ndarray]:
        """Segments to stack together: leaves of similar length."""
        lens = self.forest.end - self.forest.start
        leaves = np.flatnonzero(self.forest.is_leaf & (lens <= MAX_BATCHED_LEAF_LEN))
        return [leaves[group] for group in group_by_length(lens[leaves]) if len(group) > 1]

    @cached_property
    def recurrence(self) -> ForestRecurrence:
        """The same forest for layers that carry a state instead of attending."""
        return ForestRecurrence(self.forest, self.device)

    def window_mask(self, rect: Rectangle, sliding_window: int) -> Tensor | None:
        """`[Lq, Lk] bool`: the keys within the window of each query, counted in positions; None where all are."""
        position = self.position_ids[0]
        distance = position[rect.start : rect.subtree_end, None] - position[None, rect.start : rect.end]
        return None if int(distance.max()) < sliding_window else distance < sliding_window

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
        """Attention of the whole forest; see AttendPlan."""
        if torch.compiler.is_compiling():
            options = (*self.layout, self.implementation, scale, sliding_window or 0, softcap or 0.0)
            out = torch.ops.arctic_platform.attend(*equal_widths(q, k, v), sinks, *options)[0]
            return out[..., : v.shape[-1]]
        rule = self.rule(q, v, scale=scale, sliding_window=sliding_window, softcap=softcap)
        return attend_rectangles(q, k, v, sinks, self, rule)

    @property
    def implementation(self) -> str:
        """The `attn_implementation` that lays a forest out as this plan does."""
        return "eager" if self.kernel == "math" else "sdpa"

    @cached_property
    def layout(self) -> tuple[Tensor, Tensor]:
        """All that attention reads of the forest, on the CPU: bounds `[4, N] int64` and positions `[T] int64`."""
        forest = self.forest
        bounds = np.stack([forest.start, forest.end, forest.subtree_end, forest.segment_parent])
        return torch.from_numpy(bounds), torch.from_numpy(forest.position_ids)

    def rule(self, q: Tensor, v: Tensor, *, scale: float, sliding_window: int | None, softcap: float | None) -> Rule:
        """What this call asks of every rectangle."""
        return Rule(scale, sliding_window or None, softcap, pick_kernel(self.kernel, q, q, softcap=softcap))

    def run(self, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
        """Merged `out [1, H, T, Dv]` and `lse [1, H, T]`, both in the accumulation dtype."""
        return _attend_forest(q, k, v, self, rule)

    def differentiate(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`(dq, dk, dv)` of `run` in the accumulation dtype, given the final out and lse."""
        return _differentiate_forest(do, q, k, v, out, lse, self, rule)

    def held_mask(self, n: int, sliding_window: int | None) -> Tensor | None:
        """The window on the n-th held run of keys; an ordinary plan has none, see held.py."""
        raise NotImplementedError


@dataclass(frozen=True)
class Rectangle:
    """The queries `[start, subtree_end)` against the keys `[start, end)`."""

    start: int
    end: int
    subtree_end: int


@dataclass(frozen=True, eq=False)
class LeafBatch:
    """Stacked leaves: packed indices `[b, L] int64`, right-padded, and which of them are real `[b, L] bool`."""

    index: Tensor
    is_live: Tensor

    @cached_property
    def rows(self) -> Tensor:
        """`[b * L] int64`: packed indices, -1 for padding."""
        return self.index.masked_fill(~self.is_live, -1).flatten()


@dataclass(frozen=True)
class Rule:
    """What one attention call asks of every rectangle."""

    scale: float
    sliding_window: int | None
    softcap: float | None
    kernel: Kernel

    def merge_(
        self,
        out: Tensor,
        lse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        *,
        causal: bool = True,
    ) -> None:
        """One rectangle, merged in place into what its queries have seen elsewhere."""
        rectangle_merge_(
            out, lse, q, k, v, scale=self.scale, causal=causal, kernel=self.kernel, mask=mask, softcap=self.softcap
        )

    def merge_leaves_(self, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, leaves: LeafBatch) -> None:
        """Stacked leaves, each against itself, of packed `out`, `lse`, q, k and v."""
        index, is_live, mask = leaves.index, leaves.is_live, _leaf_mask(leaves.index, self)
        keys, values = _stack(k, index), _stack(v, index)
        if self.kernel == "flash" and native.serves(q, keys, values):
            rows = (x.transpose(1, 2) for x in (out, lse, q))
            mask = mask if mask is None else mask.unsqueeze(0)
            named = {"rows": leaves.rows, "num_queries": index.shape[1]}
            native.attend_(*rows, keys, values, **named, scale=self.scale, mask=mask, causal=True, merge=True)
            return
        stacked = _stack(q, index), keys, values
        part_out, part_lse = rectangle_forward(
            *stacked, scale=self.scale, causal=True, kernel=self.kernel, mask=mask, softcap=self.softcap
        )
        live = index[is_live]
        out_live, lse_live = out[:, :, live], lse[:, :, live]
        merge_(out_live, lse_live, _unstack(part_out, is_live), _unstack(part_lse, is_live))
        out[:, :, live], lse[:, :, live] = out_live, lse_live

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | None,
        *,
        causal: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One rectangle's `(dq, dk, dv)`."""
        return rectangle_backward(
            do, q, k, v, out, lse, scale=self.scale, causal=causal, kernel=self.kernel, mask=mask, softcap=self.softcap
        )


def attend_rectangles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    plan: ForestPlan,
    rule: Rule,
    held: Sequence[tuple[Tensor, Tensor]] = (),
) -> Tensor:
    """Attention by rectangles, `out [1, H, T, Dv]`; every query also sees the `held` pairs of k and v."""
    flat, v_width = [x for pair in held for x in pair], v.shape[-1]
    if rule.kernel == "flash" and q.shape[-1] != v_width:
        q, k, v, *flat = equal_widths(q, k, v, *flat)
    return _ForestAttention.apply(q, k, v, sinks, plan, rule, *flat)[..., :v_width]


def equal_widths(*heads: Tensor) -> list[Tensor]:
    """Heads of one size, zeros behind the smaller ones: zeros change no score and no value (MLA)."""
    width = max(x.shape[-1] for x in heads)
    return [x if x.shape[-1] == width else nn.functional.pad(x, (0, width - x.shape[-1])) for x in heads]


class _ForestAttention(torch.autograd.Function):
    """Saves q, k, v and the merged out and lse: what one ordinary flash attention would save."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: ForestPlan, rule: Rule, *held: Tensor
    ):
        out, lse = with_sinks(*_see_held(*plan.run(q, k, v, rule), q, plan, rule, held), sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, sinks, *held)
        ctx.plan, ctx.rule = plan, rule
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        q, k, v, out, lse, sinks, *held = ctx.saved_tensors
        do = grads[0].contiguous()
        d_q, d_k, d_v = ctx.plan.differentiate(do, q, k, v, out, lse, ctx.rule)
        d_held: list[Tensor] = []
        for n, (k_held, v_held) in enumerate(_pairs(held)):
            mask = ctx.plan.held_mask(n, ctx.rule.sliding_window)
            d_part, *d_pair = ctx.rule.backward(do, q, k_held, v_held, out, lse, mask, causal=False)
            d_q += d_part
            d_held += d_pair
        d_sinks = None if sinks is None else differentiate_sinks(do, out, lse, sinks)
        return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), d_sinks, None, None, *d_held


def _see_held(
    out: Tensor, lse: Tensor, q: Tensor, plan: ForestPlan, rule: Rule, held: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Merge what every query sees of the held runs into `out` and `lse`."""
    for n, (k, v) in enumerate(_pairs(held)):
        rule.merge_(out, lse, q, k, v, plan.held_mask(n, rule.sliding_window), causal=False)
    return out, lse


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """One more logit per head, `[H]`, that takes probability and gives no value (Agarwal et al. 2025, gpt-oss)."""
    if sinks is None:
        return out, lse
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])
    return out * torch.exp(lse - total).unsqueeze(-1), total


def differentiate_sinks(do: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Gradient `[H]` of the sinks, given the final out and lse."""
    share = torch.exp(sinks.to(lse.dtype)[None, :, None] - lse)
    return -(share * (do.to(lse.dtype) * out.to(lse.dtype)).sum(-1)).sum((0, 2)).to(sinks.dtype)


def _pairs(held: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values of the held runs, given as k, v, k, v, ..."""
    return zip(held[::2], held[1::2], strict=True)


def _attend_forest(q: Tensor, k: Tensor, v: Tensor, plan: ForestPlan, rule: Rule) -> tuple[Tensor, Tensor]:
    """Merged `out [1, H, T, Dv]` and `lse [1, H, T]`, both in the accumulation dtype."""
    num_heads, num_tokens = q.shape[1:3]
    out = q.new_zeros((1, num_tokens, num_heads, v.shape[-1]), dtype=acc_dtype(q.dtype)).transpose(1, 2)
    lse = torch.full(q.shape[:3], float("-inf"), dtype=out.dtype, device=q.device)
    for rect in plan.rectangles:
        mask = plan.window_mask(rect, rule.sliding_window) if rule.sliding_window else None
        seen, keys = slice(rect.start, rect.subtree_end), slice(rect.start, rect.end)
        rule.merge_(out[:, :, seen], lse[:, :, seen], q[:, :, seen], k[:, :, keys], v[:, :, keys], mask)
    for leaves in plan.leaf_batches:
        rule.merge_leaves_(out, lse, q, k, v, leaves)
    return out, lse


def _differentiate_forest(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: ForestPlan, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the rectangles' gradients in the accumulation dtype."""
    d_q, d_k, d_v = (torch.zeros_like(x, dtype=lse.dtype, memory_format=torch.contiguous_format) for x in (q, k, v))
    for rect in plan.rectangles:
        mask = plan.window_mask(rect, rule.sliding_window) if rule.sliding_window else None
        seen, keys = slice(rect.start, rect.subtree_end), slice(rect.start, rect.end)
        do_part, q_part, out_part, lse_part = (x[:, :, seen] for x in (do, q, out, lse))
        parts = rule.backward(do_part, q_part, k[:, :, keys], v[:, :, keys], out_part, lse_part, mask)
        for total, part, where in zip((d_q, d_k, d_v), parts, (seen, keys, keys), strict=True):
            total[:, :, where] += part
    for leaves in plan.leaf_batches:
        index, is_live = leaves.index, leaves.is_live
        q_part, k_part, v_part, out_part, lse_part = (_stack(x, index) for x in (q, k, v, out, lse))
        do_part = _stack(do, index) * is_live[:, None, :, None]
        parts = rule.backward(do_part, q_part, k_part, v_part, out_part, lse_part, _leaf_mask(index, rule))
        for total, part in zip((d_q, d_k, d_v), parts, strict=True):
            total.index_add_(2, index[is_live], _unstack(part, is_live).to(total.dtype))
    return d_q, d_k, d_v


def _stack(x: Tensor, index: Tensor) -> Tensor:
    """`[1, H, T, ...]` -> `[b, H, L, ...]` at packed indices `[b, L]`."""
    return x[0][:, index].transpose(0, 1).contiguous()


def _unstack(x: Tensor, is_live: Tensor) -> Tensor:
    """`[b, H, L, ...]` -> `[1, H, live, ...]`, the real tokens of a stack in order."""
    return x.transpose(0, 1)[:, is_live].unsqueeze(0)


def _leaf_mask(index: Tensor, rule: Rule) -> Tensor | None:
    """Within one leaf, positions and packed indices differ by a constant, so the window is a band."""
    length = index.shape[1]
    if not rule.sliding_window or length <= rule.sliding_window:
        return None
    steps = torch.arange(length, device=index.device)
    return steps[:, None] - steps[None, :] < rule.sliding_window


@dataclass(frozen=True, eq=False)
class RowsPlan(StatefulPlan):
    """Attention row by row: q, k and v are computed once per packed token, then every row is reconstructed.

    This is `use_split_attention=False` and the slow twin of ForestPlan: each row attends causally by itself, and a
    shared token takes the output of the first row that holds it.
    """

    forest: Forest
    device: torch.device | str = "cpu"

    input_ids = ForestPlan.input_ids
    position_ids = ForestPlan.position_ids

    @cached_property
    def row_index(self) -> Tensor:
        """`[B, S] int64`: packed indices, right-padded."""
        rows = [self.forest.row(b) for b in range(self.forest.num_rows)]
        return torch.from_numpy(pad_rows(rows)[0]).to(self.device)

    @cached_property
    def owner(self) -> Tensor:
        """`[T] int64`: where in the flattened `[B * S]` rows each packed token takes its output from."""
        lens = self.forest.row_lens
        first = np.unique(self.forest.row_index, return_index=True)[1]
        b = np.searchsorted(self.forest.row_offsets, first, side="right") - 1
        flat = b * max(lens, default=0) + first - self.forest.row_offsets[b]
        return torch.from_numpy(flat).to(self.device)

    @cached_property
    def recurrence(self) -> RowsRecurrence:
        """The same rows for layers that carry a state instead of attending."""
        return RowsRecurrence(self.row_index, self.owner)

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
        """Attention of the whole forest; see AttendPlan."""
        steps = torch.arange(self.row_index.shape[1], device=q.device)
        distance = steps[:, None] - steps[None, :]
        visible = (distance >= 0) & (distance < (sliding_window or len(steps)))
        rows = (x[0][:, self.row_index].transpose(0, 1) for x in (q, k, v))
        out = plain_attention(*rows, visible, scale=scale, softcap=softcap, sinks=sinks)
        return out.transpose(0, 1).flatten(1, 2)[:, self.owner].unsqueeze(0)


def forest_mask(forest: Forest, sliding_window: int | None = None) -> Tensor:
    """The whole mask, `[T, T] bool`, True = visible: the definition that the rectangles are tested against."""
    index = np.arange(forest.num_tokens)
    subtree_end = forest.subtree_end[forest.segment_of_token]
    visible = (index[None, :] <= index[:, None]) & (index[:, None] < subtree_end[None, :])
    if sliding_window:
        visible &= forest.position_ids[:, None] - forest.position_ids[None, :] < sliding_window
    return torch.from_numpy(visible)


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Textbook attention with autograd's own backward: the reference of everything above.

    Shapes as in kernels.py; visible: bool `[Lq, Lk]`; sinks: one extra logit per head, `[H]`, that takes probability
    and gives no value (Agarwal et al. 2025, gpt-oss).
    """
    num_groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(num_groups, 1), v.repeat_interleave(num_groups, 1)
    scores = torch.matmul(q, k.mT) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    probs = torch.softmax(scores, dim=-1, dtype=acc_dtype(q.dtype)).to(q.dtype)
    return torch.matmul(probs[..., : k.shape[2]], v)
