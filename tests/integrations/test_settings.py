"""Settings of verl and SkyRL under their own names, and what the engine then does."""

import dataclasses
import subprocess
import sys
import types
import warnings

import pytest

from arctic_platform.errors import ConfigError
from arctic_platform.integrations.skyrl import skyrl_settings
from arctic_platform.integrations.verl import verl_settings
from arctic_platform.rl.config import ArcticRLClientConfig
from arctic_platform.rl.engines.torch_train import TorchTrainEngine
from arctic_platform.rl.zorro_train.planner import Limits, plan_batch
from tests.rl.engines.builders import grouped_batch

ROWS = {"ppo_micro_batch_size_per_gpu": 4}
TOKENS = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 24_576}


def verl(actor=ROWS, *, rollout=None, ref=None, trainer=None, **others):
    roles = {"actor": actor, "rollout": rollout or {}, "ref": ref or {}}
    return {"actor_rollout_ref": roles, "trainer": trainer or {"n_gpus_per_node": 8, "nnodes": 1}, **others}


def skyrl(**trainer):
    return {"trainer": trainer, "generator": {"n_samples_per_prompt": 8}}


def namespace(node):
    return types.SimpleNamespace(**{k: namespace(v) for k, v in node.items()}) if isinstance(node, dict) else node


def dataclass_of(node):
    if not isinstance(node, dict):
        return node
    made = dataclasses.make_dataclass("Config", list(node))
    return made(**{name: dataclass_of(value) for name, value in node.items()})


def dotted(node, prefix=""):
    if not isinstance(node, dict) or not node:
        return {prefix: node} if prefix and node != {} else {}
    return {k: v for name, below in node.items() for k, v in dotted(below, f"{prefix}.{name}".strip(".")).items()}


HOLDERS = [dict, dotted, namespace, dataclass_of, types.MappingProxyType]


# --- verl


@pytest.mark.parametrize("held", HOLDERS)
def test_verl_counts_tokens_or_rows_as_use_dynamic_bsz_says(held):
    by_rows, by_tokens = verl_settings(held(verl())), verl_settings(held(verl(TOKENS)))
    assert (by_rows.zorro_train.max_rows, by_rows.zorro_train.max_token_len) == (4, None)
    assert (by_tokens.zorro_train.max_rows, by_tokens.zorro_train.max_token_len) == (None, 24_576)
    assert by_rows.num_ranks == by_tokens.num_ranks == 8


def test_verl_configs_of_omegaconf_are_read():
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create(
        verl(
            TOKENS | {"strategy": "???"},
            rollout={"n": 16},
            remote_backend={
                "training_gpus": 4,
                "zorro_train": {"enable": True, "max_rollouts": "${actor_rollout_ref.rollout.n}"},
            },
        )
    )
    settings = verl_settings(config)
    assert (settings.zorro_train.max_token_len, settings.zorro_train.max_rollouts, settings.num_ranks) == (
        24_576,
        None,
        4,
    )


def test_verl_token_budget_has_the_default_of_verl():
    assert verl_settings(verl({"use_dynamic_bsz": True})).zorro_train.max_token_len == 16_384


@pytest.mark.parametrize(
    ("actor", "num_ranks", "max_token_len"),
    [
        ({"ulysses_sequence_parallel_size": 2}, 4, 2 * 24_576),
        ({"fsdp_config": {"ulysses_sequence_parallel_size": 4}}, 2, 4 * 24_576),
        ({"strategy": "megatron", "megatron": {"tensor_model_parallel_size": 2}}, 4, 24_576),
        (
            {
                "strategy": "megatron",
                "megatron": {
                    "tensor_model_parallel_size": 2,
                    "pipeline_model_parallel_size": 2,
                    "context_parallel_size": 2,
                },
            },
            1,
            2 * 24_576,
        ),
    ],
)
def test_data_parallel_size_is_not_the_world_size(actor, num_ranks, max_token_len):
    settings = verl_settings(verl(TOKENS | actor))
    assert settings.num_ranks == num_ranks
    assert settings.zorro_train.max_token_len == max_token_len, "sequence-parallel ranks hold one micro-batch together"


