import subprocess
import sys

import pytest

from arctic_platform.errors import ArcticError, ConfigError
from arctic_platform.rl import ArcticRLClientConfig, OptimizerConfig, ZoRRoTrainConfig


def fault(**settings: object) -> str:
    """The one-line message that these settings raise."""
    with pytest.raises(ConfigError) as caught:
        ArcticRLClientConfig(**{"model": "tiny-random", **settings})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_importing_the_client_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from arctic_platform.rl import *; from arctic_platform.rl.protocol import *; "
        "ArcticRLClientConfig(model='x'); create_arctic_rl_client; "
        "assert not {'torch', 'transformers', 'ray', 'fastapi'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_name_is_an_attribute_error() -> None:
    import arctic_platform.rl as rl

    with pytest.raises(AttributeError, match="no attribute 'ArcticClient'"):
        rl.ArcticClient
    assert "create_arctic_rl_client" in dir(rl)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"zorro_trian": {}}, ["'zorro_trian'", "did you mean 'zorro_train'"]),
        ({"zorro_train": {"enabel": True}}, ["zorro_train", "'enabel'", "did you mean 'enable'"]),
        ({"zorro_train": {"rollouts": 4}}, ["'rollouts'", "max_rollouts"]),
        ({"optimizer": {"qqq": 1}}, ["'qqq'", "accepted: lr, betas"]),
        ({"optimizer": {"lr": "fast"}}, ["optimizer", "lr", "'fast'"]),
        ({"optimizer": {"lr": -1.0}}, ["lr", "-1.0"]),
        ({"optimizer": {"lr": float("nan")}}, ["lr", "nan"]),
        ({"optimizer": {"betas": (0.9, 1.0)}}, ["betas", "below 1"]),
        ({"dtype": "float31"}, ["dtype", "'float32'", "'float31'"]),
        ({"device": "gpu"}, ["device", "'gpu'"]),
        ({"transport": "htp"}, ["transport", "'embedded'", "'http'", "'htp'"]),
        ({"transport": "http"}, ["server_url", "arctic-rl serve"]),
        ({"transport": "http", "server_url": "127.0.0.1:80"}, ["server_url", "127.0.0.1:80", "http://"]),
        ({"server_url": "http://127.0.0.1:99999"}, ["server_url", "127.0.0.1:99999", "must look like"]),
        ({"server_url": "http://[::1"}, ["server_url", "must look like"]),
        ({"server_url": f"http://{'a' * 64}.de"}, ["server_url", "must look like"]),
        ({"transport": "embedded", "server_url": "http://127.0.0.1:1"}, ["server_url", "no effect", "'embedded'"]),
        ({"call_timeout": 3.0}, ["call_timeout", "no effect"]),
        ({"api_key": "k" * 20}, ["api_key", "no effect"]),
        ({"server_ulr": "x"}, ["did you mean 'server_url'"]),
        ({"cuda_ipc_weight_sync": True}, ["cuda_ipc_weight_sync", "set cuda_ipc_weight_sync=false"]),
        ({"cuda_ipc_weight_sync": True, "colocate": False}, ["cuda_ipc_weight_sync", "CUDA"]),
        ({"colocate": False, "kinds": ["training"]}, ["colocate", "no effect", "['training']"]),
        ({"training_engine": "fsdp", "kinds": ["sampling"]}, ["training_engine", "no effect", "['sampling']"]),
        ({"reference": True, "kinds": ["sampling"]}, ["reference", "no effect", "['sampling']"]),
        ({"gradient_checkpointing": True, "kinds": ["log_prob"]}, ["gradient_checkpointing", "no effect"]),
        ({"sampling_engine": "vllm", "kinds": ["training"]}, ["sampling_engine", "no effect", "['training']"]),
        ({"colocate": False, "ranks": {"num_ranks": 2}, "kinds": ["sampling"]}, ["ranks.num_ranks", "no effect"]),
        ({"lora": {"target_modules": []}}, ["target_modules", "must name layers", "all-linear"]),
        ({"lora": {"target_modules": ["q_proj", ""]}}, ["target_modules", "must name layers"]),
        ({"lora": {"rank": 0}}, ["rank", "greater than or equal to 1"]),
        ({"lora": {"alpha": float("inf")}}, ["alpha", "finite"]),
        ({"training_engine": "fsdp", "fsdp": {"cpu_offload": True}}, ["fsdp.cpu_offload", "no effect", "'cpu'"]),
        ({"training_engine": "fsdp", "zorro_train": {"compile_backend": "inductor"}}, ["compile_backend", "'fsdp'"]),
        ({"ranks": {"num_ranks": 2}, "zorro_train": {"compile_backend": "eager"}}, ["compile_backend", "one rank"]),
        ({"training_engine": "deepspeed", "zorro_train": {"compile_backend": "eager"}}, ["compile_backend"]),
        ({"training_engine": "deepseed"}, ["training_engine", "'deepspeed'", "'deepseed'"]),
        ({"ranks": {"num_ranks": 0}}, ["num_ranks", "greater than or equal to 1"]),
        ({"ranks": {"num_ranks": 2, "heartbeat_seconds": 0}}, ["heartbeat_seconds", "greater than 0"]),
        ({"ranks": {"num_ranks": 2, "start_seconds": float("inf")}}, ["start_seconds", "86400"]),
        ({"ranks": {"num_ranks": 2, "launch": "mpi"}}, ["launch", "'local', 'ray' or 'torchrun'", "'mpi'"]),
        ({"colocate": False, "weight_sync": {"bucket_mib": 0}}, ["bucket_mib", "greater than or equal to 1"]),
        ({"colocate": False, "weight_sync": {"timeout_seconds": 0}}, ["timeout_seconds", "greater than 0"]),
        ({"colocate": False, "weight_sync": {"mechanism": "shm"}}, ["mechanism", "'shared_memory'", "'shm'"]),
        ({"lora": {}, "kinds": ["sampling"]}, ["lora", "no effect", "['sampling']"]),
        ({"low_memory_weight_sync": True, "kinds": ["training"]}, ["low_memory_weight_sync", "no effect", "two sides"]),
        ({"low_memory_weight_sync": True, "kinds": ["sampling"]}, ["low_memory_weight_sync", "no effect", "two sides"]),
        (
            {"low_memory_weight_sync": True, "sampling_engine": "vllm", "colocate": False},
            ["low_memory_weight_sync", "no effect", "vLLM"],
        ),
        ({"ranks": {"num_threads": 2}}, ["ranks", "no effect", "colocate=false"]),
        ({"ranks": {"launch": "ray"}}, ["ranks", "no effect"]),
        ({"ranks": {"num_ranks": 2}, "kinds": ["sampling"]}, ["ranks", "no effect"]),
        ({"ranks": {"num_ranks": 2, "listen": "127.0.0.1:1"}}, ["ranks.listen", "'127.0.0.1:1'", "torchrun"]),
        ({"ranks": {"num_ranks": 2, "launch": "torchrun"}}, ["ranks.listen", "needed"]),
        (
            {"ranks": {"num_ranks": 2, "launch": "torchrun", "listen": "29400"}},
            ["listen", "'29400'", "127.0.0.1:29400"],
        ),
        ({"ranks": {"num_ranks": 2, "launch": "torchrun", "listen": "h:0"}}, ["listen", "'h:0'", "127.0.0.1:29400"]),
        ({"ranks": {"num_ranks": 2, "launch": "torchrun", "listen": "h:99999"}}, ["listen", "127.0.0.1:29400"]),
        ({"colocate": False, "ranks": {"launch": "torchrun", "listen": "h:1"}}, ["torchrun", "training ranks"]),
        ({"ranks": {"num_ranks": 2}, "device": "cuda:1"}, ["device", "'cuda:1'", "use 'cuda'"]),
        ({"ranks": {"num_ranks": 2}, "training_engine": "torch"}, ["'torch'", "one process", "use 'fsdp'"]),
        ({"fsdp": {"cpu_offload": True}}, ["fsdp", "no effect", "'torch'"]),
        ({"deepspeed": {"zero_optimization": {"stage": 1}}}, ["deepspeed", "no effect", "'torch'"]),
        ({"training_engine": "deepspeed", "dtype": "float64"}, ["deepspeed", "float64", "float32"]),
        ({"weight_sync": {"bucket_mib": 1}}, ["weight_sync", "no effect", "colocate=false"]),
        ({"weight_sync": {"bucket_mib": 1}, "ranks": {"num_ranks": 2}, "kinds": ["training"]}, ["weight_sync"]),
        ({"colocate": False, "weight_sync": {"mechanism": "cuda_ipc"}}, ["cuda_ipc", "CUDA", "'cpu'"]),
        ({"colocate": False, "weight_sync": {"delta": True}}, ["delta", "mechanism='stream'"]),
        (
            {
                "colocate": False,
                "device": "cuda",
                "cuda_ipc_weight_sync": True,
                "weight_sync": {"mechanism": "stream"},
            },
            ["cuda_ipc_weight_sync", "'stream'"],
        ),
        ({"keep_checkpoints": 2}, ["keep_checkpoints", "checkpoint_path"]),
    ],
)
def test_wrong_setting_says_what_was_given_and_what_is_accepted(settings: dict, names: list[str]) -> None:
    message = fault(**settings)
    assert all(name in message for name in names), message


