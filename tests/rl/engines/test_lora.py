"""Adapters in a model that is trained, and the merged weights, files and scores that come out of it."""

import copy
import sys
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from arctic_platform.errors import CheckpointError, ConfigError, MissingDependencyError, WeightSyncError
from arctic_platform.rl.config import LoraConfig
from arctic_platform.rl.engines.lora import (
    adapter_weights,
    adapters_disabled,
    apply_lora,
    base_manifest,
    load_adapter,
    merged_weights,
    read_adapter,
    write_adapter,
)
from arctic_platform.rl.engines.models import copy_model, tiny_model
from arctic_platform.rl.weight_sync.base import manifest_of, weights_of
from arctic_platform.rl.weight_sync.local import copy_weights
from arctic_platform.rl.zorro_train import ModuleReconstructionPatcher
from tests.zorro_train.architectures import build
from tests.zorro_train.twins import random_rows, relative, rows_alone

ATTENTION = LoraConfig(rank=4, alpha=6.0, target_modules=("q_proj", "v_proj"))
FAMILIES = ["llama", "qwen2", "gpt2", "phi3", "qwen3_moe", "mixtral", "qwen3_next"]


def trained(model: PreTrainedModel, config: LoraConfig | None = None, scale: float = 0.05) -> PreTrainedModel:
    """With adapters that do something, as after some steps."""
    apply_lora(model, config or LoraConfig(rank=4))
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.copy_(torch.randn(param.shape, generator=draw) * scale)
    return model


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 20).unsqueeze(0), use_cache=False).logits


def gradients(model: nn.Module, loss: Tensor) -> Tensor:
    live = [param for param in model.parameters() if param.requires_grad]
    return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, live, materialize_grads=True)])


def merged_by_peft(model: PreTrainedModel) -> dict[str, Tensor]:
    """The slow twin: peft's own merge, into a copy of the model."""
    other = copy.deepcopy(model)
    for layer in reversed([m for m in other.modules() if isinstance(m, peft.tuners.lora.LoraLayer)]):
        layer.merge()
    return {
        name.replace(".base_layer", ""): tensor for name, tensor in weights_of(other).items() if "lora_" not in name
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_weights_are_those_of_peft_under_the_names_of_the_plain_model(family: str) -> None:
    plain = build(family)
    model = trained(build(family))
    merged = dict(merged_weights(model))
    assert list(merged) == list(weights_of(plain))
    assert base_manifest(model) == manifest_of(plain)
    twin = merged_by_peft(model)
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, twin[name], rtol=1e-6, atol=1e-7)
    assert sum(not torch.equal(merged[name], tensor) for name, tensor in weights_of(plain).items()) > 2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_model_of_the_merged_weights_gives_what_the_adapted_one_gives(family: str) -> None:
    plain, model = build(family), trained(build(family))
    before = logits(plain)
    report = copy_weights(base_manifest(model), merged_weights(model), plain)
    assert report.num_tensors == len(weights_of(plain))
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-4, atol=1e-4)
    assert (logits(plain) - before).abs().max() > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_training_with_adapters_is_exact_under_sharing_and_checkpointing(family: str) -> None:
    model, twin = trained(build(family)), trained(build(family))
    patcher = ModuleReconstructionPatcher(model)
    rows, masks = random_rows(4)
    expected, _ = rows_alone(twin, rows, masks)
    theirs = gradients(twin, expected.square().sum())
    for is_checkpointed in (False, True):
        if is_checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        ours = patcher.forward_rows(rows, masks).logprobs
        torch.testing.assert_close(ours, expected, rtol=2e-6, atol=2e-6)
        assert relative(gradients(model, ours.square().sum()), theirs) <= 1e-5


def test_only_adapters_train_and_they_change_nothing_at_first() -> None:
    plain = tiny_model()
    before = logits(plain)
    model = apply_lora(plain, ATTENTION)
    assert model is plain
    assert torch.equal(logits(model), before)
    live = [name for name, param in model.named_parameters() if param.requires_grad]
    assert len(live) == 2 * 2 * 2
    assert all("lora_" in name for name in live)


