"""Balanced partitions and micro-batches of padded batches, under the names that trainers call them by.

Budgets count what a deduplicated pass computes: each group's live prompt tokens once, live response tokens always.
The planner behind it is `planner`; it also takes ragged rows, shares more than whole prompts, and plans all ranks.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from arctic_platform.errors import ConfigError, InputError
from arctic_platform.forest import RowOrder
from arctic_platform.rl.zorro_train.planner import Limits, plan_visits
from arctic_platform.rl.zorro_train.zorro_train import ZoRRoTrain

Part = tuple[float, list[int]]


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[int], k_partitions: int, equal_size: bool = False
) -> list[list[int]]:
    """Partition rows so that the sums of their lengths are near-equal (Karmarkar-Karp: largest differencing method).

    equal_size: partitions have equal numbers of rows; where they do not divide, numbers differ by one. With fewer
    rows than partitions the last ones are empty; otherwise none is.

    Returns `k_partitions` lists of ascending indices, largest sum first. Deterministic. Raises ConfigError for
    `k_partitions` below 1, InputError for a negative length.
    """
    if k_partitions < 1:
        raise ConfigError(f"k_partitions={k_partitions} must be 1 or more")
    lens = [float(n) for n in seqlen_list]
    if any(n < 0 for n in lens):
        raise InputError(f"seqlen_list holds {min(lens):g}; lengths are 0 or more")
    by_len = sorted(range(len(lens)), key=lambda i: (lens[i], i))
    if equal_size:
        fill = -len(lens) % k_partitions
        padded = [-1] * fill + by_len
        steps = range(0, len(padded), k_partitions)
        states = [[_part(i, lens) for i in padded[at : at + k_partitions]] for at in steps]
    else:
        states = [[_part(i, lens)] for i in by_len]
    parts = _difference(states, k_partitions)
    parts += [(0.0, [])] * (k_partitions - len(parts))
    return [sorted(rows) for _, rows in parts]


def _part(i: int, lens: list[float]) -> Part:
    return (lens[i], [i]) if i >= 0 else (0.0, [])


def _difference(states: list[list[Part]], k: int) -> list[Part]:
    """Join the two states of the largest spread, the largest parts of one with the smallest of the other, to the end.

    A state lists its parts largest first; parts up to the k-th that it does not list are empty.
    """
    heap: list[tuple[float, float, int, list[Part]]] = []
    for n, state in enumerate(states):
        state.sort(key=_largest_first)
        heap.append((*_urgency(state, k), n, state))
    heapq.heapify(heap)
    for n in range(len(states), 2 * len(states) - 1):
        first, second = heapq.heappop(heap)[-1], heapq.heappop(heap)[-1]
        joined = _join(first, second, k)
        heapq.heappush(heap, (*_urgency(joined, k), n, joined))
    return heap[0][-1] if heap else []


def _urgency(state: list[Part], k: int) -> tuple[float, float]:
    largest, smallest = state[0][0], state[-1][0] if len(state) == k else 0.0
    return smallest - largest, -largest


def _largest_first(part: Part) -> tuple[float, int]:
    return -part[0], -len(part[1])


def _join(first: list[Part], second: list[Part], k: int) -> list[Part]:
    apart = k - len(second)
    joined = first[:apart]
    for own, other in zip(first[apart:], reversed(second[k - len(first) :] if apart < len(first) else []), strict=True):
        small, large = sorted((own[1], other[1]), key=len)
        large.extend(small)
        joined.append((own[0] + other[0], large))
    joined += second[: max(k - len(first), 0)]
    joined.sort(key=_largest_first)
    return joined


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """The inverse of a permutation: `result[idx_map[i]] == i`. Raises InputError where `idx_map` is none."""
    order = [int(i) for i in idx_map]
    if sorted(order) != list(range(len(order))):
        raise InputError("idx_map must hold every index from 0 to its length exactly once")
    reverse = [0] * len(order)
    for i, j in enumerate(order):
        reverse[j] = i
    return reverse


def rearrange_micro_batches_with_dedup(
    batch: Mapping[str, Any],
    response_length: int,
    max_token_len: int | None,
    dp_group: dist.ProcessGroup | None = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    max_group_length_threshold: int | None = None,
) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Micro-batches of one rank's padded batch: prompt groups stay whole while they fit, no row is in two of them.

    Args:
        batch: a dict or TensorDict with `input_ids` [B, S] and, optionally, `attention_mask` and `position_ids` of
            that shape (without a mask all is live); other entries of B rows are cut alike, the rest is passed on.
        response_length: R, the last columns, which hold responses.
        max_token_len: most deduplicated tokens in a micro-batch; a longer row is alone in one, with a warning.
        dp_group: the data-parallel group whose ranks must have equal numbers of micro-batches.
        num_batches_divided_by: make the number a multiple of this.
        same_micro_num_in_dp: agree on the number over `dp_group`, where a process group exists.
        min_num_micro_batch: make at least this many.
        max_group_length_threshold: most rows of one prompt in a micro-batch.

    Returns:
        The micro-batches, dearest first, and the rows of each. A micro-batch has its rows of `batch` (ascending) and
        `dedup_input_ids`, `adapted_position_ids`, `reconstruction_info` (`ZoRRoTrain.create_deduplicated_batch`),
        `prompt_groups` and `dedup_metrics`. Where there are more micro-batches than groups can fill, the last ones
        have no rows: they hold one live prompt token, so that a pass over them takes part in collectives, and no live
        response token, so that its loss is zero.

    Raises:
        ConfigError: a budget is below 1. InputError: a shape does not fit.
    """
    limits = Limits(
        max_token_len=max_token_len,
        max_group_rows=max_group_length_threshold,
        min_micro_batches=1 if min_num_micro_batch is None else min_num_micro_batch,
        multiple_of=1 if num_batches_divided_by is None else num_batches_divided_by,
    )
    visits, prompt_lens = _by_prompt(batch, response_length)
    plan = plan_visits(visits, limits, prompt_lens=prompt_lens)
    if same_micro_num_in_dp and dist.is_available() and dist.is_initialized():
        count = _largest_count(len(plan.ranks[0]), dp_group)
        if count > len(plan.ranks[0]):
            plan = plan_visits(visits, replace(limits, min_micro_batches=count), prompt_lens=prompt_lens)
    rows = [list(part.rows) for part in plan.ranks[0]]
    return [_micro_batch(batch, chosen, response_length) for chosen in rows], rows


