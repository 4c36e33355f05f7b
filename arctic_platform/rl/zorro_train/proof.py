"""Proof in every run: an isolation probe when a model is prepared, a receipt while it trains.

Both compare the shared pass with the slow and obvious one: every row alone, through the model's stock attention.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from transformers import PreTrainedModel

from arctic_platform.errors import ExactnessError, InputError, UnsupportedModelError
from arctic_platform.forest import pad_rows
from arctic_platform.rl.limits import short_windows
from arctic_platform.rl.zorro_train.body import find_body
from arctic_platform.rl.zorro_train.logprobs import LogitsMode, target_logprobs
from arctic_platform.rl.zorro_train.router import RouterLoss, check_router_gradients, find_router_loss

if TYPE_CHECKING:
    from arctic_platform.rl.zorro_train.module_patcher import Head, ModuleReconstructionPatcher, RowValues

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


class PlainModel(Protocol):
    """What an unshared pass reads: a patcher has it, and so may a model that is not prepared for sharing."""

    @property
    def model(self) -> PreTrainedModel: ...
    @property
    def head(self) -> Head: ...
    @property
    def logits_optimization(self) -> LogitsMode: ...
    @property
    def logits_peak_gib(self) -> float | None: ...


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
    patcher: PlainModel,
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
    run = _run_padded if padded else _run_row_by_row
    hidden, targets, aux_loss = run(patcher.model, ids, masks, find_router_loss(patcher.model))
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
    return RowValues(logprobs, entropy, offsets, aux_loss=aux_loss)


def _run_row_by_row(
    model: PreTrainedModel, ids: list[np.ndarray], masks: list[np.ndarray], router_loss: RouterLoss | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden states that predict the targets `[sum of targets, E]`, the targets, and the routers' loss; a forward per
    row."""
    device = next(model.parameters()).device
    width = model.config.get_text_config().hidden_size
    hidden, targets, logits = [torch.zeros(0, width, device=device, dtype=model.dtype)], [], []
    for row, mask in zip(ids, masks, strict=True):
        if not (mask.any() or (router_loss and len(row))):
            continue
        input_ids = torch.from_numpy(row).to(device).unsqueeze(0)
        out = _run_body(model, input_ids, None, router_loss)
        at = torch.from_numpy(np.flatnonzero(mask)).to(device)
        hidden.append(out.last_hidden_state[0, at - 1])
        targets.append(input_ids[0, at])
        logits.append(out.router_logits if router_loss else ())
    flat = torch.cat([torch.zeros(0, dtype=torch.long, device=device), *targets])
    if router_loss is None or not logits:
        return torch.cat(hidden), flat, None
    return torch.cat(hidden), flat, router_loss(tuple(torch.cat(layer) for layer in zip(*logits, strict=True)), None)


def _run_padded(
    model: PreTrainedModel, ids: list[np.ndarray], masks: list[np.ndarray], router_loss: RouterLoss | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same from one right-padded batch."""
    device = next(model.parameters()).device
    input_ids, live = (torch.from_numpy(x).to(device) for x in pad_rows(ids))
    is_target = torch.from_numpy(pad_rows(masks)[0]).to(device).bool()
    out = _run_body(model, input_ids, live.long(), router_loss)
    b, s = is_target.nonzero(as_tuple=True)
    aux_loss = router_loss(out.router_logits, live) if router_loss else None
    return out.last_hidden_state[b, s - 1], input_ids[b, s], aux_loss


def _run_body(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None, router_loss: RouterLoss | None
) -> Any:
    """The stock forward without the head; `router_logits` are among its outputs where a loss needs them."""
    asked = {"output_router_logits": True} if router_loss else {}
    out = find_body(model)(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **asked)
    if router_loss:
        check_router_gradients(out.last_hidden_state, out.router_logits)
    return out


@torch.no_grad()
def isolation_probe(patcher: ModuleReconstructionPatcher) -> None:
    """Run a small forest through a model and refuse it, by name, unless rows are exact and cannot see each other.

    Catches what no registry can promise: positions added outside attention (ALiBi), recurrent state, a window that the
    attention function is not told of, a head that does more than project, a router loss of another kind. Raises
    UnsupportedModelError.
    """
    model = patcher.model
    was_training = model.training
    model.eval()
    try:
        with short_windows(model):
            error, moved = _probe(patcher)
    except (TypeError, InputError) as error:  # the plan is not taken, or it does not reach attention
        raise UnsupportedModelError(f"{_name(model)} cannot be trained with shared prefixes: {error}") from error
    finally:
        model.train(was_training)
    tolerance = LOGPROB_TOLERANCE[model.dtype]
    if not error <= tolerance or not moved <= LEAK_TOLERANCE:
        raise UnsupportedModelError(
            f"{_name(model)} is not exact under prefix sharing: log-probs differ by {error:.1e} from rows run alone "
            f"(accepted {tolerance:.0e}), and a change in one row moves others by {moved:.1e}; "
            "train it with zorro_train.enable: false"
        )


def _probe(patcher: ModuleReconstructionPatcher) -> tuple[float, float]:
    """`(largest error of a log-prob or of the routers' loss, how far a change in one row moves others)`."""
    rows, masks = _probe_rows(patcher.head.vocab_size)
    shared = patcher.forward_rows(rows, masks, temperature=1.0)
    with plain_attention(patcher.model):
        alone = plain_rows(patcher, rows, masks)
        error = _head_error(patcher, rows[0], masks[0])
    error = max(error, float((shared.logprobs - alone.logprobs).abs().max()))
    if shared.aux_loss is not None and alone.aux_loss is not None:
        error = max(error, float((shared.aux_loss - alone.aux_loss).abs()))
    return error, _leak(patcher, rows, masks, shared.logprobs)


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
    hidden = find_body(patcher.model)(input_ids=input_ids, use_cache=False).last_hidden_state[0]
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
    check_receipt(receipt, model.dtype, tolerance)
    return receipt


def check_receipt(receipt: Receipt, dtype: torch.dtype, tolerance: float | None) -> None:
    """Raise ExactnessError for differences beyond the tolerance, by default that of the dtype."""
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
