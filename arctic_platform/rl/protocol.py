"""The calls, defined once: requests and responses as pydantic models around ragged rows of token ids.

A row is `prompt + response`. Rows travel as token ids from end to end, never as text. Every list of a batch has
one entry per row, in the caller's order; lists per token are as long as that row's response. Log-prob `i` of a
response is the log-prob of token `response[i]` itself, at the call's temperature, under the full softmax.

    generate    GenerateRequest   -> GenerateResponse    log_probs    LogProbsRequest -> LogProbsResponse
    fwd_bwd     FwdBwdRequest     -> FwdBwdResponse      step         StepRequest     -> StepResponse
    sync_weights SyncWeightsRequest -> SyncResponse      and the rest below, one pair each

Rows are given as lists, tuples, arrays or tensors, kept as flat arrays (`ragged.py`) and read like lists of lists.
Importing this module loads pydantic and numpy and nothing heavier.
"""

import numbers
import uuid
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from arctic_platform import errors
from arctic_platform.errors import ArcticError, InputError, NonFiniteError, ServerError
from arctic_platform.rl.config import StrictModel
from arctic_platform.rl.ragged import FloatRows, Floats, IdRows, Ids, Ragged, array_of, offsets_of

PER_TOKEN_FIELDS = ("response_mask", "advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs")
FINITE_FIELDS = PER_TOKEN_FIELDS[1:]
MAX_TOKEN_ID = 2**31 - 1
MAX_LOGIT_BIAS = 1e6


class Message(StrictModel):
    """Base of all requests and responses; faults of the caller are `InputError`s. In JSON, -inf is a string."""

    model_config = ConfigDict(ser_json_inf_nan="strings")
    error_class: ClassVar[type[ArcticError]] = InputError


class ErrorInfo(StrictModel):
    """An error as it travels: the name of its class in `errors.py` and its one line."""

    kind: str = Field(description="Class of the error, one of arctic_platform.errors.")
    message: str = Field(description="What was given, what is accepted, what to do.")

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """An error of this package as itself, any other as a ServerError that names it."""
        text = " ".join(str(error).split())
        if isinstance(error, ArcticError):
            return cls(kind=errors.public_kind(error).__name__, message=text)
        return cls(kind=ServerError.__name__, message=f"{type(error).__name__}: {text}")

    def to_error(self) -> ArcticError:
        """The same error again; a class that this version does not know becomes a ServerError."""
        found = getattr(errors, self.kind, None)
        if isinstance(found, type) and issubclass(found, ArcticError):
            return found(self.message)
        return ServerError(f"{self.kind}: {self.message}")


