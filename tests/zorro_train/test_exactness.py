"""The shared pass against every row run alone through an unpatched twin with equal weights."""

import copy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from transformers import PreTrainedModel

from arctic_platform.errors import InputError
from arctic_platform.rl.zorro_train import ModuleReconstructionPatcher
from arctic_platform.rl.zorro_train import logprobs as logprobs_module
from arctic_platform.rl.zorro_train.tests import compare_gradients
from tests.forest.strategies import batches
from tests.zorro_train.twins import VOCAB, build_model, gradients, pad, random_rows, relative, rows_alone, split

VALUE_LIMIT = {torch.float32: 2e-6, torch.float64: 1e-7}
GRADIENT_LIMIT = {torch.float32: 1e-5, torch.float64: 1e-6}


@dataclass(frozen=True)
class Errors:
    """Relative errors of log-probs and entropies (largest) and of the gradients (norm)."""

    logprobs: float
    entropy: float
    gradients: float


@dataclass(frozen=True)
class Pair:
    """A prepared model and its unpatched twin."""

    patcher: ModuleReconstructionPatcher
    plain: PreTrainedModel

    def errors(self, rows: list[np.ndarray], masks: list[np.ndarray], temperature: float = 1.0) -> Errors:
        shared = self.patcher.forward_rows(rows, masks, temperature=temperature, calculate_entropy=True)
        logprobs, entropy = rows_alone(self.plain, rows, masks, temperature)
        assert shared.entropy is not None and shared.logprobs.shape == logprobs.shape
        weights = torch.randn(2, len(logprobs), dtype=logprobs.dtype, generator=torch.Generator().manual_seed(1))
        ours = gradients(self.patcher.model, weigh(shared.logprobs, shared.entropy, weights))
        theirs = gradients(self.plain, weigh(logprobs, entropy, weights))
        return Errors(largest(shared.logprobs, logprobs), largest(shared.entropy, entropy), relative(ours, theirs))


def weigh(logprobs: Tensor, entropy: Tensor, weights: Tensor) -> Tensor:
    return (logprobs * weights[0] + entropy * weights[1]).sum()


def largest(values: Tensor, reference: Tensor) -> float:
    """Largest difference, relative to the value where that is above 1."""
    return float(((values - reference).abs() / reference.abs().clamp(min=1.0)).max()) if len(reference) else 0.0


def make_pair(family: str = "qwen3", dtype: torch.dtype = torch.float32, **options) -> Pair:
    attn = options.pop("attn", "sdpa")
    patcher = ModuleReconstructionPatcher(build_model(family, dtype), attn_implementation=attn, **options)
    return Pair(patcher, build_model(family, dtype))


def assert_exact(pair: Pair, rows: list[np.ndarray], masks: list[np.ndarray], temperature: float = 1.0) -> None:
    dtype = pair.plain.dtype
    errors = pair.errors(rows, masks, temperature)
    assert errors.logprobs <= VALUE_LIMIT[dtype], errors
    assert errors.entropy <= VALUE_LIMIT[dtype], errors
    assert errors.gradients <= GRADIENT_LIMIT[dtype], errors


@pytest.fixture(scope="module")
def qwen3() -> Pair:
    return make_pair()


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2-window"])
def test_branching_batches_equal_rows_run_alone(family, dtype, attn):
    pair = make_pair(family, dtype, attn=attn)
    for seed in range(2):
        assert_exact(pair, *random_rows(seed), temperature=0.7)


def test_model_without_fp32_casts_is_exact_to_the_last_digits_of_fp64():
    errors = make_pair("gpt2", torch.float64).errors(*random_rows(0))
    assert max(errors.logprobs, errors.entropy, errors.gradients) <= 1e-12, errors


@pytest.mark.parametrize("mode", ["none", "compute", "memory"])
@pytest.mark.parametrize("is_split", [True, False], ids=["split", "rows"])
def test_every_mode_equals_rows_run_alone(mode, is_split):
    pair = make_pair(logits_optimization=mode, use_split_attention=is_split)
    assert_exact(pair, *random_rows(7), temperature=1.3)


