"""What of DeepSpeed's configuration is the user's, what is ours, and the whole that DeepSpeed gets.

The keys are DeepSpeed's own. It ignores a top-level key that it does not know, and takes its own word over ours where
two settings say the same thing; both are refused here, before a process is started and without importing DeepSpeed.
"""

from typing import Any, Literal

from pydantic import ConfigDict, Field

from arctic_platform.errors import ConfigError
from arctic_platform.rl.config import ArcticRLClientConfig, StrictModel

DEFAULT_STAGE = 1
AUTO = "auto"


class DataTypes(StrictModel):
    """DeepSpeed's `data_types`."""

    grad_accum_dtype: Literal["fp32", "bf16"] | None = None


class OptimizerBlock(StrictModel):
    """DeepSpeed's `optimizer`, which has to say what `config.optimizer` says."""

    type: str = "AdamW"
    params: dict[str, Any] = Field(default_factory=dict)


class DeepSpeedKeys(StrictModel):
    """The top-level keys that are taken. What is a mapping of any keys here DeepSpeed checks itself."""

    model_config = ConfigDict(title="deepspeed")

    zero_optimization: dict[str, Any] = Field(default_factory=dict)
    bf16: dict[str, Any] = Field(default_factory=dict)
    data_types: DataTypes = Field(default_factory=DataTypes)
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = None
    gradient_clipping: float | None = None
    optimizer: OptimizerBlock = Field(default_factory=OptimizerBlock)
    comms_logger: dict[str, Any] = Field(default_factory=dict)
    flops_profiler: dict[str, Any] = Field(default_factory=dict)
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    steps_per_print: int | None = None
    dump_state: bool = False
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = None


_SAID_BY_LOGGER = ("comms_logger", "steps_per_print", "dump_state")
"""Keys that say nothing unless `log_level` lets DeepSpeed's logger speak; the other ones print."""

_ROWS = "fwd_bwd calls bring a step's rows, zorro_train.max_token_len and max_rows cut them into passes"
_OURS = {
    "train_batch_size": _ROWS,
    "train_micro_batch_size_per_gpu": _ROWS,
    "gradient_accumulation_steps": "every fwd_bwd call until step() accumulates",
    "managed_gradient_accumulation": "every fwd_bwd call until step() accumulates",
    "scheduler": "set optimizer.schedule, optimizer.warmup_steps and optimizer.total_steps",
    "fp16": "dtype='bfloat16' is the half precision that trains here",
    "amp": "set dtype='bfloat16'",
    "torch_autocast": "set dtype='bfloat16'",
    "activation_checkpointing": "set gradient_checkpointing=true",
    "checkpoint": "save_checkpoint writes folders that every engine reads",
    "gradient_allreduce_op": "losses are divided by the counts of all ranks",
    "zero_force_ds_cpu_optimizer": "torch's AdamW trains, on CPU as well",
    "prescale_gradients": "losses are divided by the counts of all ranks",
    "gradient_predivide_factor": "losses are divided by the counts of all ranks",
    "disable_allgather": "DeepSpeed reads it and does nothing with it",
    "zero_allow_untested_optimizer": "torch's AdamW trains, which DeepSpeed has tested",
}
"""Top-level keys that are refused, each with what to do instead."""

_OURS_IN_ZERO = {
    "round_robin_gradients": "DeepSpeed then reads its optimizer state in the wrong order",
    "zenflow": "it applies updates by its own calendar",
    "compute_grad_norm": "the norm is that of all calls of a step and is computed here",
    "zero_quantized_weights": "training here is exact",
    "zero_quantized_gradients": "training here is exact",
    "zero_quantized_nontrainable_weights": "training here is exact",
}

_OURS_IN_BF16 = {"bf16_master_weights_and_grads": "master weights and gradients are kept in fp32"}


def deepspeed_settings(config: ArcticRLClientConfig) -> dict[str, Any]:
    """The configuration for `deepspeed.initialize`: the user's `config.deepspeed` over our defaults.

    Raises ConfigError, naming the key and what to do, for a key that is ours, contradicts ours or is unknown.
    """
    keys = _keys(config)
    zero = _zero_settings(keys)
    _check_dtype(config, keys, zero["stage"])
    _check_clipping(config, keys)
    _check_optimizer(config, keys.optimizer)
    _check_logger(keys)
    return {
        "steps_per_print": None,
        **keys.model_dump(exclude_unset=True, exclude={"optimizer", "gradient_clipping"}),
        **_data_types(config, keys, zero["stage"]),
        "zero_optimization": zero,
        "bf16": {**keys.bf16, "enabled": config.dtype == "bfloat16"},
        "zero_force_ds_cpu_optimizer": False,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
    }


def _keys(config: ArcticRLClientConfig) -> DeepSpeedKeys:
    given = _without_auto(config.deepspeed)
    for key in given:
        if key in _OURS:
            raise ConfigError(f"deepspeed.{key} is not taken: {_OURS[key]}; drop the key")
    return DeepSpeedKeys(**given)


def _without_auto(given: dict[str, Any]) -> dict[str, Any]:
    """Without the keys that are left to us."""
    return {
        key: _without_auto(value) if isinstance(value, dict) else value for key, value in given.items() if value != AUTO
    }


