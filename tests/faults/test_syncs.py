"""Weight syncs into a sampler in a process of its own, when things go wrong around them."""

import asyncio
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from arctic_platform.errors import WeightSyncError
from arctic_platform.rl import create_arctic_rl_client
from arctic_platform.rl.fetch import fetch_model
from arctic_platform.rl.protocol import SyncResponse
from tests.faults.record import Witness, fault
from tests.faults.runs import Harm, Strikes, make_recipe, numbers, run, workers_of
from tests.faults.servers import serving
from tests.rl.engines.builders import config, grouped_batch

APART: dict[str, Any] = {"colocate": False, "ranks": {"num_threads": 1}}
FEW_BYTES = 4 << 20
"""No file may be larger, and the ring of a sync is one: it is four times as large."""

pytestmark = pytest.mark.slow


@fault(
    "shared memory is exhausted, and was asked for by name",
    saw="WeightSyncError: <who> gave up: <n> bytes of shared memory cannot be had (<reason>)",
    lost="nothing: the sampler keeps its weights, and without a name the weights go over the connection",
)
def test_shared_memory_that_cannot_be_had_is_an_error_or_a_detour(tmp_path: Path, witness: Witness) -> None:
    with serving(tmp_path, max_file_bytes=FEW_BYTES) as server:
        settings = {"mechanism": "shared_memory"}
        asked = config(server_url=server.url, **APART, weight_sync=settings)
        with create_arctic_rl_client(asked, blocking_calls=True) as client:
            before = client.generate([[1, 2, 3]], {"max_tokens": 4, "seed": 1})
            client.fwd_bwd(grouped_batch())
            client.step()
            with witness.sees(WeightSyncError):
                client.sync_weights()
            assert client.generate([[1, 2, 3]], {"max_tokens": 4, "seed": 1}).rollouts == before.rollouts
        with create_arctic_rl_client(config(server_url=server.url, **APART), blocking_calls=True) as client:
            client.fwd_bwd(grouped_batch())
            client.step()
            synced = client.sync_weights()
            assert (synced.mechanism, synced.weight_version) == ("stream", 1)
        server.await_log("the weights go over the connection instead")


@fault(
    "shared memory is exhausted for a while, in the middle of a run",
    transport="run",
    saw="warning: the weight sync failed and is made again (1 of 2): <who> gave up: <n> bytes of shared memory cannot "
    "be had (<reason>)",
    lost="nothing: the sync is made again, up to twice; the third error ends the run, and the same command goes on",
)
def test_a_run_makes_a_failed_sync_again(tmp_path: Path, witness: Witness) -> None:
    model = fetch_model("tiny-llama", tmp_path / "tiny-llama")
    whole = run(make_recipe(model, tmp_path / "whole")).run
    apart = ["client.colocate=false", "client.ranks.num_threads=1", "client.weight_sync.mechanism=shared_memory"]
    endless = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)

    def limit(num_bytes: tuple[int, int]) -> None:
        resource.prlimit(workers_of(os.getpid())["sampler"], resource.RLIMIT_FSIZE, num_bytes)

    def exhaust() -> Harm:
        limit((FEW_BYTES, resource.RLIM_INFINITY))
        return lambda: None

    sign = "weight sync failed"
    view = Strikes("sync", 1, exhaust, sign=sign, mend=lambda: limit(endless))
    outcome = run(make_recipe(model, tmp_path / "apart", *apart), view)
    view.end_strike()
    assert numbers(outcome.run) == numbers(whole)
    assert (len([line for line in view.lines if sign in line]), outcome.run.restarts()) == (1, [])
    view.tell(witness)


@fault("two weight syncs are asked for at once", saw="both answers: one is made after the other")
def test_two_syncs_at_once_are_made_one_after_the_other(witness: Witness) -> None:
    async def main() -> list[SyncResponse]:
        async with create_arctic_rl_client(config(**APART)) as client:
            await client.fwd_bwd(grouped_batch())
            await client.step()
            with witness.sees():
                return await asyncio.gather(client.sync_weights(), client.sync_weights())

    assert [one.weight_version for one in asyncio.run(main())] == [1, 1]


@fault(
    "the sampler's process is killed while nobody samples",
    saw="nothing: the next sync starts it anew, and gives it the weights",
)
def test_a_sampler_that_nobody_uses_is_replaced_by_the_next_sync(witness: Witness) -> None:
    with create_arctic_rl_client(config(**APART), blocking_calls=True) as client:
        client.fwd_bwd(grouped_batch())
        client.step()
        client.sync_weights()
        before = client.generate([[1, 2, 3]], {"max_tokens": 4, "seed": 1})
        os.kill(workers_of(os.getpid())["sampler"], signal.SIGKILL)
        while client.status().lost is None:
            time.sleep(0.01)
        with witness.sees():
            client.sync_weights()
        assert client.generate([[1, 2, 3]], {"max_tokens": 4, "seed": 1}).rollouts == before.rollouts
