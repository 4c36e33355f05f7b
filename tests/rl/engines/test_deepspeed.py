"""What is particular to DeepSpeed; what it has in common with every engine is in conformance/."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from arctic_platform.errors import ConfigError
from arctic_platform.rl.engines.deepspeed_settings import deepspeed_settings
from arctic_platform.rl.engines.deepspeed_train import DeepSpeedTrainEngine
from arctic_platform.rl.engines.models import tiny_model
from arctic_platform.rl.engines.torch_train import TorchTrainEngine
from arctic_platform.rl.protocol import RolloutBatch
from arctic_platform.rl.workers.group import RankGroup
from tests.rl.engines.builders import config, grouped_batch, part_of
from tests.rl.engines.conformance.ranks import Ranks
from tests.rl.engines.test_router_loss import rollouts
from tests.zorro_train.architectures import build

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra 'deepspeed'")
OPTIMIZER = {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.1, "max_grad_norm": 0.5}
HALVES = [[0, 1, 2, 3, 4], [5, 6, 7]]


def zero_config(zero: dict, **settings: object):
    return config(**{"training_engine": "deepspeed", "deepspeed": {"zero_optimization": zero}, **settings})


def cut(stage: int) -> dict:
    """A stage, which as the third cuts every weight, the smallest too."""
    return {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}


def build_here(state: dict, make_model: Callable | None, zero: dict, settings: dict) -> None:
    if "engine" in state:
        state.pop("engine").close()
    model = None if make_model is None else make_model()
    given = zero_config(zero, ranks={"num_ranks": state["world"].size}, **settings)
    state["engine"] = DeepSpeedTrainEngine(given, model, world=state["world"])


def train(state: dict, batches: list[RolloutBatch]) -> dict[str, Tensor]:
    """One step per batch, of the rank's own half; the weights afterwards."""
    engine, world = state["engine"], state["world"]
    for batch in batches:
        engine.fwd_bwd(batch if world.size == 1 else part_of(batch, HALVES[world.rank]))
        engine.step()
    return {name: tensor.clone() for name, tensor in engine.gather_weights()}


def plain(make_model: Callable | None, settings: dict, batches: list[RolloutBatch]) -> TorchTrainEngine:
    engine = TorchTrainEngine(config(**settings), None if make_model is None else make_model())
    for batch in batches:
        engine.fwd_bwd(batch)
        engine.step()
    return engine


def furthest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name].float() - theirs[name].float()).abs().max()) for name in theirs)


