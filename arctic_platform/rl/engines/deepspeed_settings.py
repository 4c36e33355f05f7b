"""What of DeepSpeed's configuration is the user's, what is ours, and the whole that DeepSpeed gets.

The keys are DeepSpeed's own. It ignores a top-level key that it does not know, and takes its own word over ours where
two settings say the same thing; both are refused here, before a process is started and without importing DeepSpeed.
"""

import difflib
from typing import Any

from arctic_platform.errors import ConfigError
from arctic_platform.rl.config import ArcticRLClientConfig

DEFAULT_STAGE = 1
AUTO = "auto"

PASSED = (
    "zero_optimization",
    "bf16",
    "data_types",
    "communication_data_type",
    "gradient_clipping",
    "optimizer",
    "zero_allow_untested_optimizer",
    "disable_allgather",
    "comms_logger",
    "flops_profiler",
    "wall_clock_breakdown",
    "memory_breakdown",
    "steps_per_print",
    "dump_state",
    "log_level",
)
"""Top-level keys that reach DeepSpeed, once they agree with ours."""

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


def deepspeed_settings(config: ArcticRLClientConfig) -> dict[str, Any]:
    """The configuration for `deepspeed.initialize`: the user's `config.deepspeed` over our defaults.

    Raises ConfigError, naming the key and what to do, for a key that is ours, contradicts ours or is unknown.
    """
    given = {key: value for key, value in config.deepspeed.items() if value != AUTO}
    _refuse_keys(given)
    zero = _zero_settings(given)
    _check_dtype(config, given, zero["stage"])
    _check_clipping(config, given)
    _check_optimizer(config, given)
    return {
        "steps_per_print": None,
        **{key: value for key, value in given.items() if key not in ("optimizer", "gradient_clipping")},
        **_data_types(config, given, zero["stage"]),
        "zero_optimization": zero,
        "bf16": {**given.get("bf16", {}), "enabled": config.dtype == "bfloat16"},
        "zero_force_ds_cpu_optimizer": False,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
    }


def _refuse_keys(given: dict[str, Any]) -> None:
    for key in given:
        if key in _OURS:
            raise ConfigError(f"deepspeed.{key} is not taken: {_OURS[key]}; drop the key")
        if key not in PASSED:
            nearest = difflib.get_close_matches(key, PASSED, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"accepted: {', '.join(PASSED)}"
            raise ConfigError(f"deepspeed: unknown key {key!r}; {hint}")


def _zero_settings(given: dict[str, Any]) -> dict[str, Any]:
    """`zero_optimization` with our defaults. Its own keys are checked by DeepSpeed's model of them."""
    zero = given.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise ConfigError(f"deepspeed.zero_optimization={zero!r} must be a mapping, like {{'stage': 2}}")
    zero = {"stage": DEFAULT_STAGE, **{key: value for key, value in zero.items() if value != AUTO}}
    stage = zero["stage"]
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ConfigError(f"deepspeed.zero_optimization.stage={stage!r}: choose 0, 1, 2 or 3")
    for key, reason in _OURS_IN_ZERO.items():
        if zero.get(key):
            raise ConfigError(f"deepspeed.zero_optimization.{key} is not taken: {reason}; drop the key")
    if stage == 1 and zero.get("overlap_comm"):
        raise ConfigError(
            "deepspeed.zero_optimization.overlap_comm has no effect with stage 1, which reduces gradients once, at the "
            "end of a fwd_bwd call; drop the key or use stage 2"
        )
    _check_offload(zero)
    return {**zero, "compute_grad_norm": False} if _spares_norm(zero) else zero


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


def _check_dtype(config: ArcticRLClientConfig, given: dict[str, Any], stage: int) -> None:
    enabled = given.get("bf16", {}).get("enabled", AUTO)
    if enabled not in (AUTO, config.dtype == "bfloat16"):
        raise ConfigError(f"deepspeed.bf16.enabled={enabled} contradicts dtype={config.dtype!r}; drop the key")
    given_type = given.get("data_types", {}).get("grad_accum_dtype")
    if given_type == "fp32" and config.dtype == "bfloat16" and stage < 2:
        raise ConfigError(
            f"deepspeed.data_types.grad_accum_dtype='fp32' with dtype='bfloat16' needs stage 2 or 3, stage is {stage}"
        )


def _data_types(config: ArcticRLClientConfig, given: dict[str, Any], stage: int) -> dict[str, Any]:
    """Gradients of a call add up in fp32 where the stage can: several passes in bf16 lose their small terms."""
    in_fp32 = {"grad_accum_dtype": "fp32"} if config.dtype == "bfloat16" and stage >= 2 else {}
    return {"data_types": {**in_fp32, **given.get("data_types", {})}}


def _check_clipping(config: ArcticRLClientConfig, given: dict[str, Any]) -> None:
    ours = config.optimizer.max_grad_norm
    if "gradient_clipping" in given and given["gradient_clipping"] != (ours or 0.0):
        raise ConfigError(
            f"deepspeed.gradient_clipping={given['gradient_clipping']} contradicts optimizer.max_grad_norm={ours}; "
            "drop the key"
        )


def _check_optimizer(config: ArcticRLClientConfig, given: dict[str, Any]) -> None:
    """An optimizer block is accepted where it says what `config.optimizer` says."""
    block = given.get("optimizer", {})
    if block.get("type", "AdamW").lower() != "adamw":
        raise ConfigError(f"deepspeed.optimizer.type={block['type']!r}: AdamW is what trains here; drop the block")
    ours = config.optimizer.model_dump(include={"lr", "betas", "eps", "weight_decay"})
    for key, value in block.get("params", {}).items():
        if key == "torch_adam" or value == AUTO:
            continue
        mine = ours.get(key)
        if mine is None or (tuple(value) if key == "betas" else value) != mine:
            raise ConfigError(f"deepspeed.optimizer.params.{key}={value} contradicts optimizer.{key}={mine}; drop it")
