import itertools
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arctic_platform.errors import ConfigError, InputError
from arctic_platform.forest import build_forest, find_targets, order_rows
from arctic_platform.forest.cost import ModelShape, forest_cost
from arctic_platform.rl.engines.torch_train import TorchTrainEngine
from arctic_platform.rl.protocol import Processing
from arctic_platform.rl.zorro_train.planner import Limits, plan_batch, plan_padded
from tests.forest.strategies import batches
from tests.rl.engines.builders import config, grouped_batch, part_of

pytestmark = pytest.mark.filterwarnings("ignore:a row of")

SHAPE = ModelShape(num_layers=4, num_heads=4, head_dim=32, hidden_size=128, vocab_size=1000, layer_params=200_000)

budgets = st.none() | st.integers(1, 40)


@st.composite
def limits(draw, **fixed):
    return Limits(
        max_token_len=draw(budgets),
        max_rows=draw(st.none() | st.integers(1, 4)),
        max_group_rows=draw(st.none() | st.integers(1, 3)),
        num_ranks=draw(st.integers(1, 12)),
        equal_counts=draw(st.booleans()),
        equal_rows=draw(st.booleans()),
        min_micro_batches=draw(st.integers(1, 4)),
        multiple_of=draw(st.integers(1, 3)),
        **fixed,
    )


def grouped(sizes, prompt_len=50, response_lens=(5,)):
    """Rows of one group after the other, one prompt each; responses of the given lengths in turn share nothing."""
    lens, rows = itertools.cycle(response_lens), []
    for g, size in enumerate(sizes):
        rows += [np.r_[np.full(prompt_len, g), np.full(next(lens), 1000 + len(rows) + i)] for i in range(size)]
    return rows


def micro_batches(plan):
    return [batch for batches in plan.ranks for batch in batches]


def num_distinct_prefixes(rows):
    return len({tuple(row[: i + 1].tolist()) for row in rows for i in range(len(row))})


# --- every shape of a batch


@given(batches(), limits(), st.integers(1, 3), st.booleans())
def test_every_row_is_in_one_micro_batch_that_keeps_the_limits(rows, limits, min_shared, with_shape):
    plan = plan_batch(
        rows,
        limits,
        min_shared=min_shared,
        shape=SHAPE if with_shape else None,
        prompt_lens=[len(r) // 2 for r in rows],
    )
    assert len(plan.ranks) == limits.num_ranks
    assert sorted(b for batch in micro_batches(plan) for b in batch.rows) == list(range(len(rows)))
    for batch in micro_batches(plan):
        chosen = [rows[b] for b in batch.rows]
        computed = build_forest(chosen, min_shared=min_shared).num_tokens
        assert computed <= batch.num_tokens
        assert batch.exceeds_budget == (limits.max_token_len is not None and batch.num_tokens > limits.max_token_len)
        assert len(chosen) == 1 or not batch.exceeds_budget
        assert limits.max_rows is None or len(chosen) <= limits.max_rows
        if min_shared == 1:
            assert batch.num_tokens == computed == num_distinct_prefixes(chosen)


@given(batches(), limits())
def test_no_rank_is_empty_while_rows_last(rows, limits):
    plan = plan_batch(rows, limits)
    held = [len(plan.rank_rows(r)) for r in range(limits.num_ranks)]
    assert sum(num > 0 for num in held) == min(len(rows), limits.num_ranks)
    if limits.equal_rows:
        assert held == [len(part) for part in np.array_split(np.arange(len(rows)), limits.num_ranks)]


@given(batches(), limits())
def test_counts_are_equal_where_asked_and_empty_micro_batches_come_last(rows, limits):
    plan = plan_batch(rows, limits)
    for held in plan.ranks:
        assert len(held) % limits.multiple_of == 0
        assert [bool(batch.rows) for batch in held] == sorted((bool(batch.rows) for batch in held), reverse=True)
        assert [batch.cost for batch in held] == sorted((batch.cost for batch in held), reverse=True)
        assert all(batch.num_tokens == batch.cost == 0 for batch in held if not batch.rows)
    if limits.equal_counts:
        assert len({len(held) for held in plan.ranks}) == 1
        assert len(plan.ranks[0]) >= limits.min_micro_batches


@given(batches(), limits())
def test_the_same_batch_has_the_same_plan_and_values_come_back_in_its_order(rows, limits):
    plan = plan_batch(rows, limits)
    assert plan == plan_batch([row.copy() for row in rows], limits)
    flat = [b for batch in micro_batches(plan) for b in batch.rows]
    assert plan.in_callers_order([f"row {b}" for b in flat]) == [f"row {b}" for b in range(len(rows))]


def test_a_wrong_number_of_values_is_refused():
    with pytest.raises(InputError, match="1 values were given for 2 rows"):
        plan_batch([[1], [2]], Limits()).in_callers_order(["a"])


@pytest.mark.parametrize("sizes", [[1] * 9, [7, 7, 7], [3, 3, 3, 3], [1, 7, 3], [5], [64]])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 5, 1024])
@pytest.mark.parametrize("max_token_len", [None, 60, 120])
def test_groups_of_any_size_go_over_any_number_of_ranks(sizes, num_ranks, max_token_len):
    rows = grouped(sizes, response_lens=(5, 9, 2))
    plan = plan_batch(rows, Limits(max_token_len=max_token_len, num_ranks=num_ranks, equal_counts=True), shape=SHAPE)
    assert sorted(b for batch in micro_batches(plan) for b in batch.rows) == list(range(len(rows)))
    assert all(plan.rank_rows(r) for r in range(min(num_ranks, len(rows))))
    assert all(batch.num_tokens <= (max_token_len or np.inf) for batch in micro_batches(plan))


