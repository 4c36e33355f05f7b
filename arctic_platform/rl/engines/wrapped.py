"""The root module of an engine: every forward of a model runs inside its `forward`.

FSDP2 and DeepSpeed gather weights in hooks on module calls. The head's weights are read outside the body's forward,
so the module that is wrapped is one whose forward runs whatever a pass does, head included:

    PassModule.forward(run) -> run()            hooks of the root: embedding, last norm and head are whole in here
        body(...)                               hooks of each decoder layer
        log-probs from hidden states and head
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor, nn

from arctic_platform.rl.zorro_train.module_patcher import RowValues

T = TypeVar("T")

Root = Callable[[Callable[[], Any]], Any]
"""What calls a function and returns its result: a PassModule, or what FSDP2 or DeepSpeed made of one."""


class PassModule(nn.Module):
    """Runs a function that calls `model`. Tensors with a graph have to be among what the function returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], T]) -> T:
        """What `run` returns."""
        return run()


def values_through(root: Root, run: Callable[[], RowValues]) -> RowValues:
    """The values of a pass, computed inside the root; its hooks see (and may replace) the tensors."""
    kept: list[RowValues] = []

    def tensors() -> tuple[Tensor | None, ...]:
        values = run()
        kept.append(values)
        return values.logprobs, values.entropy, values.aux_loss

    logprobs, entropy, aux_loss = root(tensors)
    return replace(kept[0], logprobs=logprobs, entropy=entropy, aux_loss=aux_loss)


def result_through(root: Root, run: Callable[[], T]) -> T:
    """Whatever `run` returns, computed inside the root without a graph."""
    kept: list[T] = []

    def keep() -> tuple[Tensor, ...]:
        kept.append(run())
        return ()

    root(keep)
    return kept[0]
