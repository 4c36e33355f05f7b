"""Adapters in every training engine: they train as peft's own do, and what leaves the engine is merged."""

import copy
from pathlib import Path

import peft
import pytest
import torch
from torch import Tensor

from arctic_platform.errors import WeightSyncError
from arctic_platform.rl.config import LoraConfig
from arctic_platform.rl.engines.lora import apply_lora, file_name
from arctic_platform.rl.engines.models import tiny_model
from arctic_platform.rl.engines.torch_train import TorchTrainEngine
from arctic_platform.rl.weight_sync.base import manifest_of
from arctic_platform.rl.weight_sync.local import copy_weights
from tests.rl.engines.builders import config, grouped_batch
from tests.rl.engines.conformance.fleet import Fleet, gather
from tests.rl.engines.conformance.test_conformance import (
    OPTIMIZER,
    Twin,
    assert_same_state,
    fleet,  # noqa: F401
    furthest,
    row_logprobs,
)

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


def start(fleet: Fleet, **settings: object) -> Fleet:  # noqa: F811
    return fleet.start(lora=LORA, optimizer={**OPTIMIZER, "lr": LR}, **settings)


def adapters_of(fleet: Fleet) -> dict[str, Tensor]:  # noqa: F811
    state = fleet.on_all(gather, "gather_training")[0]
    trained = {name.removeprefix("param."): tensor for name, tensor in state.items() if name.startswith("param.")}
    return {file_name(name): tensor for name, tensor in trained.items()}


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["kept", "recomputed"])
def test_adapters_and_losses_after_every_step_are_those_of_plain_peft(fleet: Fleet, is_checkpointed: bool) -> None:  # noqa: F811
    start(fleet, gradient_checkpointing=is_checkpointed)
    twin = AdaptedTwin()
    assert furthest(adapters_of(fleet), twin.adapters) == 0.0
    for seed in range(5):
        batch = grouped_batch(seed)
        answer = fleet.fwd_bwd(batch)
        for row, logprobs in enumerate(answer.logprobs):
            expected = row_logprobs(twin.model, batch, row).detach()
            torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=2e-5)
        assert fleet.step()["grad_norm"] == pytest.approx(twin.step(batch), rel=1e-4)
        assert furthest(adapters_of(fleet), twin.adapters) <= 1e-5
        assert furthest(fleet.weights(), twin.weights) <= 1e-5


def test_the_reference_is_the_base_without_a_second_copy(fleet: Fleet) -> None:  # noqa: F811
    batch = grouped_batch()
    base = tiny_model()
    start(fleet, reference=True)
    for _ in range(2):
        fleet.fwd_bwd(batch)
        fleet.step()
    scored, policy = (fleet.rows("log_probs", batch, None, reference=reference).logprobs for reference in (True, False))
    for row, logprobs in enumerate(scored):
        torch.testing.assert_close(torch.tensor(logprobs), row_logprobs(base, batch, row).detach(), rtol=0, atol=2e-5)
    moved = [abs(a - b) for ours, theirs in zip(scored, policy, strict=True) for a, b in zip(ours, theirs, strict=True)]
    assert max(moved) > 1e-2
    metrics = fleet.fwd_bwd(batch) and fleet.step()
    assert metrics["grad_norm"] > 0.0


def test_scores_of_the_reference_between_passes_leave_training_as_it_is(fleet: Fleet) -> None:  # noqa: F811
    states = []
    for asks in (False, True):
        start(fleet, reference=True)
        if asks:
            fleet.rows("log_probs", grouped_batch(1), None, reference=True)
        fleet.fwd_bwd(grouped_batch(0))
        if asks:
            fleet.rows("log_probs", grouped_batch(1), None, reference=True)
        fleet.step()
        states.append(fleet.state())
    assert_same_state(*states)


def test_what_leaves_the_engine_fits_a_plain_model_and_moves_with_each_step(fleet: Fleet) -> None:  # noqa: F811
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


def test_adapters_that_rounding_swallows_fail_the_sync(fleet: Fleet) -> None:  # noqa: F811
    fleet.start(lora=LORA, dtype="bfloat16", optimizer={"lr": 1e-30}).fwd_bwd(grouped_batch())
    fleet.step()
    with pytest.raises(WeightSyncError, match="no merged weight differs"):
        fleet.weights()


def test_state_goes_over_into_another_engine_exactly(fleet: Fleet) -> None:  # noqa: F811
    start(fleet).fwd_bwd(grouped_batch(0))
    fleet.step()
    saved = fleet.on_all(gather, "gather_training")[0]
    fleet.fwd_bwd(grouped_batch(1))
    fleet.step()
    expected = fleet.state()
    start(fleet)
    fleet.on_all(take_over, saved)
    fleet.fwd_bwd(grouped_batch(1))
    fleet.step()
    ours = {name: tensor for name, tensor in fleet.state().items() if name != "counters"}
    assert_same_state({name: expected[name] for name in ours}, ours)


def test_a_checkpoint_of_adapters_goes_on_in_any_engine(fleet: Fleet, tmp_path: Path) -> None:  # noqa: F811
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


def save(state, path):
    state["engine"].save_checkpoint(path)


def load(state, path):
    state["engine"].load_checkpoint(path)


def specs(state):
    return state["engine"].weight_specs()


def norm_of_engine(state):
    return state["engine"].weight_norm()


def take_over(state, saved):
    state["engine"].scatter_training(saved.get, 1)
