"""The documented patcher on padded batches, against the model's own forward of every row alone."""

import inspect

import numpy as np
import pytest
import torch

from arctic_platform.errors import ConfigError, InputError, UnsupportedModelError
from arctic_platform.forest import find_targets
from arctic_platform.rl.zorro_train import (
    ModelOutput,
    ModuleReconstructionPatcher,
    Qwen3ModelOncePatcher,
    QwenAttentionOncePatcher,
    ZoRRoTrain,
)
from arctic_platform.rl.zorro_train.tests import (
    build_qwen3,
    check_gradient_correctness,
    create_dummy_batch,
    padded_response_logprobs,
)
from tests.zorro_train.twins import build_model, gradients, pad, random_rows, relative, rows_alone, split

PROMPT_LEN, RESPONSE_LEN, ROLLOUTS = 12, 7, 3
FLASH = ("flash_attention_2", "flash_attention_3")
ATTENTION = ["eager", "sdpa", *(pytest.param(name, marks=pytest.mark.gpu) for name in FLASH)]


def dummy(add_padding: bool = True, **options) -> dict:
    return create_dummy_batch(2 * ROLLOUTS, 2, PROMPT_LEN, RESPONSE_LEN, add_padding=add_padding, seed=5, **options)


def live_rows(batch: dict) -> tuple[list[np.ndarray], list[np.ndarray]]:
    rows, masks = [], []
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True):
        rows.append(ids[mask].numpy())
        num_responses = int(mask[-batch["response_length"] :].sum())
        masks.append(np.arange(len(rows[-1])) >= len(rows[-1]) - num_responses)
    return rows, masks


def patched(model, batch: dict | None = None, **options):
    """A patched model, with the documented constructor call."""
    length = RESPONSE_LEN if batch is None else batch["response_length"]
    settings = {"max_token_len": 4096, "rollout_n": ROLLOUTS, "temperature": 1.0, "logits_optimization": "none"}
    patcher = Qwen3ModelOncePatcher(model, response_len=length, world_size=1, **(settings | options))
    return patcher, patcher.patch_forward()


def call(model, batch: dict, **options) -> ModelOutput:
    return model(
        input_ids=batch["input_ids"],
        position_ids=batch["position_ids"],
        attention_mask=batch["attention_mask"],
        use_cache=False,
        **options,
    )


def check_on_cuda(model_name, attn_impl, batch, rows, masks, use_split_attention, logits_optimization):
    """In bf16, as these kernels need it: no further from fp64 than three times the rows run alone."""
    if attn_impl == "flash_attention_3":
        pytest.importorskip("flash_attn_interface")
    exact = rows_alone(build_model(model_name, torch.bfloat16).double(), rows, masks)[0]
    plain = rows_alone(build_model(model_name, torch.bfloat16), rows, masks)[0]
    _, model = patched(
        build_model(model_name, torch.bfloat16).cuda(),
        attn_implementation=attn_impl,
        use_split_attention=use_split_attention,
        logits_optimization=logits_optimization,
    )
    on_cuda = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    logprobs = call(model, on_cuda).logprobs
    logprobs.sum().backward()
    assert (logprobs.cpu() - exact).abs().mean() <= 3 * (plain - exact).abs().mean()