def odd_model() -> PreTrainedModel:
    """Hardly a weight that two ranks can halve."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=63,
            intermediate_size=127,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=32,
            vocab_size=257,
        )
    )


# --- settings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train_batch_size": 8}, "deepspeed.train_batch_size is not taken: fwd_bwd calls bring"),
        ({"gradient_accumulation_steps": 4}, "every fwd_bwd call until step"),
        ({"scheduler": {"type": "WarmupLR"}}, "set optimizer.schedule"),
        ({"fp16": {"enabled": True}}, "dtype='bfloat16'"),
        ({"zero_optimisation": {}}, "unknown key 'zero_optimisation'; did you mean 'zero_optimization'"),
        ({"nonsense": 1}, "accepted: zero_optimization"),
        ({"zero_optimization": 2}, "deepspeed.zero_optimization: Input should be a valid dictionary"),
        ({"bf16": True}, "deepspeed.bf16: Input should be a valid dictionary"),
        ({"optimizer": "AdamW"}, "deepspeed.optimizer: Input should be a valid dictionary"),
        ({"optimizer": {"parms": {}}}, "unknown key 'parms'; did you mean 'params'"),
        ({"optimizer": {"params": {"betas": 0.9}}}, "contradicts optimizer.betas"),
        ({"data_types": {"grad_accum_dtype": "fp8"}}, "should be 'fp32' or 'bf16'"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "does not go with dtype='float32' and stage 1; use fp32"),
        ({"communication_data_type": "fp8"}, "should be 'fp32', 'fp16' or 'bf16'"),
        ({"steps_per_print": "often"}, "valid integer"),
        ({"steps_per_print": 1}, "unless deepspeed.log_level is 'info'"),
        ({"comms_logger": {"enabled": True}, "log_level": "error"}, "unless deepspeed.log_level is 'info'"),
        ({"log_level": "loud"}, "'debug', 'info', 'warning'"),
        ({"flops_profiler": True}, "valid dictionary"),
        ({"disable_allgather": True}, "does nothing with it"),
        ({"zero_allow_untested_optimizer": True}, "DeepSpeed has tested"),
        ({"bf16": {"bf16_master_weights_and_grads": True}}, "kept in fp32"),
        ({"zero_optimization": {"stage": 0, "overlap_comm": True}}, "no effect with stage 0"),
        ({"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 5}}, "no effect with stage 2; .*use stage 3"),
        ({"zero_optimization": {"sub_group_size": 5}}, "no effect with stage 1"),
        ({"zero_optimization": {"stage": 4}}, "choose 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": True}}, "choose 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": 1, "overlap_comm": True}}, "use stage 2"),
        ({"zero_optimization": {"stage": 2, "round_robin_gradients": True}}, "in the wrong order"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "needs stage 3, stage is 2"),
        ({"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}, "needs stage 1 or 2 or 3"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, "use 'cpu'"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, "ratio"),
        ({"bf16": {"enabled": True}}, "contradicts dtype='float32'"),
        ({"gradient_clipping": 0.7}, "contradicts optimizer.max_grad_norm=1.0"),
        ({"optimizer": {"type": "Lamb"}}, "AdamW is what trains here"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}}, r"optimizer.params.lr=0.5 contradicts optimizer.lr="),
    ],
)
def test_key_that_cannot_take_effect_is_refused_by_name(given: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        deepspeed_settings(config(training_engine="deepspeed", deepspeed=given))


def test_keys_that_agree_and_those_left_to_us_are_taken() -> None:
    block = {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.999], "eps": "auto", "torch_adam": True}}
    given = {
        "train_batch_size": "auto",
        "gradient_clipping": 1.0,
        "bf16": {"enabled": "auto"},
        "optimizer": block,
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": "auto"},
    }
    settings = deepspeed_settings(config(training_engine="deepspeed", deepspeed=given, dtype="bfloat16"))
    assert settings["zero_optimization"] == {"stage": 2, "overlap_comm": True, "compute_grad_norm": False}
    assert settings["bf16"] == {"enabled": True}
    assert settings["data_types"] == {"grad_accum_dtype": "fp32"}
    assert settings["gradient_clipping"] == 0.0
    assert "optimizer" not in settings


def test_gradients_of_a_call_add_up_as_the_stage_and_the_caller_say() -> None:
    def chosen(stage: int, dtype: str, **data_types: str) -> str:
        given = {"zero_optimization": {"stage": stage}, "data_types": data_types}
        settings = deepspeed_settings(config(training_engine="deepspeed", deepspeed=given, dtype=dtype))
        return settings["data_types"]["grad_accum_dtype"]

    assert [chosen(stage, "float32") for stage in range(4)] == ["fp32"] * 4
    assert [chosen(stage, "bfloat16") for stage in range(4)] == ["bf16", "bf16", "fp32", "fp32"]
    assert chosen(3, "bfloat16", grad_accum_dtype="bf16") == "bf16"
    with pytest.raises(ConfigError, match="use bf16"):
        chosen(1, "bfloat16", grad_accum_dtype="fp32")


def test_stage_is_one_where_none_is_given() -> None:
    assert deepspeed_settings(config())["zero_optimization"]["stage"] == 1


def test_settings_are_refused_before_a_process_starts() -> None:
    ranks = {"num_ranks": 2, "start_seconds": 1e-3}
    with pytest.raises(ConfigError, match="drop the key"):
        RankGroup(config(training_engine="deepspeed", ranks=ranks, deepspeed={"train_batch_size": 8}))


@needs_deepspeed
def test_key_that_deepspeed_does_not_know_is_refused_by_name(rank_groups: Callable[[int], Ranks]) -> None:
    (error,) = rank_groups(1).call(build_here, None, {"stage": 2, "bucket_size": 5}, {})
    assert isinstance(error, ConfigError)
    assert "deepspeed: DeepSpeedZeroConfig.bucket_size: Extra inputs are not permitted" in str(error)


# --- weights

ON_CPU = {"device": "cpu"}


@needs_deepspeed
@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 1, "contiguous_gradients": False},
        {"stage": 1, "offload_optimizer": ON_CPU},
        {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 9999},
        {"stage": 2, "contiguous_gradients": False, "reduce_scatter": False},
        {"stage": 2, "offload_optimizer": ON_CPU, "parameter_alignment": True},
        {"stage": 3, "overlap_comm": False, "contiguous_gradients": False},
        {"stage": 3, "sub_group_size": 9999, "stage3_param_persistence_threshold": 0, "reduce_scatter": False},
        {"stage": 3, "offload_optimizer": ON_CPU, "offload_param": ON_CPU, "stage3_param_persistence_threshold": 0},
    ],
    ids=str,
)
def test_settings_change_how_and_not_what_is_computed(rank_groups: Callable[[int], Ranks], zero: dict) -> None:
    ranks, batches = rank_groups(2), [grouped_batch(seed) for seed in range(3)]
    settings = {"optimizer": OPTIMIZER}
    assert ranks.call(build_here, odd_model, zero, settings) == [None, None]
    ours = ranks.call(train, batches)[0]
    theirs = dict(plain(odd_model, settings, batches).gather_weights())
    assert furthest(ours, theirs) <= 1e-5


@needs_deepspeed
def test_gradients_are_rounded_on_their_way_where_the_user_says_so(rank_groups: Callable[[int], Ranks]) -> None:
    def distance(data_type: str) -> float:
        keys = {"zero_optimization": cut(2), "communication_data_type": data_type}
        assert rank_groups(1).call(build_here, None, cut(2), {"optimizer": OPTIMIZER, "deepspeed": keys}) == [None]
        return furthest(rank_groups(1).call(train, batches)[0], theirs)

    batches = [grouped_batch(seed) for seed in range(2)]
    theirs = dict(plain(None, {"optimizer": OPTIMIZER}, batches).gather_weights())
    assert distance("fp32") < 1e-6 < distance("bf16") < 1e-3


class ForLongRows(nn.Module):
    """A layer's MLP, and another that only rows of more than 8 tokens pass, as some experts get none of a batch."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp
        self.extra = nn.Linear(64, 64)

    def forward(self, hidden: Tensor) -> Tensor:
        out = self.mlp(hidden)
        return out + self.extra(hidden) if hidden.shape[1] > 8 else out


