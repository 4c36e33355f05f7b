"""What both sides of a sync must agree on before the first byte moves.

    sender                              receiver
    Manifest: names, shapes, dtypes  -> match: every tensor of the receiver has its source, nothing is left over
    tensors                          -> written
    digests                          -> compared with those of what was written

A tied weight (one tensor under two names) is listed once, under its first name; the other names are aliases. A
receiver that ties differently is served through them.
"""

import json
import logging
import math
import zlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from arctic_platform.errors import WeightSyncError

logger = logging.getLogger("arctic_platform.rl.weight_sync")

BLOCK_ROWS, BLOCK_COLUMNS = 64, 1024
BLOCK_BYTES = 8 * BLOCK_ROWS * BLOCK_COLUMNS


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Of all elements."""
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class Manifest:
    """`specs`: every distinct tensor by its first name. `aliases`: other names of the same tensors."""

    specs: dict[str, TensorSpec]
    aliases: dict[str, str]

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(spec.num_bytes for spec in self.specs.values())

    @property
    def digest(self) -> int:
        """Equal where names, their order, shapes, dtypes and aliases are."""
        return zlib.crc32(json.dumps(self.to_json()).encode())

    def to_json(self) -> dict[str, Any]:
        """For a control message; `from_json` is the inverse."""
        specs = {name: [spec.dtype, *spec.shape] for name, spec in self.specs.items()}
        return {"specs": specs, "aliases": self.aliases}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Manifest":
        """Raises WeightSyncError for what `to_json` does not write."""
        try:
            specs = {
                str(name): TensorSpec(tuple(int(size) for size in shape), str(dtype))
                for name, (dtype, *shape) in fields["specs"].items()
            }
            return cls(specs, {str(name): str(first) for name, first in fields["aliases"].items()})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise WeightSyncError(f"the other side's manifest cannot be read: {error!r}") from error


@dataclass(frozen=True)
class SyncReport:
    """What a sync moved, and how.

    `num_bytes`: of the weights. `num_sent_bytes`: what travelled for them, less than that where only changes did.
    `version`: of the weights, where two processes agreed on it. `note`: why it was not done as asked, if it was not.
    """

    num_tensors: int
    num_bytes: int
    mechanism: str
    num_sent_bytes: int | None = None
    version: int | None = None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Its fields."""
        return asdict(self)


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


def log_agreed(sender: Manifest, receiver: Manifest, *, context: str) -> None:
    """The documented line."""
    line = "[weight-sync names validated] context=%s sender=%d expected=%d"
    logger.info(line, context, len(sender.specs), len(receiver.specs))


class RunningDigest:
    """Of a tensor's bytes while they are filled in from the front: sees every flipped bit, swapped row, stale piece.

    A block of 512 KiB is a table of 64-bit words, of which all row sums and all column sums go into a CRC-32; what is
    left over at the end goes into it as it is. A change is missed only if it leaves every sum as it was. That is three
    times as fast as CRC-32 over all bytes, a sync's slowest part otherwise, and needs no copy of what lies on a GPU.
    """

    def __init__(self, flat: Tensor) -> None:
        """flat: [N] uint8, contiguous; see `bytes_of`."""
        self._flat = flat
        self._done = 0
        self._crc = 0

    def advance(self, end: int) -> None:
        """The first `end` bytes will not change any more."""
        num_blocks = (end - self._done) // BLOCK_BYTES
        step = 1 if self._flat.device.type == "cpu" else max(num_blocks, 1)
        for _ in range(0, num_blocks, step):
            block = self._flat[self._done : self._done + step * BLOCK_BYTES]
            self._crc = zlib.crc32(_sums(block), self._crc)
            self._done += step * BLOCK_BYTES

    def finish(self) -> int:
        """The digest, now that all bytes are there."""
        self.advance(self._flat.numel())
        return zlib.crc32(self._flat[self._done :].cpu().numpy().data, self._crc)


def digest(tensor: Tensor) -> int:
    """`RunningDigest` of a whole tensor."""
    return RunningDigest(bytes_of(tensor)).finish()


def bytes_of(tensor: Tensor) -> Tensor:
    """[N] uint8, the tensor's own memory where it is contiguous, else that of a copy."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def copy_bytes(target: Tensor, source: Tensor) -> None:
    """Between [N] uint8 of any devices. On the CPU without torch's threads, which only get in each other's way."""
    if target.device.type == source.device.type == "cpu":
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source)


def _sums(blocks: Tensor) -> bytes:
    """Row sums and column sums of each block, in turns."""
    if blocks.device.type == "cpu":
        words = blocks.numpy().view(np.int64).reshape(BLOCK_ROWS, BLOCK_COLUMNS)
        return np.add.reduce(words, 1).tobytes() + np.add.reduce(words, 0).tobytes()
    aligned = blocks if blocks.data_ptr() % 8 == 0 else blocks.clone()
    words = aligned.view(torch.int64).view(-1, BLOCK_ROWS, BLOCK_COLUMNS)
    return torch.cat([words.sum(2), words.sum(1)], 1).cpu().numpy().tobytes()


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
