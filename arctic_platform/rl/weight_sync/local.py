"""Weights within one process: a copy, checked.

By default the new weights are copied aside, compared, and only then written over the receiver's: whatever fails, the
receiver keeps its old weights whole. `low_memory` writes tensor by tensor straight into the receiver and needs no
second copy of the model; a failure half-way leaves a mixture, so the caller must not use the receiver before a sync
has succeeded.
"""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn

from arctic_platform.errors import WeightSyncError
from arctic_platform.rl.weight_sync.base import Manifest, SyncReport, digest, manifest_of, weights_of
from arctic_platform.rl.weight_sync.names import Mapping, match

CONTEXT = "local"
DIGEST_THREADS = 2


def sync_local(
    sender: nn.Module,
    receiver: nn.Module,
    *,
    low_memory: bool = False,
    on_overwrite: Callable[[], None] = lambda: None,
) -> SyncReport:
    """`copy_weights` of a model without adapters."""
    specs, weights = manifest_of(sender), weights_of(sender).items()
    return copy_weights(specs, weights, receiver, low_memory=low_memory, on_overwrite=on_overwrite)


@torch.no_grad()
def copy_weights(
    specs: Manifest,
    weights: Iterable[tuple[str, Tensor]],
    receiver: nn.Module,
    *,
    low_memory: bool = False,
    on_overwrite: Callable[[], None] = lambda: None,
) -> SyncReport:
    """Make the receiver's weights equal to the sender's, bit for bit.

    Args:
        specs, weights: what the sender has, and it tensor by tensor; no more than a few are held at once.
        low_memory: no second copy of the weights. on_overwrite: called right before the first weight changes.

    Raises:
        WeightSyncError: the models differ (nothing moved), or a digest does.
    """
    mapping = match(specs, manifest_of(receiver), context=CONTEXT)
    held = weights_of(receiver)
    targets = held if low_memory else {name: torch.empty_like(tensor) for name, tensor in held.items()}
    if low_memory:
        on_overwrite()
    _write_checked(mapping, weights, targets)
    if not low_memory:
        on_overwrite()
        for name, copied in targets.items():
            held[name].copy_(copied)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in held.values())
    return SyncReport(len(held), num_bytes, "local-low-memory" if low_memory else CONTEXT)


def _write_checked(mapping: Mapping, weights: Iterable[tuple[str, Tensor]], targets: dict[str, Tensor]) -> None:
    """Write every tensor to its places and compare digests; a few threads share the tensors out among them."""

    def write_one(name: str, tensor: Tensor) -> str | None:
        mapping.write(targets, name, tensor.detach())
        return None if digest(tensor) == digest(mapping.read_back(targets, name)) else name

    came, wrong = set(), []
    running: deque[Future[str | None]] = deque()
    with ThreadPoolExecutor(DIGEST_THREADS) as threads:
        for name, tensor in weights:
            came.add(name)
            running.append(threads.submit(write_one, name, tensor))
            if len(running) > DIGEST_THREADS:
                wrong.append(running.popleft().result())
        wrong += [one.result() for one in running]
    absent = sorted(set(mapping.by_sender) - came)
    if absent:
        raise WeightSyncError(
            f"{absent[0]!r} never came ({len(came)} of {len(mapping.by_sender)} tensors did); call sync_weights() again"
        )
    differing = [name for name in wrong if name is not None]
    if differing:
        raise WeightSyncError(
            f"digests differ for {differing[0]!r} ({len(differing)} of {len(came)} tensors): the weights changed while "
            "they were copied; call sync_weights() again while no step is running"
        )
