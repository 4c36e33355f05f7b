"""A causal LM of Hugging Face, prepared so that one pass runs over the unique tokens of a batch.

The model's own forward runs, unmodified. What is ours arrives in two ways: the attention function, through
transformers' registry, and the plan of the batch, as a keyword of the call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AttentionInterface, PreTrainedModel
from transformers.utils import ModelOutput as BaseModelOutput
from transformers.utils import logging as transformers_logging

from arctic_platform.errors import ConfigError, InputError, UnsupportedModelError
from arctic_platform.forest import (
    ATTENTION_NAME,
    Forest,
    ForestPlan,
    RowOrder,
    RowsPlan,
    build_forest,
    find_targets,
    forest_attention_forward,
    response_masks,
    rows_from_padded,
)
from arctic_platform.forest.backends import KERNELS, check_implementation, plan_of
from arctic_platform.forest.held import HeldPath, HeldPlan, HeldRun, tail_of
from arctic_platform.forest.trie import Granularity
from arctic_platform.rl.hybrid import join_recurrent_layers
from arctic_platform.rl.limits import refuse_long_rows
from arctic_platform.rl.zorro_train.body import find_body
from arctic_platform.rl.zorro_train.logprobs import (
    LinearHead,
    LogitsMode,
    check_logits_mode,
    check_peak,
    finish_logits,
    target_logprobs,
)
from arctic_platform.rl.zorro_train.router import check_router_gradients, find_router_loss, rows_through

AttentionInterface.register(ATTENTION_NAME, forest_attention_forward)


@dataclass
class ModelOutput(BaseModelOutput):
    """`logprobs` and `entropy` (None unless asked for): packed 1-D, valid response tokens only, caller's row order.

    `aux_loss`: as in RowValues.
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    aux_loss: Tensor | None = None


@dataclass(frozen=True, eq=False)
class RowValues:
    """One value per target token, row after row: row `b` owns `offsets[b]:offsets[b + 1]`.

    `logprobs [sum of targets]` with gradient; `entropy` alike, or None unless asked for; `forest`: what the pass
    computed, None where the rows ran unshared. `aux_loss`: the routers' load-balancing loss as if nothing were shared,
    a scalar to be multiplied by `config.router_aux_loss_coef`; None unless `config.output_router_logits`.
    """

    logprobs: Tensor
    entropy: Tensor | None
    offsets: np.ndarray
    forest: Forest | None = None
    aux_loss: Tensor | None = None