def model_for_long_rows() -> PreTrainedModel:
    model = tiny_model()
    torch.manual_seed(1)
    for layer in model.model.layers:
        layer.mlp = ForLongRows(layer.mlp)
    return model


@needs_deepspeed
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_without_a_part_in_a_call_keep_no_gradient_of_an_earlier_one(
    rank_groups: Callable[[int], Ranks], stage: int
) -> None:
    """Stage 3 leaves an old gradient where it is until a new one comes, and adds to it in the second pass."""
    long, short = [[5, 6, 7, 8, 9, 10, 11, 12]], [[7, 9]]
    batches = [
        RolloutBatch(prompts=prompts, responses=[[3, 4]] * len(prompts), advantages=advantages)
        for prompts, advantages in ((long, [1.0]), (short, [0.5]), (short + long, [1.0, -0.5]), (short, [1.0]))
    ]
    settings = {"optimizer": OPTIMIZER, "zorro_train": {"enable": False, "max_rows": 1}}
    ranks = rank_groups(1)
    assert ranks.call(build_here, model_for_long_rows, {"stage": stage}, settings) == [None]
    ours = ranks.call(train, batches)[0]
    assert furthest(ours, dict(plain(model_for_long_rows, settings, batches).gather_weights())) <= 1e-5


def experts() -> PreTrainedModel:
    return build("qwen3_moe")


@needs_deepspeed
@pytest.mark.parametrize("stage", [2, 3])
def test_mixture_of_experts_is_trained_as_by_the_plain_engine(rank_groups: Callable[[int], Ranks], stage: int) -> None:
    ranks, settings, batches = rank_groups(2), {"optimizer": OPTIMIZER}, [rollouts()] * 2
    assert ranks.call(build_here, experts, cut(stage), settings) == [None, None]
    ours = ranks.call(train, batches)[0]
    assert furthest(ours, dict(plain(experts, settings, batches).gather_weights())) <= 1e-5


