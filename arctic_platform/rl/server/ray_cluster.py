"""Servers in a Ray cluster: found by name, started where there is room, ended in peace.

Ray lets a request that no node can place wait without a word. Here it is an error within seconds that says what is
missing. Importing this module loads no Ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from arctic_platform.errors import ConfigError, TransportError
from arctic_platform.rl.config import RayConfig
from arctic_platform.rl.server.ray_server import ServiceActor, value_of
from arctic_platform.rl.server.settings import ServerSettings
from arctic_platform.rl.workers.ray_join import import_ray, join_cluster, listed, reason_of

MAX_CALLS_AT_ONCE = 1000
ANSWER_SECONDS = 60.0


def start_actor(settings: RayConfig, name: str, *, device: str, options: Mapping[str, Any], is_kept: bool) -> Any:
    """The actor of this name, started unless it is there, and ready.

    Raises ConfigError for resources that no node of the cluster has, TransportError when they are not free in time or
    the actor does not come up.
    """
    ray = import_ray()
    known = _find_actor(ray, settings, name)
    if known is not None:
        _await_answer(ray, known, settings, name)
        return known
    demand = _demand(settings, device)
    placement = _placement(ray, settings, demand)
    actor = (
        ray.remote(ServiceActor)
        .options(
            name=name,
            namespace=settings.namespace,
            lifetime="detached",
            get_if_exists=True,
            max_concurrency=MAX_CALLS_AT_ONCE,
            num_cpus=demand["CPU"],
            num_gpus=demand["GPU"],
            **placement,
        )
        .remote(dict(options), is_kept)
    )
    _await_ready(ray, actor, settings, name, demand)
    return actor


def serve_in_cluster(settings: ServerSettings, ray_settings: RayConfig, *, device: str) -> str:
    """Start a server that outlives this process and its jobs, with HTTP; returns its address.

    Raises ConfigError for a name that is taken, a port that is, or resources that no node has; TransportError where
    there is no cluster.
    """
    name = ray_settings.server
    if name is None:
        raise ConfigError("a server that is to stay needs a name; give one")
    ray = join_cluster(ray_settings)
    if _find_actor(ray, ray_settings, name) is not None:
        raise ConfigError(
            f"a Ray server {name!r} runs already; choose another name, or end it: arctic-rl ray-stop {name}"
        )
    options = {"max_jobs": settings.max_jobs, "idle_seconds": settings.idle_seconds}
    actor = start_actor(ray_settings, name, device=device, options=options, is_kept=True)
    key = settings.api_key.get_secret_value() if settings.api_key else None
    try:
        return value_of(ray.get(actor.listen.remote(settings.model_dump_json(), key), timeout=ANSWER_SECONDS))
    except BaseException as error:
        ray.kill(actor)
        if isinstance(error, ray.exceptions.RayError):
            raise TransportError(f"Ray server {name!r} does not listen: {reason_of(error)}") from error
        raise


def stop_in_cluster(ray_settings: RayConfig, name: str, *, drain_seconds: float) -> bool:
    """Drain the server and end it; returns whether everything that ran came to its end.

    Raises ConfigError where no such server runs.
    """
    ray = join_cluster(ray_settings)
    actor = _find_actor(ray, ray_settings, name)
    if actor is None:
        raise ConfigError(
            f"no Ray server {name!r} runs in namespace {ray_settings.namespace!r}; `ray list actors` lists all"
        )
    try:
        return bool(value_of(ray.get(actor.drain.remote(drain_seconds), timeout=drain_seconds + ANSWER_SECONDS)))
    except ray.exceptions.RayError:
        return False
    finally:
        ray.kill(actor)


def _find_actor(ray: Any, settings: RayConfig, name: str) -> Any:
    try:
        return ray.get_actor(name, namespace=settings.namespace)
    except ValueError:
        return None


def _demand(settings: RayConfig, device: str) -> dict[str, float]:
    default = 1.0 if device.startswith("cuda") else 0.0
    return {"CPU": settings.num_cpus, "GPU": default if settings.num_gpus is None else settings.num_gpus}


def _placement(ray: Any, settings: RayConfig, demand: Mapping[str, float]) -> dict[str, Any]:
    """Scheduling options. Raises ConfigError when no node, or no bundle of the placement group, is large enough."""
    if settings.placement_group is None:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        _refuse_what_fits_nowhere(demand, nodes, f"the {len(nodes)} node(s) of the cluster")
        return {}
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    name = settings.placement_group
    try:
        group = ray.util.get_placement_group(name)
    except ValueError as error:
        raise ConfigError(
            f"ray.placement_group={name!r}: namespace {settings.namespace!r} has no such group; create it with "
            "ray.util.placement_group(..., name=..., lifetime='detached') or leave it out"
        ) from error
    _refuse_what_fits_nowhere(demand, group.bundle_specs, f"placement group {name!r}")
    return {"scheduling_strategy": PlacementGroupSchedulingStrategy(group)}


def _refuse_what_fits_nowhere(demand: Mapping[str, float], places: Sequence[Mapping[str, float]], where: str) -> None:
    if any(all(place.get(kind, 0.0) >= amount for kind, amount in demand.items()) for place in places):
        return
    missing = []
    for kind, amount in demand.items():
        most = max((place.get(kind, 0.0) for place in places), default=0.0)
        if most < amount:
            missing.append(f"{kind}: {amount:g} asked, {most:g} at most in one place")
    reason = "; ".join(missing) or f"no single place has {listed(demand)} together"
    raise ConfigError(
        f"{where} can never run this server ({reason}); lower ray.num_cpus or ray.num_gpus, or add a node"
    )


def _await_ready(ray: Any, actor: Any, settings: RayConfig, name: str, demand: Mapping[str, float]) -> None:
    """Wait for the first answer; an actor that got no place in time is taken back."""
    try:
        ray.get(actor.status.remote(), timeout=settings.start_seconds)
    except ray.exceptions.GetTimeoutError as error:
        ray.kill(actor)
        raise TransportError(
            f"Ray server {name!r} got no place in {settings.start_seconds:.0f} s: it asks for {listed(demand)}, free "
            f"are {listed(_free(ray))} of {listed(_total(ray))}; end something, lower "
            "ray.num_cpus or ray.num_gpus, or raise ray.start_seconds"
        ) from error
    except ray.exceptions.RayError as error:
        raise TransportError(f"Ray server {name!r} did not come up: {reason_of(error)}") from error


def _await_answer(ray: Any, actor: Any, settings: RayConfig, name: str) -> None:
    """Wait for one that others started, which is left alone however long it takes."""
    try:
        ray.get(actor.status.remote(), timeout=settings.start_seconds)
    except ray.exceptions.GetTimeoutError as error:
        raise TransportError(
            f"Ray server {name!r} has not answered in {settings.start_seconds:.0f} s; it waits for its place, or is "
            "stuck: `ray list actors` shows which"
        ) from error
    except ray.exceptions.RayError as error:
        raise TransportError(f"Ray server {name!r} is gone: {reason_of(error)}") from error


def _free(ray: Any) -> dict[str, float]:
    return _of_kinds(ray.available_resources())


def _total(ray: Any) -> dict[str, float]:
    return _of_kinds(ray.cluster_resources())


def _of_kinds(resources: Mapping[str, float]) -> dict[str, float]:
    return {kind: resources.get(kind, 0.0) for kind in ("CPU", "GPU")}