def reorg_global_batch(
    batch: Mapping[str, Any],
    response_length: int,
    world_size: int,
    max_token_len: int | None = None,
    max_group_length_threshold: int | None = None,
) -> tuple[Any, list[int]]:
    """Reorder a global batch so that its `world_size` equal slices cost about the same and keep prompt groups whole.

    world_size: the number of *data-parallel* ranks, which is what the batch is sliced by; slice r has the rows
    `[r * B / world_size, (r + 1) * B / world_size)`, and where they do not divide the first slices have one more.
    The other arguments are those of `rearrange_micro_batches_with_dedup`.

    Returns the reordered batch (every entry of B rows) and, for each of its rows, the row of `batch` that it was;
    `get_reverse_idx` of that brings results back. Raises as above.
    """
    limits = Limits(
        max_token_len=max_token_len,
        max_group_rows=max_group_length_threshold,
        num_ranks=world_size,
        equal_rows=True,
    )
    visits, prompt_lens = _by_prompt(batch, response_length)
    plan = plan_visits(visits, limits, prompt_lens=prompt_lens)
    order = [row for batches in plan.ranks for part in batches for row in part.rows]
    return _take_rows(batch, order), order


def _by_prompt(batch: Mapping[str, Any], response_length: int) -> tuple[RowOrder, np.ndarray]:
    """Rows in order of their prompt groups, sharing the live prompt; and the live prompt length of each row.

    As in `create_deduplicated_batch`, prompts are equal when ids, mask and positions are.
    """
    mask = _mask_of(batch).numpy(force=True)
    ids = batch["input_ids"].numpy(force=True)
    if not 1 <= response_length < ids.shape[1]:
        raise InputError(
            f"response_length={response_length} does not fit input_ids of shape {ids.shape}; pass at least one "
            "response column and one prompt column"
        )
    num_columns = ids.shape[1] - response_length
    given = _entry(batch, "position_ids")
    positions = mask.cumsum(1) if given is None else given.numpy(force=True)
    groups: dict[bytes, list[int]] = {}
    for b, live in enumerate(mask[:, :num_columns]):
        kept = np.flatnonzero(live)
        key = np.stack([kept, ids[b, kept], positions[b, kept]]).tobytes()
        groups.setdefault(key, []).append(b)
    prompt_lens = mask[:, :num_columns].sum(1).astype(np.int64)
    order = np.array([b for members in groups.values() for b in members], np.int64)
    shared = prompt_lens[order]
    shared[np.cumsum([0, *map(len, groups.values())])[:-1]] = 0
    return RowOrder(order, shared, mask.sum(1).astype(np.int64)[order]), prompt_lens