class SamplingParams(Message):
    """How the rollouts of a request are drawn; names, meanings and defaults are vLLM's.

    Logits pass through logit_bias, the penalties, bad_words and min_tokens, in this order, then temperature, min_p,
    top_k and top_p, each on the probabilities that the one before left. None of them but the temperature touches a
    log-prob: what a rollout reports is the model's own (`logprobs_mode`). Unlike vLLM, n above 1 may be greedy, and a
    temperature below 0.01 is not raised to it.
    """

    n: int = Field(1, ge=1, description="Rollouts per prompt.")
    temperature: float = Field(1.0, ge=0.0, le=2.0, description="Divides the logits once; 0 is greedy.")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Smallest set of tokens with this probability.")
    top_k: int = Field(0, ge=-1, description="Most probable tokens to draw from; 0 or -1: all.")
    min_p: float = Field(0.0, ge=0.0, le=1.0, description="Least probability of a token, relative to the likeliest.")
    repetition_penalty: float = Field(
        1.0,
        gt=0.0,
        allow_inf_nan=False,
        description="Divides positive logits of tokens that prompt or rollout hold, multiplies negative ones.",
    )
    presence_penalty: float = Field(
        0.0, ge=-2.0, le=2.0, description="Taken from the logits of tokens that the rollout holds."
    )
    frequency_penalty: float = Field(
        0.0, ge=-2.0, le=2.0, description="Taken from a token's logit for every time that the rollout holds it."
    )
    max_tokens: int | None = Field(
        16, ge=1, description="Most new tokens per rollout; none: as many as the model's context leaves."
    )
    min_tokens: int = Field(0, ge=0, description="New tokens before which no end token, stop token or stop text ends.")
    stop: tuple[str, ...] = Field((), description="Texts that end a rollout; one text may be given without a list.")
    stop_token_ids: tuple[int, ...] = Field((), description="Tokens that end a rollout, beside the model's own.")
    include_stop_str_in_output: bool = Field(False, description="Keep the stop text, or stop token, in the text.")
    skip_special_tokens: bool = Field(True, description="Leave special tokens out of the text.")
    ignore_eos: bool = Field(False, description="Go on behind the model's end token.")
    seed: int | None = Field(None, ge=0, description="Same seed, prompts and settings: same rollouts; -1 is none.")
    logprobs: int | None = Field(
        None, ge=-1, description="Most probable tokens to report beside each one drawn; -1: all; none: no such report."
    )
    prompt_logprobs: int | None = Field(
        None, ge=-1, description="Most probable tokens to report beside each one of the prompt; -1: all; none: none."
    )
    logprobs_mode: Literal["processed", "raw"] = Field(
        "processed", description="Log-probs at the request's temperature (the trainer's definition), or at 1."
    )
    logit_bias: dict[int, float] = Field(
        default_factory=dict, description="Added to the logits of these token ids; -inf bans one."
    )
    bad_words: tuple[str, ...] = Field((), description="Texts whose last token is not drawn behind their others.")

    @field_validator("stop", "bad_words", "stop_token_ids", "logit_bias", "seed", mode="before")
    @classmethod
    def _accept_short_forms(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and info.field_name != "seed":
            return {} if info.field_name == "logit_bias" else ()
        if isinstance(value, str) and info.field_name in ("stop", "bad_words"):
            return (value,)
        return None if info.field_name == "seed" and value == -1 else value

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InputError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}; lower it")
        for name in ("stop", "bad_words"):
            if "" in getattr(self, name):
                raise InputError(f"{name} has an empty text; leave it out")
        for token, bias in self.logit_bias.items():
            if not bias <= MAX_LOGIT_BIAS:
                raise InputError(f"logit_bias[{token}] is {bias}; give a number up to {MAX_LOGIT_BIAS:g}, or -inf")
        for token in (*self.stop_token_ids, *self.logit_bias):
            if token < 0:
                raise InputError(f"stop_token_ids or logit_bias has token id {token}; ids are 0 or more")
        return self


class Rollout(Message):
    """One sampled answer; lists have one entry per token of `token_ids`, a stop token included.

    `stop_reason`: the stop text or the stop token of the request that ended it; none for the model's own end token.
    `top_logprobs`: with `logprobs` k, the k most probable ids and the drawn one with their log-probs.
    `prompt_logprobs`: the same for the tokens of the prompt, none for the first; of each prompt's first rollout only.
    `text`: where the sampler has a tokenizer; without special tokens and without what stopped it, unless asked for.
    Ids are what was drawn: encoding the text may give others.
    """

    prompt_index: int
    token_ids: Ids
    logprobs: Floats
    finish_reason: Literal["stop", "length", "abort"]
    stop_reason: int | str | None = None
    text: str | None = None
    top_logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None


