"""The calls, defined once: requests and responses as pydantic models around ragged rows of token ids.

A row is `prompt + response`. Rows travel as token ids from end to end, never as text. Every list of a batch has
one entry per row, in the caller's order; lists per token are as long as that row's response. Log-prob `i` of a
response is the log-prob of token `response[i]` itself, at the call's temperature, under the full softmax.

    generate    GenerateRequest   -> GenerateResponse    log_probs    LogProbsRequest -> LogProbsResponse
    fwd_bwd     FwdBwdRequest     -> FwdBwdResponse      step         StepRequest     -> StepResponse
    sync_weights SyncWeightsRequest -> SyncResponse      and the rest below, one pair each

Importing this module loads pydantic and nothing heavier.
"""

import math
import uuid
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from arctic_platform.errors import ArcticError, InputError, NonFiniteError
from arctic_platform.rl.config import StrictModel

PER_TOKEN_FIELDS = ("response_mask", "advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs")
FINITE_FIELDS = PER_TOKEN_FIELDS[1:]
MAX_TOKEN_ID = 2**31 - 1


class Message(StrictModel):
    """Base of all requests and responses; faults of the caller are `InputError`s."""

    error_class: ClassVar[type[ArcticError]] = InputError


class SamplingParams(Message):
    """How tokens are drawn; every rollout of a call uses the same."""

    n: int = Field(1, ge=1, description="Rollouts per prompt.")
    temperature: float = Field(1.0, ge=0.0, allow_inf_nan=False, description="Divides the logits once; 0 is greedy.")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Smallest set of tokens with this probability.")
    top_k: int = Field(-1, ge=-1, description="Most probable tokens to draw from; -1 or 0: all.")
    max_tokens: int = Field(64, ge=1, description="Most new tokens per rollout.")
    stop_token_ids: tuple[int, ...] = Field((), description="Tokens that end a rollout, beside the model's own.")
    seed: int | None = Field(None, ge=0, description="Same seed, prompts and settings: same rollouts.")
    ignore_eos: bool = Field(False, description="Go on behind the model's end token.")


