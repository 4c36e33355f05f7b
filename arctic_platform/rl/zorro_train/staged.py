"""A batch larger than the token budget, in stages: what its micro-batches begin with is computed once and held.

A tree that exceeds the budget has its root run held (forest/held.py) while its branches run, depth-first; a branch
that exceeds it is treated in the same way, one level down:

    s s s                  held while all below it runs
      a a                  held while the next two run
        x x x | y y        micro-batch 0
        z z z z            micro-batch 1
      b b | c              micro-batch 2

What is held counts towards the budget of the pass that reads it, so at every moment both together stay within it, and
each token is computed once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike

from arctic_platform.errors import UnsupportedModelError
from arctic_platform.forest import Forest, RowOrder
from arctic_platform.forest.held import HeldPath, common_prefix_len
from arctic_platform.rl.zorro_train.module_patcher import ModuleReconstructionPatcher, RowValues
from arctic_platform.rl.zorro_train.proof import LOGPROB_TOLERANCE

DEFAULT_MIN_SAVING = 0.05


class Run(NamedTuple):
    """A held run: which one, and the position where it ends; it begins where the run above it ends."""

    run_id: int
    end: int


@dataclass(frozen=True)
class Stage:
    """One micro-batch: its row indices, and the runs that are held while it runs, from the root downwards."""

    rows: list[int]
    held: tuple[Run, ...] = ()


class StagePass(NamedTuple):
    """The values of one micro-batch, and the tokens that it and the runs computed for it took."""

    rows: list[int]
    values: RowValues
    num_tokens: int


@dataclass(frozen=True)
class _Budget:
    """What one micro-batch may hold: tokens with everything above them, and rows; None: any number."""

    tokens: int | None
    rows: int | None

    def admits(self, num_tokens: int, num_rows: int) -> bool:
        return (self.tokens is None or num_tokens <= self.tokens) and (self.rows is None or num_rows <= self.rows)


class SharesRows(Protocol):
    """What a plan needs of a patcher: the forest of some rows."""

    def forest_of(
        self,
        rows: Sequence[ArrayLike],
        target_masks: Sequence[ArrayLike],
        content_keys: Sequence[ArrayLike] | None = None,
        visits: RowOrder | None = None,
    ) -> Forest:
        """The forest that one pass over these rows computes."""
        ...


def plan_stages(
    patcher: SharesRows,
    rows: Sequence[np.ndarray],
    target_masks: Sequence[np.ndarray],
    *,
    max_token_len: int | None,
    max_rows: int | None = None,
    content_keys: Sequence[np.ndarray] | None = None,
    min_saving: float = DEFAULT_MIN_SAVING,
    visits: RowOrder | None = None,
) -> list[Stage]:
    """Cut a batch into micro-batches and say what is held for them, in the order in which they run.

    A tree that exceeds the budget has its root held and its branches packed into micro-batches; a branch that exceeds
    it is cut in the same way. max_token_len: most tokens of a micro-batch and of what is held for it together; a row
    longer than that goes alone. max_rows: most rows of a micro-batch. min_saving: a run is held when computing it
    again would be at least this part of a micro-batch; otherwise it is computed again. visits: the order of all rows,
    where it is known.
    """
    budget, run_ids = _Budget(max_token_len, max_rows), itertools.count()

    def cut(chosen: list[int], held: tuple[Run, ...]) -> list[Stage]:
        keys = None if content_keys is None else [content_keys[b] for b in chosen]
        order = None if visits is None else visits.select(chosen)
        forest = patcher.forest_of([rows[b] for b in chosen], [target_masks[b] for b in chosen], keys, order)
        if budget.admits(forest.num_tokens, len(chosen)):
            return [Stage(chosen, held)]
        root_len = common_prefix_len(forest)
        gain = root_len - (held[-1].end if held else 0)
        packs = _pack_branches(forest, root_len, budget)
        pass_len = min(max_token_len or forest.num_tokens, forest.num_tokens)
        if len(packs) > 1 and gain > 0 and gain >= min_saving * pass_len:
            held = (*held, Run(next(run_ids), root_len))
        stages: list[Stage] = []
        for members, is_oversize in packs:
            some = [chosen[b] for b in members]
            stages += cut(some, held) if is_oversize else [Stage(some, held)]
        return stages

    return cut(list(range(len(rows))), ()) if len(rows) else []


def _pack_branches(forest: Forest, root_len: int, budget: _Budget) -> list[tuple[list[int], bool]]:
    """Row indices of each pack of branches below the root, depth-first, and whether it is one branch to cut further."""
    below = np.flatnonzero(forest.segment_parent == (0 if root_len else -1))
    sizes = (forest.subtree_end - forest.start)[below].tolist()
    branches = [forest.segment_rows(n).tolist() for n in below.tolist()]
    rest = sorted(set(range(forest.num_rows)) - {b for members in branches for b in members})
    step = budget.rows or len(rest) or 1
    packs: list[tuple[list[int], bool]] = [(rest[at : at + step], False) for at in range(0, len(rest), step)]
    used = root_len
    for members, size in zip(branches, sizes, strict=True):
        is_oversize = len(members) > 1 and not budget.admits(root_len + size, len(members))
        if not packs or packs[-1][1] or is_oversize or not budget.admits(used + size, len(packs[-1][0] + members)):
            packs.append(([], is_oversize))
            used = root_len
        packs[-1][0].extend(members)
        used += size
    return [(sorted(members), is_oversize) for members, is_oversize in packs]


def num_staged_groups(stages: Sequence[Stage]) -> int:
    """Trees that run in stages: held runs that begin at a root."""
    return len({stage.held[0] for stage in stages if stage.held})


def run_stages(
    patcher: ModuleReconstructionPatcher,
    rows: Sequence[np.ndarray],
    target_masks: Sequence[np.ndarray],
    stages: Sequence[Stage],
    *,
    temperature: float | None = None,
    calculate_entropy: bool = False,
    content_keys: Sequence[np.ndarray] | None = None,
    visits: RowOrder | None = None,
) -> Iterator[StagePass]:
    """The micro-batches one after the other, as `patcher.forward_rows` gives them; arguments as there.

    Run `backward()` through each before asking for the next: gradients of held tokens are collected in leaves. The
    backward of a held run happens here, once, behind its last micro-batch, so use the iterator up.
    """
    path = HeldPath()
    current: tuple[Run, ...] = ()
    for stage in stages:
        kept = sum(1 for mine, there in zip(stage.held, current, strict=False) if mine == there)
        for _ in current[kept:]:
            path.release()
        before = path.num_tokens
        for run in stage.held[kept:]:
            patcher.hold(rows[stage.rows[0]][: run.end], path)
        current = stage.held
        values = patcher.forward_rows(
            [rows[b] for b in stage.rows],
            [target_masks[b] for b in stage.rows],
            temperature=temperature,
            calculate_entropy=calculate_entropy,
            content_keys=None if content_keys is None else [content_keys[b] for b in stage.rows],
            held=path if current else None,
            visits=None if visits is None else visits.select(stage.rows),
        )
        num_tokens = values.forest.num_tokens if values.forest else 0
        yield StagePass(stage.rows, values, num_tokens - before)
        del values
    while path.runs:
        path.release()


@torch.no_grad()
def can_stage(patcher: ModuleReconstructionPatcher) -> bool:
    """Whether a held prefix gives this model's exact values: every layer must pass tokens on by attention alone.

    Recurrent layers carry a state that keys and values do not hold, and a router's loss counts all tokens of a pass;
    such a model runs its micro-batches by themselves.
    """
    if not patcher.use_split_attention or patcher.router_loss is not None:
        return False
    num = 8 + patcher.min_shared
    ids = np.random.default_rng(0).integers(0, min(patcher.head.vocab_size, 4096), num + 12)
    rows = [np.concatenate([ids[:num], ids[num + 4 * n : num + 4 * n + 4]]) for n in range(3)]
    masks = [np.arange(len(row)) >= num for row in rows]
    held = (Run(0, num // 2), Run(1, num))
    stages = [Stage([0], held), Stage([1, 2], held)]
    was_training = patcher.model.training
    patcher.model.eval()
    try:
        whole = patcher.forward_rows(rows, masks).logprobs
        staged = torch.cat([one.values.logprobs for one in run_stages(patcher, rows, masks, stages)])
    except UnsupportedModelError:
        return False
    finally:
        patcher.model.train(was_training)
    return bool((staged - whole).abs().max() <= LOGPROB_TOLERANCE[patcher.model.dtype])