@pytest.mark.parametrize("granularity", ["prompt", "trie"])
@pytest.mark.parametrize("min_shared", [1, 4, 100])
def test_how_much_is_shared_changes_no_value(granularity, min_shared):
    assert_exact(make_pair(granularity=granularity, min_shared=min_shared), *random_rows(3))


SHAPES = {
    "one row": ["1 2 3 | 4 5"],
    "one token each": ["1 | 2", "1 | 2", "3 | 2"],
    "single-token prompts": ["5 | 1 2 3", "5 | 1 2", "6 | 1"],
    "the same row three times": ["1 2 | 3 4", "1 2 | 3 4", "1 2 | 3 4"],
    "a row that is a prefix of another": ["1 2 3 | 4 5", "1 2 3 | 4 5 6 7", "1 2 | 3 4"],
    "an empty response": ["1 2 3 |", "1 2 3 | 4", "1 2 3 |"],
    "nothing shared": ["1 2 | 3 4", "5 6 7 | 8", "9 | 10 11 12"],
    "interleaved groups": ["1 2 3 | 4", "9 8 | 7 6", "1 2 3 | 5 6", "9 8 | 7", "1 2 3 | 4 4"],
    "answers that run together": ["1 2 3 | 7 8 9", "1 2 3 | 7 8 4"],
    "the pad id as a token": ["0 0 5 | 6", "5 | 6", "0 5 | 6 0 0", "0 0 5 | 0"],
    "prompts of different lengths inside one another": ["1 2 | 3 4 5", "1 2 3 4 | 5 6", "1 | 2 3"],
    "last token equal, histories not": ["1 2 9 | 3", "4 5 9 | 3"],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_small_batches_of_every_shape_are_exact(qwen3, shape):
    assert_exact(qwen3, *split(SHAPES[shape]))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("extra", [0, 3])
def test_padding_on_either_side_changes_no_value(qwen3, shape, extra):
    rows, masks = split(SHAPES[shape])
    batch = pad(rows, masks, extra)
    out = qwen3.patcher.patched_forward(
        batch["input_ids"],
        batch["position_ids"],
        batch["attention_mask"],
        calculate_entropy=True,
        response_len=batch["response_length"],
    )
    logprobs, entropy = rows_alone(qwen3.plain, rows, masks)
    assert largest(out.logprobs, logprobs) <= 2e-6 and largest(out.entropy, entropy) <= 2e-6


@settings(max_examples=25)
@given(batches())
def test_random_small_batches_are_exact(rows):
    pair = cached_pair()
    rows = [row for row in rows if len(row)]
    masks = [np.arange(len(row)) >= 1 + (b % 3) for b, row in enumerate(rows)]
    if rows:
        assert_exact(pair, rows, masks)


def cached_pair(cache: list[Pair] = []) -> Pair:  # noqa: B006
    if not cache:
        cache.append(make_pair())
    return cache[0]


def test_any_row_order_gives_the_same_values(qwen3):
    rows, masks = random_rows(5)
    values = qwen3.patcher.forward_rows(rows, masks)
    order = np.random.default_rng(0).permutation(len(rows))
    moved = qwen3.patcher.forward_rows([rows[i] for i in order], [masks[i] for i in order])
    for place, b in enumerate(order):
        ours = moved.logprobs[moved.offsets[place] : moved.offsets[place + 1]]
        torch.testing.assert_close(
            ours, values.logprobs[values.offsets[b] : values.offsets[b + 1]], rtol=2e-6, atol=2e-6
        )


def test_two_batches_through_one_prepared_model_do_not_mix(qwen3):
    first, second = random_rows(11), split(SHAPES["interleaved groups"])
    values = [qwen3.patcher.forward_rows(*batch) for batch in (first, second)]
    ours = gradients(qwen3.patcher.model, values[0].logprobs.sum() + values[1].logprobs.square().sum())
    plain = [rows_alone(qwen3.plain, *batch)[0] for batch in (first, second)]
    theirs = gradients(qwen3.plain, plain[0].sum() + plain[1].square().sum())
    assert relative(ours, theirs) <= 1e-5
    for value, reference in zip(values, plain, strict=True):
        assert largest(value.logprobs, reference) <= 2e-6


def test_temperature_is_per_call(qwen3):
    rows, masks = split(SHAPES["answers that run together"])
    before = qwen3.patcher.forward_rows(rows, masks).logprobs
    assert_exact(qwen3, rows, masks, temperature=0.5)
    assert torch.equal(qwen3.patcher.forward_rows(rows, masks).logprobs, before)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mode", ["none", "memory"])
def test_gradient_checkpointing_changes_no_gradient(reentrant, mode):
    rows, masks = random_rows(4)
    results = []
    for is_on in (False, True):
        patcher = ModuleReconstructionPatcher(build_model(), logits_optimization=mode)
        if is_on:
            patcher.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        patcher.model.train()
        logprobs = patcher.forward_rows(rows, masks).logprobs
        logprobs.square().sum().backward()
        results.append({name: p.grad for name, p in patcher.model.named_parameters()})
    off, on = results
    assert compare_gradients(on, off) <= 1e-7
    assert float(on["model.layers.0.self_attn.k_proj.weight"].norm()) > 0


@pytest.mark.parametrize("mode", ["compute", "memory"])
def test_chunks_are_fixed_in_forward_so_that_recomputation_meets_the_same_ones(mode, monkeypatch):
    rows, masks = random_rows(4)
    results = []
    for sizes in ((2**26, 2**26), (4 * VOCAB * 3, 4 * VOCAB * 50), (4 * VOCAB * 50, 4 * VOCAB * 3)):
        patcher = ModuleReconstructionPatcher(build_model(), logits_optimization=mode)
        patcher.model.gradient_checkpointing_enable()
        patcher.model.train()
        monkeypatch.setattr(logprobs_module, "CHUNK_BYTES", sizes[0])
        values = patcher.forward_rows(rows, masks, calculate_entropy=True)
        monkeypatch.setattr(logprobs_module, "CHUNK_BYTES", sizes[1])
        results.append(gradients(patcher.model, values.logprobs.square().sum() + values.entropy.sum()))
    assert relative(results[1], results[0]) <= 1e-6
    assert relative(results[2], results[0]) <= 1e-6


def test_modes_agree_with_one_another():
    rows, masks = random_rows(9)
    results = []
    for mode in ("none", "compute", "memory"):
        patcher = ModuleReconstructionPatcher(build_model(dtype=torch.float64), logits_optimization=mode)
        values = patcher.forward_rows(rows, masks, temperature=0.8, calculate_entropy=True)
        total = values.logprobs.square().sum() + values.entropy.sum()
        results.append((values.logprobs, values.entropy, gradients(patcher.model, total)))
    for other in results[1:]:
        for value, reference in zip(other, results[0], strict=True):
            torch.testing.assert_close(value, reference, rtol=1e-12, atol=1e-12)


def test_bf16_is_no_further_from_float64_than_the_plain_pass():
    rows, masks = random_rows(2)
    exact = rows_alone(build_model(dtype=torch.bfloat16).to(torch.float64), rows, masks)[0]
    with torch.no_grad():
        plain = rows_alone(build_model(dtype=torch.bfloat16), rows, masks)[0].double()
        shared = ModuleReconstructionPatcher(build_model(dtype=torch.bfloat16)).forward_rows(rows, masks).logprobs
    assert (shared.double() - exact).abs().mean() <= 2 * (plain - exact).abs().mean()


def test_shared_answer_tokens_keep_the_losses_of_both_rows(qwen3):
    rows, masks = split(SHAPES["answers that run together"])
    values = qwen3.patcher.forward_rows(rows, masks)
    assert values.forest.num_tokens == 7
    assert values.offsets.tolist() == [0, 3, 6]
    assert torch.equal(values.logprobs[:2], values.logprobs[3:5])
    assert_exact(qwen3, rows, masks)


@pytest.mark.parametrize("num_rows", [2, 3, 5])
def test_first_answer_tokens_come_from_one_hidden_state_and_sum_their_gradients(qwen3, num_rows):
    rows, masks = split([f"1 2 | {token}" for token in range(5, 5 + num_rows)])
    values = qwen3.patcher.forward_rows(rows, masks)
    assert len(values.logprobs) == num_rows and values.forest.num_tokens == 2 + num_rows
    assert_exact(qwen3, rows, masks)
    ids = torch.tensor([[1, 2]])
    logp = torch.log_softmax(qwen3.plain(ids).logits[0, -1], -1)
    assert largest(values.logprobs, logp[5 : 5 + num_rows]) <= 2e-6


@pytest.mark.parametrize("first", [3, 9, 0])
def test_nothing_is_predicted_behind_the_last_token(qwen3, first):
    rows, masks = split(["1 2 | 3", "1 2 | 3 4"])
    values = qwen3.patcher.forward_rows(rows, masks)
    assert np.diff(values.offsets).tolist() == [1, 2]
    other = [np.array([first, 7, 7, 7]), *rows]
    moved = qwen3.patcher.forward_rows(other, [np.arange(4) >= 2, *masks])
    torch.testing.assert_close(moved.logprobs[2:], values.logprobs, rtol=2e-6, atol=2e-6)


def test_a_target_in_two_rows_counts_for_both(qwen3):
    rows, masks = split(["1 2 3 | 4 5", "1 2 3 | 4 5"])
    model = qwen3.patcher.model
    logprobs = qwen3.patcher.forward_rows(rows, masks).logprobs
    opposite = gradients(model, (logprobs * torch.tensor([1.0, 1.0, -1.0, -1.0])).sum())
    assert opposite.abs().max() <= 1e-6
    both = gradients(model, qwen3.patcher.forward_rows(rows, masks).logprobs.sum())
    once = gradients(model, qwen3.patcher.forward_rows(rows[:1], masks[:1]).logprobs.sum())
    assert relative(both, 2 * once) <= 1e-6


@pytest.mark.parametrize(("first_mask", "weight"), [((0, 1), 1.0), ((1, 1), 2.0), ((0, 0), 1.0)])
def test_the_mask_decides_how_often_a_shared_turn_is_trained(qwen3, first_mask, weight):
    rows = [np.array([1, 2, 3]), np.array([1, 2, 4])]
    masks = [np.array([0, *first_mask], bool), np.array([0, 1, 1], bool)]
    values = qwen3.patcher.forward_rows(rows, masks)
    assert len(values.logprobs) == sum(first_mask) + 2
    ours = gradients(qwen3.patcher.model, values.logprobs.sum())
    logp = torch.log_softmax(qwen3.plain(torch.tensor([[1, 2]])).logits[0], -1)
    theirs = gradients(qwen3.plain, weight * logp[0, 2] + first_mask[1] * logp[1, 3] + logp[1, 4])
    assert relative(ours, theirs) <= 1e-5


@pytest.mark.parametrize("scored", [[2, 3], [3], [1, 3]])
def test_an_answer_prefix_that_was_not_sampled_is_context_only(qwen3, scored):
    rows = [np.array([1, 2, 5, 6, 7, 8]), np.array([1, 2, 5, 6, 9, 9])]
    mask = np.zeros(6, bool)
    mask[np.array(scored) + 2] = True
    values = qwen3.patcher.forward_rows(rows, [mask, mask])
    assert np.diff(values.offsets).tolist() == [len(scored)] * 2
    assert_exact(qwen3, rows, [mask, mask])


def test_sharing_stops_at_the_first_differing_id(qwen3):
    rows, masks = split(["1 2 3 | 4", "1 2 9 | 4"])
    values = qwen3.patcher.forward_rows(rows, masks)
    assert values.forest.num_tokens == 6
    assert_exact(qwen3, rows, masks)


def test_rows_whose_prompts_differ_in_one_token_share_what_is_before_it(qwen3):
    rows, masks = split([f"1 2 {token} 7 | 8 9" for token in (3, 4, 5, 6)])
    assert qwen3.patcher.forward_rows(rows, masks).forest.num_tokens == 2 + 4 * 4
    assert_exact(qwen3, rows, masks)


def test_scoring_again_gives_the_same_bits(qwen3):
    rows, masks = random_rows(6)
    with torch.no_grad():
        old = qwen3.patcher.forward_rows(rows, masks, temperature=0.6).logprobs
    new = qwen3.patcher.forward_rows(rows, masks, temperature=0.6).logprobs
    assert torch.equal(torch.exp(new.detach() - old), torch.ones_like(old))


@pytest.mark.parametrize("size", [1, 2, 7])
def test_a_row_scores_the_same_in_batches_of_any_size(qwen3, size):
    rows, masks = random_rows(8)
    alone = qwen3.patcher.forward_rows(rows[:1], masks[:1]).logprobs
    together = qwen3.patcher.forward_rows(rows[:size], masks[:size]).logprobs[: len(alone)]
    assert (torch.exp(together - alone) - 1).abs().max() <= 1e-5


def test_changing_one_row_leaves_the_others_bit_for_bit(qwen3):
    rows, masks = split(["1 2 3 | 4 5 6", "1 2 3 | 4 7 8", "1 9 | 4 5"])
    before = qwen3.patcher.forward_rows(rows, masks)
    rows[1][-1] = 11
    after = qwen3.patcher.forward_rows(rows, masks)
    kept = np.r_[0:5, 6:8]
    assert torch.equal(before.logprobs[kept], after.logprobs[kept])
    assert not torch.equal(before.logprobs[5], after.logprobs[5])


def test_window_is_counted_in_positions_and_not_in_the_pack():
    pair = make_pair("qwen2-window")
    rows, masks = random_rows(1)
    assert_exact(pair, rows, masks)
    unlimited = copy.deepcopy(pair.plain)
    for layer in unlimited.model.layers:
        layer.self_attn.sliding_window = None
    unlimited.config.layer_types = ["full_attention"] * 2
    values = pair.patcher.forward_rows(rows, masks).logprobs
    assert largest(values, rows_alone(unlimited, rows, masks)[0]) > 1e-3


def test_window_of_zero_means_no_window():
    rows, masks = random_rows(1)
    patcher = ModuleReconstructionPatcher(build_model("qwen3"))
    for layer in patcher.model.model.layers:
        layer.self_attn.sliding_window = 0
    reference, _ = rows_alone(build_model("qwen3"), rows, masks)
    assert largest(patcher.forward_rows(rows, masks).logprobs, reference) <= 2e-6


def test_labels_of_two_groups_of_two_are_those_of_each_row(qwen3):
    rows, masks = split(["1 2 | 3 4", "5 6 | 7 8", "1 2 | 9 10", "5 6 | 11 12"])
    values = qwen3.patcher.forward_rows(rows, masks)
    for b, row in enumerate(rows):
        logp = torch.log_softmax(qwen3.plain(torch.from_numpy(row)[None]).logits[0], -1)
        ours = values.logprobs[values.offsets[b] : values.offsets[b + 1]]
        assert largest(ours, logp[[1, 2], torch.from_numpy(row[2:])]) <= 2e-6


def test_batch_without_any_target_is_empty_and_differentiable(qwen3):
    rows, masks = split(["1 2 3 |", "1 2 |"])
    values = qwen3.patcher.forward_rows(rows, masks, calculate_entropy=True)
    assert values.logprobs.shape == (0,) == values.entropy.shape
    assert gradients(qwen3.patcher.model, values.logprobs.sum()).abs().max() == 0


def test_a_first_token_cannot_be_a_target(qwen3):
    with pytest.raises(InputError, match="nothing predicts it"):
        qwen3.patcher.forward_rows([np.array([1, 2])], [np.array([True, True])])


def test_masked_tokens_of_all_rows_leave_loss_and_gradient_zero(qwen3):
    rows, masks = random_rows(10)
    logprobs = qwen3.patcher.forward_rows(rows, masks).logprobs
    loss = torch.where(torch.zeros(len(logprobs), dtype=torch.bool), logprobs, 0.0).sum()
    grads = gradients(qwen3.patcher.model, loss)
    assert loss == 0 and torch.isfinite(grads).all() and grads.abs().max() == 0


def test_vocabulary_is_covered_by_the_random_rows():
    assert max(int(row.max()) for row in random_rows(0)[0]) < VOCAB
