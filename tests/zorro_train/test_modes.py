"""Ways to run the same pass: compiled, with adapters, in half precision, with an fp32 head."""

import numpy as np
import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from torch._dynamo.utils import counters

from arctic_platform.errors import ConfigError, InputError, UnsupportedModelError
from arctic_platform.rl.zorro_train import ModuleReconstructionPatcher
from arctic_platform.rl.zorro_train.actor import DeduplicatedActor
from arctic_platform.rl.zorro_train.staged import plan_stages, run_stages
from arctic_platform.rl.zorro_train.tests import create_dummy_batch
from tests.zorro_train.twins import build_model, gradients, pad, random_rows, relative, rows_alone

# --- torch.compile


@pytest.fixture
def count_graphs():
    torch._dynamo.reset()
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


def test_twenty_steps_of_random_lengths_compile_twice_at_most(count_graphs):
    """Once for training, once for scoring without gradients."""
    compiled = ModuleReconstructionPatcher(build_model("qwen2-window"), compile_backend="aot_eager")
    plain = ModuleReconstructionPatcher(build_model("qwen2-window"))
    for step in range(20):
        rows, masks = random_rows(step)
        if step % 3 == 0:
            with torch.no_grad():
                compiled.forward_rows(rows, masks)
        ours, theirs = (one.forward_rows(rows, masks).logprobs for one in (compiled, plain))
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)
        if step % 6 == 1:
            grads = [gradients(one.model, x.square().sum()) for one, x in ((compiled, ours), (plain, theirs))]
            assert relative(*grads) <= 1e-6
    assert count_graphs() <= 2


def test_compiled_body_takes_checkpointing_and_stages(count_graphs):
    rows, masks = random_rows(3)
    compiled = ModuleReconstructionPatcher(build_model(), compile_backend="aot_eager")
    compiled.model.gradient_checkpointing_enable({"use_reentrant": False})
    compiled.model.train()
    plain = ModuleReconstructionPatcher(build_model())
    expected = gradients(plain.model, plain.forward_rows(rows, masks).logprobs.square().sum())
    ours = gradients(compiled.model, compiled.forward_rows(rows, masks).logprobs.square().sum())
    assert relative(ours, expected) <= 1e-6
    stages = plan_stages(compiled, rows, masks, max_token_len=40, min_saving=0.0)
    for one in run_stages(compiled, rows, masks, stages):
        one.values.logprobs.square().sum().backward()
    staged = torch.cat([p.grad.flatten() for p in compiled.model.parameters()])
    assert relative(staged, expected) <= 1e-6


@pytest.mark.slow
def test_inductor_is_as_exact_as_it_is_elsewhere(count_graphs):
    """A model that torch.compile returned is unwrapped and its body compiled."""
    patcher = ModuleReconstructionPatcher(torch.compile(build_model()))
    plain = ModuleReconstructionPatcher(build_model())
    for step in range(3):
        rows, masks = random_rows(step)
        ours, theirs = (one.forward_rows(rows, masks).logprobs for one in (patcher, plain))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert relative(gradients(patcher.model, ours.sum()), gradients(plain.model, theirs.sum())) <= 2e-5
    assert count_graphs() == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compile_backend": "gcc"}, "compile_backend='gcc' is not known; choose one of"),
        ({"compile_backend": "inductor", "attn_implementation": "flex_attention"}, "needs attention by segments"),
        ({"compile_backend": "inductor", "use_split_attention": False}, "needs attention by segments"),
    ],
)
def test_what_cannot_be_compiled_is_refused_and_leaves_the_model(options, message):
    model = build_model()
    with pytest.raises(ConfigError, match=message):
        ModuleReconstructionPatcher(model, **options)
    assert model.config._attn_implementation == "sdpa"


# --- adapters