@pytest.mark.parametrize("logits_optimization", ["none", "compute", "memory"])
@pytest.mark.parametrize("use_split_attention", [True, False], ids=["split", "nosplit"])
@pytest.mark.parametrize("use_padded_batch", [True, False], ids=["padded", "unpadded"])
@pytest.mark.parametrize("attn_impl", ATTENTION)
@pytest.mark.parametrize("model_name", ["qwen3", "llama"])
def test_qwen3_model_once_patcher(model_name, attn_impl, use_padded_batch, use_split_attention, logits_optimization):
    batch = dummy(use_padded_batch)
    rows, masks = live_rows(batch)
    if attn_impl in FLASH:
        check_on_cuda(model_name, attn_impl, batch, rows, masks, use_split_attention, logits_optimization)
        return
    reference = build_model(model_name)
    expected, expected_entropy = rows_alone(reference, rows, masks)
    weights = torch.linspace(-1, 1, len(expected))
    expected_gradients = gradients(reference, (expected * weights + expected_entropy * weights.flip(0)).sum())

    _, model = patched(
        build_model(model_name),
        attn_implementation=attn_impl,
        use_split_attention=use_split_attention,
        logits_optimization=logits_optimization,
    )
    output = call(model, batch, calculate_entropy=True)
    assert isinstance(output, ModelOutput)
    torch.testing.assert_close(output.logprobs, expected, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(output.entropy, expected_entropy, rtol=2e-6, atol=2e-6)
    ours = gradients(model, (output.logprobs * weights + output.entropy * weights.flip(0)).sum())
    assert relative(ours, expected_gradients) <= 1e-5
    assert call(model, batch).entropy is None


def test_constructor_takes_the_documented_arguments_in_order():
    names = list(inspect.signature(Qwen3ModelOncePatcher).parameters)[:7]
    assert names == [
        "model", "response_len", "max_token_len", "rollout_n", "temperature", "logits_optimization", "world_size"
    ]  # fmt: skip
    assert issubclass(Qwen3ModelOncePatcher, ModuleReconstructionPatcher)


@pytest.mark.parametrize("later", ["compute", "memory", "none"])
def test_patching_a_patched_model_again_replaces_the_first_patch(later):
    batch = dummy()
    model = build_model()
    before = padded_response_logprobs(model, batch)
    first, _ = patched(model)
    values = call(model, batch).logprobs
    second, _ = patched(model, logits_optimization=later, temperature=0.5)
    torch.testing.assert_close(call(model, batch, temperature=1.0).logprobs, values, rtol=2e-6, atol=2e-6)
    assert (call(model, batch).logprobs - values).abs().max() > 0.1
    with pytest.raises(InputError, match="undone"):
        first.unpatch_forward()
        first.forward_rows(*live_rows(batch))
    second.patch_forward()
    second.unpatch_forward()
    assert torch.equal(padded_response_logprobs(model, batch), before)


def test_undone_and_done_again_a_patch_shares_again():
    batch = dummy()
    patcher, model = patched(build_model())
    values = call(model, batch).logprobs
    stock = model.config._attn_implementation
    patcher.unpatch_forward()
    assert model.config._attn_implementation == "sdpa" != stock
    assert hasattr(model(input_ids=batch["input_ids"]), "logits")
    patcher.patch_forward()
    assert torch.equal(call(model, batch).logprobs, values)


@pytest.mark.parametrize("stock", ["eager", "sdpa"])
def test_undoing_restores_forward_and_attention(stock):
    batch = dummy()
    model = build_model(attn=stock)
    before = padded_response_logprobs(model, batch)
    patcher, _ = patched(model)
    patcher.unpatch_forward()
    assert model.config._attn_implementation == stock
    assert "forward" not in vars(model)
    assert torch.equal(padded_response_logprobs(model, batch), before)


@pytest.mark.parametrize("temperature", [0.3, 0.6, 1.7])
def test_temperature_of_patcher_and_of_call_divide_once(temperature):
    batch = dummy()
    rows, masks = live_rows(batch)
    expected, entropy = rows_alone(build_model(), rows, masks, temperature)
    _, model = patched(build_model(), temperature=temperature)
    for output in (
        call(model, batch, calculate_entropy=True),
        call(patched(build_model())[1], batch, calculate_entropy=True, temperature=temperature),
    ):
        torch.testing.assert_close(output.logprobs, expected, rtol=2e-6, atol=4e-6)
        torch.testing.assert_close(output.entropy, entropy, rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize("extra", [1, 3, 9])
@pytest.mark.parametrize("with_positions", [True, False], ids=["positions", "no-positions"])
def test_left_padding_shifts_nothing(extra, with_positions):
    rows, masks = split(["1 2 3 | 4 5", "1 2 3 | 6", "7 | 8 9 1"])
    _, model = patched(build_model())
    plain, shifted = pad(rows, masks), pad(rows, masks, extra)
    if not with_positions:
        shifted["position_ids"] = None
    ours = call(model, shifted, response_len=shifted["response_length"]).logprobs
    assert torch.equal(ours, call(model, plain, response_len=plain["response_length"]).logprobs)


@pytest.mark.parametrize("pad_id", [0, 6, 127])
def test_pad_id_is_never_read(pad_id):
    rows, masks = split(["0 0 5 | 6 0", "0 5 | 6", "5 | 6 0 0", "6 6 | 0"])
    _, model = patched(build_model())
    batch = pad(rows, masks, extra=2, pad_id=pad_id)
    expected, _ = rows_alone(build_model(), rows, masks)
    ours = call(model, batch, response_len=batch["response_length"]).logprobs
    torch.testing.assert_close(ours, expected, rtol=2e-6, atol=2e-6)


def test_attention_reads_the_attention_mask_and_no_loss_mask():
    rows, masks = split(["1 2 3 | 4 5", "1 2 | 3"])
    batch = pad(rows, masks)
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [0, 1, 1, 1, 0]]
    _, model = patched(build_model())
    ours = call(model, batch, response_len=2).logprobs
    torch.testing.assert_close(ours, rows_alone(build_model(), rows, masks)[0], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("with_mask", [True, False], ids=["ones", "no-mask"])
@pytest.mark.parametrize("use_split_attention", [True, False], ids=["split", "nosplit"])
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_rows_of_a_full_batch_do_not_see_each_other(attn, use_split_attention, with_mask):
    batch = dummy(add_padding=False)
    if not with_mask:
        batch["attention_mask"] = None
    _, model = patched(build_model(), attn_implementation=attn, use_split_attention=use_split_attention)
    before = call(model, batch).logprobs.reshape(-1, RESPONSE_LEN)
    batch["input_ids"][0, -2] = (batch["input_ids"][0, -2] + 1) % 100
    after = call(model, batch).logprobs.reshape(-1, RESPONSE_LEN)
    assert torch.equal(before[1:], after[1:]) and not torch.equal(before[0], after[0])


def test_positions_that_restart_do_not_join_rows():
    rows, masks = split(["1 2 | 3 4", "1 2 | 5 6"])
    patcher, _ = patched(build_model())
    forest = patcher.forward_rows(rows, masks).forest
    assert forest.position_ids.tolist() == [0, 1, 2, 3, 2, 3]
    expected, _ = rows_alone(build_model(), rows, masks)
    torch.testing.assert_close(patcher.forward_rows(rows, masks).logprobs, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_half_precision_with_left_padding_has_no_nan(dtype, attn):
    batch = pad(*split(["1 | 2", "1 2 3 4 5 | 6 7", "1 2 | 3"]), extra=4)
    _, model = patched(build_model(dtype=dtype), batch, attn_implementation=attn)
    output = call(model, batch, calculate_entropy=True)
    assert output.logprobs.dtype == torch.float32 and torch.isfinite(output.logprobs).all()
    assert torch.isfinite(gradients(model, (output.logprobs + output.entropy).sum())).all()


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]])
def test_one_value_per_answer_token_in_the_callers_order(order):
    rows, masks = split(["1 2 | 3", "1 2 | 4 5 6", "9 | 8 7", "1 2 |"])
    rows, masks = [rows[i] for i in order], [masks[i] for i in order]
    batch = pad(rows, masks, extra=1)
    _, model = patched(build_model(), batch)
    output = call(model, batch, calculate_entropy=True)
    assert output.logprobs.shape == output.entropy.shape == (sum(int(mask.sum()) for mask in masks),)
    torch.testing.assert_close(output.logprobs, rows_alone(build_model(), rows, masks)[0], rtol=2e-6, atol=2e-6)


