import inspect
import warnings

import pytest
import torch

from arctic_platform.errors import ConfigError, InputError, NonFiniteError
from arctic_platform.rl.zorro_train import DeduplicatedActor, ModelOutput, Qwen3ModelOncePatcher
from arctic_platform.rl.zorro_train.actor import CLIP_RATIO, KL_COEF
from arctic_platform.rl.zorro_train.tests import create_dummy_batch, gradients_of, padded_response_logprobs
from tests.zorro_train.twins import build_model, relative

PROMPT_LEN, RESPONSE_LEN = 9, 5


def make_actor(**options) -> DeduplicatedActor:
    settings = {"device": "cpu", "dtype": torch.float32} | options
    return DeduplicatedActor(settings.pop("model", None) or build_model(), **settings)


def make_batch(**options) -> dict:
    batch = create_dummy_batch(6, 2, PROMPT_LEN, RESPONSE_LEN, add_padding=True, seed=1, **options)
    with torch.no_grad():
        mask = batch["attention_mask"][:, PROMPT_LEN:].bool()
        near = padded_response_logprobs(build_model(), batch)
    for name, shift in (("old_log_probs", 0.3), ("ref_log_prob", -0.2)):
        noise = shift * torch.randn(mask.shape, generator=torch.Generator().manual_seed(2))
        batch[name] = torch.zeros(mask.shape).masked_scatter(mask, near) + noise.masked_fill(~mask, 0.0)
    return batch


def flat_gradients(actor: DeduplicatedActor) -> torch.Tensor:
    return torch.cat([grad.flatten() for grad in gradients_of(actor.model).values() if grad is not None])


def plain_update(batch: dict, kl: bool, loss_mask: torch.Tensor | None = None, temperature: float = 1.0):
    """PPO with the k3 penalty written out on the padded batch: metrics and gradients."""
    model = build_model()
    mask = batch["attention_mask"][:, PROMPT_LEN:].bool()
    values = padded_response_logprobs(model, batch, temperature)
    logprobs = torch.zeros(mask.shape).masked_scatter(mask, values)
    counted = mask if loss_mask is None else mask & loss_mask.bool()
    ratio = torch.exp(logprobs - batch["old_log_probs"])
    plain = -ratio * batch["advantages"]
    clipped = -ratio.clamp(1 - CLIP_RATIO, 1 + CLIP_RATIO) * batch["advantages"]
    log_ref = batch["ref_log_prob"] - logprobs
    metrics = {
        "actor/pg_loss": torch.maximum(plain, clipped)[counted].sum() / counted.sum().clamp(min=1),
        "actor/kl_loss": (log_ref.exp() - 1 - log_ref)[counted].sum() / counted.sum().clamp(min=1),
        "actor/pg_clipfrac": (clipped > plain)[counted].float().mean(),
        "actor/ppo_kl": (batch["old_log_probs"] - logprobs)[counted].mean(),
    }
    loss = metrics["actor/pg_loss"] + (KL_COEF * metrics["actor/kl_loss"] if kl else 0.0)
    loss.backward()
    grads = torch.cat([p.grad.flatten() for p in model.parameters()])
    return {name: float(value) for name, value in (metrics | {"actor/policy_loss": loss}).items()}, grads


def test_constructor_and_methods_have_the_documented_signatures():
    parameters = inspect.signature(DeduplicatedActor).parameters
    assert {name: p.default for name, p in parameters.items() if name != "model_name_or_path"} == {
        "device": "cuda",
        "logits_optimization": "none",
        "use_split_attention": True,
        "attn_implementation": "eager",
        "world_size": 1,
        "max_token_len": 4096,
        "dtype": torch.bfloat16,
    }
    assert next(iter(parameters)) == "model_name_or_path"
    assert list(inspect.signature(DeduplicatedActor.patch).parameters) == [
        "self", "response_len", "rollout_n", "temperature"
    ]  # fmt: skip
    assert list(inspect.signature(DeduplicatedActor.forward).parameters) == [
        "self", "micro_batch", "temperature", "calculate_entropy"
    ]  # fmt: skip
    assert list(inspect.signature(DeduplicatedActor.compute_policy_loss_and_backward).parameters) == [
        "self", "micro_batch", "temperature", "gradient_accumulation"
    ]  # fmt: skip


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("mode", ["none", "compute", "memory"])
@pytest.mark.parametrize("is_split", [True, False], ids=["split", "nosplit"])
def test_forward_returns_packed_values_of_the_live_response_tokens(attn, mode, is_split):
    actor = make_actor(attn_implementation=attn, logits_optimization=mode, use_split_attention=is_split)
    batch = make_batch()
    output = actor.forward(batch, temperature=0.8, calculate_entropy=True)
    assert isinstance(output, ModelOutput)
    expected = padded_response_logprobs(build_model(), batch, 0.8)
    torch.testing.assert_close(output.logprobs, expected, rtol=5e-6, atol=5e-6)
    assert output.entropy.shape == expected.shape and (output.entropy >= 0).all()
    assert actor.forward(batch).entropy is None


