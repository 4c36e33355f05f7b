"""The ranks that train one model together, seen from one of them.

Everything that ranks must agree on goes over a group of CPU memory (gloo), so that it works the same on every device
and never waits behind a collective of the model.
"""

from __future__ import annotations

import datetime
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from arctic_platform.errors import ArcticError, ServerError, public_kind

T = TypeVar("T")
N = TypeVar("N", int, float)


@dataclass(frozen=True)
class World:
    """`rank` of `size` processes; `group` carries Python values between them, none where there is one process."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @classmethod
    def of_processes(cls, timeout_seconds: float) -> World:
        """Of the initialised default group, with a gloo group of its own for what is agreed on."""
        group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_seconds))
        return cls(dist.get_rank(), dist.get_world_size(), group)

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and sends weights."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of the ranks, on every rank. The value is pickled between own processes."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def sum(self, value: N) -> N:
        """Over all ranks, added in their order, so that every rank has the same bits."""
        total, *others = self.gather(value)
        for other in others:
            total += other
        return total

    def max(self, value: N) -> N:
        """Over all ranks."""
        return max(self.gather(value))

    @contextmanager
    def together(self) -> Generator[None]:
        """Run what each rank does alone (no collective may be inside); if one raises, all raise the first one's error.

        Raises what this rank raised, or the first failing rank's error where this one succeeded.
        """
        mine: Exception | None = None
        try:
            yield
        except Exception as error:
            mine = error
        errors = self.gather(
            None if mine is None else (public_kind(mine) if isinstance(mine, ArcticError) else None, str(mine))
        )
        if mine is not None:
            raise mine
        for rank, found in enumerate(errors):
            if found is not None:
                kind, text = found
                raise kind(text) if kind is not None else ServerError(f"rank {rank} failed: {text}")


ALONE = World()
"""One process, no group."""
