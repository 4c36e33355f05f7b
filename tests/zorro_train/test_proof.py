import copy

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, Gemma2Config, LlamaConfig, MambaConfig, MistralConfig

from arctic_platform.errors import ExactnessError, UnsupportedModelError
from arctic_platform.forest import ATTENTION_NAME, ForestPlan, build_forest
from arctic_platform.rl.zorro_train.module_patcher import ModuleReconstructionPatcher
from arctic_platform.rl.zorro_train.proof import measure_receipt, plain_attention, plain_rows

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 200,
    "max_position_embeddings": 256,
}


def build(config, dtype=torch.float32):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


def batch(seed=0):
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 200, 30)
    rows = [np.concatenate([prompt, rng.integers(0, 200, n)]) for n in (5, 9, 3, 7)]
    rows += [np.concatenate([rows[0], rng.integers(0, 200, 4)]), rows[1], rng.integers(0, 200, 12)]
    return rows, [np.arange(len(row)) >= min(30, len(row) - 3) for row in rows]


@pytest.mark.parametrize("config", [LlamaConfig(**SIZES), MistralConfig(**SIZES, sliding_window=8)], ids=type)
@pytest.mark.parametrize("split", [True, False])
def test_the_receipt_of_an_exact_model_is_within_rounding(config, split):
    patcher = ModuleReconstructionPatcher(build(copy.deepcopy(config)), use_split_attention=split)
    receipt = measure_receipt(patcher, *batch(), temperature=0.7)
    assert receipt.logprob_max_abs < 5e-6
    assert receipt.gradient_rel < 5e-6
    assert receipt.tokens_shared < receipt.tokens_alone / 2
    assert set(receipt.metrics()) >= {"receipt/logprob_max_abs", "receipt/gradient_rel"}


def test_bfloat16_passes_its_own_tolerance():
    patcher = ModuleReconstructionPatcher(build(LlamaConfig(**SIZES), torch.bfloat16))
    receipt = measure_receipt(patcher, *batch())
    assert 0 < receipt.logprob_max_abs < 0.3


@pytest.mark.parametrize("by", [1, -2], ids=["sees-its-sibling", "misses-its-parent"])
@pytest.mark.parametrize("at", [0, 1])
def test_a_corrupted_mask_cell_fails_the_receipt_and_names_a_parameter(at, by, monkeypatch):
    """The subtree of one segment ends a token too late, or two too early (its last token alone predicts nothing)."""
    patcher = ModuleReconstructionPatcher(build(LlamaConfig(**SIZES)))
    rectangles = ForestPlan.rectangles.func

    def leaking(plan):
        rects = rectangles(plan)
        wide = [r for r in rects if r.subtree_end < plan.forest.num_tokens][at]
        grown = type(wide)(wide.start, wide.end, wide.subtree_end + by)
        return [grown if r is wide else r for r in rects]

    monkeypatch.setattr(ForestPlan, "rectangles", property(leaking))
    with pytest.raises(ExactnessError, match=r"most in model\.\S+"):
        measure_receipt(patcher, *batch())


def test_the_receipt_leaves_gradients_and_the_prepared_attention_as_they_were():
    model = build(LlamaConfig(**SIZES))
    patcher = ModuleReconstructionPatcher(model)
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    measure_receipt(patcher, *batch())
    assert all((p.grad == 3.0).all() for p in model.parameters())
    assert model.config._attn_implementation == ATTENTION_NAME


@pytest.mark.parametrize(
    "config",
    [
        BloomConfig(hidden_size=64, n_layer=2, n_head=2, vocab_size=200),
        MambaConfig(hidden_size=64, num_hidden_layers=2, state_size=8, vocab_size=200),
    ],
    ids=["alibi", "mamba"],
)
def test_an_architecture_that_would_mix_rows_is_refused_by_name_and_left_usable(config):
    model = build(config)
    before = model.config._attn_implementation
    ids = torch.arange(10).unsqueeze(0)
    logits = model(input_ids=ids).logits
    with pytest.raises(UnsupportedModelError, match=type(model).__name__):
        ModuleReconstructionPatcher(model)
    assert model.config._attn_implementation == before
    assert torch.equal(model(input_ids=ids).logits, logits)


def test_a_head_that_does_more_than_ours_is_refused():
    model = build(Gemma2Config(**SIZES, final_logit_softcapping=2.0))
    ModuleReconstructionPatcher(model).unpatch_forward()
    stock = model.forward

    def shifted(*args, **kwargs):
        out = stock(*args, **kwargs)
        out.logits = out.logits * 1.5
        return out

    model.forward = shifted
    with pytest.raises(UnsupportedModelError, match="not exact under prefix sharing"):
        ModuleReconstructionPatcher(model)


def test_a_module_that_is_no_causal_lm_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="Linear is not a Hugging Face model"):
        ModuleReconstructionPatcher(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("padded", [False, True])
def test_plain_rows_equal_the_models_own_logits(padded):
    patcher = ModuleReconstructionPatcher(build(LlamaConfig(**SIZES)))
    rows, masks = batch()
    with plain_attention(patcher.model), torch.no_grad():
        values = plain_rows(patcher, rows, masks, temperature=0.5, calculate_entropy=True, padded=padded)
        for b, (row, mask) in enumerate(zip(rows, masks, strict=True)):
            logits = patcher.model(input_ids=torch.from_numpy(row).unsqueeze(0)).logits[0] / 0.5
            logp = logits.log_softmax(-1)[np.flatnonzero(mask) - 1]
            at = slice(values.offsets[b], values.offsets[b + 1])
            expected = logp.gather(1, torch.from_numpy(row[mask]).unsqueeze(1)).squeeze(1)
            assert (values.logprobs[at] - expected).abs().max() < 1e-5
            assert (values.entropy[at] + (logp.exp() * logp).sum(-1)).abs().max() < 1e-5


def test_two_models_prepared_one_after_the_other_do_not_share_state():
    first = ModuleReconstructionPatcher(build(LlamaConfig(**SIZES)))
    second = ModuleReconstructionPatcher(build(LlamaConfig(**{**SIZES, "num_hidden_layers": 1})))
    second.unpatch_forward()
    assert measure_receipt(first, *batch()).logprob_max_abs < 5e-6


@pytest.mark.parametrize("num_copies", [1, 2, 5])
def test_equal_rows_do_not_cancel_in_the_receipt(num_copies):
    patcher = ModuleReconstructionPatcher(build(LlamaConfig(**SIZES)))
    rows = [np.arange(5, 48)] * num_copies
    receipt = measure_receipt(patcher, rows, [np.arange(43) >= 40] * num_copies)
    assert receipt.gradient_rel < 5e-6


def test_a_model_that_is_sure_of_every_token_passes_the_receipt():
    """Its gradients are the rounding of 1 - p, on both sides differently."""
    model = build(LlamaConfig(**SIZES, tie_word_embeddings=False))
    with torch.no_grad():
        model.lm_head.weight *= 400
    patcher = ModuleReconstructionPatcher(model)
    rows = [np.arange(40)]
    for _ in range(4):
        logits = model.lm_head(patcher._run(build_forest(rows))[0][-1])
        rows = [np.append(rows[0], int(logits.argmax()))]
    receipt = measure_receipt(patcher, rows * 2, [np.arange(44) >= 40] * 2)
    assert receipt.logprob_max_abs < 1e-4
    assert receipt.gradient_rel < 1e-3
