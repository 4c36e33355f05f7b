"""What a pass costs, shared and unshared: FLOPs and peak bytes, from the sizes of a model and the shape of a forest.

A token at position p multiplies with every layer parameter once and attends p + 1 keys, whatever is shared. So the
FLOPs of a path depend on its depth alone, and those of a forest are differences of one cumulative function:

    segment [c, c + s) of a row:  6 * layer_params * s  +  6 * heads * (D + Dv) * layers * (s * c + s * (s + 1) / 2)
    predicting position:          6 * hidden * vocab

each forward and backward (three times the forward; a multiplication and an addition are two FLOPs).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from arctic_platform.errors import InputError
from arctic_platform.forest.trie import Forest

LogitsMode = Literal["none", "compute", "memory"]

CHUNK_BYTES = 64 * 2**20
"""Wide logits that are alive at a time in the chunked modes."""

UNGATED = {
    *("biogpt", "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt"),
    *("nanochat", "nemotron", "opt", "phi", "starcoder2"),
}
"""Model types whose feed-forward block has two matrices; all others are taken to have a gate as the third."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a causal LM that its cost depends on.

    `layer_params`: parameters of all layers that a token multiplies with (embeddings and head excluded; of a mixture
    of experts the active ones). `value_dim`: size of a value head where it is not `head_dim`. `num_window_layers`
    layers attend the last `window` positions only, `num_linear_layers` attend none (recurrent ones).
    `mlp_width`: intermediate features a token computes in one layer. None stands for what is usual.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    layer_params: int
    num_kv_heads: int | None = None
    value_dim: int | None = None
    num_window_layers: int = 0
    window: int = 0
    num_linear_layers: int = 0
    mlp_width: int | None = None

    @classmethod
    def of(cls, config: Any, layer_params: int | None = None) -> ModelShape:
        """Read the sizes from a Hugging Face config.

        layer_params: see the class; without it they are estimated from the config (`estimate_layer_params`).
        Raises InputError for a config that names no layers, heads or sizes.
        """
        config = _text_config(config)
        num_windows, num_linear = _layer_kinds(config)
        rope_dim = _first(config, "qk_rope_head_dim", default=0)
        nope_dim = _first(config, "qk_nope_head_dim", default=0)
        return cls(
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            head_dim=rope_dim + nope_dim or _head_dim(config),
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            layer_params=estimate_layer_params(config) if layer_params is None else layer_params,
            num_kv_heads=_first(config, "num_key_value_heads", default=config.num_attention_heads),
            value_dim=_first(config, "v_head_dim", default=None) if rope_dim else None,
            num_window_layers=num_windows,
            window=_first(config, "sliding_window", default=0) if num_windows else 0,
            num_linear_layers=num_linear,
            mlp_width=_mlp_width(config),
        )

    @cached_property
    def pair_flops(self) -> float:
        """FLOPs of one query-key pair in one layer, forward and backward."""
        return 6.0 * self.num_heads * (self.head_dim + (self.value_dim or self.head_dim))

    @cached_property
    def logit_flops(self) -> float:
        """FLOPs of the logits of one position, forward and backward."""
        return 6.0 * self.hidden_size * self.vocab_size

    def path_flops(self, depths: np.ndarray) -> np.ndarray:
        """FLOPs of the first `depths` tokens of a row, logits excluded; `[...] int64 -> [...] float64`."""
        d = np.asarray(depths, np.float64)
        num_full = self.num_layers - self.num_window_layers - self.num_linear_layers
        pairs = num_full * d * (d + 1) / 2
        if self.num_window_layers:
            near = np.minimum(d, self.window)
            pairs = pairs + self.num_window_layers * (near * (near + 1) / 2 + (d - near) * self.window)
        return 6.0 * self.layer_params * d + self.pair_flops * pairs