@given(st.integers(1, 20), st.integers(1, 8))
def test_equal_rows_are_one_row_to_compute_and_still_fill_every_rank(num_rows, num_ranks):
    plan = plan_batch([[1, 2, 3]] * num_rows, Limits(num_ranks=num_ranks))
    assert plan.num_tokens == 3 * min(num_rows, num_ranks)
    assert plan.num_tokens_whole == 3


@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), st.integers(1, 6))
def test_rows_that_share_nothing_are_levelled_by_length(lens, num_ranks):
    rows = [np.full(n, b) for b, n in enumerate(lens)]
    plan = plan_batch(rows, Limits(num_ranks=num_ranks))
    assert plan.num_tokens == sum(lens)
    assert plan.saving_kept == 1.0
    assert plan.makespan <= plan.ideal + max(lens)


def test_no_rows_and_rows_without_tokens_are_planned():
    assert plan_batch([], Limits(num_ranks=3)).ranks == ((), (), ())
    plan = plan_batch([[], [], [7]], Limits(max_token_len=5, num_ranks=2))
    assert sorted(b for batch in micro_batches(plan) for b in batch.rows) == [0, 1, 2]
    assert plan_batch([], Limits(num_ranks=2, equal_counts=True, min_micro_batches=2)).ranks[1][1].rows == ()


@pytest.mark.parametrize("name", ["max_token_len", "max_rows", "max_group_rows", "num_ranks", "min_micro_batches"])
@pytest.mark.parametrize("value", [0, -3])
def test_limits_below_one_are_the_only_refusal(name, value):
    with pytest.raises(ConfigError, match=f"{name}={value} must be 1 or more"):
        Limits(**{name: value})


# --- budgets


def test_groups_stay_whole_while_they_fit():
    rows = [grouped([8] * 4)[i] for i in np.random.default_rng(0).permutation(32)]
    plan = plan_batch(rows, Limits(max_token_len=90))
    assert sorted(sorted({int(rows[b][0]) for b in batch.rows}) for batch in plan.ranks[0]) == [[0], [1], [2], [3]]


