"""Which of several samplers a call goes to."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from arctic_platform.errors import InputError
from arctic_platform.rl.client import create_arctic_rl_client
from arctic_platform.rl.protocol import SamplingParams
from arctic_platform.rl.replicas import SamplingReplicas
from tests.rl.engines.builders import config

PROMPT = list(range(5, 45))
PARAMS = SamplingParams(n=2, max_tokens=4, ignore_eos=True)


def with_replicas(num: int, work: Callable[[SamplingReplicas], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(create_arctic_rl_client(config(kinds=("sampling",))))
                for _ in range(num)
            ]
            return await work(SamplingReplicas(clients))

    return asyncio.run(main())


def test_calls_with_one_key_find_what_they_share():
    async def work(replicas: SamplingReplicas) -> list[float]:
        calls = [[*PROMPT, i] for i in range(5, 9)]
        answers = [await replicas.generate([prompt], PARAMS, routing_key="group 7") for prompt in calls]
        return [answer.metrics["prefix_hit_tokens"] for answer in answers]

    assert with_replicas(3, work) == [0.0, *[float(len(PROMPT))] * 3]


def test_calls_at_once_without_a_key_go_to_different_replicas_and_draw_different_rollouts():
    async def work(replicas: SamplingReplicas) -> list[Any]:
        return await asyncio.gather(*(replicas.generate([PROMPT], PARAMS) for _ in range(2)))

    first, second = with_replicas(2, work)
    assert first.metrics["prefix_hit_tokens"] == second.metrics["prefix_hit_tokens"] == 0
    assert [list(r.token_ids) for r in first.rollouts] != [list(r.token_ids) for r in second.rollouts]


def test_keys_spread_and_one_replica_more_moves_only_what_it_takes():
    async def work(replicas: SamplingReplicas) -> None:
        four, three = replicas, SamplingReplicas(replicas.clients[:3])
        for i in range(300):
            before, after = three.replica_of(f"group {i}"), four.replica_of(f"group {i}")
            assert after in (before, 3)
        counts = [sum(four.replica_of(f"group {i}") == at for i in range(300)) for at in range(4)]
        assert min(counts) > 40

    with_replicas(4, work)


def test_no_replica_is_refused():
    with pytest.raises(InputError, match="clients is empty"):
        SamplingReplicas([])
