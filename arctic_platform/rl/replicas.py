"""Several samplers of equal weights, each a job of its own: which of them a call goes to."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from arctic_platform.errors import InputError
from arctic_platform.rl.client import ArcticRLClient
from arctic_platform.rl.protocol import GenerateResponse, SamplingParams


class SamplingReplicas:
    """Sends every `generate` to one of several clients.

    Calls with equal `routing_key` go to the same replica, where they find what they share computed; with one replica
    more, only the keys that it takes over move. Calls without a key go where the fewest prompts are in work.
    A call without a seed gets one from `seed` and its number, since each replica counts its own calls only.
    Raises InputError where there is no client.
    """

    def __init__(self, clients: Sequence[ArcticRLClient], *, seed: int = 0) -> None:
        if not clients:
            raise InputError("clients is empty; give at least one that samples")
        self.clients = list(clients)
        self._seed = seed
        self._num_calls = 0
        self._num_prompts = [0] * len(self.clients)

    def replica_of(self, routing_key: str) -> int:
        """The place in `clients` of the one that calls with this key go to."""
        return max(range(len(self.clients)), key=lambda i: _weight(routing_key, i))

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | dict[str, Any] | None = None,
        routing_key: str | None = None,
    ) -> GenerateResponse:
        """As the client's."""
        params = SamplingParams.model_validate(sampling_params or {})
        if params.seed is None:
            params = params.model_copy(update={"seed": (self._seed << 32) + self._num_calls})
        self._num_calls += 1
        at = self._num_prompts.index(min(self._num_prompts)) if routing_key is None else self.replica_of(routing_key)
        self._num_prompts[at] += len(prompts)
        try:
            return await self.clients[at].generate(prompts, params, routing_key)
        finally:
            self._num_prompts[at] -= len(prompts)


def _weight(key: str, replica: int) -> bytes:
    return hashlib.blake2b(f"{replica}:{key}".encode(), digest_size=8).digest()