def test_tensor_parallel_two_and_data_parallel_two_make_two_parts():
    actor = ROWS | {"strategy": "megatron", "megatron": {"tensor_model_parallel_size": 2}}
    settings = verl_settings(verl(actor, trainer={"n_gpus_per_node": 4, "nnodes": 1}))
    plan = plan_batch([[1, 2, b] for b in range(8)], Limits.of(settings.zorro_train, num_ranks=settings.num_ranks))
    assert len(plan.ranks) == 2


def test_verl_global_micro_batch_is_divided_by_the_data_parallel_ranks_with_a_warning():
    with pytest.warns(FutureWarning, match="ppo_micro_batch_size is an old spelling; write .*_per_gpu=8"):
        settings = verl_settings(verl({"ppo_micro_batch_size": 32, "ulysses_sequence_parallel_size": 2}))
    assert settings.zorro_train.max_rows == 8


def test_verl_scoring_budgets_are_its_own_and_follow_the_actor_where_unset():
    own = verl_settings(
        verl(TOKENS, rollout={"log_prob_max_token_len_per_gpu": 65_536}, ref={"log_prob_max_token_len_per_gpu": 65_536})
    )
    assert own.zorro_train.log_prob_max_token_len == 65_536
    assert verl_settings(verl(TOKENS)).zorro_train.log_prob_max_token_len == 24_576
    rows = verl_settings(verl(rollout={"log_prob_micro_batch_size_per_gpu": 16}))
    assert (rows.zorro_train.max_rows, rows.zorro_train.log_prob_max_rows) == (4, 16)


def test_verl_policy_and_reference_are_scored_under_the_smaller_budget_with_a_warning():
    roles = {"rollout": {"log_prob_micro_batch_size_per_gpu": 16}, "ref": {"log_prob_micro_batch_size_per_gpu": 6}}
    with pytest.warns(UserWarning, match=r"different budgets \(16 and 6\); both use 6"):
        assert verl_settings(verl(**roles)).zorro_train.log_prob_max_rows == 6


@pytest.mark.parametrize(
    "switch",
    [
        {"remote_backend": {"zorro_train": {"enable": False}}},
        {"remote_backend": {"train": {"zorro_train": {"enable": False}}}},
        {"ds_worker_config": {"zorro_train": {"enable": "False"}}},
        {"remote_backend.zorro_train.enable": False},
    ],
    ids=str,
)
def test_verl_switches_of_the_documents_are_effective(switch):
    settings = verl_settings(verl(**switch))
    assert not settings.zorro_train.enable
    engine = TorchTrainEngine(ArcticRLClientConfig(model="tiny-random", **settings.client_fields()))
    assert engine.fwd_bwd(grouped_batch()).metrics["zorro_active"] == 0.0


@pytest.mark.parametrize(
    "switch",
    [
        {"ds_worker_config": {"zorro_train_enable": False}},
        {"ds_worker_config": {"use_zorro": False}},
        {"arctic_rl": {"zorro_train": {"enable": False}}},
    ],
    ids=str,
)
def test_verl_old_switches_are_effective_with_a_warning(switch):
    with pytest.warns(FutureWarning, match=r"is an old spelling; write remote_backend.zorro_train.enable=False"):
        assert not verl_settings(verl(**switch)).zorro_train.enable


def test_verl_fca_switch_reaches_the_sampler():
    assert not verl_settings(verl(rollout={"arctic_inference_config": {"use_fca": False}})).zorro_inference.enable


@pytest.mark.parametrize(("given", "effective"), [(16, None), (20, None), (4, 4)])
def test_verl_max_rollouts_limits_a_pass_only_below_the_rollouts_of_a_prompt(given, effective):
    block = {"zorro_train": {"enable": True, "max_rollouts": given, "load_balancer": True}}
    assert verl_settings(verl(rollout={"n": 16}, remote_backend=block)).zorro_train.max_rollouts == effective