def _entry(batch: Mapping[str, Any], name: str) -> Any:
    """An entry of a dict or TensorDict, None where there is none."""
    return batch[name] if name in batch.keys() else None  # noqa: SIM118 - a TensorDict refuses `in`


def _mask_of(batch: Mapping[str, Any]) -> Tensor:
    """`[B, S] bool`, True at live tokens."""
    ids, mask = batch["input_ids"], _entry(batch, "attention_mask")
    if ids.dim() != 2 or (mask is not None and mask.shape != ids.shape):
        given = None if mask is None else tuple(mask.shape)
        raise InputError(
            f"input_ids {tuple(ids.shape)} and attention_mask {given} must have one shape [B, S]; pad the rows alike"
        )
    return torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()


def _largest_count(count: int, group: dist.ProcessGroup | None) -> int:
    """The largest number of micro-batches over the ranks of a group."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    agreed = torch.tensor([count], device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
    return int(agreed.item())


def _micro_batch(batch: Mapping[str, Any], rows: list[int], response_length: int) -> dict[str, Any]:
    """Rows of a batch with what their deduplicated pass needs."""
    part = dict(_take_rows(batch, rows).items()) if rows else _without_rows(batch, response_length)
    mask, positions = _mask_of(part), _entry(part, "position_ids")
    groups, prompts = ZoRRoTrain.find_prompt_groups(part["input_ids"], response_length, attention_mask=mask)
    packed, adapted, info = ZoRRoTrain.create_deduplicated_batch(
        part["input_ids"], positions, response_length, groups, prompts, attention_mask=mask, use_unpad=True
    )
    num_live, num_packed = int(mask.sum()), packed.numel()
    metrics = {
        "orig_tokens": num_live,
        "dedup_tokens": num_packed,
        "tokens_saved": num_live - num_packed,
        "tokens_saved_pct": 100 * (num_live - num_packed) / max(num_live, 1),
        "num_unique_prompts": len(info["prompt_groups"]) if rows else 0,
        "batch_size": len(rows),
    }
    return part | {
        "dedup_input_ids": packed,
        "adapted_position_ids": adapted,
        "reconstruction_info": info,
        "prompt_groups": info["prompt_groups"] if rows else [],
        "dedup_metrics": metrics,
    }


def _without_rows(batch: Mapping[str, Any], response_length: int) -> dict[str, Any]:
    """One row of zeros, live at its last prompt column only."""

    def zeros(value: Tensor | np.ndarray) -> Tensor | np.ndarray:
        shape = (1, *value.shape[1:])
        return value.new_zeros(shape) if isinstance(value, Tensor) else np.zeros(shape, value.dtype)

    part = _map_rows(batch, zeros)
    mask = _entry(part, "attention_mask")
    part["attention_mask"] = torch.zeros_like(part["input_ids"]) if mask is None else mask
    part["attention_mask"][:, -response_length - 1] = 1
    return part


def _is_tensordict(batch: Any) -> bool:
    """Whether this is a TensorDict, which is a mapping too; its package is imported by those who have one."""
    tensordict = sys.modules.get("tensordict")
    return tensordict is not None and isinstance(batch, tensordict.TensorDictBase)


def _take_rows(batch: Any, rows: list[int]) -> Any:
    """Rows of a batch, in the given order; a dict stays a dict, a TensorDict a TensorDict."""
    if _is_tensordict(batch):
        return batch[torch.tensor(rows, dtype=torch.long)]
    return _map_rows(batch, lambda value: value[rows])


def _map_rows(batch: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """`change` applied to every tensor or array that has one entry per row."""
    num_rows = len(batch["input_ids"])
    return {
        name: change(value) if isinstance(value, Tensor | np.ndarray) and value.shape[:1] == (num_rows,) else value
        for name, value in batch.items()
    }
