"""What happens to servers in a Ray cluster."""

import asyncio
from typing import Any

import pytest

from arctic_platform.errors import ConfigError, TransportError
from arctic_platform.rl import create_arctic_rl_client
from arctic_platform.rl.client import ArcticRLClient
from arctic_platform.rl.server.ray_cluster import stop_in_cluster
from tests.faults.record import Witness, fault
from tests.rl.engines import builders
from tests.rl.engines.builders import grouped_batch

pytestmark = pytest.mark.slow
LONG = {"n": 16, "max_tokens": 1500, "ignore_eos": True}
GONE = (
    "TransportError: <call>: Ray server <name> is gone (<why>), and with it what was not saved; create a new client "
    "and load_checkpoint()"
)


def connect(**settings: Any) -> ArcticRLClient:
    ray = {"num_cpus": 0.25} | settings.pop("ray", {})
    return create_arctic_rl_client(builders.config(transport="ray", ray=ray, **settings))


@pytest.fixture
def kill(ray_cluster: str) -> Any:
    """Ends the process of a client's server, as a node that fails would."""
    import ray

    return lambda client: ray.kill(client._transport._actor)


@fault(
    "the server's actor dies between two calls", saw=GONE, lost="what came after the last checkpoint", transport="ray"
)
def test_a_dead_actor_is_replaced_and_goes_on_from_its_checkpoint(tmp_path: Any, witness: Witness, kill: Any) -> None:
    async def train(client: ArcticRLClient, seed: int) -> float:
        await client.fwd_bwd(grouped_batch(seed))
        await client.step()
        return await client.weight_norm()

    async def main() -> None:
        first = connect(checkpoint_path=str(tmp_path))
        await train(first, 0)
        await first.save_checkpoint()
        expected = await train(first, 1)
        kill(first)
        with witness.sees(TransportError):
            await first.step()
        async with connect(checkpoint_path=str(tmp_path)) as second:
            assert (await second.load_checkpoint()).step == 1
            assert await train(second, 1) == expected

    asyncio.run(main())


@fault("the server's actor dies in a call", saw=GONE, lost="what came after the last checkpoint", transport="ray")
def test_an_actor_that_dies_in_a_call_is_said_at_once(witness: Witness, kill: Any) -> None:
    async def main() -> None:
        client = connect()
        call = asyncio.create_task(client.generate([[1, 2, 3]], LONG))
        await asyncio.sleep(0.3)
        kill(client)
        with witness.sees(TransportError):
            await call

    asyncio.run(main())


@fault(
    "a server asks for more than any node has",
    saw="ConfigError: <places> can never run this server (CPU: 64 asked, 2 at most in one place); <what to do>",
    transport="ray",
)
def test_what_no_node_has_is_refused_at_once(ray_cluster: str, witness: Witness) -> None:
    with witness.sees(ConfigError):
        connect(ray={"num_cpus": 64})


@fault(
    "a server asks for what others hold",
    saw="TransportError: Ray server <name> got no place in 1 s: it asks for CPU 2, GPU 0, free are CPU <n>, GPU 0 of "
    "CPU 2, GPU 0; <what to do>",
    transport="ray",
)
def test_what_is_not_free_in_time_is_taken_back(ray_cluster: str, witness: Witness) -> None:
    import ray

    holder = ray.util.placement_group([{"CPU": 1}])
    assert holder.wait(10)
    with witness.sees(TransportError):
        connect(ray={"num_cpus": 2, "start_seconds": 1.0})
    ray.util.remove_placement_group(holder)


@fault(
    "ray-stop while a call runs, seen by its caller",
    saw="the call's answer: the server ends after it",
    transport="ray",
)
def test_a_ray_server_that_is_stopped_lets_the_running_call_end(ray_cluster: str, witness: Witness) -> None:
    async def main() -> None:
        begun = asyncio.Event()
        config = builders.config(transport="ray", ray={"server": "stopped", "num_cpus": 0.25})
        client = create_arctic_rl_client(config, on_progress=lambda call: call.num_total and begun.set())
        other = create_arctic_rl_client(client.reconnect_config())
        with witness.sees():
            call = asyncio.create_task(client.generate([[1, 2, 3]], {"n": 8, "max_tokens": 500, "ignore_eos": True}))
            await asyncio.wait_for(begun.wait(), 60)
            stop = asyncio.create_task(asyncio.to_thread(stop_in_cluster, config.ray, "stopped", drain_seconds=200.0))
            assert len((await call).rollouts) == 8
        assert await stop
        with pytest.raises(TransportError):
            await other.step()

    asyncio.run(main())
