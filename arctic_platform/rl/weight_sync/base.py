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
ROW_BYTES = 8 * BLOCK_COLUMNS
BLOCK_BYTES = BLOCK_ROWS * ROW_BYTES


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

    A block of 512 KiB is a table of 64-bit words, of which all row sums and all column sums go into a CRC-32; the last
    block has fewer rows, and what is left over goes in as it is. A change is missed only if it leaves every sum as it
    was. That is three times as fast as CRC-32 over all bytes, a sync's slowest part otherwise, and needs no copy of
    what lies on a GPU.
    """

    def __init__(self, flat: Tensor) -> None:
        """flat: [N] uint8, contiguous; see `bytes_of`."""
        self._flat = flat
        self._bytes = flat.numpy() if flat.device.type == "cpu" else None
        self._done = 0
        self._crc = 0

    def advance(self, end: int) -> None:
        """The first `end` bytes will not change any more."""
        num_blocks = (end - self._done) // BLOCK_BYTES
        step = 1 if self._bytes is not None else max(num_blocks, 1)
        for _ in range(0, num_blocks, step):
            self._add(step, BLOCK_ROWS)

    def finish(self) -> int:
        """The digest, now that all bytes are there."""
        self.advance(self._flat.numel())
        if num_rows := (self._flat.numel() - self._done) // ROW_BYTES:
            self._add(1, num_rows)
        return zlib.crc32(self._flat[self._done :].cpu().numpy().data, self._crc)

    def _add(self, num_blocks: int, num_rows: int) -> None:
        end = self._done + num_blocks * num_rows * ROW_BYTES
        if self._bytes is not None:
            words = self._bytes[self._done : end].view(np.int64).reshape(num_rows, BLOCK_COLUMNS)
            row_sums, column_sums = np.add.reduce(words, 1), np.add.reduce(words, 0)
            self._crc = zlib.crc32(column_sums, zlib.crc32(row_sums, self._crc))
        else:
            blocks = self._flat[self._done : end]
            blocks = (blocks if blocks.data_ptr() % 8 == 0 else blocks.clone()).view(torch.int64)
            table = blocks.view(num_blocks, num_rows, BLOCK_COLUMNS)
            self._crc = zlib.crc32(torch.cat([table.sum(2), table.sum(1)], 1).cpu().numpy().data, self._crc)
        self._done = end


def digest(tensor: Tensor) -> int:
    """`RunningDigest` of a whole tensor."""
    return RunningDigest(bytes_of(tensor)).finish()


def bytes_of(tensor: Tensor) -> Tensor:
    """[N] uint8, the tensor's own memory where it is contiguous, else that of a copy."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def copy_bytes(target: Tensor, at: int, source: Tensor, start: int, num: int) -> None:
    """Between [N] uint8 of any devices: `num` bytes of the source from `start` on, to the target at `at`.

    On the CPU by numpy: slicing costs less, and torch's threads would only get in each other's way.
    """
    if target.device.type == source.device.type == "cpu":
        np.copyto(target.numpy()[at : at + num], source.numpy()[start : start + num])
    else:
        target[at : at + num].copy_(source[start : start + num])


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
