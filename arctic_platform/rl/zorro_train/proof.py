"""Proof in every run: an isolation probe when a model is prepared, a receipt while it trains.

Both compare the shared pass with the slow and obvious one: every row alone, through the model's stock attention.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from transformers import PreTrainedModel

from arctic_platform.errors import ExactnessError, UnsupportedModelError
from arctic_platform.forest import pad_rows
from arctic_platform.rl.zorro_train.logprobs import target_logprobs

if TYPE_CHECKING:
    from arctic_platform.rl.zorro_train.module_patcher import ModuleReconstructionPatcher, RowValues

LOGPROB_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 0.3, torch.float16: 0.1}
"""Largest absolute difference of a log-prob that the probe and the receipt accept, by working dtype. Models cast to
fp32 inside, so fp64 is no tighter than that; half dtypes differ by rounding alone, as two plain passes do."""

GRADIENT_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}
"""Largest difference of a parameter's gradient relative to its norm."""

GRADIENT_FLOOR = 0.1
"""Norms below this count as this in relative differences: what is left of the gradient where a model is sure of every
token is 1 - p, rounded."""

LEAK_TOLERANCE = 1e-6
"""What other rows may move when one row's own token changes; their arithmetic is the same, so this is 0 in practice."""


@contextmanager
def plain_attention(model: PreTrainedModel) -> Generator[None]:
    """The model's stock attention, for a whole forward and backward (recomputation in backward needs it too)."""
    from arctic_platform.rl.zorro_train.module_patcher import set_attention

    prepared = model.config._attn_implementation
    set_attention(model, getattr(model, "_arctic_stock_attention", prepared))
    try:
        yield
    finally:
        set_attention(model, prepared)


def plain_rows(
    patcher: ModuleReconstructionPatcher,
    rows: Sequence[ArrayLike],
    target_masks: Sequence[ArrayLike],
    *,
    temperature: float = 1.0,
    calculate_entropy: bool = False,
    padded: bool = False,
) -> RowValues:
    """What `patcher.forward_rows` returns, computed without sharing. Call under `plain_attention`.

    padded: one right-padded batch with an attention mask, as trainers do; otherwise every row alone, unpadded.
    """
    from arctic_platform.rl.zorro_train.module_patcher import RowValues

    ids = [np.asarray(row, dtype=np.int64) for row in rows]
    masks = [np.asarray(mask, dtype=bool) for mask in target_masks]
    offsets = np.concatenate([[0], np.cumsum([mask.sum() for mask in masks])]).astype(np.int64)
    hidden_of = _padded_hidden if padded else _hidden_row_by_row
    hidden, targets = hidden_of(patcher.model, ids, masks)
    logprobs, entropy = target_logprobs(
        hidden,
        patcher.head.of_pass(),
        targets,
        torch.arange(len(targets), device=targets.device),
        vocab_size=patcher.head.vocab_size,
        temperature=temperature,
        mode=patcher.logits_optimization,
        calculate_entropy=calculate_entropy,
        peak_gib=patcher.logits_peak_gib,
    )
    return RowValues(logprobs, entropy, offsets)