class ModuleReconstructionPatcher:
    """Prepares any causal LM whose attention goes through transformers' registry, and refuses the others by name.

    `patch_forward()` changes what `model(...)` returns; `forward_rows()` serves ragged rows and leaves it alone.

    response_len: columns at the end of a padded batch that hold responses; a call may give its own.
    max_token_len: longest padded row that the patched forward accepts, None for any.
    temperature: divides the logits; a call may give its own. logits_optimization: none | compute | memory, see
    logprobs.py. attn_implementation: `eager` (rectangles by matmuls), `sdpa` (rectangles by torch's fused kernels),
    `flash_attention_2`, `flash_attention_3` (one variable-length call per level of the forest, CUDA) or
    `flex_attention` (one call; no backward on CPU). use_split_attention=False: every attention layer rebuilds the rows
    instead, the slow twin. granularity, min_shared: see forest.build_forest. probe=False skips the isolation probe.
    logits_optimization_peak_mem_size_in_gib: memory that compute and memory may take to reduce a chunk of logits, 0.25
    if none. fp32_lm_head: logits of a half-precision model in fp32, at the price of an fp32 copy of the head's weights
    during a pass. compile_backend: compile the body with torch.compile and this backend (inductor, aot_eager), once
    for all lengths; passes behind a held prefix run as they are.
    rollout_n and world_size are taken for the documented signature: sharing is read from the tokens of each batch and
    no mode needs a process group, so nothing depends on them.
    """

    def __init__(
        self,
        model: nn.Module,
        response_len: int | None = None,
        max_token_len: int | None = None,
        rollout_n: int | None = None,
        temperature: float = 1.0,
        logits_optimization: LogitsMode = "none",
        world_size: int = 1,
        *,
        attn_implementation: str = "sdpa",
        use_split_attention: bool = True,
        granularity: Granularity = "trie",
        min_shared: int = 1,
        probe: bool = True,
        logits_optimization_peak_mem_size_in_gib: float | None = None,
        fp32_lm_head: bool = False,
        compile_backend: str | None = None,
    ) -> None:
        from arctic_platform.rl.zorro_train.proof import isolation_probe

        if is_compiled(model) and compile_backend is None:
            compile_backend = "inductor"
        self.model = model = unwrap_model(model)
        self.response_len, self.max_token_len = response_len, max_token_len
        self.rollout_n, self.world_size = rollout_n, world_size
        self.temperature = check_temperature(temperature)
        self.logits_optimization = check_logits_mode(logits_optimization)
        self.logits_peak_gib = check_peak(logits_optimization_peak_mem_size_in_gib, self.logits_optimization)
        self.attn_implementation = attn_implementation
        self.use_split_attention = use_split_attention
        self.granularity: Granularity = granularity
        self.min_shared = min_shared
        self._body: Callable[..., Any] | None = None
        self._stock_forward: Callable[..., Any] | None = None
        check_implementation(attn_implementation, self.device, self.model.dtype)
        _undo_earlier_patch(model)
        self.stock_attention = attach_attention(model)
        join_recurrent_layers(model)
        try:
            self.head = find_head(model, is_fp32=fp32_lm_head)
            self.router_loss = find_router_loss(model)
            if probe:
                isolation_probe(self)
            self._body = compiled_body(model, compile_backend, attn_implementation, use_split_attention)
        except Exception:
            set_attention(model, self.stock_attention)
            raise

    @property
    def device(self) -> torch.device:
        """Where the model's first parameter lives."""
        return next(self.model.parameters()).device

    def forward_rows(
        self,
        rows: Sequence[ArrayLike],
        target_masks: Sequence[ArrayLike],
        *,
        temperature: float | None = None,
        calculate_entropy: bool = False,
        content_keys: Sequence[ArrayLike] | None = None,
        held: HeldPath | None = None,
        visits: RowOrder | None = None,
    ) -> RowValues:
        """One pass over the forest of `rows`; log-probs (and entropies) of every row's targets.

        rows: token ids, ragged, any order. target_masks: one bool per token, True where it is a target. A token that
        several rows share is computed once and its value, with its gradient, counts for each of them.
        content_keys: one integer per token; tokens are shared only where ids and keys agree (placeholders of images).
        held: a prefix of all rows that earlier passes computed, see staged.py; only what lies behind it is computed.
        visits: the order of the rows, where a plan has found it already.
        Raises InputError for a first token as target, lengths that disagree, an id outside the model's vocabulary, or
        dropout in train mode.
        """
        temperature = self.temperature if temperature is None else check_temperature(temperature)
        self._check_ready()
        forest = self.forest_of(rows, target_masks, content_keys, visits)
        _check_vocabulary(forest, self.model)
        refuse_long_rows(self.model, forest)
        targets = find_targets(forest, target_masks)
        ids, slot, parents, index = (
            torch.from_numpy(x).to(self.device)
            for x in (targets.ids, targets.parent_slot, targets.parents, targets.value_index)
        )
        if not forest.num_tokens:
            nothing = torch.zeros(0, device=self.device)
            return RowValues(nothing, nothing if calculate_entropy else None, targets.value_offsets, forest)
        aux_loss = None
        if held is None:
            states, aux_loss = self._run(forest)
            hidden = states[parents]
        else:
            behind = parents[parents >= held.num_tokens] - held.num_tokens
            tail = self._tail_hidden(tail_of(forest, held.num_tokens), held)
            hidden = torch.cat([*held.hidden_at(targets.parents), tail[behind]])
        logprobs, entropy = target_logprobs(
            hidden,
            self.head.of_pass(),
            ids,
            slot,
            vocab_size=self.head.vocab_size,
            temperature=temperature,
            mode=self.logits_optimization,
            calculate_entropy=calculate_entropy,
            peak_gib=self.logits_peak_gib,
        )
        entropy = None if entropy is None else entropy[index]
        return RowValues(logprobs[index], entropy, targets.value_offsets, forest, aux_loss)

    def forest_of(
        self,
        rows: Sequence[ArrayLike],
        target_masks: Sequence[ArrayLike],
        content_keys: Sequence[ArrayLike] | None = None,
        visits: RowOrder | None = None,
    ) -> Forest:
        """The forest that one pass over these rows computes, with this patcher's options."""
        prompt_lens = [_first_target(mask) for mask in target_masks] if self.granularity == "prompt" else None
        return build_forest(
            rows,
            granularity=self.granularity,
            prompt_lens=prompt_lens,
            min_shared=self.min_shared,
            content_keys=content_keys,
            visits=visits,
        )

    def hold(self, prefix: np.ndarray, held: HeldPath) -> None:
        """Compute the tokens of `prefix` behind the held path, and lengthen the path by them.

        prefix: `[L] int64`, a row's first L tokens, those of the path included.
        """
        self._check_ready()
        chain = tail_of(build_forest([prefix]), held.num_tokens)
        _check_vocabulary(chain, self.model)
        with held.holding(len(prefix)) as run:
            run.seal(self._tail_hidden(chain, held, keeps=run))

    def _check_ready(self) -> None:
        refuse_dropout(self.model)
        if self.model.config._attn_implementation != ATTENTION_NAME:
            raise InputError("this patcher was undone, or replaced by a later one; call its patch_forward() first")

    def _tail_hidden(self, tail: Forest, held: HeldPath, keeps: HeldRun | None = None) -> Tensor:
        """Last hidden states `[T, E]` of the tokens behind a held path."""
        if not tail.num_tokens:
            return held.runs[-1].hidden[:0]
        kernel, above = KERNELS[self.attn_implementation], tuple(held.runs)
        plan = HeldPlan(tail, kernel=kernel, device=self.device, above=above, keeps=keeps)
        return self._call(find_body(self.model), plan).last_hidden_state[0]

    def _run(self, forest: Forest) -> tuple[Tensor, Tensor | None]:
        """Last hidden states `[T, E]` of the packed tokens and the routers' loss, by the model's own forward."""
        body = find_body(self.model) if self._body is None else self._body
        if self.use_split_attention:
            plan: ForestPlan | RowsPlan = plan_of(self.attn_implementation, forest, self.device)
            _ = plan.layout  # laid out here, so that a compiler finds tensors
        else:
            plan = RowsPlan(forest, device=self.device)
        if self.router_loss is None:
            return self._call(body, plan).last_hidden_state[0], None
        out = self._call(body, plan, output_router_logits=True)
        hidden = out.last_hidden_state[0]
        check_router_gradients(hidden, out.router_logits)
        return hidden, self.router_loss(out.router_logits, rows_through(forest, self.device))

    @staticmethod
    def _call(body: Callable[..., Any], plan: ForestPlan | RowsPlan, **asked: bool) -> Any:
        return body(input_ids=plan.input_ids, position_ids=plan.position_ids, forest=plan, use_cache=False, **asked)

    def patch_forward(self) -> PreTrainedModel:
        """Replace `model.forward` by the documented one, `patched_forward`; returns the model."""
        set_attention(self.model, ATTENTION_NAME)
        if self._stock_forward is None:
            self._stock_forward = self.model.forward
            self.model.forward = self.patched_forward
        return self.model

    def unpatch_forward(self) -> PreTrainedModel:
        """Give the model its own forward and attention back; returns the model."""
        if self._stock_forward is not None:
            del self.model.forward
            self._stock_forward = None
        set_attention(self.model, self.stock_attention)
        return self.model

    def patched_forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        use_cache: bool = False,
        calculate_entropy: bool = False,
        temperature: float | None = None,
        response_len: int | None = None,
        **others: Any,
    ) -> ModelOutput:
        """`model(...)` after patching.

        input_ids, position_ids, attention_mask: `[B, S] int64`, rows `[left pad][prompt][response][right pad]`; the
        last `response_len` columns are the response region. The mask alone decides what is live; positions must count
        live tokens from 0. Raises InputError where that does not hold.
        """
        given = [name for name, value in others.items() if value is not None]
        if given:
            raise InputError(f"{given[0]} has no meaning for a patched model, which returns log-probs; leave it out")
        if use_cache:
            raise InputError("use_cache=True has no meaning for a training pass; pass use_cache=False")
        response_len = self.response_len if response_len is None else response_len
        if response_len is None:
            raise InputError("response_len is not set; give it to the patcher or to this call")
        _check_padded(input_ids, attention_mask, position_ids, response_len, self.max_token_len)
        live = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        rows = rows_from_padded(input_ids.cpu().numpy(), live.cpu().numpy())
        lens = live[:, input_ids.shape[1] - response_len :].bool().sum(1).tolist()
        values = self.forward_rows(
            rows, response_masks(rows, lens), temperature=temperature, calculate_entropy=calculate_entropy
        )
        return ModelOutput(logprobs=values.logprobs, entropy=values.entropy, aux_loss=values.aux_loss)


