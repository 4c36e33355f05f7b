"""Adapters in every training engine: they train as peft's own do, and what leaves the engine is merged."""

import copy
from pathlib import Path

import peft
import pytest
import torch
from torch import Tensor, nn

from arctic_platform.errors import WeightSyncError
from arctic_platform.rl.config import LoraConfig
from arctic_platform.rl.engines.lora import apply_lora, file_name
from arctic_platform.rl.engines.models import tiny_model
from arctic_platform.rl.engines.torch_train import TorchTrainEngine
from arctic_platform.rl.protocol import RolloutBatch
from arctic_platform.rl.weight_sync.base import manifest_of
from arctic_platform.rl.weight_sync.local import copy_weights
from tests.rl.engines.builders import config, grouped_batch
from tests.rl.engines.conformance.fleet import Answer, Fleet, gather
from tests.rl.engines.conformance.test_conformance import OPTIMIZER, Twin, furthest, row_logprobs
from tests.zorro_train.architectures import build

LORA = {"rank": 4, "alpha": 8.0, "target_modules": ("q_proj", "v_proj", "down_proj")}
LR = 1e-2


class AdaptedTwin(Twin):
    """peft's own wrapper around the stock model, from the same first adapters."""

    def __init__(self) -> None:
        super().__init__(lr=LR)
        first = apply_lora(tiny_model(), LoraConfig(**LORA))
        drawn = {file_name(name): param for name, param in first.named_parameters() if "lora_" in name}
        settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(LORA["target_modules"]))
        self.model = peft.get_peft_model(tiny_model(), settings)
        peft.set_peft_model_state_dict(self.model, drawn)
        live = [param for param in self.model.parameters() if param.requires_grad]
        self.adamw = torch.optim.AdamW(live, lr=1.0, eps=self.config.eps, weight_decay=self.config.weight_decay)

    @property
    def adapters(self) -> dict[str, Tensor]:
        found = peft.get_peft_model_state_dict(self.model)
        return {name: param.detach() for name, param in found.items()}

    @property
    def weights(self) -> dict[str, Tensor]:
        """Merged, in a copy."""
        merged = copy.deepcopy(self.model).merge_and_unload()
        return {name: param.detach() for name, param in merged.named_parameters()}


def start(fleet: Fleet, **settings: object) -> Fleet:
    return fleet.start(lora=LORA, optimizer={**OPTIMIZER, "lr": LR}, **settings)


def adapters_of(fleet: Fleet) -> dict[str, Tensor]:
    state = fleet.on_all(gather, "gather_training")[0]
    trained = {name.removeprefix("param."): tensor for name, tensor in state.items() if name.startswith("param.")}
    return {file_name(name): tensor for name, tensor in trained.items()}


@pytest.mark.parametrize(("is_checkpointed", "num_steps"), [(False, 5), (True, 2)], ids=["kept", "recomputed"])
def test_adapters_losses_and_reference_after_every_step_are_those_of_plain_peft(
    fleet: Fleet,
    is_checkpointed: bool,
    num_steps: int,
) -> None:
    """The base is scored before the first pass and between a pass and its step, where switches could leave traces."""
    start(fleet, gradient_checkpointing=is_checkpointed, reference=True)
    twin, base = AdaptedTwin(), tiny_model()
    assert furthest(adapters_of(fleet), twin.adapters) == 0.0
    for seed in range(num_steps):
        batch = grouped_batch(seed)
        if seed < 2:
            assert_scores(fleet.rows("log_probs", batch, None, reference=True), base, batch)
        answer = fleet.fwd_bwd(batch)
        assert_scores(answer, twin.model, batch)
        if seed == 1:
            assert_scores(fleet.rows("log_probs", batch, None, reference=True), base, batch)
            with pytest.raises(AssertionError):
                assert_scores(answer, base, batch)
        assert fleet.step()["grad_norm"] == pytest.approx(twin.step(batch), rel=1e-4)
        assert furthest(adapters_of(fleet), twin.adapters) <= 1e-5
    assert furthest(fleet.weights(), twin.weights) <= 1e-5