@pytest.mark.parametrize(
    ("settings", "in_ranks", "engine"),
    [
        ({}, False, "torch"),
        ({"colocate": False}, False, "torch"),
        ({"ranks": {"num_ranks": 2}}, True, "fsdp"),
        ({"training_engine": "fsdp", "device": "cuda", "fsdp": {"cpu_offload": True}}, True, "fsdp"),
        ({"training_engine": "deepspeed", "kinds": ["log_prob"]}, True, "deepspeed"),
        ({"colocate": False, "kinds": ["sampling"], "ranks": {"num_threads": 1}}, False, "torch"),
    ],
)
def test_training_has_processes_of_its_own_where_it_needs_them(settings: dict, in_ranks: bool, engine: str) -> None:
    config = ArcticRLClientConfig(model="m", **settings)
    assert (config.trains_in_ranks, config.rank_engine) == (in_ranks, engine)


def test_missing_model_is_named() -> None:
    with pytest.raises(ConfigError, match="model: Field required"):
        ArcticRLClientConfig()


@pytest.mark.parametrize("name", ["use_zorro", "zorro_train_enable"])
@pytest.mark.parametrize("value", [True, False])
def test_old_spelling_warns_and_takes_effect(name: str, value: bool) -> None:
    with pytest.warns(FutureWarning, match=name):
        config = ArcticRLClientConfig(model="m", **{name: value})
    assert config.zorro_train.enable is value


