"""The Ray transport on a small local cluster: where a server runs, who reaches it, what a client hears without one."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest

from arctic_platform.cli import main
from arctic_platform.errors import CallTimeoutError, ConfigError, InputError, TransportError
from arctic_platform.rl import ArcticRLClientConfig, create_arctic_rl_client
from arctic_platform.rl.client import BlockingArcticRLClient
from arctic_platform.rl.config import RayConfig
from arctic_platform.rl.server.ray_cluster import start_actor
from arctic_platform.rl.server.states import CallState

ROOT = Path(__file__).parents[2]
BATCH = {"prompts": [[1, 2, 3], [1, 2, 9]], "responses": [[4, 5], [6]], "advantages": [1.0, -1.0]}


def connect(**ray: Any) -> BlockingArcticRLClient:
    """A client whose server takes little of the cluster."""
    settings = {"num_cpus": 0.25} | ray
    return create_arctic_rl_client({"model": "tiny-random", "transport": "ray", "ray": settings}, blocking_calls=True)


@pytest.fixture(scope="module")
def client(ray_cluster: str) -> Generator[BlockingArcticRLClient]:
    """A client with a server of its own."""
    with connect() as found:
        yield found


def servers() -> set[str]:
    import ray

    return {one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if one["namespace"] == "arctic"}


def test_a_missing_ray_is_named_with_its_extra():
    code = "import sys\nsys.modules['ray'] = None\nfrom arctic_platform.rl import create_arctic_rl_client\n"
    code += "create_arctic_rl_client({'model': 'tiny-random', 'transport': 'ray'})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (
        "MissingDependencyError: transport='ray' needs ray; install it with: pip install 'zorro-rl[ray]'" in done.stderr
    )


def test_another_process_takes_over_what_one_began(client, ray_cluster):
    client.fwd_bwd(BATCH)
    client.step()
    config = client.reconnect_config()
    code = (
        "import sys\nfrom arctic_platform.rl import ArcticRLClientConfig, create_arctic_rl_client\n"
        "config = ArcticRLClientConfig.model_validate_json(sys.stdin.read())\n"
        "client = create_arctic_rl_client(config, blocking_calls=True)\n"
        "print(client.status().step, client.weight_norm())\n"
    )
    settings = config.model_copy(update={"ray": config.ray.model_copy(update={"address": ray_cluster})})
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=settings.model_dump_json(exclude_unset=True),
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", str(client.weight_norm())]


def test_a_server_that_clients_share_ends_with_its_last_job(client, ray_cluster):
    before = servers()
    heard: list[CallState] = []
    settings = {"model": "tiny-random", "transport": "ray", "ray": {"server": "shared", "num_cpus": 0.25}}
    one = create_arctic_rl_client(settings, blocking_calls=True, on_progress=heard.append)
    assert heard[0].line.startswith("loading: the server loads tiny-random since ")
    two = connect(server="shared")
    assert servers() == before | {"shared"}
    with pytest.raises(ConfigError, match="there is no such folder"):
        create_arctic_rl_client(one.config.model_copy(update={"model": "models/nowhere"}))
    one.shutdown()
    assert servers() == before | {"shared"}
    assert two.weight_norm() > 0
    two.shutdown()
    two.shutdown()
    assert servers() == before
    with pytest.raises(InputError, match="shut down"):
        two.weight_norm()


def start(name: str, **settings: Any) -> Any:
    """A server without a model."""
    return start_actor(RayConfig(**settings), name, device="cpu", options={}, is_kept=False)


def test_servers_share_a_placement_group_by_fractions_and_the_one_too_many_hears_why(ray_cluster):
    import ray

    group = ray.util.placement_group([{"CPU": 1}], name="together", lifetime="detached")
    assert group.wait(10)
    halves = [start(f"half-{number}", placement_group="together", num_cpus=0.5) for number in range(2)]
    with pytest.raises(TransportError, match=r"got no place in 1 s: it asks for CPU 0\.5, GPU 0, free are CPU"):
        start("third", placement_group="together", num_cpus=0.5, start_seconds=1.0)
    with pytest.raises(ConfigError, match="placement group 'together' can never run this server"):
        start("wide", placement_group="together", num_cpus=1.5)
    for half in halves:
        ray.kill(half)
    ray.util.remove_placement_group(group)


@pytest.mark.parametrize(
    ("ray", "kind", "message"),
    [
        ({"num_cpus": 64}, ConfigError, r"CPU: 64 asked, 2 at most in one place"),
        ({"num_gpus": 1}, ConfigError, r"GPU: 1 asked, 0 at most in one place"),
        ({"placement_group": "none"}, ConfigError, r"has no such group"),
        ({"address": "127.0.0.1:1"}, ConfigError, r"belongs to the cluster at .* already"),
    ],
)
def test_what_can_never_be_placed_is_refused_at_once(ray_cluster, ray, kind, message):
    with pytest.raises(kind, match=message):
        connect(**ray)


def test_a_cluster_that_nobody_runs_is_a_one_line_error():
    code = (
        "from arctic_platform.rl import create_arctic_rl_client\n"
        "ray = {'address': '127.0.0.1:1'}\n"
        "create_arctic_rl_client({'model': 'tiny-random', 'transport': 'ray', 'ray': ray})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert "TransportError: no Ray cluster answers at ray.address='127.0.0.1:1' (" in done.stderr


@pytest.mark.parametrize("server_id", ["nobody/1234", "no-slash"])
def test_a_server_that_is_gone_cannot_be_joined(ray_cluster, server_id):
    with pytest.raises(ConfigError, match=f"server_id='{server_id}'"):
        create_arctic_rl_client({"model": "tiny-random", "transport": "ray", "server_id": server_id})


def test_a_job_that_is_gone_cannot_be_joined(client):
    name = client.reconnect_config().server_id.partition("/")[0]
    with pytest.raises(ConfigError, match="there is no job 'gone' here"):
        create_arctic_rl_client(client.config.model_copy(update={"server_id": f"{name}/gone"}))


def test_a_cancelled_call_frees_the_server(client):
    other = create_arctic_rl_client(client.reconnect_config())

    async def cancel_soon() -> None:
        task = asyncio.create_task(other.generate([[1, 2, 3]], {"n": 64, "max_tokens": 4000, "ignore_eos": True}))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await asyncio.wait_for(other.status(), 20)).step is not None

    asyncio.run(cancel_soon())


def test_a_call_that_takes_too_long_is_cancelled_with_the_servers_word(client):
    config = client.reconnect_config().model_copy(update={"call_timeout": 0.3})
    with (
        create_arctic_rl_client(config, blocking_calls=True) as hasty,
        pytest.raises(CallTimeoutError, match=r"generate was not finished within call_timeout=0\.3 s .* it runs since"),
    ):
        hasty.generate([[1, 2, 3]], {"n": 64, "max_tokens": 4000, "ignore_eos": True})


def test_a_server_of_the_command_line_serves_ray_and_http_and_stays_until_it_is_stopped(client, ray_cluster, capsys):
    import ray

    assert run_main("ray-serve", "team", "--address", ray_cluster, "--num-cpus", "0.25") == 0
    url = capsys.readouterr().out.splitlines()[0].rpartition(" ")[2]
    assert int(url.rpartition(":")[2]) not in range(10002, 20000)
    health = httpx.get(f"{url}/health").json()
    assert health["status"] == "ok"
    with (
        connect(server="team") as one,
        create_arctic_rl_client(
            {"model": "tiny-random", "transport": "http", "server_url": url}, blocking_calls=True
        ) as two,
    ):
        assert one.weight_norm() == two.weight_norm()
    assert "team" in servers()
    assert run_main("ray-serve", "team", "--address", ray_cluster) == 2
    assert "a Ray server 'team' runs already" in capsys.readouterr().err
    assert run_main("ray-stop", "team", "--address", ray_cluster) == 0
    assert "team" not in servers()
    assert run_main("ray-stop", "team", "--address", ray_cluster) == 2
    assert ray.is_initialized()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "12000"], "port 12000 is among those of Ray's workers (10002 to 19999)"),
        (["--host", "0.0.0.0"], "needs an API key"),
        (["--num-gpus", "3"], "GPU: 3 asked, 0 at most in one place"),
    ],
)
def test_a_server_that_cannot_be_is_one_line_and_leaves_nothing(ray_cluster, capsys, options, message):
    before = servers()
    assert run_main("ray-serve", "no", "--address", ray_cluster, "--num-cpus", "0.25", *options) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert servers() == before


def run_main(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


def test_ray_settings_without_the_ray_transport_are_refused():
    with pytest.raises(ConfigError, match="ray has no effect with transport='embedded'"):
        ArcticRLClientConfig(model="tiny-random", ray={"num_cpus": 2})