def test_a_group_above_the_budget_is_cut_at_its_prompt_and_not_inside_an_answer():
    """Two answers that go on together: the pair is worth more together than with the rest of the group."""
    prompt, stem = [1] * 10, [2] * 20
    rows = [prompt + stem + [3] * 5, prompt + [5] * 25, prompt + stem + [4] * 5, prompt + [6] * 25]
    plan = plan_batch(rows, Limits(max_token_len=60))
    assert sorted(batch.rows for batch in plan.ranks[0]) == [(0, 2), (1, 3)]


def test_a_group_of_eight_cut_in_two_keeps_six_sevenths_of_its_saving():
    plan = plan_batch(grouped([8], prompt_len=40, response_lens=(10,)), Limits(num_ranks=2))
    assert [len(plan.rank_rows(r)) for r in range(2)] == [4, 4]
    assert plan.saving_kept == pytest.approx(6 / 7)


@given(st.lists(st.integers(1, 30), min_size=2, max_size=24), st.integers(1, 60), limits())
def test_a_cut_group_keeps_its_share_of_the_saving(lens, prompt_len, limits):
    rows = grouped([len(lens)], prompt_len, lens)
    plan = plan_batch(rows, limits)
    num_parts = sum(bool(batch.rows) for batch in micro_batches(plan))
    assert plan.saving_kept >= (len(rows) - num_parts) / (len(rows) - 1) - 1e-12


@given(batches(min_size=2), limits())
def test_every_segment_keeps_its_share_of_the_saving(rows, limits):
    """n rows through a segment, cut in m parts: computed m times, so (n - m) / (n - 1) of its saving is kept."""
    plan, forest = plan_batch(rows, limits), build_forest(rows)
    part_of_row = {b: i for i, batch in enumerate(micro_batches(plan)) for b in batch.rows}
    kept = whole = 0
    for n in range(forest.num_segments):
        through = forest.segment_rows(n).tolist()
        length = int(forest.end[n] - forest.start[n])
        kept += length * (len(through) - len({part_of_row[b] for b in through}))
        whole += length * (len(through) - 1)
    assert plan.num_tokens_unshared - plan.num_tokens == kept
    assert plan.saving_kept == pytest.approx(kept / whole if whole else 1.0)


def partitions(rows):
    if not rows:
        yield []
        return
    for rest in partitions(rows[1:]):
        yield [[rows[0]], *rest]
        for i in range(len(rest)):
            yield [*rest[:i], [rows[0], *rest[i]], *rest[i + 1 :]]


@given(batches(min_size=2), st.integers(6, 25))
def test_cuts_compute_little_more_than_the_best_of_all_partitions(rows, budget):
    rows = [row for row in rows if len(row) <= budget][:6]
    plan = plan_batch(rows, Limits(max_token_len=budget))
    sizes = {
        subset: num_distinct_prefixes([rows[b] for b in subset])
        for n in range(1, len(rows) + 1)
        for subset in itertools.combinations(range(len(rows)), n)
    }
    possible = [[sizes[tuple(sorted(part))] for part in parts] for parts in partitions(list(range(len(rows))))]
    best = min(sum(parts) for parts in possible if max(parts, default=0) <= budget)
    assert plan.num_tokens <= 1.5 * best