def is_compiled(model: nn.Module) -> bool:
    """Whether this is what torch.compile returned; its import is left to those who call it."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and isinstance(model, dynamo.OptimizedModule)


def unwrap_model(model: nn.Module) -> PreTrainedModel:
    """The Hugging Face model inside what torch.compile or peft returned; adapters stay in its layers.

    Raises UnsupportedModelError for what holds no such model, and for adapters that add tokens of their own.
    """
    if is_compiled(model):
        model = vars(model)["_modules"]["_orig_mod"]
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftModel):
        if model.active_peft_config.is_prompt_learning:
            raise UnsupportedModelError(
                f"{model.active_peft_config.peft_type} adds tokens in front of every row, which a forest does not "
                "hold; use an adapter inside the layers, such as LoRA"
            )
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(f"{type(model).__name__} is not a Hugging Face model; pass a PreTrainedModel")
    return model


def compiled_body(
    model: PreTrainedModel, backend: str | None, attn_implementation: str, use_split_attention: bool
) -> Callable[..., Any] | None:
    """The model's body under torch.compile with dynamic lengths; None without a backend.

    Raises ConfigError for an attention that the compiler would look into, and for an unknown backend.
    """
    if backend is None:
        return None
    if attn_implementation == "flex_attention" or not use_split_attention:
        raise ConfigError(
            "compile_backend needs attention by segments: use_split_attention=True and attn_implementation eager, "
            "sdpa, flash_attention_2 or flash_attention_3"
        )
    known = [*torch.compiler.list_backends(), "eager", "aot_eager"]
    if backend not in known:
        raise ConfigError(f"compile_backend={backend!r} is not known; choose one of {', '.join(known)}")
    import arctic_platform.forest.compiled  # noqa: F401  registers the attention operator

    return torch.compile(find_body(model), dynamic=True, backend=backend)


class Head:
    """Hidden states to logits: the output embedding and what some families do to its result.

    soft-cap (Gemma 2, final_logit_softcapping), division (Granite, logits_scaling), factor (Cohere, logit_scale).
    The isolation probe compares the result with the model's own logits, so a head that does more is refused.
    """

    def __init__(self, projection: nn.Module, config: Any, *, is_fp32: bool = False) -> None:
        self.projection, self.is_fp32 = projection, is_fp32
        self.vocab_size = _num_rows(projection)
        self.softcap = getattr(config, "final_logit_softcapping", None)
        self.factor = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)

    def __call__(self, hidden: Tensor) -> Tensor:
        """`[u, E] -> [u, V]`, in the dtype of the projection, or in fp32."""
        return self.of_pass()(hidden)

    def of_pass(self) -> Callable[[Tensor], Tensor]:
        """The head for all calls of one pass: an fp32 head of a half model widens its weights once, with gradient.

        A projection that is a plain nn.Linear comes as LinearHead; anything else (adapters, hooks) is called as it is.
        """
        module = self.projection
        named: dict[str, Tensor] = dict(module.named_parameters())
        is_widened = self.is_fp32 and any(p.dtype in (torch.bfloat16, torch.float16) for p in named.values())
        if is_widened:
            named = {name: p.float() for name, p in named.items()}
        if type(module) is nn.Linear and not module._forward_hooks and not module._forward_pre_hooks:
            return LinearHead(named["weight"], named.get("bias"), self.factor, self.softcap)
        call = partial(functional_call, module, named) if is_widened else module
        return lambda hidden: finish_logits(call(hidden.float() if is_widened else hidden), self.factor, self.softcap)


def _num_rows(embedding: nn.Module) -> int:
    """By the module where it says so: a weight that is spread over ranks may be empty here."""
    if isinstance(embedding, nn.Linear):
        return embedding.out_features
    if isinstance(embedding, nn.Embedding):
        return embedding.num_embeddings
    weight = embedding.weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


def find_head(model: PreTrainedModel, *, is_fp32: bool = False) -> Head:
    """The output head of a causal LM, with logits in fp32 if asked for.

    Raises UnsupportedModelError where there is no body and head to take apart.
    """
    projection = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    if projection is None or find_body(model) is model:
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a causal LM of transformers with a body and an output embedding; "
            "load it with AutoModelForCausalLM"
        )
    return Head(projection, model.config, is_fp32=is_fp32)


def _undo_earlier_patch(model: PreTrainedModel) -> None:
    """Preparing a prepared model again, say with another logits mode, replaces the earlier patch."""
    earlier = getattr(vars(model).get("forward"), "__self__", None)
    if isinstance(earlier, ModuleReconstructionPatcher):
        earlier.unpatch_forward()


def attach_attention(model: PreTrainedModel) -> str:
    """Route the model's attention to the forest; returns the implementation it had before."""
    config = getattr(model, "config", None)
    stock = getattr(config, "_attn_implementation", None)
    if stock is None or not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(f"{type(model).__name__} is not a Hugging Face model; pass a PreTrainedModel")
    if stock == ATTENTION_NAME:
        stock = getattr(model, "_arctic_stock_attention", "sdpa" if model._supports_sdpa else "eager")
    set_attention(model, ATTENTION_NAME)
    if model.config._attn_implementation != ATTENTION_NAME:
        raise UnsupportedModelError(
            f"{type(model).__name__} ({model.config.model_type}) does not take its attention from transformers' "
            "registry, so rows would see each other; it cannot be trained with shared prefixes"
        )
    vars(model)["_arctic_stock_attention"] = stock
    return stock


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Switch the attention implementation without transformers' warning; the caller checks the outcome."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        model.set_attn_implementation(name)
    finally:
        transformers_logging.set_verbosity(level)


