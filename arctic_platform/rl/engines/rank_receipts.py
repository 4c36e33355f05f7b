"""A receipt where ranks keep step: shared against unshared passes, with gradients that are summed over ranks.

Every rank compares rows of its own; the gradients compared are those that training would apply.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from arctic_platform.rl.engines.passes import PassPlan, Rows
from arctic_platform.rl.engines.work import Work
from arctic_platform.rl.engines.world import World
from arctic_platform.rl.zorro_train.proof import GRADIENT_FLOOR, Receipt, check_receipt

SHARED, ALONE = PassPlan(True, []), PassPlan(False, [])


def receipt_over_ranks(
    work: Work,
    names: list[str],
    backward: Callable[[Tensor], None],
    take: Callable[[], list[Tensor | None]],
) -> dict[str, float]:
    """Metrics of a comparison, on rows of every rank that shares, of one shared pass with each row alone.

    names: of the trained parameters. take: this rank's parts of their gradients, which it clears. Call this
    where gradients are thrown away. Raises ExactnessError on all ranks alike.
    """
    passes, world = work.passes, work.world
    rows = passes.sample_of(work.rows, work.plan) if work.plan.is_shared else Rows([], [])
    num_rows = len(rows.ids)
    sizes = [int(mask.sum()) for mask in rows.targets]
    ends = np.cumsum([0, *sizes])
    weights = np.random.default_rng(0).uniform(0.5, 1.5, ends[-1])

    def run(plan: PassPlan, chosen: list[int]) -> tuple[Tensor, int]:
        part = passes.one_pass(rows, plan, chosen, temperature=work.processing.temperature, calculate_entropy=False)
        of_part = np.concatenate([weights[:0], *(weights[ends[b] : ends[b + 1]] for b in chosen)])
        backward((part.values.logprobs * torch.from_numpy(of_part).to(part.values.logprobs)).sum())
        return part.values.logprobs.detach(), part.tokens

    shared, tokens_shared = run(SHARED, list(range(num_rows)))
    shared_grads = take()
    with passes.attention(is_shared=False):
        alone = [run(ALONE, [b] if b < num_rows else []) for b in range(world.max(num_rows))]
    alone_grads = take()
    difference = (shared - torch.cat([shared[:0], *(values for values, _ in alone)])).abs()
    gradient_rel, worst, worst_rel = _compare(names, shared_grads, alone_grads, world)
    receipt = Receipt(
        logprob_max_abs=world.max(float(difference.max()) if len(difference) else 0.0),
        gradient_rel=gradient_rel,
        worst_parameter=worst,
        worst_rel=worst_rel,
        num_rows=world.sum(num_rows),
        tokens_shared=world.sum(tokens_shared),
        tokens_alone=world.sum(rows.num_tokens),
    )
    check_receipt(receipt, passes.model.dtype, passes.config.receipt_tolerance)
    return receipt.metrics()


def _compare(
    names: list[str], shared: list[Tensor | None], alone: list[Tensor | None], world: World
) -> tuple[float, str, float]:
    """`(relative error of all, name of the worst parameter, its relative error)`, of the whole gradients."""
    zero = torch.zeros(())
    own = []
    for ours, plain in zip(shared, alone, strict=True):
        ours, plain = zero if ours is None else ours, zero if plain is None else plain
        own.append((float((ours - plain).float().norm()) ** 2, float(plain.float().norm()) ** 2))
    off, reference = np.sqrt(np.sum(world.gather(own), axis=0)).T
    relative = off / np.maximum(reference, GRADIENT_FLOOR)
    worst = int(relative.argmax())
    total = float(np.linalg.norm(off)) / max(float(np.linalg.norm(reference)), GRADIENT_FLOOR)
    return total, names[worst], float(relative[worst])