def lora(dtype: torch.dtype = torch.float32, family: str = "qwen3", **options):
    """A model with LoRA whose second matrices are not zero, as after some training."""
    targets = ["c_attn"] if family == "gpt2" else ["q_proj", "v_proj", "down_proj"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = get_peft_model(build_model(family, dtype), LoraConfig(r=4, target_modules=targets, **options))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def adapter_gradients(model, loss) -> torch.Tensor:
    live = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, live)])


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head"]}, {"fan_in_fan_out": False, "use_dora": True}])
def test_adapters_get_the_gradients_of_rows_run_alone_and_nothing_else_gets_any(options, is_checkpointed):
    model, twin = lora(**options), lora(**options)
    patcher = ModuleReconstructionPatcher(model)
    if is_checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    rows, masks = random_rows(4)
    expected, _ = rows_alone(twin, rows, masks)
    ours = patcher.forward_rows(rows, masks).logprobs
    torch.testing.assert_close(ours, expected, rtol=2e-6, atol=2e-6)
    theirs = adapter_gradients(twin, expected.square().sum())
    assert relative(adapter_gradients(model, ours.square().sum()), theirs) <= 1e-5
    patcher.forward_rows(rows, masks).logprobs.sum().backward()
    touched = {name for name, p in model.named_parameters() if p.grad is not None}
    assert touched == {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(touched) < len(list(model.parameters())) / 2


@pytest.mark.parametrize("mode", ["none", "compute", "memory"])
def test_an_adapter_on_the_head_is_part_of_the_head(mode):
    options = {"target_modules": ["q_proj", "lm_head"]}
    model, twin = (
        get_peft_model(build_model(), LoraConfig(r=4, init_lora_weights="gaussian", **options)) for _ in range(2)
    )
    with torch.no_grad():
        for one in (model, twin):
            for at, (name, parameter) in enumerate(one.named_parameters()):
                if "lora_" in name:
                    parameter.copy_(torch.linspace(-0.1, 0.1 + at / 100, parameter.numel()).reshape(parameter.shape))
    patcher = ModuleReconstructionPatcher(model.eval(), logits_optimization=mode)
    rows, masks = random_rows(5)
    expected, _ = rows_alone(twin.eval(), rows, masks)
    ours = patcher.forward_rows(rows, masks).logprobs
    torch.testing.assert_close(ours, expected, rtol=2e-6, atol=2e-6)
    theirs = adapter_gradients(twin, expected.sum())
    assert relative(adapter_gradients(model, ours.sum()), theirs) <= 1e-5


def test_disabled_adapters_score_the_base_model():
    model = lora()
    patcher = ModuleReconstructionPatcher(model)
    rows, masks = random_rows(6)
    with torch.no_grad(), model.disable_adapter():
        base = patcher.forward_rows(rows, masks).logprobs
    torch.testing.assert_close(base, rows_alone(build_model(), rows, masks)[0].detach(), rtol=2e-6, atol=2e-6)


def test_scores_without_gradients_are_those_of_training_with_adapters():
    patcher = ModuleReconstructionPatcher(lora())
    rows, masks = random_rows(7)
    with torch.no_grad():
        scored = patcher.forward_rows(rows, masks).logprobs
    assert torch.equal(scored, patcher.forward_rows(rows, masks).logprobs.detach())


def test_patched_forward_answers_through_the_wrapper_too():
    rows, masks = random_rows(8)
    model = lora()
    batch = pad(rows, masks)
    patcher = ModuleReconstructionPatcher(model, response_len=batch["responses"].shape[1])
    inner = patcher.patch_forward()
    fields = {name: batch[name] for name in ("input_ids", "position_ids", "attention_mask")}
    outer = model(**fields, use_cache=False)
    assert torch.equal(outer.logprobs, inner(**fields, use_cache=False).logprobs)
    with pytest.raises(InputError, match="labels has no meaning"):
        model(**fields, use_cache=False, labels=batch["input_ids"])
    patcher.unpatch_forward()
    assert hasattr(model(input_ids=batch["input_ids"]), "logits")


def test_actor_takes_a_model_with_adapters():
    batch = create_dummy_batch(4, 2, 8, 5, "cpu", True, True, seed=1, vocab_size=100)
    actor = DeduplicatedActor(lora(), device="cpu")
    actor.compute_policy_loss_and_backward(batch)
    touched = {name for name, p in actor.model.named_parameters() if p.grad is not None}
    assert touched and all("lora_" in name for name in touched)


def test_adapters_with_dropout_or_tokens_of_their_own_are_refused():
    patcher = ModuleReconstructionPatcher(lora(lora_dropout=0.1))
    patcher.model.train()
    with pytest.raises(InputError, match="dropout is active in"):
        patcher.forward_rows(*random_rows(1))
    prefixed = get_peft_model(build_model(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(UnsupportedModelError, match="adds tokens in front of every row"):
        ModuleReconstructionPatcher(prefixed)


# --- half precision


def errors_of_half(dtype: torch.dtype, **options) -> tuple[float, float, float, float]:
    """Mean log-prob and relative gradient errors against fp64: ours, then those of rows run alone in `dtype`."""
    rows, masks = random_rows(2)
    reference = build_model(dtype=dtype).double()
    exact = rows_alone(reference, rows, masks)[0]
    exact_gradient = gradients(reference, exact.sum())
    plain = build_model(dtype=dtype)
    theirs = rows_alone(plain, rows, masks)[0]
    their_gradient = gradients(plain, theirs.sum()).double()
    patcher = ModuleReconstructionPatcher(build_model(dtype=dtype), **options)
    ours = patcher.forward_rows(rows, masks).logprobs
    our_gradient = gradients(patcher.model, ours.sum()).double()
    return (
        float((ours - exact).detach().abs().mean()),
        relative(our_gradient, exact_gradient),
        float((theirs - exact).detach().abs().mean()),
        relative(their_gradient, exact_gradient),
    )


@pytest.mark.parametrize("mode", ["none", "compute", "memory"])
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("fp32_lm_head", [False, True])
def test_bf16_errors_are_at_most_those_of_the_plain_pass_and_three_times_for_gradients(mode, attn, fp32_lm_head):
    ours, gradient, plain, plain_gradient = errors_of_half(
        torch.bfloat16, logits_optimization=mode, attn_implementation=attn, fp32_lm_head=fp32_lm_head
    )
    assert ours <= 2 * plain
    assert gradient <= 3 * plain_gradient


def test_fp32_head_computes_logits_in_fp32_and_sends_its_gradient_to_the_half_weights():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 64, generator=generator).bfloat16()
    narrow, wide = (
        ModuleReconstructionPatcher(build_model(dtype=torch.bfloat16), fp32_lm_head=is_on).head
        for is_on in (False, True)
    )
    exact = hidden.double() @ wide.projection.weight.double().T
    assert wide(hidden).dtype == torch.float32 and narrow(hidden).dtype == torch.bfloat16
    assert (wide(hidden) - exact).abs().max() <= 1e-3 * (narrow(hidden) - exact).abs().max()
    wide(hidden).sum().backward()
    assert wide.projection.weight.grad.dtype == torch.bfloat16


def test_fp32_head_changes_nothing_where_the_model_is_fp32():
    rows, masks = random_rows(3)
    narrow, wide = (ModuleReconstructionPatcher(build_model(), fp32_lm_head=is_on) for is_on in (False, True))
    assert torch.equal(narrow.forward_rows(rows, masks).logprobs, wide.forward_rows(rows, masks).logprobs)


def test_peak_of_the_logits_reaches_the_pass():
    """A tiny peak means one predicting position at a time: many calls of the head, the same values."""
    rows, masks = random_rows(3)
    patcher = ModuleReconstructionPatcher(
        build_model(), logits_optimization="memory", logits_optimization_peak_mem_size_in_gib=1e-9
    )
    plain = ModuleReconstructionPatcher(build_model()).forward_rows(rows, masks).logprobs
    torch.testing.assert_close(patcher.forward_rows(rows, masks).logprobs, plain, rtol=2e-6, atol=2e-6)
    with pytest.raises(ConfigError, match="no effect with logits_optimization='none'"):
        ModuleReconstructionPatcher(build_model(), logits_optimization_peak_mem_size_in_gib=1.0)


def test_flex_attention_scores_on_cpu_and_names_the_missing_backward():
    rows, masks = random_rows(3)
    patcher = ModuleReconstructionPatcher(build_model(), attn_implementation="flex_attention")
    with torch.no_grad():
        ours = patcher.forward_rows(rows, masks).logprobs
    torch.testing.assert_close(ours, rows_alone(build_model(), rows, masks)[0].detach(), rtol=2e-6, atol=2e-6)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="flex_attention has no backward on CPU"):
            patcher.forward_rows(rows, masks)


def test_rows_of_numpy_and_of_lists_are_the_same_rows():
    rows, masks = random_rows(3)
    patcher = ModuleReconstructionPatcher(build_model())
    as_lists = patcher.forward_rows([row.tolist() for row in rows], [mask.tolist() for mask in masks]).logprobs
    assert torch.equal(as_lists, patcher.forward_rows(rows, [np.asarray(mask) for mask in masks]).logprobs)
