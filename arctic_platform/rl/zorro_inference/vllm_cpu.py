"""Forest cascade attention in vLLM's CPU engine.

Decoding requests that share blocks attend here: once per shared run of blocks with the queries of all its requests,
once over their own tails, and merged by log-sum-exp. All other requests of a step, chunks of a prefill among them, and
all layers that need more than plain causal attention (windows, ALiBi), run vLLM's own kernel, as does every step whose
sharing is not worth a call.

vLLM's cache, `[blocks, K, block_size, 2 * D]`, holds for each block and head first the keys as `[D, block_size]`, then
the values as `[block_size, D]` (its "vec" layout, which fp32 and fp16 always have, and bf16 without AMX).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from arctic_platform.forest.attention import with_sinks
from arctic_platform.rl.zorro_inference.blocks import CALL_COST, CascadePlan, ReadCounters
from arctic_platform.rl.zorro_inference.vllm_plugin import call_cost, is_on
from arctic_platform.rl.zorro_inference.vllm_step import StepPlanner, StepShape, merge_rows, select_requests

LAYOUT = "vec"

logger = init_logger("vllm.arctic_rl_fca")


class ForestCPUBackend(CPUAttentionBackend):
    """vLLM's CPU attention with shared blocks read once."""

    @staticmethod
    def get_impl_cls() -> type[ForestCPUImpl]:
        """The attention of one layer."""
        return ForestCPUImpl

    @staticmethod
    def get_builder_cls() -> type[ForestCPUBuilder]:
        """What plans a step for all layers of a cache group."""
        return ForestCPUBuilder


@dataclass(frozen=True, eq=False)
class TailBatch:
    """Own blocks of requests with about equally many: `rows [r]`, `blocks [r, w]`, `visible [r, w, block_size]`."""

    rows: Tensor
    blocks: Tensor
    visible: Tensor


@dataclass(frozen=True, eq=False)
class Cascade:
    """One step: the requests that share, where their queries lie, their tails, and the metadata of all others."""

    plan: CascadePlan
    tokens: Tensor
    tails: list[TailBatch]
    num_keys: int
    rest: CPUAttentionMetadata | None
    rest_tokens: Tensor
    counters: ReadCounters


@dataclass
class ForestCPUMetadata(CPUAttentionMetadata):
    """vLLM's metadata and, where a step shares enough, the cascade."""

    cascade: Cascade | None = field(default=None)