@dataclass(frozen=True)
class ForestCost:
    """Tokens and forward+backward FLOPs of one pass, shared and with every row by itself."""

    tokens: int
    tokens_unshared: int
    flops: float
    flops_unshared: float

    @property
    def saving(self) -> float:
        """Share of the unshared FLOPs that is not computed, 0 to 1."""
        return 1.0 - self.flops / self.flops_unshared if self.flops_unshared else 0.0

    @property
    def bound(self) -> float:
        """The speed-up that this batch can reach: unshared over shared FLOPs."""
        return self.flops_unshared / self.flops if self.flops else 1.0


def segment_flops(forest: Forest, shape: ModelShape, parents: np.ndarray | None = None) -> np.ndarray:
    """FLOPs of each segment, `[N] float64`, forward and backward.

    parents: packed positions with logits (`Targets.parents`), `[U] int64`; without them the head is left out.
    """
    first = forest.position_ids[forest.start]
    flops = shape.path_flops(first + forest.end - forest.start) - shape.path_flops(first)
    if parents is not None:
        flops += shape.logit_flops * np.bincount(forest.segment_of_token[parents], minlength=forest.num_segments)
    return flops


def forest_cost(forest: Forest, shape: ModelShape, *, num_predicting: int, num_targets: int) -> ForestCost:
    """Cost of one forward and backward pass.

    num_predicting: distinct positions with logits (U); num_targets: response tokens of all rows.
    """
    return ForestCost(
        tokens=forest.num_tokens,
        tokens_unshared=forest.num_row_tokens,
        flops=float(segment_flops(forest, shape).sum() + shape.logit_flops * num_predicting),
        flops_unshared=float(shape.path_flops(forest.row_lens).sum() + shape.logit_flops * num_targets),
    )


def peak_bytes(
    shape: ModelShape,
    num_tokens: int,
    num_predicting: int,
    *,
    dtype_bytes: int = 4,
    logits: LogitsMode = "none",
    checkpointing: bool = False,
) -> int:
    """Bytes at the peak of a pass above weights, gradients and optimizer: activations kept for backward, and logits.

    num_tokens: packed tokens T; num_predicting: positions with logits U; dtype_bytes: of weights and activations;
    logits: how they are held, see `rl.zorro_train.logprobs`; checkpointing: layers are recomputed in backward.
    An estimate for pre-norm decoders with rotary positions; attention keeps no [T, T] array.
    """
    e = shape.hidden_size
    heads = shape.num_heads * (shape.head_dim + 2 * (shape.value_dim or shape.head_dim))
    kv_heads = (shape.num_kv_heads or shape.num_heads) * (shape.head_dim + (shape.value_dim or shape.head_dim))
    of_layer = num_tokens * dtype_bytes * (6 * e + heads + kv_heads + 4 * (shape.mlp_width or 4 * e))
    kept = num_tokens * dtype_bytes * e * shape.num_layers + of_layer if checkpointing else of_layer * shape.num_layers
    return int(kept + _logit_bytes(shape, num_predicting, dtype_bytes, logits))


def _logit_bytes(shape: ModelShape, num_predicting: int, dtype_bytes: int, logits: LogitsMode) -> float:
    """Logits, their gradient, and two wide arrays (scaled logits, probabilities) of all positions or of a chunk."""
    wide = 4.0 * num_predicting * shape.vocab_size
    narrow = float(dtype_bytes * num_predicting * shape.vocab_size)
    if logits == "none":
        return 2 * narrow + 2 * wide
    chunk = min(wide, CHUNK_BYTES)
    return 4 * chunk if logits == "memory" else 2 * narrow + 2 * chunk


def estimate_layer_params(config: Any) -> int:
    """Parameters of all layers that a token multiplies with, from a Hugging Face config.

    Attention (grouped queries, low-rank keys and values), feed-forward blocks with or without a gate, and of a
    mixture of experts the router, the chosen and the shared experts. Norms and biases are left out.
    """
    config = _text_config(config)
    num_linear = _layer_kinds(config)[1]
    num_sparse = _num_sparse_layers(config)
    num_layers = config.num_hidden_layers
    attention = (num_layers - num_linear) * _attention_params(config) + num_linear * _linear_attention_params(config)
    dense = _num_mlp_matrices(config) * config.hidden_size * _dense_width(config)
    return int(attention + num_sparse * _sparse_params(config) + (num_layers - num_sparse) * dense)


