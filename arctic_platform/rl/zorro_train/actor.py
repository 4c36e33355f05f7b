"""A model, its deduplicated forward and one PPO update on a padded batch: the documented way in for scripts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from arctic_platform.errors import ConfigError, InputError, NonFiniteError
from arctic_platform.forest import rows_from_padded
from arctic_platform.forest.backends import check_implementation
from arctic_platform.rl.losses import LossSettings, TokenBatch, compute_loss, summarise
from arctic_platform.rl.zorro_train.logprobs import LOGITS_MODES, LogitsMode
from arctic_platform.rl.zorro_train.module_patcher import ModelOutput
from arctic_platform.rl.zorro_train.planner import Limits, plan_batch
from arctic_platform.rl.zorro_train.qwen_model_patcher import Qwen3ModelOncePatcher

CLIP_RATIO = 0.2
"""How far the probability ratio may move before PPO clips it, both ways."""

KL_COEF = 0.001
"""Weight of the KL term when a batch brings `ref_log_prob`."""

DEFAULT_DTYPE = torch.bfloat16

MicroBatch = Mapping[str, Any]


class DeduplicatedActor:
    """Loads a causal LM and runs padded batches through it with every shared token computed once.

    A micro-batch is a mapping with `input_ids`, `position_ids`, `attention_mask` [B, S] (rows
    `[left pad][prompt][response][right pad]`) and `responses` [B, R] or `response_length` (int); for an update also
    `advantages` and `old_log_probs`, and optionally `ref_log_prob` and `response_mask`, all [B, R].

    Args:
        model_name_or_path: a folder, a Hugging Face id, or a model that is already built. A built model keeps its
            dtype, unless another one than the default is asked for.
        device: where the model lives, "cuda" or "cpu".
        logits_optimization: "none", "compute" or "memory".
        use_split_attention: attend over segments; False rebuilds every row inside the attention.
        attn_implementation: kernel of the attention: "eager", "sdpa", "flash_attention_2", "flash_attention_3" or
            "flex_attention".
        world_size: of the run, as the documented patcher takes it.
        max_token_len: most unique tokens in one pass. An update, or a forward without gradients, of more runs in
            several passes with the same result, each of which computes the prefixes of its rows; a longer row runs
            alone, with a warning.
        dtype: of the loaded weights.

    Raises:
        ConfigError: an option or a device is not available. InputError: the model cannot be found.
        UnsupportedModelError: the model cannot be trained exactly this way (on the first pass).
    """

    def __init__(
        self,
        model_name_or_path: str | os.PathLike[str] | nn.Module,
        device: str = "cuda",
        logits_optimization: LogitsMode = "none",
        use_split_attention: bool = True,
        attn_implementation: str = "eager",
        world_size: int = 1,
        max_token_len: int = 4096,
        dtype: torch.dtype = DEFAULT_DTYPE,
    ) -> None:
        _check_options(device, logits_optimization, attn_implementation, max_token_len)
        self.logits_optimization = logits_optimization
        self.use_split_attention = use_split_attention
        self.attn_implementation = attn_implementation
        self.world_size = world_size
        self.max_token_len = max_token_len
        if isinstance(model_name_or_path, nn.Module):
            self.model = model_name_or_path.to(device)
            if dtype != DEFAULT_DTYPE:
                self.model = self.model.to(dtype)
        else:
            self.model = _load(model_name_or_path, dtype, attn_implementation).to(device)
        self.model.eval()
        self.patcher: Qwen3ModelOncePatcher | None = None

    def train(self) -> None:
        """Put the model into training mode."""
        self.model.train()

    def eval(self) -> None:
        """Put the model into evaluation mode."""
        self.model.eval()

    def patch(
        self, response_len: int | None = None, rollout_n: int | None = None, temperature: float = 1.0
    ) -> Qwen3ModelOncePatcher:
        """Prepare the model, or prepare it anew with other settings; `forward` does it when it has not been done.

        Args:
            response_len: columns at the end of a batch that hold the response.
            rollout_n: rows per prompt, as documented; sharing is read from the tokens themselves.
            temperature: divides the logits where a call names none.
        """
        if self.patcher is not None:
            self.patcher.unpatch_forward()
        self.patcher = Qwen3ModelOncePatcher(
            self.model,
            response_len=response_len,
            rollout_n=rollout_n,
            temperature=temperature,
            logits_optimization=self.logits_optimization,
            world_size=self.world_size,
            use_split_attention=self.use_split_attention,
            attn_implementation=self.attn_implementation,
        )
        self.patcher.patch_forward()
        return self.patcher

    def forward(
        self, micro_batch: MicroBatch, temperature: float = 1.0, calculate_entropy: bool = False
    ) -> ModelOutput:
        """Log-probs (and entropies) of the live response tokens, packed 1-D, rows in the batch's order."""
        if torch.is_grad_enabled():
            return self._pass(micro_batch, temperature, calculate_entropy)
        lens = self._response_mask(micro_batch).sum(1).tolist()
        parts = self._parts(micro_batch)
        outputs = [self._pass(_take_rows(micro_batch, rows), temperature, calculate_entropy) for rows in parts]
        logprobs = _in_row_order([output.logprobs for output in outputs], parts, lens)
        return ModelOutput(logprobs, _in_row_order([output.entropy for output in outputs], parts, lens))

    def _forward_micro_batch(
        self, micro_batch: MicroBatch, temperature: float = 1.0, calculate_entropy: bool = False
    ) -> tuple[Tensor | None, Tensor]:
        """The documented padded form of `forward`: `(entropy, log_probs)`, [B, R] each, 0 at padding."""
        output = self.forward(micro_batch, temperature, calculate_entropy)
        mask = self._response_mask(micro_batch)
        entropy = None if output.entropy is None else _unpack(output.entropy, mask)
        return entropy, _unpack(output.logprobs, mask)

    def compute_policy_loss_and_backward(
        self, micro_batch: MicroBatch, temperature: float = 1.0, gradient_accumulation: int = 1
    ) -> dict[str, float]:
        """One PPO loss and its gradients, which add to those that the parameters hold.

        The clipped surrogate (arXiv 1707.06347, eq. 7) is averaged over the batch's response tokens; with
        `ref_log_prob`, `KL_COEF` times the k3 estimate of the KL divergence is added. Tokens whose `response_mask`
        is 0 carry no loss. Without `old_log_probs` the ratio is 1. A model with `config.output_router_logits` also gets
        the gradients of its routers' loss, which the metrics leave out.

        Args:
            gradient_accumulation: divides the loss before backward, for gradients summed over so many calls.

        Returns:
            `actor/pg_loss`, `actor/pg_clipfrac`, `actor/ppo_kl`, `actor/kl_loss` (with a reference),
            `actor/policy_loss` (surrogate and KL term) and `actor/loss` (the same, divided).

        Raises:
            InputError: a field is missing or of another shape. NonFiniteError: a field holds NaN or infinity; in
            both cases no gradient was touched.
        """
        if gradient_accumulation < 1:
            raise InputError(f"gradient_accumulation={gradient_accumulation} must be 1 or more")
        fields, settings = self._loss_inputs(micro_batch)
        results = []
        for rows in self._parts(micro_batch):
            output = self._pass(_take_rows(micro_batch, rows), temperature, False)
            assert output.logprobs is not None, "a pass always returns log-probs"
            result = compute_loss("ppo", self._token_batch(output.logprobs, fields, micro_batch, rows), settings)
            loss = result.loss + self._router_term(output.aux_loss, micro_batch, rows)
            if loss.requires_grad:
                (loss / gradient_accumulation).backward()
            results.append(result)
        sums = summarise(results)
        metrics = {
            "actor/policy_loss": sums["loss"],
            "actor/pg_loss": sums["pg_loss"],
            "actor/pg_clipfrac": sums["clip_fraction"],
            "actor/ppo_kl": sums["ppo_kl"],
            "actor/loss": sums["loss"] / gradient_accumulation,
        }
        if "kl_loss" in sums:
            metrics["actor/kl_loss"] = sums["kl_loss"]
        return metrics

    def _router_term(self, aux_loss: Tensor | None, micro_batch: MicroBatch, rows: list[int]) -> Tensor | float:
        """The routers' loss of a pass over some rows, times its coefficient and their part of all tokens."""
        if aux_loss is None or self.patcher is None or self.patcher.router_loss is None:
            return 0.0
        mask = micro_batch.get("attention_mask")
        lens = (torch.ones_like(micro_batch["input_ids"]) if mask is None else mask).bool().sum(1)
        return aux_loss * (self.patcher.router_loss.coef * float(lens[rows].sum() / lens.sum()))

    def _pass(self, micro_batch: MicroBatch, temperature: float, calculate_entropy: bool) -> ModelOutput:
        response_len = self._response_len(micro_batch)
        if self.patcher is None:
            self.patch(response_len, temperature=temperature)
        return self.model(
            input_ids=micro_batch["input_ids"],
            position_ids=micro_batch.get("position_ids"),
            attention_mask=micro_batch.get("attention_mask"),
            use_cache=False,
            calculate_entropy=calculate_entropy,
            temperature=temperature,
            response_len=response_len,
        )

    def _parts(self, micro_batch: MicroBatch) -> list[list[int]]:
        """Rows of each pass, at most `max_token_len` unique tokens in each."""
        mask = micro_batch.get("attention_mask")
        rows = rows_from_padded(micro_batch["input_ids"].cpu().numpy(), None if mask is None else mask.cpu().numpy())
        plan = plan_batch(rows, Limits(max_token_len=self.max_token_len))
        return [list(batch.rows) for batch in plan.ranks[0]]

    def _response_len(self, micro_batch: MicroBatch) -> int:
        if "input_ids" not in micro_batch:
            raise InputError(f"the micro-batch has {', '.join(micro_batch) or 'nothing'}; add input_ids [B, S]")
        if "response_length" in micro_batch:
            return int(micro_batch["response_length"])
        if "responses" in micro_batch:
            return micro_batch["responses"].shape[1]
        if self.patcher is not None and self.patcher.response_len is not None:
            return self.patcher.response_len
        raise InputError("the micro-batch names no response length; add responses [B, R] or response_length")

    def _response_mask(self, micro_batch: MicroBatch) -> Tensor:
        """[B, R] bool: the live response tokens."""
        mask = micro_batch.get("attention_mask")
        response_len = self._response_len(micro_batch)
        mask = torch.ones_like(micro_batch["input_ids"]) if mask is None else mask
        return mask[:, mask.shape[1] - response_len :].bool()

    def _loss_inputs(self, micro_batch: MicroBatch) -> tuple[dict[str, Tensor], LossSettings]:
        """Checked [B, R] fields under the names of `TokenBatch`, and what the loss is divided by."""
        live = self._response_mask(micro_batch)
        names = {"advantages": "advantages", "old_log_probs": "old_logprobs", "ref_log_prob": "ref_logprobs"}
        fields = {
            ours: _checked(theirs, micro_batch[theirs], live) for theirs, ours in names.items() if theirs in micro_batch
        }
        if "advantages" not in fields:
            raise InputError("the micro-batch has no advantages; add one number per response token, [B, R]")
        fields["mask"] = live
        if "response_mask" in micro_batch:
            fields["mask"] = live & _checked("response_mask", micro_batch["response_mask"], live).bool()
        settings = LossSettings(
            num_loss_tokens=max(int(fields["mask"].sum()), 1),
            num_loss_rows=max(int(fields["mask"].any(1).sum()), 1),
            clip_low=CLIP_RATIO,
            clip_high=CLIP_RATIO,
            kl_coef=KL_COEF if "ref_logprobs" in fields else 0.0,
        )
        return fields, settings

    def _token_batch(
        self, logprobs: Tensor, fields: dict[str, Tensor], micro_batch: MicroBatch, rows: list[int]
    ) -> TokenBatch:
        live = self._response_mask(micro_batch)[rows]
        packed = {name: value[rows][live].to(logprobs.device) for name, value in fields.items()}
        lens = live.sum(1).to(logprobs.device)
        return TokenBatch(
            logprobs=logprobs,
            advantages=packed["advantages"],
            mask=packed["mask"],
            row_offsets=torch.cat([lens.new_zeros(1), lens.cumsum(0)]),
            old_logprobs=packed.get("old_logprobs"),
            ref_logprobs=packed.get("ref_logprobs"),
        )


