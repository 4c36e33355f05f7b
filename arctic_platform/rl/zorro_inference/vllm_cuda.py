"""Forest cascade attention in vLLM's FlashAttention backend. Runs on CUDA; its kernels have no CPU build.

The plan is that of the CPU engine (vllm_cpu.py). All shared runs of blocks of a step are the "sequences" of one call
of the variable-length kernel: the queries of a run's requests, not causal, against the run's blocks. The requests'
tails are a second call. Both return log-sum-exps, and the levels of the forest are merged one after the other.

    call 1    cu_seqlens_q  0 3 5        block_table  7 8 9      seqused_k  3 * block_size
              (requests 0 1 2, 0 1)                   3                     1 * block_size
    call 2    cu_seqlens_q  0 1 2 3      block_table  11         seqused_k  what each request has of its own
                                                      12
                                                      4

Planning needs the block tables on the host, so a step waits for the device; full CUDA graphs are switched off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from arctic_platform.forest.attention import with_sinks
from arctic_platform.rl.zorro_inference.blocks import CALL_COST, CascadePlan, ReadCounters
from arctic_platform.rl.zorro_inference.vllm_plugin import call_cost, is_on
from arctic_platform.rl.zorro_inference.vllm_step import StepPlanner, StepShape, merge_rows, select_requests

logger = init_logger("vllm.arctic_rl_fca")

Varlen = Callable[..., tuple[Tensor, Tensor]]


class ForestFlashBackend(FlashAttentionBackend):
    """vLLM's FlashAttention with shared blocks read once."""

    @staticmethod
    def get_impl_cls() -> type[ForestFlashImpl]:
        """The attention of one layer."""
        return ForestFlashImpl

    @staticmethod
    def get_builder_cls() -> type[ForestFlashBuilder]:
        """What plans a step for all layers of a cache group."""
        return ForestFlashBuilder


@dataclass(frozen=True, eq=False)
class VarlenCall:
    """Arguments of one call: `take [M]` the requests' queries it reads, int64; the rest is int32."""

    take: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    seqused_k: Tensor
    max_seqlen_k: int
    block_table: Tensor


@dataclass(frozen=True, eq=False)
class Level:
    """Results `[start, end)` of the shared call belong to the requests `readers`, each at most once."""

    start: int
    end: int
    readers: Tensor


@dataclass(frozen=True, eq=False)
class FlashCascade:
    """One step: two calls and how their results are merged, and the metadata of all other requests."""

    plan: CascadePlan
    tokens: Tensor
    shared: VarlenCall
    tails: VarlenCall
    levels: list[Level]
    num_keys: int
    rest: FlashAttentionMetadata | None
    rest_tokens: Tensor
    counters: ReadCounters


@dataclass
class ForestFlashMetadata(FlashAttentionMetadata):
    """vLLM's metadata and, where a step shares enough, the cascade."""

    cascade: FlashCascade | None = field(default=None)


class ForestFlashBuilder(FlashAttentionMetadataBuilder):
    """Plans each step from the block tables."""

    supports_update_block_table = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = self.vllm_config.additional_config
        self.counters = ReadCounters()
        is_plain = self.vllm_config.speculative_config is None and self.dcp_world_size == 1 and self.rswa_window is None
        self.is_forest = is_on(settings) and is_plain
        if self.is_forest:
            logger.info_once("Forest cascade attention reads shared blocks once")
        self._planner = StepPlanner(self.block_size, call_cost(settings, CALL_COST))

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """The calls of a step depend on what its requests share: no graph can hold them."""
        if is_on(vllm_config.additional_config):
            return AttentionCGSupport.NEVER
        return super().get_cudagraph_support(vllm_config, kv_cache_spec)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> ForestFlashMetadata:
        """Metadata of one step."""
        whole = super().build(common_prefix_len, common_attn_metadata, fast_build)
        given = {entry.name: getattr(whole, entry.name) for entry in fields(FlashAttentionMetadata)}
        return ForestFlashMetadata(**given, cascade=self._cascade(common_attn_metadata))

    def _cascade(self, common: CommonAttentionMetadata) -> FlashCascade | None:
        if not self.is_forest or common.causal is not True or common.mm_req_doc_ranges is not None:
            return None
        shape = StepShape.of(common)
        plan = self._planner.plan(shape)
        if plan is None:
            return None
        others = shape.others(plan.rows)
        rest = super().build(0, select_requests(common, shape, others)) if len(others) else None
        return flash_cascade(plan, shape, rest, others, self.counters, self.device)


