"""The CUDA backend's two calls and their merge, with a plain twin of the variable-length kernel in place of its own.

The kernel itself needs a GPU: the last test is marked so and runs where there is one.
"""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from arctic_platform.rl.zorro_inference.blocks import ReadCounters
from arctic_platform.rl.zorro_inference.vllm_cuda import attend_cascade, flash_cascade
from arctic_platform.rl.zorro_inference.vllm_step import StepPlanner, StepShape

SIZE, NUM_HEADS, NUM_KV_HEADS, DIM = 4, 6, 2, 16
TABLES = [[7, 8, 9, 3, 11], [7, 8, 9, 3, 12], [7, 8, 9, 4, 0], [5, 6, 0, 0, 0], [7, 8, 2, 0, 0]]
SEQ_LENS = [18, 17, 14, 8, 11]
QUERY_LENS = [1, 1, 1, 1, 3]


def plain_varlen(q, k, v, *, cu_seqlens_q, seqused_k, block_table, causal, softmax_scale, softcap, **_):
    """What flash-attn computes over a paged cache: sequence by sequence, with its log-sum-exp by head."""
    assert not causal
    outs, lses = [], []
    for i, num_keys in enumerate(seqused_k.tolist()):
        queries = q[cu_seqlens_q[i] : cu_seqlens_q[i + 1]]
        keys, values = (
            x[block_table[i].long()].flatten(0, 1)[:num_keys].repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 1)
            for x in (k, v)
        )
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * softmax_scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
        lses.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(lses, 1)


def step_of(device="cpu"):
    starts = np.concatenate([[0], np.cumsum(QUERY_LENS)])
    shape = StepShape(starts[:-1], np.array(QUERY_LENS), np.array(SEQ_LENS), np.array(TABLES))
    plan = StepPlanner(SIZE, call_cost=1).plan(shape)
    others = shape.others(plan.rows)
    return plan, flash_cascade(plan, shape, None, others, ReadCounters(), torch.device(device)), others


def tensors(dtype=torch.float64, device="cpu"):
    torch.manual_seed(0)
    query = torch.randn(3, NUM_HEADS, DIM, dtype=dtype, device=device)
    keys, values = torch.randn(2, 13, SIZE, NUM_KV_HEADS, DIM, dtype=dtype, device=device)
    return query, keys, values, torch.randn(NUM_HEADS, device=device)


def dense(query, keys, values, sinks, *, softcap):
    outs = []
    for i, (table, num_keys) in enumerate(zip(TABLES[:3], SEQ_LENS[:3], strict=True)):
        k, v = (x[table].flatten(0, 1)[:num_keys].repeat_interleave(3, 1) for x in (keys, values))
        scores = torch.einsum("hd,khd->hk", query[i], k) / math.sqrt(DIM)
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        extra = torch.empty(NUM_HEADS, 0) if sinks is None else sinks[:, None]
        weights = torch.cat([scores, extra.to(scores)], 1).softmax(-1)[:, :num_keys]
        outs.append(torch.einsum("hk,khd->hd", weights, v))
    return torch.stack(outs)


def test_requests_that_decode_and_share_take_part_and_the_others_do_not():
    plan, cascade, others = step_of()
    assert plan.rows.tolist() == [0, 1, 2]
    assert others.tolist() == [3, 4]
    assert cascade.rest_tokens.tolist() == [3, 4, 5, 6]
    assert cascade.shared.block_table.tolist() == [[7, 8, 9], [3, 0, 0]]
    assert cascade.shared.seqused_k.tolist() == [12, 4]
    assert cascade.tails.block_table.tolist() == [[11], [12], [4]]
    assert cascade.tails.seqused_k.tolist() == [2, 1, 2]


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_two_calls_and_a_merge_are_dense_attention(softcap, has_sinks):
    _, cascade, _ = step_of()
    query, keys, values, sinks = tensors()
    sinks = sinks if has_sinks else None
    settings = {"softmax_scale": 1 / math.sqrt(DIM), "softcap": softcap}
    out = attend_cascade(query, keys, values, cascade, varlen=plain_varlen, sinks=sinks, **settings)
    torch.testing.assert_close(out.double(), dense(query, keys, values, sinks, softcap=softcap), atol=1e-6, rtol=1e-5)
    counted = cascade.counters
    assert (counted.shared, counted.tail, counted.apart) == (16, 5, 49)


@pytest.mark.gpu
def test_the_kernel_of_vllm_gives_the_same():
    from vllm.v1.attention.backends import fa_utils

    _, cascade, _ = step_of("cuda")
    torch.manual_seed(0)
    query = torch.randn(3, NUM_HEADS, 64, dtype=torch.bfloat16, device="cuda")
    keys, values = torch.randn(2, 13, 16, NUM_KV_HEADS, 64, dtype=torch.bfloat16, device="cuda")
    settings = {"softmax_scale": 0.125, "softcap": 0.0}
    version = {"fa_version": fa_utils.get_flash_attn_version()}
    ours = attend_cascade(
        query, keys, values, cascade, varlen=fa_utils.flash_attn_varlen_func, sinks=None, **settings, **version
    )
    plain = attend_cascade(
        query.float(), keys.float(), values.float(), cascade, varlen=plain_varlen, sinks=None, **settings
    )
    torch.testing.assert_close(ours, plain, atol=2e-2, rtol=2e-2)
