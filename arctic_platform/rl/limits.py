"""What a model does differently in a pack than alone from some length on, read from its config and refused in time.

Probes run short rows. A rule that sets in at a distance beyond them is brought within their reach by `short_windows`,
or refused when a row or a pass reaches it: `refuse_long_rows` in training, `longest_exact_row` and
`longest_exact_pass` in sampling.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from arctic_platform.errors import InputError
from arctic_platform.forest import Forest

PROBE_WINDOW = 5
"""Attention window while a model is probed; the probe's rows are several times longer."""


@contextmanager
def short_windows(model: PreTrainedModel) -> Generator[None]:
    """The model with every sliding window cut to PROBE_WINDOW tokens, in its config and in its layers."""
    kept: list[tuple[Any, int]] = []
    for holder in (model.config, model.config.get_text_config(), *model.modules()):
        window = vars(holder).get("sliding_window")
        if isinstance(window, int) and window > PROBE_WINDOW:
            kept.append((holder, window))
            vars(holder)["sliding_window"] = PROBE_WINDOW
    try:
        yield
    finally:
        for holder, window in kept:
            vars(holder)["sliding_window"] = window


def refuse_long_rows(model: PreTrainedModel, forest: Forest) -> None:
    """Raise InputError for a batch of such lengths that the model would take its rules from the pack, not the row.

    Chunked attention starts anew at multiples of its chunk, and temperature tuning counts packed tokens (both Llama 4);
    `dynamic` and `longrope` position embeddings pick their frequencies by the longest row of a forward.
    """
    config = model.config.get_text_config()
    longest, chunk = int(forest.row_lens.max(initial=0)), _chunk(config)
    if chunk and longest > chunk:
        raise InputError(
            f"a row of {longest} tokens exceeds attention_chunk_size={chunk}, where this model's attention starts "
            "anew; cut the rows, or train with zorro_train.enable: false"
        )
    floor = _floor(config)
    if floor and forest.num_tokens >= floor:
        raise InputError(
            f"{forest.num_tokens} packed tokens reach floor_scale={floor}, from where this model scales attention by "
            "the place in the pack; set a smaller max_token_len, or train with zorro_train.enable: false"
        )
    for rope_type, limit in _length_dependent_positions(config):
        is_beyond = forest.row_lens > limit
        if "dynamic" in rope_type and is_beyond.any():
            raise InputError(
                f"a row of {longest} tokens exceeds {limit}, where dynamic position embeddings change with the longest "
                "row of the batch; cut the rows, or train with zorro_train.enable: false"
            )
        if rope_type == "longrope" and is_beyond.any() and not is_beyond.all():
            raise InputError(
                f"rows on both sides of original_max_position_embeddings={limit} cannot share a pass, since longrope "
                "picks one set of frequencies for all; send them in separate calls"
            )


def longest_exact_row(model: PreTrainedModel) -> int | None:
    """Tokens that a row may have while keys and values stay right for whatever follows; None for any number.

    Keys that `dynamic` and `longrope` rotated by the frequencies of a short row would be wrong for a longer one.
    """
    config = model.config.get_text_config()
    ropes = [limit for name, limit in _length_dependent_positions(config) if "dynamic" in name or name == "longrope"]
    return min((limit for limit in (_chunk(config), longest_exact_pass(model), *ropes) if limit), default=None)


def longest_exact_pass(model: PreTrainedModel) -> int | None:
    """Tokens that a packed pass may have; None for any number."""
    floor = _floor(model.config.get_text_config())
    return floor - 1 if floor else None


def _chunk(config: Any) -> int | None:
    has_chunks = "chunked_attention" in (getattr(config, "layer_types", None) or [])
    return getattr(config, "attention_chunk_size", None) if has_chunks else None


def _floor(config: Any) -> int | None:
    is_tuned = getattr(config, "attn_temperature_tuning", False)
    return getattr(config, "floor_scale", None) if is_tuned else None


def _length_dependent_positions(config: Any) -> list[tuple[str, int]]:
    """`(rope_type, length from which it changes)`, one per kind of layer where a model has several."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    length = getattr(config, "original_max_position_embeddings", None) or getattr(config, "max_position_embeddings", 0)
    ropes = [rope for rope in (found, *found.values()) if isinstance(rope, dict)]
    named = [
        (rope.get("rope_type") or rope.get("type"), rope.get("original_max_position_embeddings")) for rope in ropes
    ]
    return [(name, int(own or length)) for name, own in named if isinstance(name, str)]
