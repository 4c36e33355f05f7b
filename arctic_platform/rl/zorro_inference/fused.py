"""The passes of Llama-like models without their modules: few operations per layer, on laid-out weights.

A family that is listed here is an embedding, layers of RMSNorm, attention with rotary positions, RMSNorm and SwiGLU,
and a head. Its pass is written out once: one product for queries, keys and values, activations, gates and residuals
within the products, and everything that looks at one token at a time done on tiles of tokens that a cache holds. Before
it is used it must give, on a few tokens, what the model itself gives, and ask the same of attention; else the model
runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from arctic_platform.forest import ATTENTION_NAME, ForestPlan, build_forest
from arctic_platform.forest.attention import AttendPlan
from arctic_platform.rl.zorro_inference.packed import Product
from arctic_platform.rl.zorro_inference.probe import attention_of, probe_prompts

logger = logging.getLogger(__name__)

TILE = 512
"""Tokens that norms, products and gates of one layer take at once."""

TOLERANCE, HALF_TOLERANCE = 1e-3, 0.1
"""Median error allowed against the model, in standard deviations of the logits. Single logits may be ill-conditioned:
oneDNN's products alone move some of SmolLM2-135M's by 2e-3."""


def _no_window(attention: nn.Module) -> int | None:
    return None


def _config_window(attention: Any) -> int | None:
    return getattr(attention.config, "sliding_window", None)


def _own_window(attention: Any) -> int | None:
    return attention.sliding_window


WINDOWS: dict[str, Callable[[Any], int | None]] = {
    "Llama": _no_window,
    "Mistral": _config_window,
    "Qwen2": _own_window,
    "Qwen3": _own_window,
    "SmolLM3": _own_window,
}
"""The families, by what their class names begin with, and the window that each of their layers asks for."""

LAYER_PARTS = ("input_layernorm", "mlp", "post_attention_layernorm", "self_attn")
PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PRODUCTS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, eq=False)
class _Layer:
    """One decoder layer: its modules, and its products on laid-out weights."""

    attention: Any
    num_heads: int
    num_kv_heads: int
    input_norm: Callable[[Tensor], Tensor]
    middle_norm: Callable[[Tensor], Tensor]
    q_norm: Callable[[Tensor], Tensor] | None
    k_norm: Callable[[Tensor], Tensor] | None
    has_rotary: bool
    qkv: Product
    o: Product
    gate: Product
    up: Product
    down: Product


class FusedModel:
    """Runs passes of one model, of a listed family, in eval mode and without gradients.

    Weights are laid out at the first pass, and again after `drop`. `fits` says whether the model may run this way; it
    is asked anew whenever somebody may have changed its modules.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        self._family: str | None = None
        self._modules: list[nn.Module] = []
        self._is_proven: bool | None = None
        self._layers: list[_Layer] = []
        self._head: Product | None = None

    def fits(self) -> bool:
        """Known throughout, without hooks or replaced forwards, and proven once on a few tokens."""
        modules = all_modules(self._model)
        if modules != self._modules:
            self.drop()
            self._modules, self._family, self._is_proven = modules, _family_of(self._model), None
        if self._family is None or any(map(_is_changed, modules)):
            self.drop()
            return False
        if self._is_proven is None:
            self._is_proven = self._prove()
        return self._is_proven

    def prepare(self, *, enable: bool) -> None:
        """Ask once whether the model fits, so that no request has to wait for it; keeps no copy of a weight."""
        if enable:
            self.fits()
            self.drop()

    def drop(self) -> None:
        """The weights are about to change, or have, or memory is wanted."""
        self._layers = []
        self._head = None

    def logits(self, input_ids: Tensor, position_ids: Tensor, plan: AttendPlan, keep: Tensor | int = 0) -> Tensor:
        """`[kept, V]` of `input_ids [1, T]`: all positions for keep=0, else those at packed indices `keep`."""
        if self._head is None:
            self._lay_out()
        assert self._head is not None
        body = self._model.model
        hidden = functional.embedding(input_ids[0], body.embed_tokens.weight)
        cos, sin = (x[0].unsqueeze(1) for x in body.rotary_emb(hidden, position_ids))
        tables = _Tables.of(cos, sin)
        tiles = list(hidden.split(TILE))
        for layer in self._layers:
            tiles = self._run_layer(layer, tiles, tables, plan)
        hidden = tiles[0] if len(tiles) == 1 else torch.cat(tiles)
        kept = hidden if isinstance(keep, int) else hidden[keep]
        return self._head(_norm(body.norm)(kept))

    def _run_layer(self, layer: _Layer, tiles: list[Tensor], tables: _Tables, plan: AttendPlan) -> list[Tensor]:
        attention = layer.attention
        num_heads, num_rotated = layer.num_heads, layer.num_heads + layer.num_kv_heads
        parts = []
        for n, tile in enumerate(tiles):
            part = layer.qkv(layer.input_norm(tile)).view(len(tile), -1, attention.head_dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                for heads, norm in (
                    (part[:, :num_heads], layer.q_norm),
                    (part[:, num_heads:num_rotated], layer.k_norm),
                ):
                    heads.copy_(norm(heads))
            if layer.has_rotary:
                tables.rotate_(part[:, :num_rotated], n)
            parts.append(part)
        heads = (parts[0] if len(parts) == 1 else torch.cat(parts)).transpose(0, 1).unsqueeze(0)
        out = plan.attend(
            attention.layer_idx,
            heads[:, :num_heads],
            heads[:, num_heads:num_rotated],
            heads[:, num_rotated:],
            scale=attention.scaling,
            sliding_window=WINDOWS[self._family or ""](attention),
        )
        attended = out[0].transpose(0, 1).flatten(1)
        return [_finish(layer, tile, own) for tile, own in zip(tiles, attended.split(TILE), strict=True)]

    def _lay_out(self) -> None:
        self._layers = [_lay_out_layer(layer) for layer in self._model.model.layers]
        self._head = Product.of(self._model.lm_head)

    @torch.no_grad()
    def _prove(self) -> bool:
        """Whether a small forest gives the model's own logits, with the same questions to attention."""
        forest = build_forest(probe_prompts(self._model.config.vocab_size))
        plans = [_RecordingPlan(ForestPlan(forest, device=self._model.device)) for _ in range(2)]
        ids, positions = plans[0].plan.input_ids, plans[0].plan.position_ids
        with attention_of(self._model, ATTENTION_NAME):
            theirs = self._model(input_ids=ids, position_ids=positions, forest=plans[0], use_cache=False).logits[0]
        ours = self.logits(ids, positions, plans[1])
        spread = theirs.double().std(-1, keepdim=True).clamp_min(torch.finfo(theirs.dtype).eps)
        error = float(((ours.double() - theirs.double()).abs() / spread).median())
        is_half = torch.finfo(ours.dtype).bits < 32
        if plans[0].asked == plans[1].asked and error <= (HALF_TOLERANCE if is_half else TOLERANCE):
            return True
        self.drop()
        name = type(self._model).__name__
        logger.warning("%s comes out differently without its modules (%.1e); it samples through them", name, error)
        return False


class _RecordingPlan:
    """A plan that notes what every layer asks."""

    def __init__(self, plan: ForestPlan) -> None:
        self.plan = plan
        self.asked: list[tuple] = []

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, **rule: Any) -> Tensor:
        """Note, and attend."""
        said = {name: value for name, value in rule.items() if value is not None}
        self.asked.append((layer_idx, q.shape, k.shape, v.shape, scale, said))
        return self.plan.attend(layer_idx, q, k, v, scale=scale, **rule)


