"""Layers that carry a state (convolutions, delta rules, Mamba-2) join the forest; all that is known of them is here.

transformers' hybrid layers call a few functions of their own module and hand on the keywords of the model call, the
plan of the batch among them. Those functions are wrapped, once per module: with a plan they run over the forest,
without one they are the stock ones. Layers that keep their state elsewhere are left to the isolation probe, which
refuses them by name.

Older transformers hand the keywords down to the layer and no further. There, the plan is kept at hand while a layer
runs, in the forward and in its recomputation, and what the layer calls looks it up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from arctic_platform.errors import UnsupportedModelError
from arctic_platform.forest.recurrent import Recurrence, StatefulPlan

MIN_CHUNK, MAX_CHUNK = 16, 64
"""Tokens that a chunked scan takes at once: the stock functions pad every segment to a multiple of it."""


KEYWORDS_REACH_FUNCTIONS = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)
"""Whether every recurrent layer of this transformers hands the keywords of the model call on."""

_plan_at_hand: ContextVar[object] = ContextVar("plan of the layer that runs now", default=None)


def join_recurrent_layers(model: nn.Module) -> None:
    """Wrap the functions behind the model's recurrent layers; again is harmless, without a plan nothing changes."""
    for name in sorted({type(module).__module__ for module in model.modules()}):
        namespace = vars(sys.modules[name])
        for function, wrap in WRAPPERS.items():
            stock = namespace.get(function)
            if callable(stock) and not getattr(stock, "is_forest_aware", False):
                namespace[function] = wrap(stock)
    if not KEYWORDS_REACH_FUNCTIONS:
        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                _keep_plan_at_hand(layer)


def _keep_plan_at_hand(layer: nn.Module) -> None:
    """Let the recurrent parts of a decoder layer find its plan; nothing happens to a layer without such parts."""
    convolutions = [m for m in layer.modules() if type(m) is nn.Conv1d and m.groups == m.in_channels > 1]
    if not convolutions:
        return
    if not getattr(type(layer).forward, "is_forest_aware", False):
        setattr(type(layer), "forward", _with_plan_at_hand(type(layer).forward))  # noqa: B010
    for convolution in convolutions:
        if _convolve_again not in convolution._forward_hooks.values():
            convolution.register_forward_hook(_convolve_again)
    for module in layer.modules():
        for name in ("causal_conv1d_fn", "chunk_gated_delta_rule"):
            stock = vars(module).get(name)
            if callable(stock) and not getattr(stock, "is_forest_aware", False):
                vars(module)[name] = WRAPPERS[name](stock)


