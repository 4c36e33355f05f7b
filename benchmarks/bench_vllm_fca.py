"""One layer of a decode step in vLLM's CPU attention: its own kernel against the plugin's shared reads.

    .venvs/vllm/bin/python benchmarks/bench_vllm_fca.py
    .venvs/vllm/bin/python benchmarks/bench_vllm_fca.py --shared-len 16384 --num-requests 64

Processor time of one thread, the least of interleaved repeats, and the largest difference of the results. The defaults
are a layer of SmolLM2-135M. The last line is one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import cyclopts
import numpy as np
import torch
import vllm
from torch import Tensor
from vllm import _custom_ops as ops

from arctic_platform.rl.zorro_inference.blocks import ReadCounters
from arctic_platform.rl.zorro_inference.vllm_cpu import Cascade, attend_cascade, batch_tails
from arctic_platform.rl.zorro_inference.vllm_step import StepPlanner, StepShape

SCALE = 0.125


def bench(
    *,
    shared_len: int = 2048,
    tail_len: int = 20,
    num_requests: int = 16,
    num_heads: int = 9,
    num_kv_heads: int = 3,
    head_dim: int = 64,
    block_size: int = 128,
    repeats: int = 20,
    out: Path | None = None,
) -> None:
    """Measure one shape: `num_requests` requests over `shared_len` tokens in common and a tail each."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    num_shared = shared_len // block_size
    tables = np.stack([np.append(np.arange(num_shared), num_shared + i) for i in range(num_requests)])
    ones = np.ones(num_requests, np.int64)
    shape = StepShape(np.arange(num_requests), ones, ones * (num_shared * block_size + tail_len), tables)
    cache = torch.randn(num_shared + num_requests, num_kv_heads, block_size, 2 * head_dim)
    query = torch.randn(num_requests, num_heads, head_dim)
    kernel, cascade = vllm_kernel(shape, query, cache), plugin(shape, query, cache, block_size)
    difference = float((kernel() - cascade()).abs().max())
    seconds = least_seconds([kernel, cascade], repeats)
    record = {
        "shape": {"shared_len": shared_len, "num_requests": num_requests, "heads": [num_heads, num_kv_heads, head_dim]},
        "vllm_ms": seconds[0] * 1e3,
        "plugin_ms": seconds[1] * 1e3,
        "ratio": seconds[1] / seconds[0],
        "max_difference": difference,
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
    }
    print(f"vLLM's kernel {seconds[0] * 1e3:.2f} ms, the plugin {seconds[1] * 1e3:.2f} ms of one thread")
    print(json.dumps(record))
    if out is not None:
        out.write_text(json.dumps(record) + "\n", encoding="utf-8")


def vllm_kernel(shape: StepShape, query: Tensor, cache: Tensor) -> Callable[[], Tensor]:
    """vLLM's own attention over the step."""
    num_blocks, num_kv_heads, block_size, width = cache.shape
    keys, values = cache.view(num_blocks, num_kv_heads, 2 * block_size, -1).chunk(2, dim=2)
    starts = torch.arange(shape.num_reqs + 1, dtype=torch.int32)
    lens, tables = (torch.from_numpy(x.astype(np.int32)) for x in (shape.seq_lens, shape.tables))
    common = {"query_start_loc": starts, "seq_lens": lens, "causal": True}
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=shape.num_reqs,
        num_heads=query.shape[1],
        num_kv_heads=num_kv_heads,
        head_dim=width // 2,
        dtype=torch.float32,
        sliding_window_size=-1,
        isa="vec",
        enable_kv_split=True,
        **common,
    )

    def run() -> Tensor:
        output = torch.empty_like(query)
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=keys,
            value_cache=values,
            output=output,
            scale=SCALE,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=tables,
            softcap=0,
            scheduler_metadata=plan,
            s_aux=None,
            **common,
        )
        return output

    return run


def plugin(shape: StepShape, query: Tensor, cache: Tensor, block_size: int) -> Callable[[], Tensor]:
    """The plugin's attention over the step."""
    plan = StepPlanner(block_size, call_cost=1).plan(shape)
    assert plan is not None
    cascade = Cascade(
        plan=plan,
        tokens=torch.arange(shape.num_reqs),
        tails=batch_tails(plan, shape),
        num_keys=int(shape.seq_lens.sum()),
        rest=None,
        rest_tokens=torch.empty(0, dtype=torch.int64),
        counters=ReadCounters(),
    )
    return lambda: attend_cascade(query, cache, cascade, scale=SCALE, softcap=0.0, sinks=None)


def least_seconds(ways: list[Callable[[], Tensor]], repeats: int) -> list[float]:
    """Processor time of each way, in turns."""
    least = [float("inf")] * len(ways)
    for _ in range(repeats):
        for i, way in enumerate(ways):
            started = time.process_time()
            way()
            least[i] = min(least[i], time.process_time() - started)
    return least


if __name__ == "__main__":
    cyclopts.run(bench)