class RolloutBatch(Message):
    """Rows to score or to train on; ragged, one entry per row everywhere.

    Attributes:
        prompts: token ids, at least one per row. responses: token ids, may be empty.
        response_mask: 1 where a response token carries loss, 0 where it is context only; none: all 1.
        advantages: per response token; one number per row is spread over its response.
        old_logprobs: of the policy before this step's updates; none: the current ones (ratio exactly 1).
        ref_logprobs: of the reference model, for a KL term. rollout_logprobs: as the sampler reported them.
        pairs: `[preferred row, other row]` for each pair of loss='dpo'; a row may be in several.
        content_keys: one integer per token of prompt and response, all 0 if none. Tokens are shared only where ids and
            keys agree: placeholders of two images have equal ids and need different keys.

    Raises:
        InputError: numbers of rows or lengths differ, an id is negative, a prompt is empty, a pair names no row.
        NonFiniteError: an advantage or a log-prob is NaN or infinite.
    """

    prompts: IdRows
    responses: IdRows
    response_mask: IdRows | None = None
    advantages: FloatRows | None = None
    old_logprobs: FloatRows | None = None
    ref_logprobs: FloatRows | None = None
    rollout_logprobs: FloatRows | None = None
    pairs: IdRows | None = None
    content_keys: IdRows | None = None

    @model_validator(mode="before")
    @classmethod
    def _accept_row_advantages(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "advantages" not in data:
            return data
        return {**data, "advantages": _spread(data["advantages"], data.get("responses"))}

    @model_validator(mode="after")
    def _check_rows(self) -> Self:
        _check_num_rows(self)
        _check_ids(self.prompts, "prompts")
        _check_ids(self.responses, "responses")
        _check_none_empty(self.prompts)
        for name in PER_TOKEN_FIELDS:
            _check_lengths(self, name)
        for name in FINITE_FIELDS:
            _check_finite(getattr(self, name), name)
        _check_mask(self.response_mask)
        _check_pairs(self)
        _check_content_keys(self)
        return self

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As pydantic's, without a check of what is put in; rows may be lists."""
        rows = {name: None if value is None else Ragged.from_rows(value) for name, value in (update or {}).items()}
        return super().model_copy(update=rows, deep=deep)

    @property
    def num_rows(self) -> int:
        """Rows in the batch."""
        return len(self.prompts)

    @property
    def response_lens(self) -> list[int]:
        """Tokens in each response."""
        return self.responses.lens.tolist()

    @property
    def num_loss_tokens(self) -> int:
        """Response tokens that carry loss."""
        return len(self.responses.values) if self.response_mask is None else int(self.response_mask.values.sum())

    @property
    def num_loss_rows(self) -> int:
        """Rows with at least one response token that carries loss."""
        has_tokens = self.responses.lens > 0
        if self.response_mask is None or not has_tokens.any():
            return int(has_tokens.sum())
        starts = self.responses.offsets[:-1][has_tokens]
        return int((np.maximum.reduceat(self.response_mask.values, starts) > 0).sum())

    @property
    def num_loss_pairs(self) -> int:
        """Pairs of rows, for loss='dpo'."""
        return len(self.pairs or ())


class Processing(Message):
    """What the training side does with a batch."""

    loss: str = Field("grpo", description="Name of a loss in the registry.")
    temperature: float = Field(1.0, gt=0.0, allow_inf_nan=False, description="Divides the logits once.")
    clip_low: float | None = Field(None, ge=0.0, description="Ratio may fall by this much; none: the loss's own.")
    clip_high: float | None = Field(None, ge=0.0, description="Ratio may rise by this much; none: the loss's own.")
    kl_coef: float = Field(0.0, ge=0.0, allow_inf_nan=False, description="Weight of the KL term to ref_logprobs.")
    entropy_coef: float = Field(0.0, ge=0.0, allow_inf_nan=False, description="Weight of the entropy bonus.")
    calculate_entropy: bool = Field(False, description="Return the entropy of every response position.")
    num_loss_tokens: int | None = Field(
        None, ge=1, description="Loss tokens of the whole step, over all its calls; none: those of this call."
    )
    num_loss_rows: int | None = Field(
        None, ge=1, description="Rows with loss tokens of the whole step, over all its calls; none: of this call."
    )
    num_loss_pairs: int | None = Field(
        None, ge=1, description="Pairs of the whole step, over all its calls; none: those of this call."
    )
    max_response_len: int | None = Field(None, ge=1, description="Constant that dr_grpo divides by; none: 1.")
    dpo_beta: float | None = Field(None, gt=0.0, allow_inf_nan=False, description="Beta of dpo; none: 0.1.")
    rollout_is: Literal["token", "sequence"] | None = Field(
        None, description="Weigh the policy term by p_trainer / p_sampler, of the token or of its row; none: do not."
    )
    rollout_is_threshold: float | None = Field(
        None, gt=0.0, allow_inf_nan=False, description="Largest such weight (TIS); none: 2."
    )
    rollout_rs: Literal["token", "sequence", "geometric"] | None = Field(
        None, description="Reject a token, or a row by product or geometric mean, whose ratio is out of bounds."
    )
    rollout_rs_threshold: float | None = Field(
        None, gt=0.0, allow_inf_nan=False, description="Largest ratio that is not rejected; none: 2."
    )
    rollout_rs_threshold_lower: float | None = Field(
        None, ge=0.0, allow_inf_nan=False, description="Smallest such ratio; none: one over the largest."
    )
    zorro: bool | None = Field(None, description="Share tokens in this call or not; none: as configured.")


class Request(Message):
    """Base of all requests. The same `request_id` sent twice is executed once."""

    method: ClassVar[str]
    request_id: str = Field(
        default_factory=lambda: uuid.uuid4().hex, max_length=128, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:-]*$"
    )


