"""Weights within one process: a copy, checked.

By default the new weights are copied aside, compared, and only then written over the receiver's: whatever fails, the
receiver keeps its old weights whole. `low_memory` writes tensor by tensor straight into the receiver and needs no
second copy of the model; a failure half-way leaves a mixture, so the caller must not use the receiver before a sync
has succeeded.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from arctic_platform.errors import WeightSyncError
from arctic_platform.rl.weight_sync.base import SyncReport, agree, digest, manifest_of, weights_of

CONTEXT = "local"
DIGEST_THREADS = 2


@torch.no_grad()
def sync_local(
    sender: nn.Module,
    receiver: nn.Module,
    *,
    low_memory: bool = False,
    on_overwrite: Callable[[], None] = lambda: None,
) -> SyncReport:
    """Make the receiver's weights equal to the sender's, bit for bit.

    Args:
        low_memory: no second copy of the weights. on_overwrite: called right before the first weight changes.

    Raises:
        WeightSyncError: the models differ (nothing moved), or a digest does.
    """
    sources = agree(manifest_of(sender), manifest_of(receiver), context=CONTEXT)
    given, held = weights_of(sender), weights_of(receiver)
    pairs = [(name, given[source], held[name]) for name, source in sources.items()]
    if low_memory:
        on_overwrite()
        _copy_checked([(name, source, target) for name, source, target in pairs])
    else:
        staged = [(name, source, torch.empty_like(target)) for name, source, target in pairs]
        _copy_checked(staged)
        on_overwrite()
        for (_, _, target), (_, _, copied) in zip(pairs, staged, strict=True):
            target.copy_(copied)
    num_bytes = sum(target.numel() * target.element_size() for _, _, target in pairs)
    return SyncReport(len(pairs), num_bytes, "local-low-memory" if low_memory else CONTEXT)


def _copy_checked(pairs: list[tuple[str, Tensor, Tensor]]) -> None:
    """Copy every source into its target and compare their digests; the tensors are shared out over a few threads."""

    def copy_one(pair: tuple[str, Tensor, Tensor]) -> str | None:
        name, source, target = pair
        with torch.no_grad():
            target.copy_(source)
        return None if digest(source) == digest(target) else name

    with ThreadPoolExecutor(DIGEST_THREADS) as threads:
        wrong = [name for name in threads.map(copy_one, pairs) if name is not None]
    if wrong:
        raise WeightSyncError(
            f"digests differ for {wrong[0]!r} ({len(wrong)} of {len(pairs)} tensors): the weights changed while they "
            "were copied; call sync_weights() again while no step is running"
        )
