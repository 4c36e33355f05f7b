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
    from arctic_platform.rl.replicas import SamplingReplicas

__all__ = [
    "ArcticRLClient",
    "ArcticRLClientConfig",
    "BlockingArcticRLClient",
    "OptimizerConfig",
    "Processing",
    "Rollout",
    "RolloutBatch",
    "SamplingParams",
    "SamplingReplicas",
    "ZoRRoInferenceConfig",
    "ZoRRoTrainConfig",
    "create_arctic_rl_client",
]

_MODULES = {
    **dict.fromkeys(("ArcticRLClient", "BlockingArcticRLClient", "create_arctic_rl_client"), "client"),
    **dict.fromkeys(("Processing", "Rollout", "RolloutBatch", "SamplingParams"), "protocol"),
    "SamplingReplicas": "replicas",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"arctic_platform.rl.{_MODULES.get(name, 'config')}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