class Response(Message):
    """Base of all responses."""


class GenerateRequest(Request):
    """Sample `sampling_params.n` answers to each prompt."""

    method: ClassVar[str] = "generate"
    prompts: IdRows
    sampling_params: SamplingParams = Field(default_factory=SamplingParams)
    routing_key: str | None = Field(
        None,
        description="`SamplingReplicas` sends calls with equal keys to the same sampler; one alone takes them all.",
    )

    @model_validator(mode="after")
    def _check_prompts(self) -> Self:
        _check_ids(self.prompts, "prompts")
        _check_none_empty(self.prompts)
        return self


class GenerateResponse(Response):
    """Rollouts in prompt order, those of one prompt next to each other (`len(prompts) * n` in all).

    `metrics`: tokens_computed, tokens_naive, kv_tokens_stored, kv_tokens_naive, prefill_seconds, decode_seconds; of the
    embedded sampler also prefix_hit_tokens (of the prompts), kv_tokens_read and forest_tokens_read (by decode steps).
    """

    rollouts: list[Rollout]
    weight_version: int
    metrics: dict[str, float] = Field(default_factory=dict)


class LogProbsRequest(Request):
    """Score a batch without gradients, with the policy or with the reference model."""

    method: ClassVar[str] = "log_probs"
    batch: RolloutBatch
    processing: Processing = Field(default_factory=Processing)
    reference: bool = False


class LogProbsResponse(Response):
    """Values per response token. `metrics`: tokens_computed, tokens_naive, zorro_active, seconds."""

    logprobs: FloatRows
    entropy: FloatRows | None = None
    metrics: dict[str, float] = Field(default_factory=dict)


class FwdBwdRequest(Request):
    """Forward, loss and backward; gradients add up until `step`."""

    method: ClassVar[str] = "fwd_bwd"
    batch: RolloutBatch
    processing: Processing = Field(default_factory=Processing)


class FwdNoGradRequest(Request):
    """The same forward and loss as `fwd_bwd`, without gradients."""

    method: ClassVar[str] = "fwd_no_grad"
    batch: RolloutBatch
    processing: Processing = Field(default_factory=Processing)


class FwdBwdResponse(Response):
    """Log-probs of this pass, and metrics.

    `metrics`: loss, pg_loss, clip_fraction, ppo_kl, kl_loss (with ref_logprobs), entropy (when computed),
    sampler_diff_max and sampler_diff_mean (with rollout_logprobs), rollout_is_mean, rollout_is_truncated and
    rollout_rs_rejected (parts of the loss tokens, with rollout_is or rollout_rs), router_loss (where the model asks for
    one; `loss` holds it times its coefficient), num_loss_tokens, num_loss_rows, num_loss_pairs, dpo_accuracy and
    dpo_margin (dpo: part of pairs in the right order, mean of beta times the margin),
    tokens_computed (padding counts where nothing is shared), tokens_naive (all rows, unpadded), zorro_active (1 or 0),
    num_micro_batches, num_staged_groups (trees whose prefix is held for several micro-batches), seconds, and, when a
    receipt was taken, receipt/logprob_max_abs, receipt/gradient_rel, receipt/worst_parameter_rel, receipt/num_rows,
    receipt/tokens_shared, receipt/tokens_alone, receipt/seconds.
    """

    logprobs: FloatRows
    entropy: FloatRows | None = None
    metrics: dict[str, float] = Field(default_factory=dict)


class StepRequest(Request):
    """Clip the accumulated gradients, update the weights, advance the schedule, clear the gradients."""

    method: ClassVar[str] = "step"


class StepResponse(Response):
    """`metrics`: step (updates done so far), lr (used by this update), grad_norm (before clipping), seconds."""

    metrics: dict[str, float]


class SyncWeightsRequest(Request):
    """Give the sampler the trainer's weights; an option that is none is taken from the config."""

    method: ClassVar[str] = "sync_weights"
    cuda_ipc: bool | None = None
    low_memory: bool | None = None


class SyncResponse(Response):
    """What a sync moved; `weight_version` is the one the sampler now reports."""

    weight_version: int
    num_tensors: int
    num_bytes: int
    seconds: float
    mechanism: str