def test_every_rank_draws_the_same_adapters_and_leaves_the_random_state_alone() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    ours = dict(adapter_weights(apply_lora(tiny_model(), ATTENTION, seed=5)))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    theirs = dict(adapter_weights(apply_lora(tiny_model(), ATTENTION, seed=5)))
    other = dict(adapter_weights(apply_lora(tiny_model(), ATTENTION, seed=6)))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not all(torch.equal(ours[name], other[name]) for name in ours)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_adapters_have_the_type_of_their_layer_and_the_sum_is_rounded_once(dtype: torch.dtype) -> None:
    model = trained(tiny_model().to(dtype), ATTENTION)
    assert {param.dtype for param in model.parameters()} == {dtype}
    name = "model.layers.1.self_attn.q_proj"
    layer = model.get_submodule(name)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    parts = [layer.base_layer.weight, layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    base, first, second = (part.detach().to(wide) for part in parts)
    exact = (base.double() + 1.5 * (second.double() @ first.double())).to(dtype)
    found = dict(merged_weights(model))[f"{name}.weight"]
    assert found.dtype == dtype
    off = (found.double() - exact.double()).abs() / exact.double().abs().clamp(min=1e-3)
    assert off.max() <= torch.finfo(dtype).eps * (8 if dtype == torch.float64 else 1)


def test_the_live_model_is_not_touched_and_one_merged_tensor_exists_at_a_time() -> None:
    model = trained(tiny_model())
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    held = []
    for name, tensor in merged_weights(model):
        is_live = any(tensor.data_ptr() == place for place, _ in before.values())
        assert is_live is not ("proj" in name)
        held.append(tensor.untyped_storage().data_ptr())
    assert len(set(held)) < len(held)
    for name, tensor in model.state_dict().items():
        assert tensor.data_ptr() == before[name][0]
        assert torch.equal(tensor, before[name][1])


def test_a_model_without_adapters_yields_its_weights() -> None:
    model = tiny_model()
    assert all(tensor.data_ptr() == weights_of(model)[name].data_ptr() for name, tensor in merged_weights(model))
    assert base_manifest(model) == manifest_of(model)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_disabled_adapters_leave_the_base_and_gradients_are_as_before(family: str) -> None:
    plain, model = build(family), trained(build(family))
    live = {name for name, param in model.named_parameters() if param.requires_grad}
    adapted = logits(model)
    with adapters_disabled(model):
        assert torch.equal(logits(model), logits(plain))
        assert {name for name, param in model.named_parameters() if param.requires_grad} == live
    assert torch.equal(logits(model), adapted)


def test_adapters_whose_product_is_rounded_away_are_no_silent_sync_of_the_base() -> None:
    model = trained(tiny_model().to(torch.bfloat16), scale=1e-30)
    assert len(list(merged_weights(model))) == len(weights_of(tiny_model()))
    with pytest.raises(WeightSyncError, match="no merged weight differs from the base's: in bfloat16"):
        list(merged_weights(model, refuse_unchanged=True))
    list(merged_weights(apply_lora(tiny_model(), ATTENTION), refuse_unchanged=True))
    list(merged_weights(trained(tiny_model(), ATTENTION), refuse_unchanged=True))


def test_what_was_not_merged_reaches_no_sampler() -> None:
    model = trained(tiny_model())
    receiver = tiny_model()
    with pytest.raises(WeightSyncError, match=r"the sender holds .* adapters"):
        copy_weights(manifest_of(model), weights_of(model).items(), receiver)
    with pytest.raises(WeightSyncError, match=r"the receiver holds .* hold them already"):
        copy_weights(base_manifest(model), merged_weights(model), trained(tiny_model()))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_adapter_folder_is_read_by_peft_and_by_this_engine(family: str, tmp_path: Path) -> None:
    model = trained(build(family))
    write_adapter(model, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    theirs = peft.PeftModel.from_pretrained(build(family), tmp_path)
    torch.testing.assert_close(logits(theirs), logits(model), rtol=0, atol=0)
    again = apply_lora(build(family), LoraConfig(rank=4))
    load_adapter(again, tmp_path)
    assert torch.equal(logits(again), logits(model))
    names = {name for name, param in model.named_parameters() if param.requires_grad}
    assert read_adapter(tmp_path).keys() == names


def test_adapters_of_stacked_experts_are_saved_and_read(tmp_path: Path) -> None:
    model = trained(build("qwen3_moe"))
    write_adapter(model, tmp_path)
    again = apply_lora(build("qwen3_moe"), LoraConfig(rank=4))
    load_adapter(again, tmp_path)
    assert torch.equal(logits(again), logits(model))


def test_adapters_that_peft_saved_are_read(tmp_path: Path) -> None:
    settings = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    theirs = peft.get_peft_model(tiny_model(), settings)
    theirs.save_pretrained(tmp_path)
    model = apply_lora(tiny_model(), ATTENTION)
    load_adapter(model, tmp_path)
    torch.testing.assert_close(logits(model), logits(theirs), rtol=0, atol=0)


def empty(folder: Path) -> None:
    """No adapter at all."""


def cut_off(folder: Path) -> None:
    write_adapter(trained(tiny_model(), ATTENTION), folder)
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def of_another_rank(folder: Path) -> None:
    write_adapter(trained(tiny_model(), ATTENTION.model_copy(update={"rank": 8})), folder)


def of_other_layers(folder: Path) -> None:
    write_adapter(trained(tiny_model(), LoraConfig(rank=4)), folder)


@pytest.mark.parametrize("write", [empty, cut_off, of_another_rank, of_other_layers])
def test_adapters_that_do_not_fit_change_nothing(write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path)
    model = trained(tiny_model(), ATTENTION)
    before = {name: tensor.clone() for name, tensor in adapter_weights(model)}
    with pytest.raises(CheckpointError, match="adapters"):
        load_adapter(model, tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in adapter_weights(model))


@pytest.mark.parametrize(
    ("family", "targets", "message"),
    [
        (
            "llama",
            ("no_such",),
            "no layer of this model is named 'no_such'; it has down_proj, .*, or all-linear",
        ),
        ("llama", ("q_proj", "no_such"), "no layer of this model is named 'no_such'; leave it out"),
        ("llama", ("q_proj", "embed_tokens"), r"model\.embed_tokens is a Embedding; name linear layers"),
        ("gpt_oss", ("q_proj", "down_proj"), "'down_proj'.*gate_up_proj is one tensor for all experts"),
    ],
)
def test_targets_that_cannot_have_adapters_are_refused_by_name(family: str, targets: tuple, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_lora(build(family), LoraConfig(target_modules=targets))


def test_a_tied_head_is_not_untied() -> None:
    with pytest.raises(ConfigError, match="the weight of lm_head is tied"):
        apply_lora(tiny_model(), LoraConfig(target_modules=("q_proj", "lm_head")))


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "gate_proj")])
def test_experts_that_get_no_adapters_are_named(targets: str | tuple) -> None:
    with pytest.warns(UserWarning, match=r"experts of llama4_text get no adapters: .*experts\.gate_up_proj"):
        apply_lora(build("llama4"), LoraConfig(target_modules=targets))


def test_missing_peft_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingDependencyError, match=r"zorro-rl\[lora\]"):
        apply_lora(tiny_model(), ATTENTION)


def test_a_copy_for_the_sampler_taken_before_adapters_stays_plain() -> None:
    model = tiny_model()
    sampler = copy_model(model)
    trained(model)
    copy_weights(base_manifest(model), merged_weights(model), sampler)
    assert not any("lora_" in name for name in weights_of(sampler))
    torch.testing.assert_close(logits(sampler), logits(model), rtol=1e-5, atol=1e-5)