@pytest.mark.parametrize("nested", [{"max_rollouts": 4}, ZoRRoTrainConfig(max_rollouts=4)])
def test_old_spelling_joins_what_is_nested(nested: object) -> None:
    with pytest.warns(FutureWarning):
        config = ArcticRLClientConfig(model="m", use_zorro=False, zorro_train=nested)
    assert (config.zorro_train.enable, config.zorro_train.max_rollouts) == (False, 4)


def test_old_spelling_that_contradicts_the_new_one_is_refused() -> None:
    with pytest.warns(FutureWarning):
        assert "contradicts" in fault(use_zorro=False, zorro_train={"enable": True})


def test_schedule_needs_its_length_and_only_where_it_is_read() -> None:
    assert "needs total_steps" in fault(optimizer={"schedule": "cosine"})
    assert "no effect" in fault(optimizer={"total_steps": 5})
    assert "below total_steps" in fault(optimizer={"schedule": "linear", "total_steps": 5, "warmup_steps": 5})
    assert OptimizerConfig(schedule="linear", total_steps=5, warmup_steps=4).total_steps == 5


def test_model_validate_raises_the_same_errors() -> None:
    with pytest.raises(ConfigError, match="did you mean 'model'"):
        ArcticRLClientConfig.model_validate({"modell": "m"})


def test_numbers_written_as_yaml_strings_are_read() -> None:
    assert OptimizerConfig(lr="1e-6").lr == 1e-6


def test_settings_are_frozen_and_survive_a_round_trip() -> None:
    config = ArcticRLClientConfig(model="m", zorro_train={"max_rollouts": 3}, optimizer={"lr": 1e-3})
    assert ArcticRLClientConfig(**config.model_dump()) == config
    with pytest.raises(ValueError, match="frozen"):
        config.model = "other"


def test_config_error_is_also_a_value_error() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, ArcticError)


def test_the_api_key_is_in_no_message_and_no_dump() -> None:
    secret = "sEcReT-kEy-0123456789"
    served = {"model": "m", "transport": "http", "server_url": "http://127.0.0.1:1"}
    config = ArcticRLClientConfig(**served, api_key=secret)
    shown = [repr(config), str(config), config.model_dump_json(), str(config.model_dump()), str(config.for_server())]
    for wrong in ({"api_key": [secret]}, {"api_key": f"{secret}\n"}, {"server_url": f"http://u:{secret}@host"}):
        with pytest.raises(ConfigError) as caught:
            ArcticRLClientConfig(**{**served, **wrong})
        shown.append(str(caught.value))
    assert not [text for text in shown if secret in text]
    assert config.api_key is not None
    assert config.api_key.get_secret_value() == secret
    assert ArcticRLClientConfig(**config.model_dump()).api_key is None


def test_what_travels_to_a_server_builds_the_same_settings_there() -> None:
    given = {"model": "m", "dtype": "float64", "optimizer": {"lr": 0.5}, "kinds": ("sampling",)}
    config = ArcticRLClientConfig(**given, transport="http", server_url="http://127.0.0.1:1", call_timeout=3.0)
    assert ArcticRLClientConfig(**config.for_server()) == ArcticRLClientConfig(**given)


def test_an_address_implies_http() -> None:
    assert ArcticRLClientConfig(model="m", server_url="http://127.0.0.1:1").transport == "http"
    assert ArcticRLClientConfig(model="m").transport == "embedded"
