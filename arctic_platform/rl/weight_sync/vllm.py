"""Weights from a trainer in this process into vLLM.

vLLM takes weights layer by layer and in place, and says only afterwards which of them it did not take. So both sides
agree on names and shapes before the first one moves, and every weight is read back after vLLM has stored it. A failure
on the way leaves old and new layers side by side; the sampler then refuses to generate until a sync has succeeded.
"""

import logging
from typing import Protocol

from torch import Tensor, nn

from arctic_platform.rl.weight_sync.base import SyncReport, agree, manifest_of, weights_of

CONTEXT = "vllm"

logger = logging.getLogger("arctic_platform.rl.weight_sync")


class Receiver(Protocol):
    """The sampler's side; its `model` has the names, shapes and dtypes of what vLLM was built for, without values."""

    @property
    def model(self) -> nn.Module:
        """On the meta device."""

    def load(self, weights: dict[str, Tensor]) -> list[str]:
        """Write the weights, compare what was stored with what was sent, and name what could not be compared."""


def sync_vllm(sender: nn.Module, receiver: Receiver) -> SyncReport:
    """Give vLLM the sender's weights.

    Raises:
        WeightSyncError: the models differ (nothing moved), vLLM did not take a weight, or stored another.
    """
    agree(manifest_of(sender), manifest_of(receiver.model), context=CONTEXT)
    weights = weights_of(sender)
    not_compared = receiver.load(weights)
    logger.log(
        logging.WARNING if not_compared else logging.INFO,
        "[weight-sync digests compared] context=%s not_compared=%d%s",
        CONTEXT,
        len(not_compared),
        f" first={not_compared[0]}" if not_compared else "",
    )
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    return SyncReport(len(weights), num_bytes, CONTEXT)
