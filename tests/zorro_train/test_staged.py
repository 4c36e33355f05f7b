"""Stages against one packed pass over the same rows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from arctic_platform.errors import ConfigError
from arctic_platform.rl.zorro_train import ModuleReconstructionPatcher
from arctic_platform.rl.zorro_train.staged import Stage, can_stage, num_staged_groups, plan_stages, run_stages
from tests.forest.strategies import batches
from tests.zorro_train import architectures
from tests.zorro_train.twins import VOCAB, build_model, gradients, relative

Rows = list[np.ndarray]


def tree(seed: int = 0, trunk: int = 20) -> tuple[Rows, Rows]:
    """Two prompts behind one trunk, answers that fork, one row that is a prefix of others, one row twice."""
    draw = np.random.default_rng(seed)
    common = draw.integers(0, VOCAB, trunk)
    prompts = [np.concatenate([common, draw.integers(0, VOCAB, num)]) for num in (6, 9)]
    rows = [np.concatenate([prompts[i % 2], draw.integers(0, 3, draw.integers(1, 9))]) for i in range(8)]
    rows += [prompts[0].copy(), rows[0].copy(), common[:15].copy(), draw.integers(0, VOCAB, 11)]
    masks = [np.arange(len(row)) >= min(22, len(row) - 4) for row in rows]
    return rows, masks


def weigh(logprobs: Tensor, entropy: Tensor, weights: Tensor) -> Tensor:
    return (logprobs * weights[0] + entropy * weights[1]).sum()


def compare(
    patcher: ModuleReconstructionPatcher, rows: Rows, masks: Rows, stages: list[Stage], content_keys: Rows | None = None
) -> tuple[float, float, int]:
    """Largest difference of a value, relative difference of the gradients, and the tokens computed in stages."""
    model = patcher.model
    options = {"temperature": 0.8, "calculate_entropy": True, "content_keys": content_keys}
    whole = patcher.forward_rows(rows, masks, **options)
    weights = torch.randn(2, len(whole.logprobs), generator=torch.Generator().manual_seed(1)).to(whole.logprobs)
    expected = gradients(model, weigh(whole.logprobs, whole.entropy, weights))
    model.zero_grad()
    error, num_tokens, seen = 0.0, 0, []
    for one in run_stages(patcher, rows, masks, stages, **options):
        index = np.concatenate([np.arange(*whole.offsets[b : b + 2]) for b in one.rows])
        for ours, theirs in ((one.values.logprobs, whole.logprobs), (one.values.entropy, whole.entropy)):
            off = (ours - theirs[index]).abs() / theirs[index].abs().clamp(min=1.0)
            error = max([error, *off.tolist()])
        loss = weigh(one.values.logprobs, one.values.entropy, weights[:, index])
        if loss.requires_grad:
            loss.backward()
        num_tokens, seen = num_tokens + one.num_tokens, seen + one.rows
    assert sorted(seen) == list(range(len(rows)))
    ours = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])
    model.zero_grad()
    return error, relative(ours, expected), num_tokens


def stages_of(
    patcher: ModuleReconstructionPatcher, rows: Rows, masks: Rows, budget: int, **options: object
) -> list[Stage]:
    return plan_stages(patcher, rows, masks, **{"max_token_len": budget, "min_saving": 0.0, **options})


@pytest.fixture(scope="module")
def gpt2() -> ModuleReconstructionPatcher:
    """The family without fp32 casts, in fp64: what remains is arithmetic."""
    return ModuleReconstructionPatcher(build_model("gpt2", torch.float64))


@pytest.fixture(scope="module")
def qwen3() -> ModuleReconstructionPatcher:
    return ModuleReconstructionPatcher(build_model())


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2-window", "gpt2"])
def test_values_and_gradients_are_those_of_one_pass(family, dtype, is_checkpointed):
    model = build_model(family, dtype)
    patcher = ModuleReconstructionPatcher(model)
    if is_checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    rows, masks = tree()
    stages = stages_of(patcher, rows, masks, 40)
    assert max(len(stage.held) for stage in stages) >= 2, "a trunk, and prompts under it"
    error, gradient_error, num_tokens = compare(patcher, rows, masks, stages)
    limits = {torch.float32: (2e-6, 1e-6), torch.float64: (1e-9, 1e-7)}[dtype]
    if (family, dtype) == ("gpt2", torch.float64):
        limits = (1e-12, 1e-10)
    assert error <= limits[0] and gradient_error <= limits[1], (error, gradient_error)
    assert num_tokens < sum(patcher.forest_of([rows[b] for b in s.rows], masks).num_tokens for s in stages)


@given(rows=batches(), data=st.data())
@settings(max_examples=60)
def test_any_batch_under_any_budget_is_exact(gpt2, rows, data):
    prefix = np.array(data.draw(st.lists(st.integers(4, 6), max_size=4)), np.int64)
    rows = [np.concatenate([prefix, row]) if data.draw(st.booleans()) else row for row in rows]
    masks = [np.array(data.draw(st.lists(st.booleans(), min_size=len(row), max_size=len(row))), bool) for row in rows]
    for mask in masks:
        mask[:1] = False
    max_rows = data.draw(st.sampled_from([None, 1, 2]))
    min_saving = data.draw(st.sampled_from([0.0, 0.2]))
    stages = stages_of(gpt2, rows, masks, data.draw(st.integers(1, 30)), max_rows=max_rows, min_saving=min_saving)
    assert max_rows is None or max(len(stage.rows) for stage in stages) <= max_rows
    error, gradient_error, _ = compare(gpt2, rows, masks, stages)
    assert error <= 1e-12 and gradient_error <= 1e-10


@pytest.mark.parametrize("budget", [25, 40, 64])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_each_token_is_computed_once_and_held_and_running_ones_stay_within_the_budget(qwen3, budget, seed):
    rows, masks = tree(seed)
    passes = []

    def note(_module: torch.nn.Module, _args: tuple, kwargs: dict) -> None:
        held = sum(run.end - run.start for run in getattr(kwargs["forest"], "above", ()))
        passes.append((held, kwargs["input_ids"].shape[1]))

    stages = stages_of(qwen3, rows, masks, budget)
    handle = qwen3.model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        total = sum(one.num_tokens for one in run_stages(qwen3, rows, masks, stages))
    finally:
        handle.remove()
    assert max(held + running for held, running in passes) <= max(budget, *(len(row) for row in rows))
    assert sum(running for _, running in passes) == total == qwen3.forest_of(rows, masks).num_tokens


@pytest.mark.parametrize("granularity", ["trie", "prompt"])
@pytest.mark.parametrize("min_shared", [1, 3, 12])
def test_how_much_is_shared_changes_no_value(granularity, min_shared):
    patcher = ModuleReconstructionPatcher(
        build_model(dtype=torch.float64), granularity=granularity, min_shared=min_shared
    )
    rows, masks = tree()
    for budget in (40, 64):
        error, gradient_error, _ = compare(patcher, rows, masks, stages_of(patcher, rows, masks, budget))
        assert error <= 1e-9 and gradient_error <= 1e-7


def test_whole_prompts_only_are_held_where_whole_prompts_are_shared():
    patcher = ModuleReconstructionPatcher(build_model(), granularity="prompt")
    prompt = np.arange(10)
    rows = [np.concatenate([prompt, [50, 51, tail]]) for tail in (1, 2, 3, 4)]
    masks = [np.arange(13) >= 10] * 4
    stages = stages_of(patcher, rows, masks, 16)
    assert [[run.end for run in stage.held] for stage in stages] == [[10]] * 2


def test_rows_of_equal_ids_and_other_content_hold_only_what_is_before_it(gpt2):
    rows = [np.concatenate([np.arange(8), np.full(4, 99), [tail, 5]]) for tail in (1, 2, 3, 4)]
    keys = [np.concatenate([np.zeros(8), np.full(4, image), np.zeros(2)]).astype(np.int64) for image in (1, 1, 2, 2)]
    masks = [np.arange(14) >= 12] * 4
    stages = stages_of(gpt2, rows, masks, 14, content_keys=keys)
    assert [[run.end for run in stage.held] for stage in stages] == [[8, 12]] * 4
    assert stages[0].held[1] != stages[2].held[1], "the two images are two runs"
    error, gradient_error, num_tokens = compare(gpt2, rows, masks, stages, content_keys=keys)
    assert error <= 1e-12 and gradient_error <= 1e-10
    assert num_tokens == 8 + 2 * 4 + 4 * 2


def test_targets_inside_a_held_run_count_for_every_row_above_it(gpt2):
    rows = [np.concatenate([np.arange(12), [tail]]) for tail in (1, 2, 3)]
    masks = [np.arange(13) >= 4, np.arange(13) >= 12, np.arange(13) >= 8]
    stages = stages_of(gpt2, rows, masks, 13)
    assert [[run.end for run in stage.held] for stage in stages] == [[12]] * 3
    error, gradient_error, num_tokens = compare(gpt2, rows, masks, stages)
    assert error <= 1e-12 and gradient_error <= 1e-10
    assert num_tokens == 15


def test_row_that_ends_where_the_held_run_ends_computes_nothing(gpt2):
    rows = [np.arange(9), np.arange(9), np.concatenate([np.arange(9), [1]])]
    masks = [np.arange(len(row)) >= 3 for row in rows]
    stages = stages_of(gpt2, rows, masks, 10, max_rows=1)
    assert [stage.rows for stage in stages] == [[0], [1], [2]]
    error, gradient_error, num_tokens = compare(gpt2, rows, masks, stages)
    assert error <= 1e-12 and gradient_error <= 1e-10
    assert num_tokens == 10


def test_row_beyond_the_budget_goes_alone_and_equal_rows_with_it(gpt2):
    rows = [np.arange(30), np.arange(30), np.arange(30, 35), np.arange(32, 36)]
    masks = [np.arange(len(row)) >= 3 for row in rows]
    stages = stages_of(gpt2, rows, masks, 10)
    assert [stage.rows for stage in stages] == [[0, 1], [2, 3]]
    assert num_staged_groups(stages) == 0


def test_run_is_held_only_where_that_saves_enough(qwen3):
    rows = [np.concatenate([[7], np.full(30, fill)]) for fill in (1, 2, 3)]
    masks = [np.arange(31) >= 20] * 3
    assert num_staged_groups(stages_of(qwen3, rows, masks, 31, min_saving=0.05)) == 0, "1 token of 31 is no reason"
    assert num_staged_groups(stages_of(qwen3, rows, masks, 31, min_saving=0.02)) == 1


def test_beginning_that_is_not_worth_it_is_part_of_the_run_below_it(gpt2):
    """A token that all share is too little by itself; where two parts share more, it is held with the rest."""
    rows = [np.concatenate([[7], body, [tail]]) for body in (np.full(9, 1), np.full(9, 2)) for tail in (3, 4)]
    masks = [np.arange(11) >= 8] * 4
    stages = stages_of(gpt2, rows, masks, 11, min_saving=0.2)
    assert [[run.end for run in stage.held] for stage in stages] == [[10]] * 4
    assert num_staged_groups(stages) == 2
    error, gradient_error, _ = compare(gpt2, rows, masks, stages)
    assert error <= 1e-12 and gradient_error <= 1e-10


def test_no_rows_are_no_stages(qwen3):
    assert stages_of(qwen3, [], [], 10) == []


def test_micro_batch_without_loss_sends_nothing_back(gpt2):
    rows, _ = tree()
    masks = [np.zeros(len(row), bool) for row in rows]
    masks[2][-2:] = True
    error, gradient_error, _ = compare(gpt2, rows, masks, stages_of(gpt2, rows, masks, 40))
    assert error <= 1e-12 and gradient_error <= 1e-10


def test_scoring_without_gradients_holds_the_same_prefixes(qwen3):
    rows, masks = tree()
    stages = stages_of(qwen3, rows, masks, 40)
    with torch.no_grad():
        whole = qwen3.forward_rows(rows, masks)
        for one in run_stages(qwen3, rows, masks, stages):
            index = np.concatenate([np.arange(*whole.offsets[b : b + 2]) for b in one.rows])
            assert (one.values.logprobs - whole.logprobs[index]).abs().max() <= 2e-6
            assert not one.values.logprobs.requires_grad


def test_frozen_lower_layers_take_no_gradient_and_disturb_none():
    model = build_model(dtype=torch.float64)
    for parameter in [*model.model.embed_tokens.parameters(), *model.model.layers[0].parameters()]:
        parameter.requires_grad_(False)
    patcher = ModuleReconstructionPatcher(model)
    rows, masks = tree()
    whole = patcher.forward_rows(rows, masks)
    live = [p for p in model.parameters() if p.requires_grad]
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(whole.logprobs.square().sum(), live)])
    for one in run_stages(patcher, rows, masks, stages_of(patcher, rows, masks, 40)):
        one.values.logprobs.square().sum().backward()
    assert relative(torch.cat([p.grad.flatten() for p in live]), expected) <= 1e-7


def test_bf16_gradients_are_no_further_from_float64_than_those_of_one_pass():
    rows, masks = tree()
    half = ModuleReconstructionPatcher(build_model(dtype=torch.bfloat16))
    exact_model: PreTrainedModel = build_model(dtype=torch.bfloat16).to(torch.float64)
    exact = ModuleReconstructionPatcher(exact_model)
    expected = gradients(exact.model, exact.forward_rows(rows, masks).logprobs.sum())
    whole = gradients(half.model, half.forward_rows(rows, masks).logprobs.sum()).double()
    for one in run_stages(half, rows, masks, stages_of(half, rows, masks, 40)):
        one.values.logprobs.sum().backward()
    staged = torch.cat([p.grad.flatten() for p in half.model.parameters()]).double()
    assert relative(staged, expected) <= 3 * relative(whole, expected)


def test_reentrant_checkpointing_is_refused_by_name(qwen3):
    model = build_model()
    patcher = ModuleReconstructionPatcher(model)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.train()
    rows, masks = tree()
    with pytest.raises(ConfigError, match="use_reentrant"):
        list(run_stages(patcher, rows, masks, stages_of(patcher, rows, masks, 40)))


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "deepseek_v3", "llama4", "qwen3_moe"])
def test_families_that_attend_in_every_layer_stage_exactly(family):
    """Soft-caps and windows, sinks, value heads of another size, chunked attention, experts."""
    patcher = ModuleReconstructionPatcher(architectures.build(family))
    assert can_stage(patcher)
    rows, masks = tree()
    rows = [row % architectures.VOCAB for row in rows]
    error, gradient_error, _ = compare(patcher, rows, masks, stages_of(patcher, rows, masks, 40))
    assert error <= 5e-6 and gradient_error <= 5e-6


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1"])
def test_recurrent_families_cannot_stage(family):
    assert not can_stage(ModuleReconstructionPatcher(architectures.build(family)))


@pytest.mark.parametrize("options", [{}, {"granularity": "prompt"}, {"min_shared": 30}])
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2-window", "gpt2"])
def test_models_that_attend_in_every_layer_can_stage_whatever_is_shared(family, options):
    assert can_stage(ModuleReconstructionPatcher(build_model(family), **options))


def test_attention_over_rebuilt_rows_cannot_stage():
    assert not can_stage(ModuleReconstructionPatcher(build_model(), use_split_attention=False))


def test_model_that_mixes_tokens_outside_attention_cannot_stage(qwen3):
    """A layer that adds the token before it, as a convolution does: keys and values do not hold that."""
    patcher = ModuleReconstructionPatcher(build_model())

    def shift(_module: torch.nn.Module, _args: tuple, output: Tensor) -> Tensor:
        return output + torch.nn.functional.pad(output, (0, 0, 1, 0))[:, :-1]

    handle = patcher.model.model.layers[0].mlp.register_forward_hook(shift)
    try:
        assert not can_stage(patcher)
    finally:
        handle.remove()
