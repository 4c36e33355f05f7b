"""SkyRL's settings of micro-batches and sharing, under its own names, as this package's.

trainer             micro_train_batch_size_per_gpu, micro_forward_batch_size_per_gpu, max_tokens_per_microbatch
trainer.zorro       train_dedup, fca_inference (with trainer.backend: arctic_rl)
trainer.placement   policy_num_nodes, policy_num_gpus_per_node
trainer.policy      sequence_parallel_size, megatron_config
"""

from __future__ import annotations

from typing import Any

from arctic_platform.errors import ConfigError
from arctic_platform.integrations.settings import FrameworkSettings, Source, data_parallel, warn_no_effect

ZORRO_KEYS = ("train_dedup", "fca_inference")
OLD_SWITCH = "trainer.arctic_rl.use_zorro"


def skyrl_settings(config: Any) -> FrameworkSettings:
    """Read a SkyRL config: the dataclasses, OmegaConf or dict that its trainer gets, nested or with dotted keys.

    With `max_tokens_per_microbatch` above 0 the budget is in tokens, of training and of scoring, and the two numbers of
    rows have no effect, as in SkyRL; otherwise it is in rows.

    Raises ConfigError for settings that contradict each other or cannot take effect; warns of old spellings.
    """
    source = Source(config)
    source.refuse_unknown("trainer.zorro", ZORRO_KEYS)
    backend = source.get("trainer.backend")
    shared = source.one_flag(["trainer.zorro.train_dedup"], old=[OLD_SWITCH])
    fca = source.one_flag(["trainer.zorro.fca_inference"])
    if backend not in (None, "arctic_rl") and (shared or fca):
        raise ConfigError(
            f"trainer.zorro has no effect with trainer.backend={backend!r}; set trainer.backend=arctic_rl"
        )
    zorro = _budgets(source)
    return FrameworkSettings(
        zorro_train=zorro if shared is None else zorro | {"enable": shared},
        zorro_inference={} if fca is None else {"enable": fca},
        num_ranks=_num_ranks(source),
    )


def _budgets(source: Source) -> dict[str, int | None]:
    """Tokens of a micro-batch, or rows; SkyRL's default is one row."""
    train = source.count("trainer.micro_train_batch_size_per_gpu", 1)
    forward = source.count("trainer.micro_forward_batch_size_per_gpu", 1)
    tokens = source.get("trainer.max_tokens_per_microbatch", -1)
    if str(tokens) in ("-1", "0"):
        return {"max_token_len": None, "max_rows": train, "log_prob_max_rows": forward}
    for name, value in (("micro_train_batch_size_per_gpu", train), ("micro_forward_batch_size_per_gpu", forward)):
        if value != 1:
            warn_no_effect(f"trainer.{name}={value}", "max_tokens_per_microbatch cuts by tokens")
    return {"max_token_len": source.count("trainer.max_tokens_per_microbatch")}


def _num_ranks(source: Source) -> int:
    """Data-parallel ranks of the policy."""
    nodes = source.count("trainer.placement.policy_num_nodes", 1) or 1
    world = nodes * (source.count("trainer.placement.policy_num_gpus_per_node", 1) or 1)
    if source.get("trainer.strategy") == "megatron":
        names = [f"megatron_config.{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context")]
    else:
        names = ["sequence_parallel_size"]
    sizes = {name: source.count(f"trainer.policy.{name}", 1) or 1 for name in names}
    return data_parallel(world, {name: size for name, size in sizes.items() if size > 1})