def assert_scores(answer: Answer, model: nn.Module, batch: RolloutBatch) -> None:
    for row, logprobs in enumerate(answer.logprobs):
        expected = row_logprobs(model, batch, row).detach()
        torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=2e-5)


def test_what_leaves_the_engine_fits_a_plain_model_and_moves_with_each_step(fleet: Fleet) -> None:
    start(fleet)
    receiver, base = tiny_model(), tiny_model()
    assert fleet.on_all(specs)[0] == manifest_of(base)
    assert furthest(fleet.weights(), dict(base.named_parameters())) == 0.0
    fleet.fwd_bwd(grouped_batch())
    fleet.step()
    copy_weights(manifest_of(base), fleet.weights().items(), receiver)
    moved = {name for name, param in receiver.named_parameters() if not torch.equal(param, base.get_parameter(name))}
    assert moved == {
        f"model.layers.{layer}.{name}.weight"
        for layer in range(2)
        for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    }
    norm = torch.cat([param.detach().double().flatten() for param in receiver.parameters()]).norm()
    assert fleet.on_all(norm_of_engine)[0] == pytest.approx(float(norm), rel=1e-9)


def test_adapters_that_rounding_swallows_fail_the_sync(fleet: Fleet) -> None:
    fleet.start(lora=LORA, dtype="bfloat16", optimizer={"lr": 1e-30}).fwd_bwd(grouped_batch())
    fleet.step()
    with pytest.raises(WeightSyncError, match="no merged weight differs"):
        fleet.weights()


def test_a_checkpoint_of_adapters_goes_on_in_any_engine(fleet: Fleet, tmp_path: Path) -> None:
    start(fleet).fwd_bwd(grouped_batch(0))
    fleet.step()
    fleet.on_all(save, str(tmp_path / "saved"))
    fleet.fwd_bwd(grouped_batch(1))
    fleet.step()
    alone = TorchTrainEngine(config(lora=LORA, optimizer={**OPTIMIZER, "lr": LR}))
    alone.load_checkpoint(str(tmp_path / "saved"))
    alone.fwd_bwd(grouped_batch(1))
    alone.step()
    assert furthest(dict(alone.gather_training()), fleet.on_all(gather, "gather_training")[0]) <= 1e-5
    alone.save_checkpoint(str(tmp_path / "again"))
    expected = dict(alone.gather_weights())
    start(fleet)
    fleet.on_all(load, str(tmp_path / "again"))
    assert furthest(fleet.weights(), expected) == 0.0


def test_adapters_of_stacked_experts_train_alike_in_every_engine(fleet: Fleet, tmp_path: Path) -> None:
    build("qwen3_moe").save_pretrained(tmp_path)
    settings = {"model": str(tmp_path), "lora": {"rank": 4}, "optimizer": {**OPTIMIZER, "lr": LR}}
    alone = TorchTrainEngine(config(**settings))
    fleet.start(**settings)
    for seed in range(2):
        batch = small_ids(grouped_batch(seed))
        alone.fwd_bwd(batch)
        fleet.fwd_bwd(batch)
        assert fleet.step()["grad_norm"] == pytest.approx(alone.step().metrics["grad_norm"], rel=1e-4)
    assert furthest(fleet.weights(), dict(alone.gather_weights())) <= 1e-5
    assert any("experts" in name for name in alone.trainable)


def small_ids(batch: RolloutBatch) -> RolloutBatch:
    """The same rows in a vocabulary of 128."""
    rows = {name: [[token % 128 for token in row] for row in getattr(batch, name)] for name in ("prompts", "responses")}
    return RolloutBatch(**rows, advantages=[list(row) for row in batch.advantages])


def save(state, path):
    state["engine"].save_checkpoint(path)


def load(state, path):
    state["engine"].load_checkpoint(path)


def specs(state):
    return state["engine"].weight_specs()


def norm_of_engine(state):
    return state["engine"].weight_norm()