def test_a_row_above_the_budget_is_alone_and_warned_of_once():
    rows = [np.arange(5), np.arange(30, 60), np.arange(5) + 7, np.arange(70, 95)]
    with pytest.warns(
        UserWarning, match=r"30 tokens exceeds max_token_len=10 and runs alone \(so do 1 more\)"
    ) as caught:
        plan = plan_batch(rows, Limits(max_token_len=10, num_ranks=2))
    assert len(caught) == 1
    assert sorted(batch.rows for batch in micro_batches(plan) if batch.exceeds_budget) == [(1,), (3,)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan_batch(rows, Limits(max_token_len=30))


def test_a_group_whose_prompt_alone_exceeds_the_budget_is_marked_and_still_runs():
    rows = [*grouped([3], prompt_len=50), *[row + 5000 for row in grouped([2], prompt_len=20)]]
    plan = plan_batch(rows, Limits(max_token_len=40))
    assert plan.staged_groups == ((0, 1, 2),)
    assert [batch.is_staged for batch in plan.ranks[0]] == [True, True, True, False]
    assert [len(batch.rows) for batch in plan.ranks[0]] == [1, 1, 1, 2]
    assert plan_batch(rows, Limits(max_token_len=55)).staged_groups == ()


def test_a_chain_of_a_thousand_turns_is_cut_without_recursion():
    rows = [np.arange(3 * (turn + 1)) for turn in range(1500)]
    plan = plan_batch(rows, Limits(max_token_len=4600, num_ranks=3))
    assert sorted(b for batch in micro_batches(plan) for b in batch.rows) == list(range(1500))
    branches = [np.r_[np.arange(2 * turn), 9000 + np.arange(40) + 40 * turn] for turn in range(400)]
    plan = plan_batch(branches, Limits(max_token_len=2000))
    assert all(batch.num_tokens <= 2000 for batch in micro_batches(plan))


# --- cost and ranks


@given(batches(), limits())
def test_costs_are_those_of_the_cost_model(rows, limits):
    """Responses start right behind the prompts; rows of one prompt are targets from the same depth on."""
    before = [min(2, len(row)) for row in rows]
    plan = plan_batch(rows, limits, shape=SHAPE, prompt_lens=before)
    for batch in micro_batches(plan):
        forest = build_forest([rows[b] for b in batch.rows])
        masks = [np.arange(len(rows[b])) >= before[b] for b in batch.rows]
        num_predicting = len(find_targets(forest, masks).parents)
        assert batch.cost == pytest.approx(
            forest_cost(forest, SHAPE, num_predicting=num_predicting, num_targets=0).flops, rel=1e-9
        )
    assert plan.makespan >= plan.ideal * (1 - 1e-9)


def long_tailed(num_groups, group_size, *, seed=0, prompt_len=256, response_len=512):
    rng = np.random.default_rng(seed)
    rows, before = [], []
    for _ in range(num_groups):
        prompt = rng.integers(0, 5000, int(prompt_len * rng.lognormal(0, 0.3)))
        for _ in range(group_size):
            response = rng.integers(0, 5000, int(np.clip(response_len * rng.lognormal(0, 0.8), 1, 4096)))
            rows.append(np.concatenate([prompt, response]))
            before.append(len(prompt))
    return rows, before


@pytest.mark.parametrize("num_ranks", [8, 16, 32, 64])
@pytest.mark.parametrize(("num_groups", "group_size"), [(64, 16), (16, 64), (256, 4)])
def test_ranks_finish_within_five_per_cent_of_the_ideal(num_groups, group_size, num_ranks):
    rows, before = long_tailed(num_groups, group_size)
    plan = plan_batch(rows, Limits(max_token_len=16384, num_ranks=num_ranks), shape=SHAPE, prompt_lens=before)
    assert plan.makespan <= 1.05 * plan.ideal
    assert plan.makespan <= 1.15 * plan.bound
    assert plan.saving_kept > 0.8


def test_whole_groups_are_not_cut_where_they_level_the_ranks_by_themselves():
    plan = plan_batch(grouped([4] * 64, response_lens=(5, 6, 7, 8)), Limits(num_ranks=8))
    assert plan.saving_kept == 1.0
    assert plan.makespan == plan.ideal


def test_three_groups_over_two_ranks_cut_one_group():
    rows = grouped([8, 8, 8], prompt_len=20, response_lens=(30,))
    plan = plan_batch(rows, Limits(num_ranks=2))
    assert plan.num_tokens == plan.num_tokens_whole + 20
    assert plan.makespan <= 1.05 * plan.ideal


def test_micro_batches_of_a_rank_are_near_equal():
    rows, before = long_tailed(64, 8)
    plan = plan_batch(rows, Limits(max_token_len=16384), shape=SHAPE, prompt_lens=before)
    tokens = [batch.num_tokens for batch in plan.ranks[0]]
    assert max(tokens) <= 16384
    assert min(tokens) >= 0.8 * max(tokens)


def test_ten_thousand_rows_over_a_thousand_ranks():
    rng = np.random.default_rng(0)
    rows = [np.r_[np.full(20, b // 16), rng.integers(0, 99, rng.integers(1, 40))] for b in range(10_000)]
    plan = plan_batch(rows, Limits(max_token_len=512, num_ranks=1024))
    assert all(plan.rank_rows(r) for r in range(1024))
    assert plan.makespan <= 1.1 * plan.ideal


# --- unshared


@given(st.lists(st.integers(0, 50), max_size=30), limits())
def test_padded_batches_keep_the_limits_with_their_padding(lens, limits):
    plan = plan_padded(lens, limits, shape=SHAPE)
    assert sorted(b for batch in micro_batches(plan) for b in batch.rows) == list(range(len(lens)))
    for batch in micro_batches(plan):
        area = len(batch.rows) * max((lens[b] for b in batch.rows), default=0)
        assert batch.num_tokens == area
        assert limits.max_token_len is None or area <= limits.max_token_len or len(batch.rows) == 1
        assert limits.max_rows is None or len(batch.rows) <= limits.max_rows
    if limits.equal_counts:
        assert len({len(held) for held in plan.ranks}) == 1


def test_rows_of_like_length_are_padded_together():
    plan = plan_padded([5, 50, 6, 49, 4, 48], Limits(max_token_len=150))
    assert [batch.rows for batch in plan.ranks[0]] == [(1, 3, 5), (0, 2, 4)]


# --- what a plan is for


@pytest.mark.parametrize("equal_counts", [True, False])
@pytest.mark.parametrize(("num_ranks", "max_token_len"), [(2, 30), (3, None), (5, 24), (16, None)])
@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo"])
def test_losses_and_gradients_over_ranks_equal_those_of_one(loss, num_ranks, max_token_len, equal_counts):
    batch = grouped_batch(group_size=5)
    rows = [prompt + response for prompt, response in zip(batch.prompts, batch.responses, strict=True)]
    limits = Limits(max_token_len=max_token_len, num_ranks=num_ranks, equal_counts=equal_counts)
    plan = plan_batch(rows, limits, prompt_lens=[len(prompt) for prompt in batch.prompts])
    processing = Processing(loss=loss, num_loss_tokens=batch.num_loss_tokens, num_loss_rows=batch.num_loss_rows)
    one, total = TorchTrainEngine(config()), torch.zeros(())
    whole = one.fwd_bwd(batch, processing)
    many = TorchTrainEngine(config())
    logprobs = []
    for part in micro_batches(plan):
        result = many.fwd_bwd(part_of(batch, list(part.rows)), processing)
        total = total + result.metrics["loss"]
        logprobs += result.logprobs
    assert total.item() == pytest.approx(whole.metrics["loss"], abs=1e-5)
    for ours, theirs in zip(plan.in_callers_order(logprobs), whole.logprobs, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    for ours, theirs in zip(many.model.parameters(), one.model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-6)


def test_planning_reads_rows_and_changes_none():
    rows = [np.array([1, 2, 3], np.int32), [1, 2, 4], np.array([9], np.uint16)]
    plan = plan_batch(rows, Limits(max_token_len=4))
    assert sorted(batch.rows for batch in plan.ranks[0]) == [(0, 1), (2,)]
    assert order_rows(rows).shared.tolist() == [0, 2, 0]