def _check_options(device: str, logits_optimization: str, attn_implementation: str, max_token_len: int) -> None:
    check_implementation(attn_implementation, device)
    if logits_optimization not in LOGITS_MODES:
        raise ConfigError(
            f"logits_optimization={logits_optimization!r} is not known; choose one of {', '.join(LOGITS_MODES)}"
        )
    if str(device).startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={str(device)!r} is not available here; pass device='cpu'")
    if max_token_len < 1:
        raise ConfigError(f"max_token_len={max_token_len} must be 1 or more")


def _load(name: str | os.PathLike[str], dtype: torch.dtype, attn_implementation: str) -> PreTrainedModel:
    stock = "eager" if attn_implementation == "eager" else "sdpa"
    try:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, attn_implementation=stock)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"model_name_or_path={str(name)!r} cannot be loaded ({reason}); give a folder that holds a config.json "
            "and weights, a Hugging Face id, or a built model"
        ) from error


def _take_rows(micro_batch: MicroBatch, rows: list[int]) -> dict[str, Any]:
    num_rows = len(micro_batch["input_ids"])
    if len(rows) == num_rows:
        return dict(micro_batch)
    return {
        name: value[rows] if isinstance(value, Tensor) and value.dim() and len(value) == num_rows else value
        for name, value in micro_batch.items()
    }


def _in_row_order(values: list[Tensor | None], parts: list[list[int]], lens: list[int]) -> Tensor | None:
    """Packed values of several passes, put back into the order of all rows; None where they were not asked for."""
    pieces: dict[int, Tensor] = {}
    for value, rows in zip(values, parts, strict=True):
        if value is None:
            return None
        pieces |= dict(zip(rows, value.split([lens[row] for row in rows]), strict=True))
    return torch.cat([pieces[row] for row in sorted(pieces)])


def _unpack(values: Tensor | None, mask: Tensor) -> Tensor:
    """Packed values at the True places of mask [B, R], 0 elsewhere."""
    assert values is not None, "a pass always returns log-probs"
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


def _checked(name: str, value: Tensor, live: Tensor) -> Tensor:
    if tuple(value.shape) != tuple(live.shape):
        raise InputError(f"{name} has shape {tuple(value.shape)}; pass one per response token, {tuple(live.shape)}")
    if not np.isfinite(value[live.to(value.device)].detach().float().cpu().numpy()).all():
        raise NonFiniteError(f"{name} holds NaN or infinity at a live response token; nothing was changed")
    return value.to(live.device)