def _text_config(config: Any) -> Any:
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    needed = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
    missing = [name for name in needed if getattr(config, name, None) is None]
    if missing:
        raise InputError(f"{type(config).__name__} has no {missing[0]}; give the config of a causal language model")
    return config


def _first(config: Any, *names: str, default: Any) -> Any:
    """The first of `names` that the config sets."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), default)


def _head_dim(config: Any) -> int:
    return _first(config, "head_dim", default=config.hidden_size // config.num_attention_heads)


def _layer_kinds(config: Any) -> tuple[int, int]:
    """How many layers attend a window, and how many do not attend at all."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        is_windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        return (config.num_hidden_layers if is_windowed else 0), 0
    num_windows = sum("sliding" in kind for kind in kinds) if getattr(config, "sliding_window", None) else 0
    return num_windows, sum(kind in ("linear_attention", "conv", "mamba") for kind in kinds)


def _attention_params(config: Any) -> int:
    hidden, heads = config.hidden_size, config.num_attention_heads
    kv_rank = getattr(config, "kv_lora_rank", None)
    if kv_rank:
        nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        q_rank = getattr(config, "q_lora_rank", None)
        query = q_rank * (hidden + heads * (nope + rope)) if q_rank else hidden * heads * (nope + rope)
        return query + hidden * (kv_rank + rope) + kv_rank * heads * (nope + value) + heads * value * hidden
    head_dim, kv_heads = _head_dim(config), _first(config, "num_key_value_heads", default=heads)
    gate = heads * head_dim * hidden if getattr(config, "linear_num_value_heads", None) else 0
    return 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim + gate


def _linear_attention_params(config: Any) -> int:
    """A gated delta rule layer; for other recurrent layers, what an attention layer has."""
    num_values = getattr(config, "linear_num_value_heads", None)
    if num_values is None:
        return _attention_params(config)
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = num_values * config.linear_value_head_dim
    return config.hidden_size * (2 * keys + 3 * values + 2 * num_values)


def _num_mlp_matrices(config: Any) -> int:
    return 2 if getattr(config, "model_type", "") in UNGATED else 3


def _dense_width(config: Any) -> int:
    return _first(config, "intermediate_size", "n_inner", "ffn_dim", default=4 * config.hidden_size)


def _num_experts(config: Any) -> int:
    return _first(config, "num_local_experts", "num_experts", "n_routed_experts", default=0)


def _num_sparse_layers(config: Any) -> int:
    """Layers whose feed-forward block is a mixture of experts."""
    if not _num_experts(config):
        return 0
    step = _first(config, "decoder_sparse_step", "moe_layer_freq", default=1)
    step = step if isinstance(step, int) else 1
    dense = set(_first(config, "mlp_only_layers", default=())) | set(
        range(_first(config, "first_k_dense_replace", default=0))
    )
    return sum(n not in dense and (n + 1) % step == 0 for n in range(config.num_hidden_layers))


def _expert_width(config: Any) -> int:
    """Intermediate features of the experts that see a token."""
    width = _first(config, "moe_intermediate_size", default=_dense_width(config))
    shared = _first(config, "n_shared_experts", default=0) * width
    shared += _first(config, "shared_expert_intermediate_size", default=0)
    return _first(config, "num_experts_per_tok", "top_k", default=1) * width + shared


def _sparse_params(config: Any) -> int:
    return config.hidden_size * (_num_mlp_matrices(config) * _expert_width(config) + _num_experts(config))


def _mlp_width(config: Any) -> int:
    """Intermediate features a token computes in one layer, on average."""
    num_sparse, num_layers = _num_sparse_layers(config), config.num_hidden_layers
    if not num_sparse:
        return _dense_width(config)
    return (num_sparse * _expert_width(config) + (num_layers - num_sparse) * _dense_width(config)) // num_layers
