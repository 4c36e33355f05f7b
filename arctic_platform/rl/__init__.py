"""Reinforcement learning: the client's names, loaded on first use so that importing them brings no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arctic_platform.rl.client import ArcticRLClient, BlockingArcticRLClient, create_arctic_rl_client
    from arctic_platform.rl.config import (
        ArcticRLClientConfig,
        OptimizerConfig,
        ZoRRoInferenceConfig,
        ZoRRoTrainConfig,
    )
    from arctic_platform.rl.protocol import Processing, Rollout, RolloutBatch, SamplingParams

__all__ = [
    "ArcticRLClient",
    "ArcticRLClientConfig",
    "BlockingArcticRLClient",
    "OptimizerConfig",
    "Processing",
    "Rollout",
    "RolloutBatch",
    "SamplingParams",
    "ZoRRoInferenceConfig",
    "ZoRRoTrainConfig",
    "create_arctic_rl_client",
]

_CLIENT_NAMES = ("ArcticRLClient", "BlockingArcticRLClient", "create_arctic_rl_client")
_PROTOCOL_NAMES = ("Processing", "Rollout", "RolloutBatch", "SamplingParams")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "client" if name in _CLIENT_NAMES else "protocol" if name in _PROTOCOL_NAMES else "config"
    return getattr(import_module(f"arctic_platform.rl.{module}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