def refuse_dropout(model: PreTrainedModel) -> None:
    """Raise InputError when train mode would drop units: a shared token would drop the same ones for all its rows."""
    if not model.training:
        return
    active = [f"{name} (p={m.p})" for name, m in model.named_modules() if isinstance(m, nn.Dropout) and m.p]
    if active:
        raise InputError(
            f"dropout is active in {active[0]} and {len(active) - 1} more modules and cannot be shared between rows; "
            "set every dropout of the config to 0 or call model.eval()"
        )


def check_temperature(temperature: float) -> float:
    """Raise InputError unless the temperature is a finite number above 0."""
    if not (np.isfinite(temperature) and temperature > 0):
        raise InputError(f"temperature={temperature} must be a finite number above 0")
    return float(temperature)


def _check_vocabulary(forest: Forest, model: PreTrainedModel) -> None:
    num_embeddings = _num_rows(model.get_input_embeddings())
    if forest.num_tokens and forest.input_ids.max() >= num_embeddings:
        raise InputError(
            f"token id {forest.input_ids.max()} is outside the model's vocabulary of {num_embeddings}; tokenise with "
            "the model's own tokenizer"
        )


def _first_target(mask: ArrayLike) -> int:
    """Tokens before the first target: the prompt. The whole row where nothing is a target."""
    targets = np.flatnonzero(np.asarray(mask))
    return int(targets[0]) if len(targets) else len(np.asarray(mask))