class Rollout(Message):
    """One sampled answer."""

    prompt_index: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]


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

    prompts: list[list[int]]
    responses: list[list[int]]
    response_mask: list[list[int]] | None = None
    advantages: list[list[float]] | None = None
    old_logprobs: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    rollout_logprobs: list[list[float]] | None = None
    pairs: list[list[int]] | None = None
    content_keys: list[list[int]] | None = None

    @model_validator(mode="before")
    @classmethod
    def _accept_arrays_and_row_advantages(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = {name: _as_lists(value) for name, value in data.items()}
        advantages, responses = data.get("advantages"), data.get("responses")
        if isinstance(advantages, list) and isinstance(responses, list):
            data["advantages"] = _spread(advantages, responses)
        return data

    @model_validator(mode="after")
    def _check_rows(self) -> Self:
        _check_num_rows(self)
        _check_ids(self.prompts, "prompts")
        _check_ids(self.responses, "responses")
        for row, prompt in enumerate(self.prompts):
            if not prompt:
                raise InputError(f"prompts[{row}] is empty; give at least one token id (a BOS token, say)")
        for name in PER_TOKEN_FIELDS:
            _check_lengths(self, name)
        for name in FINITE_FIELDS:
            _check_finite(getattr(self, name), name)
        for row, mask in enumerate(self.response_mask or ()):
            if not set(mask) <= {0, 1}:
                raise InputError(f"response_mask[{row}] has a value other than 0 and 1; give one 0 or 1 per token")
        _check_pairs(self)
        _check_content_keys(self)
        return self

    @property
    def num_rows(self) -> int:
        """Rows in the batch."""
        return len(self.prompts)

    @property
    def response_lens(self) -> list[int]:
        """Tokens in each response."""
        return [len(response) for response in self.responses]

    @property
    def num_loss_tokens(self) -> int:
        """Response tokens that carry loss."""
        return sum(sum(mask) for mask in self.response_mask) if self.response_mask else sum(self.response_lens)

    @property
    def num_loss_rows(self) -> int:
        """Rows with at least one response token that carries loss."""
        return sum(1 for live in (self.response_mask or self.responses) if (any(live) if self.response_mask else live))

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
    request_id: str = Field(default_factory=lambda: uuid.uuid4().hex, min_length=1)


class Response(Message):
    """Base of all responses."""


class GenerateRequest(Request):
    """Sample `sampling_params.n` answers to each prompt."""

    method: ClassVar[str] = "generate"
    prompts: list[list[int]]
    sampling_params: SamplingParams = Field(default_factory=SamplingParams)
    routing_key: str | None = Field(None, description="Calls with equal keys go to the same sampler, if several.")

    @field_validator("prompts", mode="before")
    @classmethod
    def _accept_arrays(cls, value: Any) -> Any:
        return _as_lists(value)

    @model_validator(mode="after")
    def _check_prompts(self) -> Self:
        _check_ids(self.prompts, "prompts")
        for row, prompt in enumerate(self.prompts):
            if not prompt:
                raise InputError(f"prompts[{row}] is empty; give at least one token id (a BOS token, say)")
        return self


class GenerateResponse(Response):
    """Rollouts in prompt order, those of one prompt next to each other (`len(prompts) * n` in all).

    `metrics`: tokens_computed, tokens_naive, kv_tokens_stored, kv_tokens_naive, prefill_seconds, decode_seconds.
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

    logprobs: list[list[float]]
    entropy: list[list[float]] | None = None
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

    logprobs: list[list[float]]
    entropy: list[list[float]] | None = None
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
    and why not. What a job did not load (`kinds`) is none.
    """

    model: str
    kinds: tuple[str, ...]
    num_parameters: int
    dtype: str
    device: str
    training_engine: str | None
    sampling_engine: str | None
    step: int | None
    trainer_version: int | None
    sampler_version: int | None
    is_sampler_current: bool
    is_sampler_asleep: bool
    has_pending_gradients: bool
    zorro_train: bool
    zorro_train_effect: str
    zorro_inference: bool
    zorro_inference_effect: str
    max_rollouts: int | None


class SideBySideRequest(Request):
    """Time one `fwd_bwd` and one `generate` with sharing on and off, interleaved; nothing is kept of either."""

    method: ClassVar[str] = "side_by_side"
    batch: RolloutBatch
    processing: Processing = Field(default_factory=Processing)
    prompts: list[list[int]]
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


def _as_lists(value: Any) -> Any:
    """Arrays and tensors as lists, one level down as well; anything else as it is."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [item.tolist() if hasattr(item, "tolist") else item for item in value]
    return value


def _spread(advantages: list[Any], responses: list[Any]) -> list[Any]:
    """One number per row becomes one per response token; rows that are lists already stay."""
    if len(advantages) != len(responses):
        return [[value] if isinstance(value, (int, float)) else value for value in advantages]
    return [
        [value] * len(response) if isinstance(value, (int, float)) and hasattr(response, "__len__") else value
        for value, response in zip(advantages, responses, strict=True)
    ]


def _check_num_rows(batch: RolloutBatch) -> None:
    for name in ("responses", *PER_TOKEN_FIELDS):
        values = getattr(batch, name)
        if values is not None and len(values) != batch.num_rows:
            raise InputError(f"{name} has {len(values)} rows, prompts has {batch.num_rows}; give one entry per row")


def _check_pairs(batch: RolloutBatch) -> None:
    for at, pair in enumerate(batch.pairs or ()):
        if len(pair) != 2 or pair[0] == pair[1] or not all(0 <= row < batch.num_rows for row in pair):
            raise InputError(
                f"pairs[{at}] is {pair}; give [preferred row, other row], two different ones of {batch.num_rows} rows"
            )


def _check_content_keys(batch: RolloutBatch) -> None:
    if batch.content_keys is None:
        return
    if len(batch.content_keys) != batch.num_rows:
        raise InputError(
            f"content_keys has {len(batch.content_keys)} rows, prompts has {batch.num_rows}; give one entry per row"
        )
    for row, keys in enumerate(batch.content_keys):
        if len(keys) != len(batch.prompts[row]) + len(batch.responses[row]):
            raise InputError(
                f"content_keys[{row}] has {len(keys)} entries, prompt and response have "
                f"{len(batch.prompts[row]) + len(batch.responses[row])} tokens; give one per token of both"
            )
        if keys and not -(2**63) <= min(keys) <= max(keys) < 2**63:
            raise InputError(f"content_keys[{row}] has a key beyond 64 bits with sign; take the hash modulo 2**63")


def _check_ids(rows: Sequence[Sequence[int]], name: str) -> None:
    for row, ids in enumerate(rows):
        if ids and min(ids) < 0:
            raise InputError(f"{name}[{row}] has token id {min(ids)}; ids are 0 or more, drop padding from the row")
        if ids and max(ids) > MAX_TOKEN_ID:
            raise InputError(f"{name}[{row}] has token id {max(ids)}; no vocabulary goes beyond {MAX_TOKEN_ID}")


def _check_lengths(batch: RolloutBatch, name: str) -> None:
    values = getattr(batch, name)
    for row, length in enumerate(batch.response_lens if values is not None else ()):
        if len(values[row]) != length:
            raise InputError(
                f"{name}[{row}] has {len(values[row])} entries, responses[{row}] has {length} tokens; "
                "give one entry per response token"
            )


def _check_finite(rows: Sequence[Sequence[float]] | None, name: str) -> None:
    for row, values in enumerate(rows or ()):
        if math.isfinite(sum(values)):
            continue
        for position, value in enumerate(values):
            if not math.isfinite(value):
                raise NonFiniteError(f"{name}[{row}][{position}] is {value}; every entry must be a finite number")