class SaveCheckpointRequest(Request):
    """Write a checkpoint folder; `client_state` (JSON values) comes back on load, for a data position and the like."""

    method: ClassVar[str] = "save_checkpoint"
    path: str | None = None
    client_state: dict[str, Any] = Field(default_factory=dict)


class LoadCheckpointRequest(Request):
    """Read a checkpoint folder, or the newest in the configured folder when `path` is none."""

    method: ClassVar[str] = "load_checkpoint"
    path: str | None = None


class CheckpointResponse(Response):
    """Where the checkpoint is, and the state it holds."""

    path: str
    step: int
    weight_version: int
    client_state: dict[str, Any] = Field(default_factory=dict)


class ExportModelRequest(Request):
    """Write the trainer's weights as a Hugging Face folder."""

    method: ClassVar[str] = "export_model"
    path: str


class PathResponse(Response):
    """A folder that was written."""

    path: str


class SleepSamplingRequest(Request):
    """Free the sampler's memory: its key-value cache, and with `level` 2 its weights too (a sync must follow)."""

    method: ClassVar[str] = "sleep_sampling"
    level: Literal[1, 2] = 1


class WakeSamplingRequest(Request):
    """Make the sampler ready again."""

    method: ClassVar[str] = "wake_sampling"


class SleepTrainingRequest(Request):
    """Move weights, optimizer and reference out of the device's memory, into CPU memory or a file, until they wake."""

    method: ClassVar[str] = "sleep_training"
    target: Literal["cpu", "disk"] = "cpu"


class WakeTrainingRequest(Request):
    """Bring the trainer back as it was, bit for bit."""

    method: ClassVar[str] = "wake_training"


class ResetPrefixCacheRequest(Request):
    """Forget cached prefixes."""

    method: ClassVar[str] = "reset_prefix_cache"


class WeightNormRequest(Request):
    """Ask for the norm of all weights."""

    method: ClassVar[str] = "weight_norm"


class WeightNormResponse(Response):
    """Euclidean norm over all parameters of the trainer."""

    norm: float


class StatusRequest(Request):
    """Ask what is loaded and how far it is."""

    method: ClassVar[str] = "status"


class StatusResponse(Response):
    """What is loaded, which options are in effect, how far training is.

    `is_sampler_current`: the sampler holds the trainer's weights; false after a step that was not synced yet.
    `zorro_train`, `zorro_inference`: as configured; the `_effect` says in one line whether tokens are really shared,
    and why not. What a job did not load (`kinds`) is none. `num_ranks` processes train; `rank_pids` and `sampler_pid`
    are of those that are processes of their own. `lost`: which process of the trainer or the sampler is gone.
    """

    model: str
    kinds: tuple[str, ...]
    num_parameters: int
    dtype: str
    device: str
    training_engine: str | None
    sampling_engine: str | None
    num_ranks: int = 1
    rank_pids: tuple[int, ...] = ()
    sampler_pid: int | None = None
    step: int | None
    trainer_version: int | None
    sampler_version: int | None
    is_sampler_current: bool
    is_sampler_asleep: bool
    is_trainer_asleep: bool = False
    has_pending_gradients: bool
    zorro_train: bool
    zorro_train_effect: str
    zorro_inference: bool
    zorro_inference_effect: str
    max_rollouts: int | None
    max_token_len: int | None = None
    max_rows: int | None = None
    lost: str | None = None


class SideBySideRequest(Request):
    """Time one `fwd_bwd` and one `generate` with sharing on and off, interleaved; nothing is kept of either."""

    method: ClassVar[str] = "side_by_side"
    batch: RolloutBatch
    processing: Processing = Field(default_factory=Processing)
    prompts: IdRows
    sampling_params: SamplingParams = Field(default_factory=SamplingParams)
    repeats: int = Field(3, ge=1, description="Pairs of on and off; the medians are reported.")


class SideBySideResponse(Response):
    """Medians in seconds; a ratio above 1 says that sharing is that much faster. Tokens are those one call computes."""

    train_seconds_on: float
    train_seconds_off: float
    train_tokens_on: float
    train_tokens_off: float
    train_loss_on: float
    train_loss_off: float
    sample_seconds_on: float
    sample_seconds_off: float
    sample_tokens_on: float
    sample_tokens_off: float
    repeats: int
    train_ratio: float
    sample_ratio: float


class EmptyResponse(Response):
    """Done; nothing to report."""


