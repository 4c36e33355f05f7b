"""verl's settings of micro-batches and sharing, under its own names, as this package's.

    actor_rollout_ref.actor     use_dynamic_bsz, ppo_max_token_len_per_gpu, ppo_micro_batch_size_per_gpu,
                                ppo_micro_batch_size (old), ulysses_sequence_parallel_size
    actor_rollout_ref.rollout   log_prob_use_dynamic_bsz, log_prob_max_token_len_per_gpu,
    actor_rollout_ref.ref       log_prob_micro_batch_size_per_gpu, log_prob_micro_batch_size (old)
    remote_backend              zorro_train.{enable, max_rollouts}, training_gpus, logits_optimization
    ds_worker_config            zorro_train.enable

Read of verl 0.4 to 0.9 and of the `remote_backend` block that its Arctic backend adds.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from arctic_platform.errors import ConfigError
from arctic_platform.integrations.settings import STACK, FrameworkSettings, Source, data_parallel, warn_no_effect

ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{role}" for role in ("actor", "rollout", "ref"))
BACKENDS = ("remote_backend", "remote_backend.train", "arctic_rl", "arctic_rl.train")
"""Where the Arctic block has stood; the last two are old."""

WORKERS = ("ds_worker_config", "remote_backend.ds_worker_config", f"{ACTOR}.ds_worker_config")
ZORRO_KEYS = ("enable", "max_rollouts", "load_balancer")
DEFAULT_TOKEN_LEN = 16_384
"""verl's own default of every token budget."""


@dataclass(frozen=True)
class _Budgets:
    """Of one micro-batch on one data-parallel rank; None: no limit."""

    max_token_len: int | None = None
    max_rows: int | None = None


def verl_settings(config: Any) -> FrameworkSettings:
    """Read a verl config: the dict, OmegaConf or dataclasses that its trainers get, nested or with dotted keys.

    Token budgets are per GPU in verl; sequence-parallel ranks work on one micro-batch together, so theirs add up. With
    `use_dynamic_bsz` the budget is in tokens, without it in rows, and the other one has no effect, as in verl. The
    policy and the reference are scored under one budget here, the smaller of theirs.

    Raises ConfigError for settings that contradict each other, miss, or cannot take effect; warns of old spellings.
    """
    source = Source(config)
    parts = _parts_of_model(source, ACTOR)
    num_ranks = data_parallel(_world(source), parts)
    train = _budgets(source, ACTOR, "", num_ranks, _sequence_parallel(parts))
    if train == _Budgets():
        raise ConfigError(
            f"{ACTOR} sets no micro-batch; set use_dynamic_bsz=True with ppo_max_token_len_per_gpu, or "
            "ppo_micro_batch_size_per_gpu"
        )
    scored = [
        _budgets(source, role, "log_prob_", num_ranks, _sequence_parallel(_parts_of_model(source, of) or parts))
        for role, of in ((ROLLOUT, ACTOR), (REF, REF))
    ]
    zorro = {
        "max_token_len": train.max_token_len,
        "max_rows": train.max_rows,
        "log_prob_max_token_len": _smaller("max_token_len", scored),
        "log_prob_max_rows": _smaller("max_rows", scored),
        "max_rollouts": _max_rollouts(source),
        **_logits(source),
    }
    enable = _is_shared(source)
    fca = source.one_flag(
        [f"{ROLLOUT}.arctic_inference_config.use_fca", "remote_backend.rollout.zorro_inference.enable"]
    )
    return FrameworkSettings(
        zorro_train=zorro if enable is None else zorro | {"enable": enable},
        zorro_inference={} if fca is None else {"enable": fca},
        num_ranks=num_ranks,
    )


def _world(source: Source) -> int:
    """Devices that train: those of the Arctic backend where there is one, otherwise verl's own."""
    gpus = source.count("remote_backend.training_gpus") or source.count("arctic_rl.training_gpus")
    return gpus or (source.count("trainer.n_gpus_per_node", 8) or 8) * (source.count("trainer.nnodes", 1) or 1)


def _parts_of_model(source: Source, role: str) -> dict[str, int]:
    """The ways in which devices share one micro-batch, by name; those of size 1 left out."""
    if str(source.get(f"{role}.strategy", "")).startswith("megatron"):
        names = [f"megatron.{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context")]
    else:
        names = ["fsdp_config.ulysses_sequence_parallel_size", "ulysses_sequence_parallel_size"]
    sizes = {name.split(".")[-1]: size for name in names if (size := source.count(f"{role}.{name}", 1)) and size > 1}
    given = {size for name in names if (size := source.count(f"{role}.{name}", 1)) and size > 1}
    if names[0].startswith("fsdp") and len(given) > 1:
        told = " and ".join(f"{role}.{name}={source.count(f'{role}.{name}', 1)}" for name in names)
        raise ConfigError(f"{told} contradict each other; keep the first")
    return sizes


