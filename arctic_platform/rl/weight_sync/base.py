"""What both sides of a sync must agree on before the first byte moves.

    sender                              receiver
    Manifest: names, shapes, dtypes  -> agree: every tensor of the receiver has its source, nothing is left over
    tensors                          -> written
    digests                          -> compared with those of what was written

A tied weight (one tensor under two names) is listed once, under its first name; the other names are aliases. A
receiver that ties differently is served through them.
"""

import logging
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from arctic_platform.errors import WeightSyncError

logger = logging.getLogger("arctic_platform.rl.weight_sync")


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one tensor."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Manifest:
    """`specs`: every distinct tensor by its first name. `aliases`: other names of the same tensors."""

    specs: dict[str, TensorSpec]
    aliases: dict[str, str]


@dataclass(frozen=True)
class SyncReport:
    """What a sync moved, and how."""

    num_tensors: int
    num_bytes: int
    mechanism: str


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers by name, each tensor once."""
    aliases = _aliases(model)
    return {name: tensor for name, tensor in _saved_tensors(model) if name not in aliases}


def manifest_of(model: nn.Module) -> Manifest:
    """What `model` holds."""
    specs = {
        name: TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in weights_of(model).items()
    }
    return Manifest(specs, _aliases(model))


def agree(sender: Manifest, receiver: Manifest, *, context: str) -> dict[str, str]:
    """Receiver name -> sender name for every tensor of the receiver, and the documented log line.

    Raises:
        WeightSyncError: a name has no counterpart, or a shape or dtype differs; nothing was moved.
    """
    sources = {name: sender.aliases.get(name, name) for name in receiver.specs}
    missing = sorted(name for name, source in sources.items() if source not in sender.specs)
    unused = sorted(set(sender.specs) - set(sources.values()))
    if missing or unused:
        side, name = ("receiver", missing[0]) if missing else ("sender", unused[0])
        raise WeightSyncError(
            f"weight names differ: {name!r} exists on the {side} only (sender {len(sender.specs)} tensors, receiver "
            f"{len(receiver.specs)}); both sides must hold the same model"
        )
    for name, source in sources.items():
        if receiver.specs[name] != sender.specs[source]:
            ours, theirs = receiver.specs[name], sender.specs[source]
            raise WeightSyncError(
                f"{name!r} is {theirs.dtype}{list(theirs.shape)} on the sender and {ours.dtype}{list(ours.shape)} on "
                "the receiver; both sides must hold the same model in the same dtype"
            )
    logger.info(
        "[weight-sync names validated] context=%s sender=%d expected=%d",
        context,
        len(sender.specs),
        len(receiver.specs),
    )
    return sources


def digest(tensor: Tensor) -> int:
    """CRC-32 of the bytes of a tensor: sees every flipped bit, swapped row and stale piece."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(memoryview(flat.cpu().numpy()))


def _saved_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return list(model.state_dict(keep_vars=True).items())


def _aliases(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    aliases = {}
    for name, tensor in _saved_tensors(model):
        known = first.setdefault(id(tensor), name)
        if known != name:
            aliases[name] = known
    return aliases