def _spread(advantages: Any, responses: Any) -> Any:
    """One number per row becomes one per response token; rows that are rows already stay."""
    advantages = array_of(advantages)
    is_flat = isinstance(advantages, np.ndarray) and advantages.ndim == 1 and advantages.dtype.kind in "iubf"
    if not is_flat and not (isinstance(advantages, (list, tuple)) and any(map(_is_number, advantages))):
        return advantages
    try:
        lens = [len(response) for response in responses]
    except TypeError:
        return advantages
    if len(lens) != len(advantages):
        return [[value] if _is_number(value) else value for value in advantages]
    if is_flat or all(map(_is_number, advantages)):
        return Ragged(np.repeat(np.asarray(advantages, np.float64), lens), offsets_of(lens))
    return [[value] * num if _is_number(value) else value for value, num in zip(advantages, lens, strict=True)]


def _is_number(value: Any) -> bool:
    return isinstance(value, (numbers.Real, np.number))


def _check_num_rows(batch: RolloutBatch) -> None:
    for name in ("responses", *PER_TOKEN_FIELDS, "content_keys"):
        values = getattr(batch, name)
        if values is not None and len(values) != batch.num_rows:
            raise InputError(f"{name} has {len(values)} rows, prompts has {batch.num_rows}; give one entry per row")


def _check_pairs(batch: RolloutBatch) -> None:
    for at, pair in enumerate(() if batch.pairs is None else batch.pairs.tolist()):
        if len(pair) != 2 or pair[0] == pair[1] or not all(0 <= row < batch.num_rows for row in pair):
            raise InputError(
                f"pairs[{at}] is {pair}; give [preferred row, other row], two different ones of {batch.num_rows} rows"
            )


def _check_content_keys(batch: RolloutBatch) -> None:
    keys = batch.content_keys
    if keys is None:
        return
    if keys.values.dtype == object:
        row = next(row for row, values in enumerate(keys) if any(not -(2**63) <= key < 2**63 for key in values))
        raise InputError(f"content_keys[{row}] has a key beyond 64 bits with sign; take the hash modulo 2**63")
    lens = batch.prompts.lens + batch.responses.lens
    for row in np.flatnonzero(keys.lens != lens)[:1]:
        raise InputError(
            f"content_keys[{row}] has {keys.lens[row]} entries, prompt and response have {lens[row]} tokens; give one "
            "per token of both"
        )


def _check_ids(rows: Ragged, name: str) -> None:
    if rows.is_within(0, MAX_TOKEN_ID):
        return
    row = rows.row_of(int(np.flatnonzero((rows.values < 0) | (rows.values > MAX_TOKEN_ID))[0]))
    low, high = rows.array(row).min(), rows.array(row).max()
    if low < 0:
        raise InputError(f"{name}[{row}] has token id {low}; ids are 0 or more, drop padding from the row")
    raise InputError(f"{name}[{row}] has token id {high}; no vocabulary goes beyond {MAX_TOKEN_ID}")


def _check_none_empty(prompts: Ragged) -> None:
    for row in np.flatnonzero(prompts.lens == 0)[:1]:
        raise InputError(f"prompts[{row}] is empty; give at least one token id (a BOS token, say)")


def _check_mask(mask: Ragged | None) -> None:
    if mask is None or mask.is_within(0, 1):
        return
    row = mask.row_of(int(np.flatnonzero((mask.values < 0) | (mask.values > 1))[0]))
    raise InputError(f"response_mask[{row}] has a value other than 0 and 1; give one 0 or 1 per token")


def _check_lengths(batch: RolloutBatch, name: str) -> None:
    values = getattr(batch, name)
    if values is None or np.array_equal(values.offsets, batch.responses.offsets):
        return
    row = int(np.flatnonzero(values.lens != batch.responses.lens)[0])
    raise InputError(
        f"{name}[{row}] has {values.lens[row]} entries, responses[{row}] has {batch.responses.lens[row]} tokens; "
        "give one entry per response token"
    )


def _check_finite(rows: Ragged | None, name: str) -> None:
    if rows is None or rows.is_finite():
        return
    at = int(np.flatnonzero(~np.isfinite(rows.values))[0])
    row, value = rows.row_of(at), rows.values[at]
    position = at - rows.offsets[row]
    raise NonFiniteError(f"{name}[{row}][{position}] is {value}; every entry must be a finite number")