def test_value_i_is_the_log_prob_of_answer_token_i_itself():
    rows, masks = split(["1 2 | 5 6"])
    batch = pad(rows, masks)
    model = build_model()
    logp = torch.log_softmax(model(torch.tensor([[1, 2, 5, 6]])).logits[0], -1)
    _, model = patched(model, batch)
    ours = call(model, batch).logprobs
    torch.testing.assert_close(ours, torch.stack([logp[1, 5], logp[2, 6]]), rtol=2e-6, atol=2e-6)
    assert abs(float(logp[1, 5] - logp[2, 6])) > 0.1


def test_no_grad_and_grad_passes_give_the_same_bits():
    batch = dummy()
    _, model = patched(build_model())
    with torch.no_grad():
        old = call(model, batch, temperature=0.6).logprobs
    assert torch.equal(call(model, batch, temperature=0.6).logprobs.detach(), old)


def test_gradient_checkpointing_through_the_patched_model_changes_no_gradient():
    batch = dummy()
    results = []
    for is_on in (False, True):
        _, model = patched(build_model())
        model.train()
        if is_on:
            model.gradient_checkpointing_enable()
        results.append(gradients(model, call(model, batch).logprobs.square().sum()))
    assert relative(results[1], results[0]) <= 1e-7


def test_pads_outside_the_mask_may_be_any_number():
    rows, masks = split(["1 2 3 | 4 5", "7 | 8"])
    _, model = patched(build_model())
    values = [call(model, pad(rows, masks, 1, pad_id), response_len=3).logprobs for pad_id in (0, -100, 10**6)]
    assert torch.equal(values[0], values[1]) and torch.equal(values[0], values[2])


