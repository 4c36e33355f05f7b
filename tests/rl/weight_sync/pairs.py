"""Two sides of a sync over plain dicts of tensors: in threads of one process, or with the other side in its own."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from arctic_platform.rl.config import WeightSyncConfig
from arctic_platform.rl.weight_sync.base import Manifest, SyncReport, TensorSpec
from arctic_platform.rl.weight_sync.delta import DeltaBase
from arctic_platform.rl.weight_sync.session import Receiver, SyncOffer, open_receiver, send_weights

MECHANISMS = ["shared_memory", "stream", "collective"]
SECONDS = 2.0
SHAPES = {
    "large": (700, 1024),
    "empty": (0, 3),
    "tiny": (5,),
    "row": (1, 7),
    "half": (513, 129),
    "counter": (),
    "last": (3, 200, 300),
}
"""With buckets of 1 MiB: cut over several, several in one, and sizes that no power of two divides."""
DTYPES = {"half": torch.bfloat16, "counter": torch.int64}


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """The same names, shapes and dtypes for every seed, other values."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (100 * torch.randn(shape, generator=generator)).to(DTYPES.get(name, torch.float32))
        for name, shape in SHAPES.items()
    }


def manifest(held: dict[str, torch.Tensor]) -> Manifest:
    return Manifest(
        {name: TensorSpec(tuple(one.shape), str(one.dtype).removeprefix("torch.")) for name, one in held.items()}, {}
    )


@dataclass
class DictSink:
    """Counts the calls; `fail` is raised by `begin_overwrite`."""

    held: dict[str, torch.Tensor] = field(default_factory=lambda: tensors(0))
    num_begun: int = 0
    fail: Exception | None = None

    def contents(self) -> tuple[Manifest, dict[str, torch.Tensor]]:
        return manifest(self.held), self.held

    def begin_overwrite(self) -> None:
        self.num_begun += 1
        if self.fail is not None:
            raise self.fail


def settings(mechanism: str | None = "stream", **changes: Any) -> WeightSyncConfig:
    return WeightSyncConfig(**{"mechanism": mechanism, "bucket_mib": 1, "timeout_seconds": SECONDS} | changes)


def receiver(sink: Any, mechanism: str | None = "stream", *, low_memory: bool = False, **changes: Any) -> Receiver:
    return open_receiver(settings(mechanism, **changes), sink, low_memory=low_memory)


class Run(threading.Thread):
    """`work` beside the test; `outcome` is what it returned or raised."""

    def __init__(self, work: Any) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._outcome: Any = None
        self.start()

    def run(self) -> None:
        try:
            self._outcome = self._work()
        except Exception as error:
            self._outcome = error

    @property
    def outcome(self) -> Any:
        self.join(20)
        assert not self.is_alive(), "no wait of a sync is without an end"
        return self._outcome


def sync(
    side: Receiver, weights: dict[str, torch.Tensor], version: int = 1, base: DeltaBase | None = None
) -> tuple[SyncReport, SyncReport]:
    """What both sides report."""
    offer = SyncOffer.from_json(side.offer.to_json())
    receiving = Run(side.run)
    sent = send_weights(offer, manifest(weights), iter(weights.items()), version=version, base=base)
    received = receiving.outcome
    if isinstance(received, Exception):
        raise received
    return sent, received


def outcomes(
    side: Receiver,
    weights: dict[str, torch.Tensor],
    items: Iterator[Any] | None = None,
    version: int = 1,
    base: DeltaBase | None = None,
) -> tuple[Any, Any]:
    """What each side returned or raised."""
    offer = side.offer
    receiving = Run(side.run)
    sending = Run(
        lambda: send_weights(offer, manifest(weights), items or iter(weights.items()), version=version, base=base)
    )
    return sending.outcome, receiving.outcome


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