@dataclass(frozen=True, eq=False)
class _Tables:
    """Cosines and signed sines of every token, `[t, 1, D]` per tile: `x cos + swap(x) sin` rotates a head."""

    cos: tuple[Tensor, ...]
    sin: tuple[Tensor, ...]

    @classmethod
    def of(cls, cos: Tensor, sin: Tensor) -> _Tables:
        """From `[T, 1, D]` of both, halves alike, as transformers gives them."""
        half = sin.shape[-1] // 2
        signed = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        return cls(cos.split(TILE), signed.split(TILE))

    def rotate_(self, heads: Tensor, tile: int) -> None:
        """In place, `heads [t, n, D]`."""
        swapped = torch.roll(heads, heads.shape[-1] // 2, -1)
        heads.mul_(self.cos[tile]).addcmul_(swapped, self.sin[tile])


def _finish(layer: _Layer, tile: Tensor, attended: Tensor) -> Tensor:
    """The layer behind its attention, for one tile `[t, E]`."""
    tile = layer.o.plus(attended, tile)
    normed = layer.middle_norm(tile)
    return layer.down.plus(layer.up.times(normed, layer.gate.silu(normed)), tile)


def _norm(norm: Any) -> Callable[[Tensor], Tensor]:
    """RMSNorm; where the model rounds in between, its own."""
    if norm.weight.dtype != torch.float32:
        return norm
    shape, weight, eps = tuple(norm.weight.shape), norm.weight, norm.variance_epsilon
    return lambda x: torch.rms_norm(x, shape, weight, eps)


def _lay_out_layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return _Layer(
        attention,
        attention.q_proj.out_features // attention.head_dim,
        attention.k_proj.out_features // attention.head_dim,
        _norm(layer.input_layernorm),
        _norm(layer.post_attention_layernorm),
        None if q_norm is None else _norm(q_norm),
        None if k_norm is None else _norm(k_norm),
        bool(getattr(attention, "use_rope", True)),
        Product.of(attention.q_proj, attention.k_proj, attention.v_proj),
        Product.of(attention.o_proj),
        Product.of(mlp.gate_proj),
        Product.of(mlp.up_proj),
        Product.of(mlp.down_proj),
    )


def _is_changed(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _family_of(model: Any) -> str | None:
    """The family whose classes all modules of the model are of exactly; None where one is not."""
    family = type(model).__name__.removesuffix("ForCausalLM")
    if (
        family not in WINDOWS
        or type(model).__module__ != f"transformers.models.{family.lower()}.modeling_{family.lower()}"
    ):
        return None
    is_known = (
        _children(model) == {"model": f"{family}Model", "lm_head": "Linear"}
        and _children(model.model)
        == {
            "embed_tokens": "Embedding",
            "layers": "ModuleList",
            "norm": f"{family}RMSNorm",
            "rotary_emb": f"{family}RotaryEmbedding",
        }
        and model.lm_head.weight.device.type == "cpu"
        and all(_is_known_layer(layer, family) for layer in model.model.layers)
    )
    return family if is_known else None


def _is_known_layer(layer: Any, family: str) -> bool:
    norm = f"{family}RMSNorm"
    attention = dict.fromkeys(PRODUCTS, "Linear")
    if family == "Qwen3":
        attention |= {"q_norm": norm, "k_norm": norm}
    mlp = _children(layer.mlp)
    return (
        _children(layer)
        == {
            "self_attn": f"{family}Attention",
            "mlp": f"{family}MLP",
            "input_layernorm": norm,
            "post_attention_layernorm": norm,
        }
        and _children(layer.self_attn) == attention
        and mlp.pop("act_fn", "") in ("SiLUActivation", "SiLU")
        and mlp == dict.fromkeys(MLP_PRODUCTS, "Linear")
    )


def all_modules(model: nn.Module) -> list[nn.Module]:
    """Every module, some perhaps twice; several times as fast as `model.modules()`, which collects their names."""
    found = [model]
    for module in found:
        found += [child for child in module._modules.values() if child is not None]
    return found


def _children(module: nn.Module) -> dict[str, str]:
    """The class of every child by its name; of other packages with their module, so that it is none that is known."""
    return {name: _class_name(type(child)) for name, child in module.named_children()}


def _class_name(kind: type) -> str:
    is_known = kind.__module__.startswith(("torch.nn.", "transformers."))
    return kind.__name__ if is_known else f"{kind.__module__}.{kind.__name__}"
