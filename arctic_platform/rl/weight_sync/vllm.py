"""Weights from a trainer in this process into vLLM.

vLLM takes weights layer by layer and in place, and says only afterwards which of them it did not take. So both sides
agree on names and shapes before the first one moves, and every weight is read back after vLLM has stored it. A failure
on the way leaves old and new layers side by side; the sampler then refuses to generate until a sync has succeeded.
"""

import logging
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

from arctic_platform.rl.weight_sync.base import Manifest, SyncReport, manifest_of, weights_of
from arctic_platform.rl.weight_sync.names import Mapping, match

CONTEXT = "vllm"

logger = logging.getLogger("arctic_platform.rl.weight_sync")


class Receiver(Protocol):
    """The sampler's side; its `model` has the names, shapes and dtypes of what vLLM was built for, without values."""

    @property
    def model(self) -> nn.Module:
        """On the meta device."""

    def load(self, weights: dict[str, Tensor]) -> list[str]:
        """Write the weights, compare what was stored with what was sent, and name what could not be compared."""


def load_weights(specs: Manifest, weights: Iterable[tuple[str, Tensor]], receiver: Receiver) -> SyncReport:
    """Give vLLM the sender's weights.

    Args:
        specs, weights: what the sender has, and it tensor by tensor. vLLM cuts them anew, so all are held at once;
            those that the sender itself holds are not copied for that.

    Raises:
        WeightSyncError: the models differ (nothing moved), vLLM did not take a weight, or stored another.
    """
    mapping = match(specs, manifest_of(receiver.model), context=CONTEXT)
    not_compared = receiver.load(_as_received(mapping, weights))
    logger.log(
        logging.WARNING if not_compared else logging.INFO,
        "[weight-sync digests compared] context=%s not_compared=%d%s",
        CONTEXT,
        len(not_compared),
        f" first={not_compared[0]}" if not_compared else "",
    )
    held = weights_of(receiver.model)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in held.values())
    return SyncReport(len(held), num_bytes, CONTEXT)


def _as_received(mapping: Mapping, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The weights under the receiver's names; only what is cut differently there is copied."""
    found: dict[str, Tensor] = {}
    for name, tensor in weights:
        for piece in mapping.pieces(name):
            source, spec = piece.source.of(tensor.detach()), mapping.receiver.specs[piece.receiver]
            if tuple(source.shape) == spec.shape and not piece.into.is_transposed:
                found[piece.receiver] = source.contiguous()
                continue
            if piece.receiver not in found:
                found[piece.receiver] = torch.empty(spec.shape, dtype=source.dtype, device=source.device)
            piece.into.of(found[piece.receiver]).copy_(source)
    return found
