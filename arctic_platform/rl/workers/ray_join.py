"""Joining a Ray cluster.

Ray tries for minutes to reach an address where nobody is. Here that is an error within seconds. Importing this module
loads no Ray.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from arctic_platform.errors import ConfigError, MissingDependencyError, TransportError
from arctic_platform.rl.config import RayConfig


def import_ray(asker: str = "transport='ray'") -> Any:
    """The module `ray`. Raises MissingDependencyError."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"{asker} needs {error.name}; install it with: pip install 'zorro-rl[ray]'"
        ) from error
    return ray


def join_cluster(settings: RayConfig, asker: str = "transport='ray'") -> Any:
    """Ray, connected: to the cluster that this process is in, to the one at `address`, or to a new one on this machine.

    Raises TransportError when nobody answers at the address.
    """
    ray = import_ray(asker)
    if ray.is_initialized():
        _check_joined(settings, ray.get_runtime_context().gcs_address)
        return ray
    _check_reachable(settings)
    try:
        ray.init(
            address=settings.address,
            namespace=settings.namespace,
            include_dashboard=None if settings.address else False,
            log_to_driver=False,
            logging_level="error",
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise TransportError(
            f"no Ray cluster can be joined at {settings.address or 'this machine'}: {reason_of(error)}; start one "
            "with: ray start --head"
        ) from error
    return ray


def _check_joined(settings: RayConfig, joined: str) -> None:
    """A process belongs to one cluster; an address of another one cannot take effect."""
    if settings.address is None or settings.address in ("auto", joined):
        return
    host, _, port = settings.address.rpartition(":")
    if port != joined.rpartition(":")[2] or not (_is_same_host(host, joined.rpartition(":")[0])):
        raise ConfigError(
            f"ray.address={settings.address!r}, but this process belongs to the cluster at {joined!r} already; leave "
            "it out, or call ray.shutdown() first"
        )


def _is_same_host(one: str, other: str) -> bool:
    try:
        return socket.gethostbyname(one) in (socket.gethostbyname(other), "127.0.0.1")
    except OSError:
        return False


def _check_reachable(settings: RayConfig) -> None:
    """Ray itself tries for minutes to reach an address where nobody is."""
    host, _, port = (settings.address or "").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=min(settings.start_seconds, 5.0)).close()
    except OSError as error:
        raise TransportError(
            f"no Ray cluster answers at ray.address={settings.address!r} ({reason_of(error)}); `ray status` on its "
            "head node shows the address"
        ) from error


def listed(resources: Mapping[str, float]) -> str:
    """Resources as a person reads them."""
    return ", ".join(f"{kind} {amount:g}" for kind, amount in resources.items())


def reason_of(error: BaseException) -> str:
    """One line of what Ray says at length: why an actor died, or what its creation raised."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if "creation task" in lines[0]:
        return lines[-1].rstrip(".")
    why = [line for line in lines if line.startswith("The actor is dead because")]
    return (why or lines)[0].rstrip(".")