def _with_plan_at_hand(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a layer class, inside of which its plan can be looked up."""

    @wraps(stock)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = _plan_at_hand.set(kwargs.get("forest"))
        try:
            return stock(self, *args, **kwargs)
        finally:
            _plan_at_hand.reset(before)

    vars(forward)["is_forest_aware"] = True
    return forward


def _convolve_again(module: nn.Conv1d, args: tuple[Tensor], output: Tensor) -> Tensor:
    """Replace the output of a padded convolution module, cut to the length of its input as its callers do."""
    plan = _plan_at_hand.get()
    if plan is None:
        return output

    def conv(part: Tensor) -> Tensor:
        return nn.Conv1d.forward(module, part)[..., : part.shape[-1]]

    return _recurrence(plan, type(module).forward).convolve(conv, args[0], module.kernel_size[0])


def _forest_aware(wrap: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
    """Make `wrap(stock) -> run(recurrence, *args, **kwargs)` a function that falls through without a plan."""

    def wrapper(stock: Callable[..., Any]) -> Callable[..., Any]:
        run = wrap(stock)

        @wraps(stock)
        def function(*args: Any, forest: object = None, **kwargs: Any) -> Any:
            plan = _plan_at_hand.get() if forest is None else forest
            return stock(*args, **kwargs) if plan is None else run(_recurrence(plan, stock), *args, **kwargs)

        vars(function)["is_forest_aware"] = True
        return function

    return wrapper


def _recurrence(plan: object, stock: Callable[..., Any]) -> Recurrence:
    if isinstance(plan, StatefulPlan):
        return plan.recurrence
    family = stock.__module__.rpartition(".modeling_")[2]
    raise UnsupportedModelError(
        f"{family} keeps a recurrent state, which a {type(plan).__name__} does not carry; use another model or engine"
    )


@_forest_aware
def _convolution(stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`causal_conv1d_fn(x [1, C, T], weight [C, K], ...) -> [1, C, T]`."""

    def run(recurrence: Recurrence, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weight = kwargs["weight"] if "weight" in kwargs else args[0]
        return recurrence.convolve(lambda part: stock(part, *args, **kwargs), x, weight.shape[-1])

    return run


@_forest_aware
def _delta_rule(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`chunk_gated_delta_rule(q, k, v [1, T, H, D], g=, beta=, ...) -> (out, None)`, of Gated DeltaNet and of KDA.

    A token with g = 0 and beta = 0 leaves the state as it is (Yang et al. 2024, arXiv 2412.06464, eq. 10).
    """

    def run(recurrence: Recurrence, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, **kwargs: Any) -> Any:
        _refuse_cache(kwargs.pop("initial_state", None), kwargs.pop("output_final_state", False))

        def scan(parts: Sequence[Tensor], initial: Tensor | None, keep_state: bool) -> tuple[Tensor, Tensor | None]:
            q, k, v, g, beta = parts
            options = {**kwargs, "initial_state": initial, "output_final_state": keep_state}
            if getattr(stock, "__name__", "") != "chunk_gated_delta_rule":  # flash-linear-attention's has its own
                options["chunk_size"] = _chunk_len(q.shape[1])
            return stock(q, k, v, g=g, beta=beta, **options)

        return recurrence.scan(scan, (q, k, v, g, beta)), None

    return run


@_forest_aware
def _state_space(stock: Callable[..., Any]) -> Callable[..., Tensor]:
    """`mamba2_chunk_scan(x [1, T, H, P], dt [1, T, H], A, B, C [1, T, G, N], ...) -> out`, of Mamba-2.

    A token with dt = 0 leaves the state as it is (Dao and Gu 2024, arXiv 2405.21060), so dt is made final first.
    """

    def run(
        recurrence: Recurrence, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *,
        dt_bias: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")),
        **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        _refuse_cache(kwargs.pop("initial_states", None), kwargs.pop("return_final_states", False))
        chunk_size = kwargs.pop("chunk_size")
        dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        dt = nn.functional.softplus(dt) if dt_softplus else dt
        dt = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1])

        def scan(parts: Sequence[Tensor], initial: Tensor | None, keep_state: bool) -> tuple[Tensor, Tensor | None]:
            x, dt, B, C = parts
            size = min(chunk_size, _chunk_len(x.shape[1]))
            states = {"initial_states": initial, "return_final_states": keep_state}
            out = stock(x, dt, A, B, C, chunk_size=size, **states, **kwargs)
            return out if keep_state else (out, None)

        return recurrence.scan(scan, (x, dt, B, C))

    return run


@_forest_aware
def _fused_state_space(stock: Callable[..., Any]) -> Callable[..., None]:
    """The one-kernel shortcut of Mamba-2 layers knows no forest: None sends them to the separate steps."""
    return lambda recurrence, *args, **kwargs: None


WRAPPERS: dict[str, Callable[..., Callable[..., Any]]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _state_space,
    "mamba2_split_conv1d_scan_combined": _fused_state_space,
}
"""The functions that transformers' layers look up in their own module, by name."""


def _chunk_len(length: int) -> int:
    """The power of two that holds `length`, within bounds."""
    return min(MAX_CHUNK, max(MIN_CHUNK, 1 << (length - 1).bit_length()))


def _refuse_cache(initial_state: Tensor | None, is_final_wanted: bool) -> None:
    assert initial_state is None and not is_final_wanted, "a forest pass runs without a cache"