def _check_padded(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    response_len: int,
    max_token_len: int | None,
) -> None:
    """Raise InputError unless the batch has the documented layout."""
    if input_ids.dim() != 2:
        raise InputError(f"input_ids must have shape [B, S], got {list(input_ids.shape)}")
    padded_len = input_ids.shape[1]
    if not 0 <= response_len <= padded_len:
        raise InputError(
            f"response_len={response_len} does not fit rows of {padded_len} columns; give 0 to {padded_len}"
        )
    if max_token_len is not None and padded_len > max_token_len:
        raise InputError(f"rows of {padded_len} columns exceed max_token_len={max_token_len}; raise it or cut the rows")
    for name, given in (("attention_mask", attention_mask), ("position_ids", position_ids)):
        if given is not None and given.shape != input_ids.shape:
            raise InputError(f"{name} has shape {list(given.shape)}, expected {list(input_ids.shape)} like input_ids")
    live = torch.ones_like(input_ids) if attention_mask is None else attention_mask.bool().long()
    edges = (live.diff(dim=1, prepend=live.new_zeros(len(live), 1)) == 1).sum(1)
    if (edges > 1).any():
        row = int((edges > 1).nonzero()[0])
        raise InputError(f"attention_mask of row {row} has a hole; live tokens must be one run between the pads")
    if position_ids is not None and ((position_ids - (live.cumsum(1) - 1)) * live).any():
        row = int(((position_ids - (live.cumsum(1) - 1)) * live).any(1).nonzero()[0])
        raise InputError(
            f"position_ids of row {row} do not count its live tokens from 0; "
            "pass (attention_mask.cumsum(1) - 1).clamp(0)"
        )
