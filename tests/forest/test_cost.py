import pytest

from arctic_platform.forest import build_forest
from arctic_platform.forest.cost import ModelShape, forest_cost

SHAPE = ModelShape(num_layers=2, num_heads=4, head_dim=8, hidden_size=32, vocab_size=100, layer_params=1000)


def cost(rows, num_predicting=0, num_targets=0):
    return forest_cost(build_forest(rows), SHAPE, num_predicting=num_predicting, num_targets=num_targets)


def test_rows_that_share_nothing_cost_the_same_shared_and_alone():
    result = cost([[1, 2, 3], [4, 5]], num_predicting=2, num_targets=2)
    assert result.tokens == result.tokens_unshared == 5
    assert result.flops == result.flops_unshared
    assert (result.saving, result.bound) == (0.0, 1.0)


def test_flops_are_linear_tokens_plus_attended_pairs_plus_logits():
    result = cost([[1, 2, 3], [1, 2, 4]], num_predicting=1, num_targets=2)
    pair, logit = 12 * 2 * 4 * 8, 6 * 32 * 100
    assert result.flops == 6 * 1000 * 4 + pair * (1 + 2 + 3 + 3) + logit
    assert result.flops_unshared == 6 * 1000 * 6 + pair * 2 * (1 + 2 + 3) + 2 * logit


def test_the_bound_approaches_the_group_size_for_long_prompts():
    prompt = list(range(1000))
    result = cost([[*prompt, 1000 + b] for b in range(8)], num_predicting=1, num_targets=8)
    assert result.bound == pytest.approx(8, rel=0.02)


def test_an_empty_batch_costs_nothing():
    result = cost([])
    assert (result.flops, result.saving, result.bound) == (0.0, 0.0, 1.0)