# --- state


@needs_deepspeed
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_state_is_that_of_any_other_engine(rank_groups: Callable[[int], Ranks], stage: int, dtype: str) -> None:
    """From plain PyTorch into two ranks, and back into plain PyTorch, bit by bit; no weight divides by two ranks."""
    ranks, batches = rank_groups(2), [grouped_batch(seed) for seed in range(3)]
    settings = {"optimizer": OPTIMIZER, "dtype": dtype}
    engine = plain(half_odd if dtype == "bfloat16" else odd_model, settings, batches[:2])
    saved = dict(engine.gather_training())
    make_model = half_odd if dtype == "bfloat16" else odd_model
    ranks.call(build_here, make_model, cut(stage), settings)
    back = ranks.call(through, saved, 2)[0]
    assert back.keys() == saved.keys()
    assert all(torch.equal(back[name], saved[name]) for name in saved)
    ours = ranks.call(train, batches[2:])[0]
    other = plain(make_model, settings, [])
    other.scatter_training(back.get, 2)
    for one in (engine, other):
        one.fwd_bwd(batches[2])
        one.step()
    weights = dict(engine.gather_weights())
    assert furthest(dict(other.gather_weights()), weights) == 0.0
    assert furthest(ours, weights) <= (1e-5 if dtype == "float32" else 0.01)


def half_odd() -> PreTrainedModel:
    return odd_model().bfloat16()


def through(state: dict, saved: dict[str, Tensor], optimizer_step: int) -> dict[str, Tensor]:
    engine = state["engine"]
    engine.scatter_training(saved.get, optimizer_step)
    assert engine.optimizer_step == optimizer_step
    return {name: tensor.clone() for name, tensor in engine.gather_training()}


# --- its process

STEP = """
import sys
from arctic_platform.rl.engines.deepspeed_train import DeepSpeedTrainEngine
from tests.rl.engines.builders import config, grouped_batch

zero = {"zero_optimization": {"stage": int(sys.argv[1])}}
given = config(training_engine="deepspeed", deepspeed=zero, device=sys.argv[2])
engine = DeepSpeedTrainEngine(given)
engine.fwd_bwd(grouped_batch())
engine.step()
from deepspeed.comm.torch import build_shm_op
assert build_shm_op() is None, "DeepSpeed compiles without asking __compatible_ops__"
print("done")
"""


def run_alone(script: str, *args: str, home: Path) -> subprocess.CompletedProcess:
    """A process that finds no compiler, and whose every default folder is in `home`."""
    empty = home / "bin"
    empty.mkdir()
    names = ("PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
    env = {name: os.environ[name] for name in names if name in os.environ}
    places = {"HOME": home, "TMPDIR": home, "TORCH_EXTENSIONS_DIR": home / "extensions", "XDG_CACHE_HOME": home}
    env |= {name: str(place) for name, place in places.items()} | {"PATH": str(empty), "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", script, *args]
    return subprocess.run(command, check=False, cwd=root, env=env, capture_output=True, text=True, timeout=240)


@needs_deepspeed
@pytest.mark.parametrize("stage", [2, 3])
def test_step_on_a_cpu_compiles_nothing_prints_nothing_and_leaves_no_file(tmp_path: Path, stage: int) -> None:
    """DeepSpeed's own defaults compile C++ when a group starts and when AdamW does, and die without a compiler."""
    done = run_alone(STEP, str(stage), "cpu", home=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
    left = [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()]
    assert left == []


@pytest.mark.gpu
@needs_deepspeed
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_step_on_a_gpu_needs_no_compiler(tmp_path: Path, stage: int) -> None:
    done = run_alone(STEP, str(stage), "cuda", home=tmp_path)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_missing_deepspeed_names_the_extra(tmp_path: Path) -> None:
    script = "import sys; sys.modules['deepspeed'] = None\n" + STEP
    done = run_alone(script, "1", "cpu", home=tmp_path)
    assert "MissingDependencyError" in done.stderr
    assert "pip install 'zorro-rl[deepspeed]'" in done.stderr