def _zero_settings(keys: DeepSpeedKeys) -> dict[str, Any]:
    """`zero_optimization` with our defaults. Its own keys are checked by DeepSpeed's model of them."""
    zero = {"stage": DEFAULT_STAGE, **keys.zero_optimization}
    stage = zero["stage"]
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ConfigError(f"deepspeed.zero_optimization.stage={stage!r}: choose 0, 1, 2 or 3")
    _refuse_ours("zero_optimization", zero, _OURS_IN_ZERO)
    _check_stage(zero)
    _check_offload(zero)
    return {**zero, "compute_grad_norm": False} if _spares_norm(zero) else zero


def _check_stage(zero: dict[str, Any]) -> None:
    """Keys of other stages have no effect."""
    stage = zero["stage"]
    if stage < 2 and zero.get("overlap_comm"):
        raise ConfigError(
            f"deepspeed.zero_optimization.overlap_comm has no effect with stage {stage}, which reduces gradients once, "
            "at the end of a fwd_bwd call; drop the key or use stage 2"
        )
    for key in zero if stage < 3 else ():
        if key.startswith("stage3_") or key == "sub_group_size":
            raise ConfigError(
                f"deepspeed.zero_optimization.{key} has no effect with stage {stage}; drop the key or use stage 3"
            )


def _refuse_ours(name: str, block: dict[str, Any], ours: dict[str, str]) -> None:
    for key, reason in ours.items():
        if block.get(key):
            raise ConfigError(f"deepspeed.{name}.{key} is not taken: {reason}; drop the key")


def _spares_norm(zero: dict[str, Any]) -> bool:
    """Whether DeepSpeed can leave out a norm of its own: it says no for stages 0 and 3 and with offload."""
    return zero["stage"] in (1, 2) and _device(zero, "offload_optimizer") == "none"


def _check_offload(zero: dict[str, Any]) -> None:
    for key, stages in (("offload_optimizer", (1, 2, 3)), ("offload_param", (3,))):
        device = _device(zero, key)
        if device == "none":
            continue
        if device != "cpu":
            raise ConfigError(
                f"deepspeed.zero_optimization.{key}.device={device!r} compiles C++ while it trains; use 'cpu'"
            )
        if zero["stage"] not in stages:
            names = " or ".join(str(stage) for stage in stages)
            raise ConfigError(f"deepspeed.zero_optimization.{key} needs stage {names}, stage is {zero['stage']}")
        if zero[key].get("ratio", 1.0) != 1.0:
            raise ConfigError(
                f"deepspeed.zero_optimization.{key}.ratio needs an optimizer that DeepSpeed compiles; drop the key"
            )


def _device(zero: dict[str, Any], key: str) -> str:
    offload = zero.get(key) or {}
    if not isinstance(offload, dict):
        raise ConfigError(
            f"deepspeed.zero_optimization.{key}={offload!r} must be a mapping, such as {{'device': 'cpu'}}"
        )
    return str(offload.get("device") or "none")


def _check_dtype(config: ArcticRLClientConfig, keys: DeepSpeedKeys, stage: int) -> None:
    enabled = keys.bf16.get("enabled")
    if enabled not in (None, config.dtype == "bfloat16"):
        raise ConfigError(f"deepspeed.bf16.enabled={enabled} contradicts dtype={config.dtype!r}; drop the key")
    _refuse_ours("bf16", keys.bf16, _OURS_IN_BF16)
    given, accepted = keys.data_types.grad_accum_dtype, _accumulates_in(config, stage)
    if given not in (None, *accepted):
        raise ConfigError(
            f"deepspeed.data_types.grad_accum_dtype={given!r} does not go with dtype={config.dtype!r} and stage "
            f"{stage}; use {' or '.join(accepted)}, or drop the key"
        )


def _accumulates_in(config: ArcticRLClientConfig, stage: int) -> tuple[str, ...]:
    """In what gradients of a call can add up, best first: several passes in bf16 lose their small terms."""
    if config.dtype != "bfloat16":
        return ("fp32",)
    return ("fp32", "bf16") if stage >= 2 else ("bf16",)


def _data_types(config: ArcticRLClientConfig, keys: DeepSpeedKeys, stage: int) -> dict[str, Any]:
    return {"data_types": {"grad_accum_dtype": keys.data_types.grad_accum_dtype or _accumulates_in(config, stage)[0]}}


def _check_clipping(config: ArcticRLClientConfig, keys: DeepSpeedKeys) -> None:
    ours, given = config.optimizer.max_grad_norm, keys.gradient_clipping
    if given is not None and given != (ours or 0.0):
        raise ConfigError(
            f"deepspeed.gradient_clipping={given} contradicts optimizer.max_grad_norm={ours}; drop the key"
        )


def _check_optimizer(config: ArcticRLClientConfig, block: OptimizerBlock) -> None:
    """An optimizer block is accepted where it says what `config.optimizer` says."""
    if block.type.lower() != "adamw":
        raise ConfigError(f"deepspeed.optimizer.type={block.type!r}: AdamW is what trains here; drop the block")
    ours = config.optimizer.model_dump(include={"lr", "betas", "eps", "weight_decay"}) | {"torch_adam": True}
    for key, value in block.params.items():
        mine = ours.get(key)
        if mine is None or (tuple(value) if isinstance(value, list) else value) != mine:
            raise ConfigError(f"deepspeed.optimizer.params.{key}={value} contradicts optimizer.{key}={mine}; drop it")


def _check_logger(keys: DeepSpeedKeys) -> None:
    for key in _SAID_BY_LOGGER:
        if getattr(keys, key) and keys.log_level not in ("debug", "info"):
            raise ConfigError(
                f"deepspeed.{key} says nothing unless deepspeed.log_level is 'info'; set it, or drop {key}"
            )