def _sequence_parallel(parts: dict[str, int]) -> int:
    return parts.get("ulysses_sequence_parallel_size", 1) * parts.get("context_parallel_size", 1)


def _budgets(source: Source, role: str, prefix: str, num_ranks: int, sequence_parallel: int) -> _Budgets:
    """The budget of a role, in tokens or in rows. prefix: `log_prob_` for the roles that score."""
    names = prefix or "ppo_"
    is_dynamic = source.flag(f"{role}.{prefix}use_dynamic_bsz")
    if is_dynamic is None and prefix:
        is_dynamic = source.flag(f"{ACTOR}.use_dynamic_bsz")
    tokens_path = f"{role}.{names}max_token_len_per_gpu"
    rows = _rows(source, f"{role}.{names}micro_batch_size", num_ranks)
    if is_dynamic:
        if rows is not None:
            warn_no_effect(f"{role}.{names}micro_batch_size_per_gpu", "use_dynamic_bsz=True cuts by tokens")
        default = source.count(f"{ACTOR}.ppo_max_token_len_per_gpu", DEFAULT_TOKEN_LEN)
        tokens = source.count(tokens_path, default) or DEFAULT_TOKEN_LEN
        return _Budgets(max_token_len=tokens * sequence_parallel)
    if not prefix and source.count(tokens_path, DEFAULT_TOKEN_LEN) != DEFAULT_TOKEN_LEN:
        warn_no_effect(tokens_path, "it needs use_dynamic_bsz=True")
    return _Budgets(max_rows=rows)


def _rows(source: Source, path: str, num_ranks: int) -> int | None:
    """Rows per GPU; the old setting counts those of all ranks."""
    rows, of_all = source.count(f"{path}_per_gpu"), source.count(path)
    if of_all is None:
        return rows
    if rows is not None:
        raise ConfigError(f"{path}={of_all} and {path}_per_gpu={rows} contradict each other; drop {path}")
    if of_all % num_ranks:
        raise ConfigError(f"{path}={of_all} does not divide by {num_ranks} data-parallel ranks; set {path}_per_gpu")
    rows = of_all // num_ranks
    warnings.warn(f"{path} is an old spelling; write {path}_per_gpu={rows}", FutureWarning, STACK + 2)
    return rows


def _smaller(name: str, budgets: list[_Budgets]) -> int | None:
    """One budget for the policy and the reference."""
    values = [value for budget in budgets if (value := getattr(budget, name)) is not None]
    if len(set(values)) > 1:
        warnings.warn(
            f"rollout and ref score under different budgets ({values[0]} and {values[1]}); both use {min(values)}",
            UserWarning,
            STACK - 1,
        )
    return min(values, default=None)


def _is_shared(source: Source) -> bool | None:
    for block in (*BACKENDS, *WORKERS):
        source.refuse_unknown(f"{block}.zorro_train", ZORRO_KEYS)
        if source.flag(f"{block}.zorro_train.load_balancer") is False:
            warn_no_effect(f"{block}.zorro_train.load_balancer=False", "ranks are always balanced")
    return source.one_flag(
        [f"{block}.zorro_train.enable" for block in (*BACKENDS[:2], *WORKERS)],
        old=[
            *(f"{block}.zorro_train.enable" for block in BACKENDS[2:]),
            *(f"{block}.{name}" for block in WORKERS for name in ("zorro_train_enable", "use_zorro")),
        ],
    )


def _max_rollouts(source: Source) -> int | None:
    """Rows of one prompt in a pass; as many as a prompt has are no limit."""
    paths = [f"{block}.zorro_train.max_rollouts" for block in (*BACKENDS, *WORKERS)]
    given = {path: value for path in paths if (value := source.count(path)) is not None}
    if len(set(given.values())) > 1:
        told = " and ".join(f"{path}={value}" for path, value in given.items())
        raise ConfigError(f"{told} contradict each other; keep {next(iter(given))}")
    most, num_rollouts = next(iter(given.values()), None), source.count(f"{ROLLOUT}.n")
    return None if most is None or (num_rollouts is not None and most >= num_rollouts) else most


def _logits(source: Source) -> dict[str, Any]:
    """How logits are held, and in how much memory where that has a meaning."""
    names = ("remote_backend.logits_optimization", "remote_backend.train.logits.optimization")
    modes = [mode for name in names if (mode := source.get(name)) is not None]
    if not modes or modes[0] == "none":
        return {}
    peak = source.get("remote_backend.logits_optimization_peak_mem_size_in_gib")
    return {"logits_optimization": modes[0], "logits_optimization_peak_mem_size_in_gib": peak}