def test_forward_patches_by_itself_and_patch_sets_the_default_temperature():
    batch = make_batch()
    actor = make_actor()
    assert actor.patcher is None
    values = actor.forward(batch).logprobs
    patcher = actor.patch(RESPONSE_LEN, 3, 0.5)
    assert isinstance(patcher, Qwen3ModelOncePatcher)
    assert (patcher.response_len, patcher.rollout_n, patcher.temperature) == (RESPONSE_LEN, 3, 0.5)
    torch.testing.assert_close(actor.forward(batch, temperature=1.0).logprobs, values)
    arguments = {key: batch[key] for key in ("input_ids", "position_ids", "attention_mask")}
    direct = actor.model(**arguments, use_cache=False).logprobs
    torch.testing.assert_close(direct, actor.forward(batch, temperature=0.5).logprobs)


@pytest.mark.parametrize("left_out", ["responses", "response_length", "position_ids"])
def test_batches_name_their_response_one_way_or_the_other(left_out):
    batch = make_batch()
    actor = make_actor()
    full = actor.forward(batch).logprobs
    assert torch.equal(actor.forward({k: v for k, v in batch.items() if k != left_out}).logprobs, full)


def test_response_length_of_the_patch_serves_a_batch_that_names_none():
    batch = make_batch()
    bare = {key: batch[key] for key in ("input_ids", "position_ids", "attention_mask")}
    actor = make_actor()
    with pytest.raises(InputError, match="response length"):
        actor.forward(bare)
    actor.patch(RESPONSE_LEN, 3, 1.0)
    assert torch.equal(actor.forward(bare).logprobs, actor.forward(batch).logprobs)


def test_batches_of_other_shapes_follow_one_another():
    actor = make_actor()
    for sizes in ((4, 2, 6, 3), (3, 1, 11, 8), (1, 1, 2, 1)):
        batch = create_dummy_batch(*sizes, add_padding=True, seed=4)
        expected = padded_response_logprobs(build_model(), batch)
        torch.testing.assert_close(actor.forward(batch).logprobs, expected, rtol=5e-6, atol=5e-6)


def test_padded_form_holds_the_same_values_and_zeros_at_padding():
    batch = make_batch()
    actor = make_actor()
    output = actor.forward(batch, calculate_entropy=True)
    entropy, logprobs = actor._forward_micro_batch(batch, temperature=1.0, calculate_entropy=True)
    mask = batch["attention_mask"][:, PROMPT_LEN:].bool()
    assert torch.equal(logprobs[mask], output.logprobs) and torch.equal(entropy[mask], output.entropy)
    assert (logprobs[~mask] == 0).all() and (entropy[~mask] == 0).all()
    assert actor._forward_micro_batch(batch)[0] is None


@pytest.mark.parametrize("kl", [True, False], ids=["with-reference", "no-reference"])
@pytest.mark.parametrize("budget", [4096, 30, 1])
def test_update_equals_ppo_written_out_on_the_padded_batch(kl, budget):
    batch = make_batch()
    expected, expected_gradients = plain_update(batch, kl, temperature=0.9)
    if not kl:
        del batch["ref_log_prob"], expected["actor/kl_loss"]
    actor = make_actor(max_token_len=budget)
    actor.train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if budget == 1 else "error")
        metrics = actor.compute_policy_loss_and_backward(batch, temperature=0.9)
    assert metrics.keys() == expected.keys() | {"actor/loss"}
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert metrics["actor/loss"] == metrics["actor/policy_loss"]
    assert 0 < metrics["actor/pg_clipfrac"] < 1
    assert relative(flat_gradients(actor), expected_gradients) <= 1e-5