def test_verl_logits_mode_and_its_memory_are_taken():
    block = {"logits_optimization": "memory", "logits_optimization_peak_mem_size_in_gib": 4}
    zorro = verl_settings(verl(remote_backend=block)).zorro_train
    assert (zorro.logits_optimization, zorro.logits_optimization_peak_mem_size_in_gib) == ("memory", 4.0)
    assert (
        verl_settings(verl(remote_backend=block | {"logits_optimization": "none"})).zorro_train.logits_optimization
        == "none"
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (verl({}), "actor_rollout_ref.actor sets no micro-batch; set use_dynamic_bsz=True"),
        (verl(ROWS | {"ppo_micro_batch_size": 8}), "contradict each other; drop .*ppo_micro_batch_size"),
        (verl({"ppo_micro_batch_size": 9}), "9 does not divide by 8 data-parallel ranks"),
        (verl({"ppo_micro_batch_size_per_gpu": 0}), "must be a whole number of 1 or more"),
        (verl({"ppo_micro_batch_size_per_gpu": "four"}), "must be a whole number of 1 or more"),
        (verl({"use_dynamic_bsz": "maybe"}), "must be true or false"),
        (verl(ROWS | {"ulysses_sequence_parallel_size": 3}), "8 devices cannot be divided by ulysses"),
        (
            verl(ROWS | {"ulysses_sequence_parallel_size": 2, "fsdp_config": {"ulysses_sequence_parallel_size": 4}}),
            "contradict each other; keep the first",
        ),
        (
            verl(remote_backend={"zorro_train": {"enable": True}}, ds_worker_config={"zorro_train": {"enable": False}}),
            "contradict each other; keep remote_backend.zorro_train.enable",
        ),
        (verl(remote_backend={"zorro_train": {"enabled": True}}), "unknown key 'enabled'; did you mean 'enable'"),
        (
            verl(**{"remote_backend.zorro_train.max_rollout": 4}),
            "unknown key 'max_rollout'; did you mean 'max_rollouts'",
        ),
        (verl({"ppo_micro_batch_size_per_gpu": "${x.y}"}), "is not resolved; pass OmegaConf.to_container"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_verl_settings_that_contradict_or_cannot_take_effect_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        verl_settings(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (verl(TOKENS | ROWS), "ppo_micro_batch_size_per_gpu has no effect"),
        (verl(ROWS | {"ppo_max_token_len_per_gpu": 999}), "ppo_max_token_len_per_gpu has no effect"),
        (verl(remote_backend={"zorro_train": {"load_balancer": False}}), "load_balancer=False has no effect"),
    ],
)
def test_verl_settings_without_effect_are_told(config, message):
    with pytest.warns(UserWarning, match=message):
        verl_settings(config)


# --- SkyRL


@pytest.mark.parametrize("held", HOLDERS)
def test_skyrl_counts_rows_or_tokens(held):
    rows = skyrl_settings(held(skyrl(micro_train_batch_size_per_gpu=8, micro_forward_batch_size_per_gpu=32)))
    assert (rows.zorro_train.max_rows, rows.zorro_train.log_prob_max_rows, rows.zorro_train.max_token_len) == (
        8,
        32,
        None,
    )
    tokens = skyrl_settings(held(skyrl(max_tokens_per_microbatch=16_000)))
    assert (tokens.zorro_train.max_rows, tokens.zorro_train.max_token_len) == (None, 16_000)


def test_skyrl_defaults_are_its_own():
    settings = skyrl_settings(skyrl(max_tokens_per_microbatch=-1))
    assert (settings.zorro_train.max_rows, settings.zorro_train.log_prob_max_rows, settings.num_ranks) == (1, 1, 1)


@pytest.mark.parametrize(
    ("policy", "strategy", "num_ranks"),
    [
        ({"sequence_parallel_size": 4}, "fsdp", 4),
        ({"megatron_config": {"tensor_model_parallel_size": 2, "context_parallel_size": 2}}, "megatron", 4),
        ({}, "fsdp2", 16),
    ],
)
def test_skyrl_data_parallel_size_is_not_the_world_size(policy, strategy, num_ranks):
    placement = {"policy_num_nodes": 2, "policy_num_gpus_per_node": 8}
    assert skyrl_settings(skyrl(placement=placement, policy=policy, strategy=strategy)).num_ranks == num_ranks


def test_skyrl_switches_of_the_documents_are_effective():
    zorro = {"train_dedup": False, "fca_inference": False}
    settings = skyrl_settings(skyrl(backend="arctic_rl", zorro=zorro))
    assert not settings.zorro_train.enable
    assert not settings.zorro_inference.enable
    with pytest.warns(FutureWarning, match="use_zorro is an old spelling; write trainer.zorro.train_dedup=True"):
        assert skyrl_settings(skyrl(arctic_rl={"use_zorro": True})).zorro_train.enable


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (skyrl(zorro={"train_dedupe": True}), "unknown key 'train_dedupe'; did you mean 'train_dedup'"),
        (skyrl(backend="fsdp", zorro={"train_dedup": True}), "no effect with trainer.backend='fsdp'"),
        (skyrl(zorro={"train_dedup": True}, arctic_rl={"use_zorro": False}), "contradict each other"),
        (skyrl(micro_train_batch_size_per_gpu=0), "must be a whole number of 1 or more"),
        (skyrl(max_tokens_per_microbatch=-5), "must be a whole number of 1 or more"),
        (skyrl(policy={"sequence_parallel_size": 2}), "1 devices cannot be divided by sequence_parallel_size=2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore:trainer.arctic_rl")
def test_skyrl_settings_that_contradict_or_cannot_take_effect_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        skyrl_settings(config)


def test_skyrl_rows_beside_a_token_budget_are_told():
    with pytest.warns(UserWarning, match="micro_train_batch_size_per_gpu=4 has no effect"):
        skyrl_settings(skyrl(max_tokens_per_microbatch=100, micro_train_batch_size_per_gpu=4))


# --- what the engine does


@pytest.mark.parametrize(
    ("settings", "trained", "scored"),
    [
        (verl_settings(verl()), 2, 2),
        (verl_settings(verl(rollout={"log_prob_micro_batch_size_per_gpu": 8})), 2, 1),
        (skyrl_settings(skyrl(micro_train_batch_size_per_gpu=2, micro_forward_batch_size_per_gpu=4)), 4, 2),
    ],
    ids=["verl", "verl scores more rows", "skyrl"],
)
@pytest.mark.parametrize("enable", [True, False])
def test_rows_of_a_micro_batch_are_what_the_framework_says(settings, trained, scored, enable):
    config = ArcticRLClientConfig(model="tiny-random", **settings.client_fields())
    config = config.model_copy(update={"zorro_train": config.zorro_train.model_copy(update={"enable": enable})})
    engine, batch = TorchTrainEngine(config), grouped_batch(num_groups=2, group_size=4)
    counts = engine.fwd_bwd(batch).metrics["num_micro_batches"], engine.log_probs(batch).metrics["num_micro_batches"]
    if enable:
        assert counts >= (trained, scored), "a tree in stages may leave a micro-batch less than full"
    else:
        assert counts == (trained, scored)


def test_reading_settings_loads_neither_torch_nor_a_trainer():
    code = (
        "import sys\n"
        "from arctic_platform.integrations.verl import verl_settings\n"
        "from arctic_platform.integrations.skyrl import skyrl_settings\n"
        "skyrl_settings({})\n"
        "assert not {'torch', 'transformers', 'verl', 'skyrl', 'omegaconf'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_config_without_old_or_idle_settings_is_read_in_silence():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verl_settings(verl(TOKENS))
        skyrl_settings(skyrl(micro_train_batch_size_per_gpu=4))
