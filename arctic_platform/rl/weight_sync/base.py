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
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from arctic_platform.errors import WeightSyncError

logger = logging.getLogger("arctic_platform.rl.weight_sync")

BLOCK_BYTES = 2 << 20
"""Copied and digested at once: what caches hold. `memcpy` is slower below the size of a core's own cache."""


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

    @cached_property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(spec.num_bytes for spec in self.specs.values())

    @cached_property
    def text(self) -> str:
        """For a control message; equal where names, their order, shapes, dtypes and aliases are."""
        specs = {name: [spec.dtype, *spec.shape] for name, spec in self.specs.items()}
        return json.dumps({"specs": specs, "aliases": self.aliases})

    @staticmethod
    @lru_cache(4)
    def from_text(text: str) -> "Manifest":
        """The inverse; remembered, since it is the same from sync to sync.

        Raises WeightSyncError for what is no manifest's text.
        """
        try:
            fields = json.loads(text)
            specs = {
                str(name): TensorSpec(tuple(int(size) for size in shape), str(dtype))
                for name, (dtype, *shape) in fields["specs"].items()
            }
            return Manifest(specs, {str(name): str(first) for name, first in fields["aliases"].items()})
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
    return _weights_and_aliases(model)[0]


def manifest_of(model: nn.Module) -> Manifest:
    """What `model` holds."""
    return manifest_and_weights(model)[0]


def manifest_and_weights(model: nn.Module) -> tuple[Manifest, dict[str, Tensor]]:
    """`manifest_of` and `weights_of`, which both walk through all modules, at once."""
    weights, aliases = _weights_and_aliases(model)
    specs = {
        name: TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in weights.items()
    }
    return Manifest(specs, aliases), weights


def log_agreed(sender: Manifest, receiver: Manifest, *, context: str) -> None:
    """The documented line."""
    line = "[weight-sync names validated] context=%s sender=%d expected=%d"
    logger.info(line, context, len(sender.specs), len(receiver.specs))


class RunningDigest:
    """XXH3 (64 bits) of a tensor's bytes while they are filled in from the front.

    On bytes that the cache still holds it costs a small part of what copying them does. Bytes on a GPU are brought to
    the CPU for it, as many at once as are ready.
    """

    def __init__(self, flat: Tensor) -> None:
        """flat: [N] uint8, contiguous; see `bytes_of`."""
        self._flat = flat
        self._bytes = flat.numpy() if flat.device.type == "cpu" else None
        self._done = 0
        self._hash = xxhash.xxh3_64()

    def advance(self, end: int) -> None:
        """The first `end` bytes will not change any more."""
        part = slice(self._done, end)
        self._hash.update(self._bytes[part] if self._bytes is not None else self._flat[part].cpu().numpy())
        self._done = end

    def finish(self) -> int:
        """The digest, now that all bytes are there."""
        if self._done < self._flat.numel():
            self.advance(self._flat.numel())
        return self._hash.intdigest()


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


def _weights_and_aliases(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors by their first names, and the first name behind every other one."""
    first: dict[int, str] = {}
    weights, aliases = {}, {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        known = first.setdefault(id(tensor), name)
        if known == name:
            weights[name] = tensor
        else:
            aliases[name] = known
    return weights, aliases