class ForestCPUBuilder(CPUAttentionMetadataBuilder):
    """Plans each step from the block tables."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = self.vllm_config.additional_config
        self.counters = ReadCounters()
        self.is_forest = is_on(settings) and self.isa == LAYOUT and not self.is_cross_attention
        if self.is_forest:
            logger.info_once("Forest cascade attention reads shared blocks once")
        self._planner = StepPlanner(self.block_size, call_cost(settings, CALL_COST))

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> ForestCPUMetadata:
        """Metadata of one step."""
        whole = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return ForestCPUMetadata(**vars(whole), cascade=self._cascade(common_attn_metadata))

    def _cascade(self, common: CommonAttentionMetadata) -> Cascade | None:
        if not self.is_forest or common.causal is not True:
            return None
        shape = StepShape.of(common)
        plan = self._planner.plan(shape)
        if plan is None:
            return None
        others = shape.others(plan.rows)
        rest = super().build(0, select_requests(common, shape, others)) if len(others) else None
        return Cascade(
            plan=plan,
            tokens=torch.from_numpy(shape.query_starts[plan.rows]),
            tails=batch_tails(plan, shape),
            num_keys=int(shape.seq_lens[plan.rows].sum()),
            rest=rest,
            rest_tokens=torch.from_numpy(shape.tokens_of(others)),
            counters=self.counters,
        )


class ForestCPUImpl(CPUAttentionBackendImpl):
    """The attention of one layer."""

    @property
    def can_cascade(self) -> bool:
        """Plain causal attention over a cache in the layout that is read here."""
        is_plain = self.sliding_window == -1 and self.alibi_slopes is None and not self.is_fp8_kv_cache
        return is_plain and self.attn_type == AttentionType.DECODER

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """`query [tokens, H, D]` -> `output [tokens, H, D]`; keys and values of this step are in the cache already."""
        cascade = attn_metadata.cascade if isinstance(attn_metadata, ForestCPUMetadata) else None
        scales = output_scale, output_block_scale
        if cascade is None or not self.can_cascade:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales)
        if cascade.rest is not None:
            some = query[cascade.rest_tokens]
            out = super().forward(
                layer, some, key, value, kv_cache, cascade.rest, torch.empty_like(output[: len(some)]), *scales
            )
            output[cascade.rest_tokens] = out
        out = attend_cascade(
            query[cascade.tokens], kv_cache, cascade, scale=self.scale, softcap=self.logits_soft_cap, sinks=self.sinks
        )
        output[cascade.tokens] = out.to(output.dtype).view(-1, *output.shape[1:])
        return output


def attend_cascade(
    query: Tensor, kv_cache: Tensor, cascade: Cascade, *, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """`query [R, H, D]` of the requests of the plan -> `out [R, H, D]` fp32."""
    num_kv_heads = kv_cache.shape[1]
    q = (query.float() * scale).unflatten(1, (num_kv_heads, -1))
    out, lse = _attend_tails(q, kv_cache, cascade.tails, softcap)
    for read in cascade.plan.reads:
        readers = torch.from_numpy(read.readers)
        merge_rows(out, lse, readers, *_attend_shared(q[readers], kv_cache, read.blocks, softcap))
    cascade.counters.count(cascade.plan, cascade.num_keys)
    out, lse = out.flatten(1, 2), lse.flatten(1, 2)
    return with_sinks(out.transpose(0, 1)[None], lse.T[None], sinks)[0][0].transpose(0, 1)


def _attend_shared(q: Tensor, kv_cache: Tensor, blocks: np.ndarray, softcap: float) -> tuple[Tensor, Tensor]:
    """`q [m, K, G, D]` against `w` blocks that all of them see whole: `out [m, K, G, D]`, `lse [m, K, G]`."""
    keys, values = keys_and_values(_take(kv_cache, blocks))
    folded = q.transpose(0, 1).flatten(1, 2)
    scores = _softcapped(torch.matmul(folded, keys), softcap)
    peak = scores.amax((0, 3), keepdim=True)
    weights = torch.exp_(scores - peak)
    total = weights.sum((0, 3))
    out = torch.matmul(weights, values).sum(0) / total.unsqueeze(-1)
    lse = total.log() + peak[0, :, :, 0]
    shape = len(q), -1
    return out.unflatten(1, shape).transpose(0, 1), lse.unflatten(1, shape).transpose(0, 1)


def _attend_tails(q: Tensor, kv_cache: Tensor, tails: list[TailBatch], softcap: float) -> tuple[Tensor, Tensor]:
    """`q [R, K, G, D]`, each against its own blocks: `out [R, K, G, D]`, `lse [R, K, G]`."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])
    for tail in tails:
        keys, values = keys_and_values(kv_cache[tail.blocks])
        values = values.masked_fill(~tail.visible[:, :, None, :, None], 0.0)  # what was never written may be NaN
        scores = _softcapped(torch.matmul(q[tail.rows].unsqueeze(1), keys), softcap)
        scores = scores.masked_fill_(~tail.visible[:, :, None, None, :], float("-inf"))
        peak = scores.amax((1, 4), keepdim=True)
        weights = torch.exp_(scores - peak)
        total = weights.sum((1, 4))
        out[tail.rows] = torch.matmul(weights, values).sum(1) / total.unsqueeze(-1)
        lse[tail.rows] = total.log() + peak[:, 0, :, :, 0]
    return out, lse


def keys_and_values(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """`[..., K, block_size, 2 * D]` -> keys `[..., K, D, block_size]` and values `[..., K, block_size, D]`, in fp32."""
    block_size, head_dim = blocks.shape[-2], blocks.shape[-1] // 2
    keys, values = blocks.flatten(-2).unflatten(-1, (2, -1)).unbind(-2)
    return keys.unflatten(-1, (head_dim, block_size)).float(), values.unflatten(-1, (block_size, head_dim)).float()


def batch_tails(plan: CascadePlan, shape: StepShape) -> list[TailBatch]:
    """Requests whose numbers of own blocks round up to the same power of two go together."""
    seq_lens, size = shape.seq_lens[plan.rows], plan.block_size
    widths = -(-seq_lens // size) - plan.tail_start
    batches = []
    rounded = np.ceil(np.log2(widths)).astype(np.int64)
    for exponent in np.unique(rounded):
        rows = np.flatnonzero(rounded == exponent)
        steps = np.arange(widths[rows].max())
        at = plan.tail_start[rows, None] + np.minimum(steps, widths[rows, None] - 1)
        first = (plan.tail_start[rows, None] + steps) * size
        visible = first[:, :, None] + np.arange(size) < seq_lens[rows, None, None]
        blocks = shape.tables[plan.rows[rows, None], at]
        batches.append(TailBatch(torch.from_numpy(rows), torch.from_numpy(blocks), torch.from_numpy(visible)))
    return batches


def _take(kv_cache: Tensor, blocks: np.ndarray) -> Tensor:
    """Blocks of the cache: a view where their ids follow each other, else a copy."""
    first = int(blocks[0])
    if blocks[-1] - first == len(blocks) - 1 and (np.diff(blocks) == 1).all():
        return kv_cache[first : first + len(blocks)]
    return kv_cache[torch.from_numpy(blocks)]


def _softcapped(scores: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(scores / softcap) if softcap else scores