def _hidden_row_by_row(model: PreTrainedModel, ids: list[np.ndarray], masks: list[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Hidden states that predict the targets `[sum of targets, E]`, and the targets, one forward per row."""
    device = next(model.parameters()).device
    hidden, targets = [], []
    for row, mask in zip(ids, masks, strict=True):
        if not mask.any():
            continue
        input_ids = torch.from_numpy(row).to(device).unsqueeze(0)
        states = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[0]
        at = torch.from_numpy(np.flatnonzero(mask)).to(device)
        hidden.append(states[at - 1])
        targets.append(input_ids[0, at])
    if not targets:
        width = model.config.get_text_config().hidden_size
        return torch.zeros(0, width, device=device), torch.zeros(0, dtype=torch.long, device=device)
    return torch.cat(hidden), torch.cat(targets)


def _padded_hidden(model: PreTrainedModel, ids: list[np.ndarray], masks: list[np.ndarray]) -> tuple[Tensor, Tensor]:
    """The same from one right-padded batch."""
    device = next(model.parameters()).device
    input_ids, live = (torch.from_numpy(x).to(device) for x in pad_rows(ids))
    is_target = torch.from_numpy(pad_rows(masks)[0]).to(device).bool()
    states = model.base_model(input_ids=input_ids, attention_mask=live.long(), use_cache=False).last_hidden_state
    b, s = is_target.nonzero(as_tuple=True)
    return states[b, s - 1], input_ids[b, s]


@torch.no_grad()
def isolation_probe(patcher: ModuleReconstructionPatcher) -> None:
    """Run a small forest through a model and refuse it, by name, unless rows are exact and cannot see each other.

    Catches what no registry can promise: positions added outside attention (ALiBi), recurrent state, a head that does
    more than project. Raises UnsupportedModelError.
    """
    model = patcher.model
    was_training = model.training
    model.eval()
    try:
        rows, masks = _probe_rows(patcher.head.vocab_size)
        shared = patcher.forward_rows(rows, masks, temperature=1.0).logprobs
        with plain_attention(model):
            alone = plain_rows(patcher, rows, masks).logprobs
            head_error = _head_error(patcher, rows[0], masks[0])
        moved = _leak(patcher, rows, masks, shared)
    except TypeError as error:
        raise UnsupportedModelError(
            f"{_name(model)} does not pass keywords to its attention layers: {error}"
        ) from error
    finally:
        model.train(was_training)
    error = max(float((shared - alone).abs().max()), head_error)
    tolerance = LOGPROB_TOLERANCE[model.dtype]
    if not error <= tolerance or not moved <= LEAK_TOLERANCE:
        raise UnsupportedModelError(
            f"{_name(model)} is not exact under prefix sharing: log-probs differ by {error:.1e} from rows run alone "
            f"(accepted {tolerance:.0e}), and a change in one row moves others by {moved:.1e}; "
            "train it with zorro_train.enable: false"
        )


def _probe_rows(vocab_size: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Six rows, three levels deep, with a shared answer, a prefix of another row and a row of its own."""
    ids = np.random.default_rng(0).permutation(min(vocab_size, 4096))[:40]
    ids = ids if len(ids) == 40 else np.resize(ids, 40)
    trunk, branch = ids[:9], ids[9:14]
    tails = [ids[14:18], ids[18:25], ids[25:26]]
    rows = [np.concatenate([trunk, branch, tail]) for tail in tails]
    rows += [np.concatenate([trunk, branch]), np.concatenate([trunk, ids[26:31]]), ids[31:40]]
    return rows, [np.arange(len(row)) >= 4 for row in rows]


def _leak(
    patcher: ModuleReconstructionPatcher, rows: list[np.ndarray], masks: list[np.ndarray], shared: Tensor
) -> float:
    """How far the other rows' log-probs move when a private token of row 1 changes."""
    changed = [row.copy() for row in rows]
    changed[1][15] = (changed[1][15] + 1) % min(patcher.head.vocab_size, 4096)
    values = patcher.forward_rows(changed, masks, temperature=1.0)
    others = np.ones(len(values.logprobs), bool)
    others[values.offsets[1] : values.offsets[2]] = False
    return float((values.logprobs - shared)[torch.from_numpy(others).to(shared.device)].abs().max())


def _head_error(patcher: ModuleReconstructionPatcher, row: np.ndarray, mask: np.ndarray) -> float:
    """Difference between our head and the model's own logits on one row, in log-probs."""
    input_ids = torch.from_numpy(row).to(patcher.device).unsqueeze(0)
    own = patcher.model(input_ids=input_ids, use_cache=False).logits[0]
    hidden = patcher.model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[0]
    ours = patcher.head(hidden)
    wide = torch.promote_types(own.dtype, torch.float32)
    return float((own.to(wide).log_softmax(-1) - ours.to(wide).log_softmax(-1)).abs().max())


def _name(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} (model_type {model.config.model_type})"


@dataclass(frozen=True)
class Receipt:
    """Measured differences between the shared pass and rows run alone.

    `logprob_max_abs`: largest absolute difference of a log-prob. `gradient_rel`: norm of the difference of all
    gradients over the norm of the gradients. `worst_parameter`, `worst_rel`: where one parameter's gradient differs
    most, relative to its own norm. `num_rows`, `tokens_shared`, `tokens_alone`: what was compared.
    """

    logprob_max_abs: float
    gradient_rel: float
    worst_parameter: str
    worst_rel: float
    num_rows: int
    tokens_shared: int
    tokens_alone: int

    def metrics(self) -> dict[str, float]:
        """The numbers, under the names that metrics and reports use."""
        return {
            "receipt/logprob_max_abs": self.logprob_max_abs,
            "receipt/gradient_rel": self.gradient_rel,
            "receipt/worst_parameter_rel": self.worst_rel,
            "receipt/num_rows": float(self.num_rows),
            "receipt/tokens_shared": float(self.tokens_shared),
            "receipt/tokens_alone": float(self.tokens_alone),
        }


def measure_receipt(
    patcher: ModuleReconstructionPatcher,
    rows: Sequence[ArrayLike],
    target_masks: Sequence[ArrayLike],
    *,
    temperature: float = 1.0,
    tolerance: float | None = None,
    content_keys: Sequence[ArrayLike] | None = None,
) -> Receipt:
    """Compare log-probs and gradients of some rows of a real batch, shared against alone.

    The gradients are those of a fixed weighted sum of the log-probs; `.grad` of the parameters is left untouched.
    tolerance: largest accepted difference of a log-prob and of a gradient, default by dtype (LOGPROB_TOLERANCE,
    GRADIENT_TOLERANCE). Raises ExactnessError, which names the parameter that is furthest off.
    """
    model = patcher.model
    shared = patcher.forward_rows(rows, target_masks, temperature=temperature, content_keys=content_keys)
    shared_grads = _gradients(model, shared.logprobs)
    with plain_attention(model):
        alone = plain_rows(patcher, rows, target_masks, temperature=temperature)
        alone_grads = _gradients(model, alone.logprobs)
    difference = (shared.logprobs - alone.logprobs).detach().abs()
    gradient_rel, worst, worst_rel = _compare(shared_grads, alone_grads)
    receipt = Receipt(
        logprob_max_abs=float(difference.max()) if len(difference) else 0.0,
        gradient_rel=gradient_rel,
        worst_parameter=worst,
        worst_rel=worst_rel,
        num_rows=len(rows),
        tokens_shared=shared.forest.num_tokens if shared.forest else 0,
        tokens_alone=sum(len(np.asarray(row)) for row in rows),
    )
    _check_receipt(receipt, model.dtype, tolerance)
    return receipt


def _check_receipt(receipt: Receipt, dtype: torch.dtype, tolerance: float | None) -> None:
    logprob_limit = LOGPROB_TOLERANCE[dtype] if tolerance is None else tolerance
    gradient_limit = GRADIENT_TOLERANCE[dtype] if tolerance is None else tolerance
    if receipt.logprob_max_abs <= logprob_limit and receipt.gradient_rel <= gradient_limit:
        return
    raise ExactnessError(
        f"shared and unshared passes disagree: log-probs by {receipt.logprob_max_abs:.1e} (accepted "
        f"{logprob_limit:.0e}), gradients by {receipt.gradient_rel:.1e} (accepted {gradient_limit:.0e}), most in "
        f"{receipt.worst_parameter}; stop here, or train with zorro_train.enable: false"
    )


def _gradients(model: PreTrainedModel, logprobs: Tensor) -> dict[str, Tensor]:
    """Gradients of a fixed weighted sum of the log-probs, by parameter name; absent where a parameter has no part.

    All weights are positive, so that equal rows do not cancel.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not len(logprobs) or not named:
        return {}
    weights = torch.from_numpy(np.random.default_rng(0).uniform(0.5, 1.5, len(logprobs)))
    total = (logprobs * weights.to(logprobs)).sum()
    grads = torch.autograd.grad(total, [p for _, p in named], allow_unused=True)
    return {name: grad for (name, _), grad in zip(named, grads, strict=True) if grad is not None}


def _compare(shared: dict[str, Tensor], alone: dict[str, Tensor]) -> tuple[float, str, float]:
    """`(relative error of all, name of the worst parameter, its relative error)`."""
    squares, reference, worst, worst_rel = 0.0, 0.0, "no parameter", 0.0
    zero = torch.zeros(())
    for name in alone.keys() | shared.keys():
        plain = alone.get(name, zero)
        off, norm = float((shared.get(name, zero) - plain).float().norm()), float(plain.float().norm())
        squares, reference = squares + off**2, reference + norm**2
        if off / max(norm, GRADIENT_FLOOR) > worst_rel:
            worst, worst_rel = name, off / max(norm, GRADIENT_FLOOR)
    return squares**0.5 / max(reference**0.5, GRADIENT_FLOOR), worst, worst_rel