def test_weights_that_are_wrapped_score_and_train_through_the_same_function():
    class LowRank(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            self.a = torch.nn.Parameter(torch.randn(inner.in_features, 2, generator=torch.Generator().manual_seed(3)))
            self.b = torch.nn.Parameter(torch.ones(2, inner.out_features))

        def forward(self, x):
            return self.inner(x) + x @ self.a @ self.b

    batch = dummy()
    models = [build_model(), build_model()]
    for model in models:
        for layer in model.model.layers:
            layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
    expected, _ = rows_alone(models[1], *live_rows(batch))
    _, model = patched(models[0])
    trained = call(model, batch).logprobs
    with torch.no_grad():
        scored = call(model, batch).logprobs
    assert torch.equal(trained, scored)
    torch.testing.assert_close(trained, expected, rtol=2e-6, atol=2e-6)
    assert relative(gradients(model, trained.sum()), gradients(models[1], expected.sum())) <= 1e-5


def test_logits_exist_at_predicting_positions_only():
    batch = dummy()
    patcher, model = patched(build_model())
    seen = []
    handle = model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    call(model, batch)
    handle.remove()
    rows, masks = live_rows(batch)
    forest = patcher.forward_rows(rows, masks).forest
    assert seen == [(len(find_targets(forest, masks).parents), 128)]
    assert seen[0][0] <= sum(int(mask.sum()) for mask in masks)


@pytest.mark.parametrize("where", ["left", "right"])
def test_documented_correctness_helper_reports_rounding_and_nothing_else(where):
    batch = dummy()
    patcher = Qwen3ModelOncePatcher(build_qwen3(), RESPONSE_LEN)
    result = check_gradient_correctness(patcher, batch, temperature=0.9)
    assert result.logprob_error <= 1e-5 and result.gradient_error <= 1e-5
    if where == "left":
        assert all(parameter.grad is None for parameter in patcher.model.parameters())


def test_attention_patcher_serves_a_pack_of_the_static_functions():
    batch = dummy()
    groups, unique = ZoRRoTrain.find_prompt_groups(
        batch["input_ids"], RESPONSE_LEN, attention_mask=batch["attention_mask"]
    )
    ids, positions, info = ZoRRoTrain.create_deduplicated_batch(
        batch["input_ids"], batch["position_ids"], RESPONSE_LEN, groups, unique, batch["attention_mask"], True
    )
    model = build_model()
    expected = torch.cat([model(torch.from_numpy(row)[None]).logits[0] for row in live_rows(batch)[0]])
    for is_split in (True, False):
        patcher = QwenAttentionOncePatcher(model, use_split_attention=is_split)
        patcher.patch_forward()
        logits = model(input_ids=ids, position_ids=positions, forest=patcher.plan(ids, info), use_cache=False).logits
        torch.testing.assert_close(ZoRRoTrain.reconstruct_sequences(logits, info)[0], expected, rtol=1e-5, atol=1e-5)
        patcher.unpatch_forward()
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("seed", range(3))
def test_attention_patcher_plans_any_order_and_empty_responses(seed):
    rows, masks = random_rows(seed)
    batch = pad(rows, masks)
    length, mask = batch["response_length"], batch["attention_mask"]
    groups, unique = ZoRRoTrain.find_prompt_groups(batch["input_ids"], length, attention_mask=mask)
    ids, positions, info = ZoRRoTrain.create_deduplicated_batch(
        batch["input_ids"], batch["position_ids"], length, groups, unique, mask, True
    )
    model = build_model()
    expected = torch.cat([model(torch.from_numpy(row)[None]).logits[0] for row in rows])
    patcher = QwenAttentionOncePatcher(model)
    patcher.patch_forward()
    logits = model(input_ids=ids, position_ids=positions, forest=patcher.plan(ids, info), use_cache=False).logits
    torch.testing.assert_close(ZoRRoTrain.reconstruct_sequences(logits, info)[0], expected, rtol=1e-5, atol=1e-5)


def test_attention_patcher_refuses_a_pack_with_padding():
    batch = dummy()
    groups, unique = ZoRRoTrain.find_prompt_groups(batch["input_ids"], RESPONSE_LEN)
    ids, _, info = ZoRRoTrain.create_deduplicated_batch(
        batch["input_ids"], batch["position_ids"], RESPONSE_LEN, groups, unique, batch["attention_mask"]
    )
    with pytest.raises(InputError, match="use_unpad=True"):
        QwenAttentionOncePatcher(build_model()).plan(ids, info)


def test_unpad_switch_warns_that_it_changes_nothing():
    with pytest.warns(UserWarning, match="use_unpad=False has no effect"):
        Qwen3ModelOncePatcher(build_model(), RESPONSE_LEN, use_unpad=False)


BAD_OPTIONS = {
    "unknown attention": ({"attn_implementation": "sdpa2"}, ConfigError, "choose one of eager, sdpa"),
    "flash without its kernels": ({"attn_implementation": "flash_attention_2"}, ConfigError, "use sdpa or eager"),
    "unknown logits mode": ({"logits_optimization": "disk"}, ConfigError, "none, compute, memory"),
    "temperature 0": ({"temperature": 0.0}, InputError, "above 0"),
    "temperature NaN": ({"temperature": float("nan")}, InputError, "above 0"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_option_is_refused_and_leaves_the_model_as_it_was(name):
    options, kind, words = BAD_OPTIONS[name]
    model = build_model()
    with pytest.raises(kind, match=words) as error:
        patched(model, **options)
    assert "\n" not in str(error.value)
    assert model.config._attn_implementation == "sdpa" and "forward" not in vars(model)


BAD_CALLS = {
    "cache": (lambda b: {"use_cache": True}, "use_cache"),
    "M-RoPE positions": (lambda b: {"position_ids": torch.zeros(3, 1, 19, dtype=torch.long)}, "position_ids has shape"),
    "mask of another shape": (lambda b: {"attention_mask": b["attention_mask"][:, 1:]}, "attention_mask has shape"),
    "mask with a hole": (
        lambda b: {"attention_mask": torch.ones(6, 19).long().index_fill(1, torch.tensor([4]), 0)},
        "hole",
    ),
    "positions of the padded columns": (lambda b: {"position_ids": torch.arange(19).expand(6, 19) + 1}, "position_ids"),
    "flat ids": (lambda b: {"input_ids": b["input_ids"][0]}, "input_ids must have shape"),
    "pad id -100 inside the mask": (
        lambda b: {"input_ids": b["input_ids"].index_fill(1, torch.tensor([4]), -100)},
        "outside",
    ),
    "id outside the vocabulary": (lambda b: {"input_ids": b["input_ids"].index_fill(1, torch.tensor([4]), 128)}, "128"),
    "response longer than the row": (lambda b: {"response_len": 20}, "response_len=20"),
    "response that is the whole row": (lambda b: {"response_len": 19}, "nothing predicts it"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_batch_is_refused_in_one_line(name):
    make, words = BAD_CALLS[name]
    batch = dummy(add_padding=False)
    _, model = patched(build_model())
    arguments = {key: batch[key] for key in ("input_ids", "position_ids", "attention_mask")} | {"use_cache": False}
    with pytest.raises(InputError, match=words) as error:
        model(**(arguments | make(batch)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("is_attention", [True, False], ids=["attention", "module"])
def test_dropout_is_refused_in_training_and_absent_in_evaluation(is_attention):
    model = build_model("qwen3" if is_attention else "gpt2")
    if is_attention:
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
    else:
        model.transformer.drop.p = 0.1
    _, model = patched(model)
    batch = dummy()
    model.train()
    with pytest.raises(InputError, match=r"dropout.*model\.eval\(\)"):
        call(model, batch)
    model.eval()
    assert torch.isfinite(call(model, batch).logprobs).all()


def test_model_whose_attention_is_outside_the_registry_is_refused_by_name():
    from transformers import AutoModelForCausalLM, BloomConfig

    model = AutoModelForCausalLM.from_config(BloomConfig(hidden_size=64, n_layer=2, n_head=2, vocab_size=128))
    with pytest.raises(UnsupportedModelError, match="BloomForCausalLM"):
        Qwen3ModelOncePatcher(model, RESPONSE_LEN)


def test_all_ones_mask_of_gemma_runs():
    from transformers import AutoModelForCausalLM, Gemma2Config

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Gemma2Config(**sizes, num_key_value_heads=1, head_dim=32, vocab_size=128, sliding_window=4)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    batch = dummy(add_padding=False)
    expected, _ = rows_alone(model, *live_rows(batch))
    _, model = patched(model)
    torch.testing.assert_close(call(model, batch).logprobs, expected, rtol=2e-6, atol=2e-6)
