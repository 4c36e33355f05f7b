"""A step of vLLM as its attention sees it, on the host, and the plan of its shared reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from arctic_platform.forest.kernels import merge_
from arctic_platform.rl.zorro_inference.blocks import CascadePlan, plan_cascade

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata


@dataclass(frozen=True, eq=False)
class StepShape:
    """`query_starts [n]`, `query_lens [n]`, `seq_lens [n]`, `tables [n, w]`, all int64: the requests of one step.

    seq_lens counts the tokens of a request that are in the cache, those of this step included.
    """

    query_starts: np.ndarray
    query_lens: np.ndarray
    seq_lens: np.ndarray
    tables: np.ndarray

    @classmethod
    def of(cls, common: CommonAttentionMetadata) -> StepShape:
        """Copy what is needed to the host; without speculative decoding, vLLM's upper bound of lengths is exact."""
        num, on_host = common.num_reqs, common.seq_lens_cpu_upper_bound
        starts = common.query_start_loc_cpu[: num + 1].numpy().astype(np.int64)
        return cls(
            query_starts=starts[:-1],
            query_lens=np.diff(starts),
            seq_lens=(common.seq_lens if on_host is None else on_host)[:num].cpu().numpy().astype(np.int64),
            tables=common.block_table_tensor[:num].cpu().numpy().astype(np.int64),
        )

    @property
    def num_reqs(self) -> int:
        """Requests in the step."""
        return len(self.seq_lens)

    def others(self, rows: np.ndarray) -> np.ndarray:
        """The requests with queries that are not among `rows`."""
        return np.setdiff1d(np.flatnonzero(self.query_lens), rows)

    def tokens_of(self, rows: np.ndarray) -> np.ndarray:
        """Where the queries of some requests lie in the step, `[their queries] int64`."""
        parts = [np.arange(self.query_starts[row], self.query_starts[row] + self.query_lens[row]) for row in rows]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


def select_requests(common: CommonAttentionMetadata, shape: StepShape, rows: np.ndarray) -> CommonAttentionMetadata:
    """The metadata of some requests of a step, as if they were alone."""
    lens = shape.query_lens[rows]
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(lens)]).astype(np.int32))
    index = torch.from_numpy(rows).to(common.seq_lens.device)
    bound = common.seq_lens_cpu_upper_bound
    return replace(
        common,
        query_start_loc=starts.to(common.query_start_loc.device),
        query_start_loc_cpu=starts,
        seq_lens=common.seq_lens[index],
        num_reqs=len(rows),
        num_actual_tokens=int(lens.sum()),
        max_query_len=int(lens.max()),
        max_seq_len=int(shape.seq_lens[rows].max()),
        block_table_tensor=common.block_table_tensor[index],
        slot_mapping=common.slot_mapping[torch.from_numpy(shape.tokens_of(rows)).to(index.device)],
        seq_lens_cpu_upper_bound=None if bound is None else bound[torch.from_numpy(rows)],
    )


def merge_rows(out: Tensor, lse: Tensor, rows: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge a part that the requests `rows [m] int64`, each at most once, have read into what all have, in place."""
    merged_out, merged_lse = out[rows], lse[rows]
    merge_(merged_out, merged_lse, part_out, part_lse)
    out[rows], lse[rows] = merged_out, merged_lse


class StepPlanner:
    """Plans steps; the plan of the last one is kept while the full blocks of its requests stay the same."""

    def __init__(self, block_size: int, call_cost: int) -> None:
        self.block_size = block_size
        self.call_cost = call_cost
        self._key: tuple[bytes, ...] = ()
        self._plan: CascadePlan | None = None

    def plan(self, shape: StepShape) -> CascadePlan | None:
        """The shared reads of the requests that decode one token, or None where sharing is not worth a call."""
        rows = np.flatnonzero(shape.query_lens == 1)
        num_full = (shape.seq_lens[rows] - 1) // self.block_size
        if len(rows) < 2 or not num_full.any():
            return None
        tables = shape.tables[rows, : num_full.max()]
        key = rows.tobytes(), num_full.tobytes(), tables.tobytes()
        if key != self._key:
            full = [table[:num] for table, num in zip(tables, num_full.tolist(), strict=True)]
            self._plan = plan_cascade(full, rows, block_size=self.block_size, call_cost=self.call_cost)
            self._key = key
        return self._plan
