"""The fused passes against the model's own modules, their slow obvious twin."""

import copy
import logging

import numpy as np
import pytest
import torch
from torch import nn

from arctic_platform.forest import ATTENTION_NAME, ForestPlan, build_forest
from arctic_platform.rl.protocol import SamplingParams
from arctic_platform.rl.zorro_inference import Sampler
from arctic_platform.rl.zorro_inference.fused import WINDOWS, FusedModel
from arctic_platform.rl.zorro_inference.probe import attention_of
from tests.zorro_inference.models import build_model, token_lists
from tests.zorro_train.architectures import FAMILIES, VOCAB, build

FUSED = [family.lower() for family in WINDOWS]
LONG = SamplingParams(n=2, max_tokens=40, seed=0, temperature=0.7, ignore_eos=True)


def long_plan() -> ForestPlan:
    """More tokens than one tile, and a branch."""
    ids = np.random.default_rng(0).integers(3, VOCAB, 600).tolist()
    return ForestPlan(build_forest([ids, [*ids[:300], 5, 6, 7]]))


@torch.no_grad()
def by_modules(model, plan: ForestPlan) -> torch.Tensor:
    with attention_of(model, ATTENTION_NAME):
        ids, positions = plan.input_ids, plan.position_ids
        return model(input_ids=ids, position_ids=positions, forest=plan, use_cache=False).logits[0].double()


@torch.no_grad()
def by_products(model, plan: ForestPlan, keep: torch.Tensor | int = 0) -> torch.Tensor:
    fused = FusedModel(model)
    assert fused.fits()
    return fused.logits(plan.input_ids, plan.position_ids, plan, keep).double()


def with_clear_weights(name: str) -> nn.Module:
    """In fp64; norms and biases are no ones and zeros."""
    model, random = build(name, torch.float64).eval(), torch.Generator().manual_seed(1)
    for param in model.parameters():
        if param.dim() == 1:
            param.data += 0.1 * torch.randn(param.shape, generator=random, dtype=param.dtype)
    return model


@pytest.mark.parametrize("name", FUSED)
def test_fused_pass_is_that_of_the_modules(name):
    model, plan = with_clear_weights(name), long_plan()
    exact = by_modules(model, plan)
    torch.testing.assert_close(by_products(model, plan), exact, atol=1e-12, rtol=1e-12)
    keep = torch.tensor([1, 299, 602])
    torch.testing.assert_close(by_products(model, plan, keep), exact[keep], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUSED)
def test_other_precisions_are_as_close_as_the_modules(name, dtype):
    model, plan = with_clear_weights(name).to(dtype), long_plan()
    exact = by_modules(copy.deepcopy(model).double(), plan)
    ours, theirs = (by(model, plan) - exact for by in (by_products, by_modules))
    assert ours.abs().max() <= 2 * theirs.abs().max()
    assert ours.abs().mean() <= 1.5 * theirs.abs().mean()


def test_other_families_run_through_their_modules():
    fused = {name for name in FAMILIES if FusedModel(build(name)).fits()}
    assert fused == set(FUSED)


def hook(model):
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)


def replace_forward(model):
    model.lm_head.forward = model.lm_head.forward


def replace_layer(model):
    class Linear(nn.Linear):
        """As peft's: the same name, and more behind it."""

    model.model.layers[0].self_attn.q_proj.__class__ = Linear


def other_activation(model):
    model.model.layers[1].mlp.act_fn = nn.GELU()


@pytest.mark.parametrize("change", [hook, replace_forward, replace_layer, other_activation])
def test_changed_modules_are_run(change):
    model = build_model()
    change(model)
    assert not FusedModel(model).fits()


def wrap_layer(model):
    layers = model.model.layers
    layers[0].mlp.up_proj = nn.Sequential(layers[0].mlp.up_proj)


@pytest.mark.parametrize("change", [hook, wrap_layer])
def test_change_of_later_counts_too(change):
    model = build_model()
    fused = FusedModel(model)
    assert fused.fits()
    change(model)
    assert not fused.fits()


def test_model_that_comes_out_differently_is_run_through_its_modules(caplog):
    model = build_model()
    norm_class = type(model.model.norm)

    class Doubling(norm_class):
        def forward(self, hidden_states):
            return 2 * super().forward(hidden_states)

    Doubling.__name__, Doubling.__module__ = norm_class.__name__, norm_class.__module__
    model.model.layers[0].input_layernorm.__class__ = Doubling
    with caplog.at_level(logging.WARNING):
        assert not FusedModel(model).fits()
    assert "comes out differently without its modules" in caplog.text


def test_window_that_is_not_asked_for_is_noticed(monkeypatch):
    monkeypatch.setitem(WINDOWS, "Mistral", lambda attention: None)
    assert not FusedModel(build_model("mistral_window")).fits()


@pytest.mark.parametrize("params", [LONG, LONG.model_copy(update={"temperature": 0.0, "n": 1})])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral_window"])
def test_sampler_draws_what_it_draws_through_the_modules(family, params):
    model = build_model(family)
    prompts = np.random.default_rng(0).integers(6, 100, (3, 150)).tolist()
    fused, plain = (
        Sampler(model, eos_token_ids=[], pack_weights=pack, probe=False).generate(prompts, params)
        for pack in (True, False)
    )
    assert token_lists(fused) == token_lists(plain)
    for ours, theirs in zip(fused.rollouts, plain.rollouts, strict=True):
        assert np.abs(np.subtract(ours.logprobs, theirs.logprobs)).max() < 1e-4


def test_new_weights_count_from_the_next_call_on():
    model, other = build_model(), build_model(seed=1)
    prompts = np.random.default_rng(0).integers(6, 100, (2, 200)).tolist()
    sampler = Sampler(model, eos_token_ids=[], probe=False)
    sampler.generate(prompts, LONG)
    model.load_state_dict(other.state_dict())
    sampler.update_weights(1)
    expected = Sampler(other, eos_token_ids=[], probe=False).generate(prompts, LONG)
    assert token_lists(sampler.generate(prompts, LONG)) == token_lists(expected)


def test_model_is_left_on_its_own_attention():
    model = build_model()
    own = model.config._attn_implementation
    Sampler(model, eos_token_ids=[], probe=False).generate([list(range(6, 60))], LONG)
    assert model.config._attn_implementation == own