class ForestFlashImpl(FlashAttentionImpl):
    """The attention of one layer."""

    @property
    def can_cascade(self) -> bool:
        """Plain causal attention over an unquantized cache."""
        is_plain = self.sliding_window == (-1, -1) and self.alibi_slopes is None and not self.fa4_hd256
        return is_plain and self.attn_type == AttentionType.DECODER and not is_quantized_kv_cache(self.kv_cache_dtype)

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlashAttentionMetadata,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """`query [tokens, H, D]` -> `output [tokens, H, D]`; keys and values of this step are in the cache already."""
        cascade = attn_metadata.cascade if isinstance(attn_metadata, ForestFlashMetadata) else None
        scales = output_scale, output_block_scale
        if cascade is None or not self.can_cascade:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales)
        if cascade.rest is not None:
            some = query[cascade.rest_tokens]
            out = torch.empty_like(output[: len(some)])
            output[cascade.rest_tokens] = super().forward(layer, some, key, value, kv_cache, cascade.rest, out, *scales)
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        out = attend_cascade(
            query[cascade.tokens],
            keys,
            values,
            cascade,
            varlen=fa_utils.flash_attn_varlen_func,
            sinks=self.sinks,
            softmax_scale=self.scale,
            softcap=self.logits_soft_cap,
            fa_version=self.vllm_flash_attn_version,
        )
        output[cascade.tokens] = out.to(output.dtype).view(-1, *output.shape[1:])
        return output


def attend_cascade(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    cascade: FlashCascade,
    *,
    varlen: Varlen,
    sinks: Tensor | None,
    **settings: Any,
) -> Tensor:
    """`query [R, H, D]` of the requests of the plan, `keys, values [blocks, block_size, K, D]` -> `out [R, H, D]`."""
    out, lse = _call(query, keys, values, cascade.tails, varlen, settings)
    shared_out, shared_lse = _call(query, keys, values, cascade.shared, varlen, settings)
    for level in cascade.levels:
        part = slice(level.start, level.end)
        merge_rows(out, lse, level.readers, shared_out[part], shared_lse[part])
    cascade.counters.count(cascade.plan, cascade.num_keys)
    return with_sinks(out.transpose(0, 1)[None], lse.T[None], sinks)[0][0].transpose(0, 1)


def _call(
    query: Tensor, keys: Tensor, values: Tensor, call: VarlenCall, varlen: Varlen, settings: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """`out [M, H, D]` fp32 and `lse [M, H]`; the kernel gives the latter by head."""
    out, lse = varlen(
        q=query[call.take],
        k=keys,
        v=values,
        cu_seqlens_q=call.cu_seqlens_q,
        max_seqlen_q=call.max_seqlen_q,
        seqused_k=call.seqused_k,
        max_seqlen_k=call.max_seqlen_k,
        block_table=call.block_table,
        causal=False,
        return_softmax_lse=True,
        **settings,
    )
    return out.float(), lse.float().T.contiguous()


def flash_cascade(
    plan: CascadePlan,
    shape: StepShape,
    rest: FlashAttentionMetadata | None,
    others: np.ndarray,
    counters: ReadCounters,
    device: torch.device,
) -> FlashCascade:
    """Lay out the two calls of a step."""
    reads = [read for level in plan.levels() for read in level]
    size, seq_lens = plan.block_size, shape.seq_lens[plan.rows]
    shared = _varlen_call(
        take=[read.readers for read in reads],
        blocks=[read.blocks for read in reads],
        num_keys=np.array([len(read.blocks) * size for read in reads]),
        device=device,
    )
    num_blocks = -(-seq_lens // size)
    tails = _varlen_call(
        take=list(np.arange(len(plan.rows))[:, None]),
        blocks=[
            shape.tables[row, start:end] for row, start, end in zip(plan.rows, plan.tail_start, num_blocks, strict=True)
        ],
        num_keys=seq_lens - plan.tail_start * size,
        device=device,
    )
    levels, start = [], 0
    for members in plan.levels():
        readers = np.concatenate([read.readers for read in members])
        levels.append(Level(start, start + len(readers), torch.from_numpy(readers).to(device)))
        start += len(readers)
    return FlashCascade(
        plan=plan,
        tokens=torch.from_numpy(shape.query_starts[plan.rows]).to(device),
        shared=shared,
        tails=tails,
        levels=levels,
        num_keys=int(seq_lens.sum()),
        rest=rest,
        rest_tokens=torch.from_numpy(shape.tokens_of(others)).to(device),
        counters=counters,
    )


def _varlen_call(
    *, take: list[np.ndarray], blocks: list[np.ndarray], num_keys: np.ndarray, device: torch.device
) -> VarlenCall:
    """Sequence i: queries `take[i]` against the first `num_keys[i]` tokens of `blocks[i]`."""
    lens = np.array([len(queries) for queries in take])
    table = np.zeros((len(blocks), max(len(run) for run in blocks)), np.int32)
    for i, run in enumerate(blocks):
        table[i, : len(run)] = run

    def on_device(x: np.ndarray, dtype: type = np.int32) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x, dtype)).to(device)

    return VarlenCall(
        take=on_device(np.concatenate(take), np.int64),
        cu_seqlens_q=on_device(np.concatenate([[0], np.cumsum(lens)])),
        max_seqlen_q=int(lens.max()),
        seqused_k=on_device(num_keys),
        max_seqlen_k=int(num_keys.max()),
        block_table=on_device(table),
    )
