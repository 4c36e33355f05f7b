"""What a receiver tells a sender of itself, and the first words of both."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
import xxhash

from arctic_platform.errors import WeightSyncError
from arctic_platform.rl.weight_sync.base import Manifest
from arctic_platform.rl.weight_sync.terms import Terms

PROTOCOL = 2
"""Of the control messages. The two sides of a sync must speak the same."""


@dataclass(frozen=True)
class SyncOffer:
    """What a sender needs to know of a receiver that waits for it: good for one sync.

    `mechanism`: None for shared memory where both sides can reach it, else the stream.
    """

    host: str
    port: int
    token: str = field(repr=False)
    mechanism: str | None
    bucket_bytes: int
    low_memory: bool
    timeout_seconds: float
    delta: bool = False

    def to_json(self) -> dict[str, Any]:
        """Its fields; `from_json` is the inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> SyncOffer:
        """Raises WeightSyncError for other fields than `to_json` writes."""
        names = {one.name for one in fields(cls)}
        if values.keys() != names:
            raise WeightSyncError(f"an offer has the fields {sorted(names)}; given {sorted(values)}")
        return cls(**values)

    def terms(self, device: torch.device) -> Terms:
        """For a side whose weights are on `device`."""
        return Terms(self.host, self.bucket_bytes, self.timeout_seconds, device)


def told(manifest: Manifest) -> dict[str, Any]:
    """The part of a message that carries a manifest."""
    return {"manifest": manifest.text, "digest": xxhash.xxh3_64_intdigest(manifest.text.encode())}


def read_manifest(message: dict[str, Any]) -> Manifest:
    """The manifest in a message. Raises WeightSyncError if it is not as it was sent."""
    text = str(message["manifest"])
    manifest = Manifest.from_text(text)
    if xxhash.xxh3_64_intdigest(text.encode()) != message["digest"]:
        raise WeightSyncError("the manifest was damaged on its way: its digest differs; call sync_weights() again")
    return manifest
