"""The calls that a trainer refuses while it sleeps, of both kinds of clients."""

from collections.abc import Callable
from typing import Any

from tests.rl.engines.builders import grouped_batch

PROMPTS = [[5, 6, 7, 8]]

CALLS: dict[str, Callable[[Any], Any]] = {
    "log_probs": lambda client: client.log_probs(grouped_batch()),
    "fwd_bwd": lambda client: client.fwd_bwd(grouped_batch()),
    "fwd_no_grad": lambda client: client.fwd_no_grad(grouped_batch()),
    "step": lambda client: client.step(),
    "sync_weights": lambda client: client.sync_weights(),
    "save_checkpoint": lambda client: client.save_checkpoint("/nowhere/at/all"),
    "load_checkpoint": lambda client: client.load_checkpoint("/nowhere/at/all"),
    "export_model": lambda client: client.export_model("/nowhere/at/all"),
    "weight_norm": lambda client: client.weight_norm(),
    "fwd_bwd_discarding": lambda client: client.side_by_side(grouped_batch(), None, PROMPTS, {"max_tokens": 2}),
}
"""By the name that the refusal has."""


def refusal(name: str) -> str:
    """What it says, as a regular expression."""
    return rf"the trainer is asleep; call wake_training\(\) before {name}\(\)"