def test_gradients_of_accumulated_calls_add_up():
    batch = make_batch()
    actor = make_actor()
    actor.compute_policy_loss_and_backward(batch)
    once = flat_gradients(actor)
    actor.model.zero_grad()
    for _ in range(4):
        metrics = actor.compute_policy_loss_and_backward(batch, gradient_accumulation=4)
    assert relative(flat_gradients(actor), once) <= 1e-6
    assert metrics["actor/loss"] == pytest.approx(metrics["actor/policy_loss"] / 4)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_ratio_is_one_when_the_old_values_come_from_forward(temperature):
    batch = make_batch()
    actor = make_actor()
    with torch.no_grad():
        _, batch["old_log_probs"] = actor._forward_micro_batch(batch, temperature=temperature)
    metrics = actor.compute_policy_loss_and_backward(batch, temperature=temperature)
    assert metrics["actor/ppo_kl"] == 0.0 and metrics["actor/pg_clipfrac"] == 0.0


def test_ratio_is_one_without_old_values():
    batch = make_batch()
    del batch["old_log_probs"]
    metrics = make_actor().compute_policy_loss_and_backward(batch)
    assert metrics["actor/ppo_kl"] == 0.0 and metrics["actor/pg_clipfrac"] == 0.0


def test_opposite_advantages_of_equal_rows_cancel_and_equal_ones_double():
    batch = make_batch()
    del batch["ref_log_prob"], batch["old_log_probs"]
    twice = {k: v[[0, 0]] if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    twice["advantages"] = torch.tensor([[1.0], [-1.0]]).expand(2, RESPONSE_LEN)
    actor = make_actor()
    actor.compute_policy_loss_and_backward(twice)
    assert flat_gradients(actor).abs().max() <= 1e-6
    results = []
    for rows in ([0, 0], [0]):
        actor.model.zero_grad()
        part = {k: v[rows] if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        part["advantages"] = torch.ones(len(rows), RESPONSE_LEN)
        actor.compute_policy_loss_and_backward(part, gradient_accumulation=1)
        results.append(flat_gradients(actor) * len(rows))
    assert relative(results[0], 2 * results[1]) <= 1e-5


@pytest.mark.parametrize("pattern", [(0, 0, 1, 1, 1), (1, 0, 1, 0, 1)])
def test_response_mask_takes_tokens_out_of_the_loss(pattern):
    batch = make_batch()
    batch["response_mask"] = torch.tensor(pattern).expand(6, RESPONSE_LEN)
    expected, expected_gradients = plain_update(batch, True, batch["response_mask"])
    actor = make_actor()
    metrics = actor.compute_policy_loss_and_backward(batch)
    assert metrics["actor/policy_loss"] == pytest.approx(expected["actor/policy_loss"], rel=1e-4, abs=1e-6)
    assert relative(flat_gradients(actor), expected_gradients) <= 1e-5


@pytest.mark.parametrize("budget", [4096, 20])
def test_batch_without_loss_tokens_has_loss_zero_and_gradients_zero(budget):
    batch = make_batch()
    batch["response_mask"] = torch.zeros(6, RESPONSE_LEN)
    actor = make_actor(max_token_len=budget)
    metrics = actor.compute_policy_loss_and_backward(batch)
    assert set(metrics.values()) == {0.0}
    assert flat_gradients(actor).abs().max() == 0.0


def test_batch_without_response_tokens_has_loss_zero():
    batch = make_batch()
    batch["attention_mask"][:, PROMPT_LEN:] = 0
    batch["position_ids"] = None
    metrics = make_actor().compute_policy_loss_and_backward(batch)
    assert metrics["actor/loss"] == 0.0


def test_scoring_in_several_passes_gives_the_values_in_row_order():
    batch = make_batch()
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    batch = {k: v[order] if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    with torch.no_grad():
        whole = make_actor().forward(batch, calculate_entropy=True)
        parts = make_actor(max_token_len=18).forward(batch, calculate_entropy=True)
    torch.testing.assert_close(parts.logprobs, whole.logprobs, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(parts.entropy, whole.entropy, rtol=2e-6, atol=2e-6)


def test_train_and_eval_reach_the_model():
    actor = make_actor()
    assert not actor.model.training
    actor.train()
    assert actor.model.training
    actor.eval()
    assert not actor.model.training


def test_model_can_be_a_folder(tmp_path):
    build_model().save_pretrained(tmp_path / "model")
    batch = make_batch()
    for path in (tmp_path / "model", str(tmp_path / "model")):
        actor = DeduplicatedActor(path, device="cpu", dtype=torch.float32)
        torch.testing.assert_close(actor.forward(batch).logprobs, make_actor().forward(batch).logprobs)
        assert actor.model.dtype == torch.float32


def test_default_dtype_of_a_loaded_model_is_bfloat16_and_trains(tmp_path):
    build_model().save_pretrained(tmp_path)
    actor = DeduplicatedActor(tmp_path, device="cpu", attn_implementation="sdpa")
    assert actor.model.dtype == torch.bfloat16
    metrics = actor.compute_policy_loss_and_backward(make_batch())
    assert all(torch.isfinite(torch.tensor(list(metrics.values()))))
    assert torch.isfinite(flat_gradients(actor)).all()


def test_built_model_keeps_its_dtype_unless_another_is_asked_for():
    assert DeduplicatedActor(build_model(dtype=torch.float32), device="cpu").model.dtype == torch.float32
    assert make_actor(dtype=torch.float64).model.dtype == torch.float64


BAD_OPTIONS = {
    "unknown attention": ({"attn_implementation": "sdpa2"}, "'sdpa2' is not registered; choose one of eager, sdpa"),
    "flash 2": ({"attn_implementation": "flash_attention_2"}, "needs CUDA, the device is cpu; use sdpa or eager"),
    "flash 3": ({"attn_implementation": "flash_attention_3"}, "needs CUDA, the device is cpu; use sdpa or eager"),
    "unknown logits mode": ({"logits_optimization": "disk"}, "choose one of none, compute, memory"),
    "no budget": ({"max_token_len": 0}, "max_token_len=0"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_option_is_refused_before_anything_is_loaded(name):
    options, words = BAD_OPTIONS[name]
    with pytest.raises(ConfigError) as error:
        DeduplicatedActor("no/such/folder", device="cpu", **options)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_missing_cuda_is_one_line_that_names_the_cpu():
    with pytest.raises(ConfigError, match="device='cuda' is not available here; pass device='cpu'"):
        DeduplicatedActor("no/such/folder")


def test_missing_folder_is_one_line_that_says_what_is_accepted(tmp_path):
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(InputError, match=r"a folder that holds a config\.json") as error:
            DeduplicatedActor(path, device="cpu")
        assert "\n" not in str(error.value)


BAD_FIELDS = {
    "NaN advantage": ("advantages", lambda v: v.index_fill(1, torch.tensor([0]), float("nan")), NonFiniteError),
    "infinite old value": ("old_log_probs", lambda v: v - float("inf"), NonFiniteError),
    "short reference": ("ref_log_prob", lambda v: v[:, 1:], InputError),
    "advantage per row": ("advantages", lambda v: v[:, 0], InputError),
}


@pytest.mark.parametrize("name", BAD_FIELDS)
def test_bad_field_is_named_and_touches_no_gradient(name):
    field, spoil, kind = BAD_FIELDS[name]
    batch = make_batch()
    actor = make_actor()
    with pytest.raises(kind, match=field) as error:
        actor.compute_policy_loss_and_backward(batch | {field: spoil(batch[field])})
    assert "\n" not in str(error.value)
    assert all(parameter.grad is None for parameter in actor.model.parameters())


@pytest.mark.parametrize("is_training", [True, False])
def test_batch_without_ids_or_with_a_response_beyond_its_rows_is_one_line(is_training):
    batch, actor = make_batch(), make_actor()
    without = {name: value for name, value in batch.items() if name != "input_ids"}
    with torch.set_grad_enabled(is_training):
        with pytest.raises(InputError, match="add input_ids"):
            actor.forward(without)
        with pytest.raises(InputError, match=r"response_len=100 does not fit rows of .* columns; give 0 to"):
            actor.forward(batch | {"response_length": 100})


def test_padding_may_hold_anything():
    batch = make_batch()
    mask = batch["attention_mask"][:, PROMPT_LEN:].bool()
    metrics = make_actor().compute_policy_loss_and_backward(batch)
    for name in ("advantages", "old_log_probs", "ref_log_prob"):
        batch[name] = batch[name].masked_fill(~mask, float("nan"))
    assert make_actor().compute_policy_loss_and_backward(batch) == metrics


def test_update_without_advantages_is_refused():
    batch = make_batch()
    del batch["advantages"]
    with pytest.raises(InputError, match="no advantages"):
        make_actor().compute_policy_loss_and_backward(batch)


def test_accumulation_over_no_calls_is_refused():
    with pytest.raises(InputError, match="gradient_accumulation=0"):
        make_actor().compute_policy_loss_and_backward(make_batch(), gradient_accumulation=0)
