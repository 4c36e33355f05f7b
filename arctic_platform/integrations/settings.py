"""What a trainer's config says about sharing and budgets, and how it is read from whatever holds it.

Importing this loads pydantic and nothing heavier; no trainer needs to be installed.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from arctic_platform.errors import ConfigError
from arctic_platform.rl.config import StrictModel, ZoRRoInferenceConfig, ZoRRoTrainConfig

STACK = 4
"""Frames from a warning to whoever called the adapter."""


class FrameworkSettings(StrictModel):
    """A trainer's settings in this package's terms: `ArcticRLClientConfig(model=..., **settings.client_fields())`."""

    zorro_train: ZoRRoTrainConfig = Field(description="Sharing in training, and the budgets of a micro-batch.")
    zorro_inference: ZoRRoInferenceConfig = Field(
        default_factory=ZoRRoInferenceConfig, description="Sharing in sampling."
    )
    num_ranks: int = Field(1, ge=1, description="Data-parallel ranks that a batch is spread over; not the world size.")

    def client_fields(self) -> dict[str, Any]:
        """What these settings give to a client's config."""
        return {"zorro_train": self.zorro_train, "zorro_inference": self.zorro_inference}


class Source:
    """A trainer's config, read by dotted paths: nested or dotted mappings (OmegaConf's too), dataclasses, namespaces.

    What is absent, None, or OmegaConf's `???` counts as not set.
    """

    def __init__(self, config: Any) -> None:
        self.config = config

    def get(self, path: str, default: Any = None) -> Any:
        """The value at a path. Raises ConfigError for an interpolation that nothing resolved."""
        value = _find(self.config, path.split("."))
        if isinstance(value, str) and value.startswith("${"):
            raise ConfigError(
                f"{path}={value!r} is not resolved; pass OmegaConf.to_container(config, resolve=True) or the config "
                "as the trainer's main function gets it"
            )
        return default if value is None or (isinstance(value, str) and value == "???") else value

    def count(self, path: str, default: int | None = None) -> int | None:
        """A whole number of 1 or more. Raises ConfigError for another value."""
        value = self.get(path, default)
        if value is None:
            return None
        if isinstance(value, bool) or not str(value).strip().isdigit() or int(value) < 1:
            raise ConfigError(f"{path}={value!r} must be a whole number of 1 or more")
        return int(value)

    def flag(self, path: str) -> bool | None:
        """True, False or not set, also as text. Raises ConfigError for another value."""
        value = self.get(path)
        if value is None or isinstance(value, bool):
            return value
        text = str(value).lower()
        if text not in ("true", "false"):
            raise ConfigError(f"{path}={value!r} must be true or false")
        return text == "true"

    def one_flag(self, paths: Sequence[str], old: Sequence[str] = ()) -> bool | None:
        """What all the paths that are set agree on; `old` ones with a warning. Raises ConfigError where they do not."""
        given = {path: self.flag(path) for path in (*paths, *old)}
        found = {path: value for path, value in given.items() if value is not None}
        for path in old:
            if path in found:
                warnings.warn(f"{path} is an old spelling; write {paths[0]}={found[path]}", FutureWarning, STACK)
        if len(set(found.values())) > 1:
            told = " and ".join(f"{path}={value}" for path, value in found.items())
            raise ConfigError(f"{told} contradict each other; keep {next(iter(found))}")
        return next(iter(found.values()), None)

    def refuse_unknown(self, path: str, accepted: Sequence[str]) -> None:
        """Raise ConfigError for a key below a path that is not among those that have an effect."""
        block = _find(self.config, path.split("."))
        names = block if isinstance(block, Mapping) else getattr(block, "__dict__", {})
        dotted = (key[len(path) + 1 :] for key in _keys(self.config) if key.startswith(f"{path}."))
        for name in (*map(str, names), *dotted):
            key = name.split(".")[0]
            if key in accepted or key.startswith("_"):
                continue
            nearest = difflib.get_close_matches(key, accepted, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"accepted: {', '.join(accepted)}"
            raise ConfigError(f"{path}: unknown key {key!r}; {hint}")


def warn_no_effect(setting: str, reason: str) -> None:
    """Say that a setting changes nothing."""
    warnings.warn(f"{setting} has no effect: {reason}", UserWarning, STACK)


def data_parallel(world: int, parts: Mapping[str, int]) -> int:
    """Ranks that differ in their rows. Raises ConfigError where the other ways of splitting do not divide the world."""
    size = 1
    for value in parts.values():
        size *= value
    if world % size:
        told = " * ".join(f"{name}={value}" for name, value in parts.items())
        raise ConfigError(f"{world} devices cannot be divided by {told}; change one of them")
    return world // size


def _keys(config: Any) -> list[str]:
    return [key for key in config if isinstance(key, str)] if isinstance(config, Mapping) else []


def _find(node: Any, names: list[str]) -> Any:
    """The value at a path of names, any of which may be joined by dots in one key; None where there is none."""
    if not names:
        return node
    if node is None:
        return None
    for num in range(1, len(names) + 1):
        key = ".".join(names[:num])
        if isinstance(node, Mapping):
            below = node.get(key)
        else:
            below = getattr(node, key, None) if num == 1 else None
        found = None if below is None else _find(below, names[num:])
        if found is not None:
            return found
    return None
