import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from arctic_platform.errors import ConfigError, InputError
from arctic_platform.integrations.verl import verl_settings
from arctic_platform.rl.zorro_train import DeduplicatedActor, ZoRRoTrain
from arctic_platform.rl.zorro_train.seqlen_balancing import (
    get_reverse_idx,
    get_seqlen_balanced_partitions,
    rearrange_micro_batches_with_dedup,
    reorg_global_batch,
)
from arctic_platform.rl.zorro_train.tests import build_qwen3, create_dummy_batch

P, R = 16, 8


def dummy_batch(num_rows, num_prompts, *, training=False, **options):
    return create_dummy_batch(
        num_rows,
        num_prompts,
        P,
        R,
        vocab_size=100,
        include_training_fields=training,
        add_padding=True,
        seed=0,
        **options,
    )


def batch_of(groups, *, prompt_len=P):
    """Rows of one batch from `(prompt length, [response lengths])` of each group; ids tell groups and rows apart."""
    rows = [(g, p, r) for g, (p, lens) in enumerate(groups) for r in lens]
    width = prompt_len + max([1, *(r for _, _, r in rows)])
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for b, (g, p, r) in enumerate(rows):
        ids[b, prompt_len - p : prompt_len] = 1 + g
        ids[b, prompt_len : prompt_len + r] = 50 + b
        mask[b, prompt_len - p : prompt_len + r] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}, width - prompt_len


group_shapes = st.lists(
    st.tuples(st.integers(1, P), st.lists(st.integers(0, 12), min_size=1, max_size=7)), min_size=1, max_size=6
)


# --- partitions


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 12), st.booleans())
def test_every_row_is_in_one_partition_and_no_partition_is_empty_while_rows_last(lens, k, equal_size):
    parts = get_seqlen_balanced_partitions(lens, k, equal_size)
    assert len(parts) == k
    assert sorted(i for part in parts for i in part) == list(range(len(lens)))
    assert sum(not part for part in parts) == max(0, k - len(lens))
    assert all(part == sorted(part) for part in parts)
    if equal_size:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def largest(lens, parts):
    return max(sum(lens[i] for i in part) for part in parts)


def best_possible(lens, k):
    """The smallest largest sum over all assignments, tried one by one."""
    sums = {(0,) * k}
    for n in lens:
        sums = {tuple(sorted((*s[:i], s[i] + n, *s[i + 1 :]))) for s in sums for i in range(k)}
    return min(s[-1] for s in sums)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_sums_are_within_a_third_of_the_best_assignment(lens, k):
    assert largest(lens, get_seqlen_balanced_partitions(lens, k, False)) <= 4 / 3 * best_possible(lens, k)


def test_the_differencing_method_on_its_textbook_example():
    parts = get_seqlen_balanced_partitions([8, 7, 6, 5, 4], 2, False)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in parts) == [14, 16]


def test_partitions_of_long_tailed_lengths_are_level():
    lens = np.random.default_rng(0).lognormal(6, 1, 512).astype(int).tolist()
    ideal = max([sum(lens) / 16, *lens])
    assert largest(lens, get_seqlen_balanced_partitions(lens, 16, equal_size=False)) <= 1.01 * ideal
    contiguous = [list(range(at, at + 32)) for at in range(0, 512, 32)]
    equal = get_seqlen_balanced_partitions(lens, 16, equal_size=True)
    assert largest(lens, equal) < min(1.25 * ideal, largest(lens, contiguous))


def test_five_rows_over_four_ranks_differ_by_at_most_one_row():
    parts = get_seqlen_balanced_partitions([60, 10, 20, 30, 40], 4, equal_size=True)
    assert sorted(map(len, parts)) == [1, 1, 1, 2]


@pytest.mark.parametrize(
    ("lens", "k", "error"), [([1], 0, ConfigError), ([1], -2, ConfigError), ([1, -1], 1, InputError)]
)
def test_a_partition_number_below_one_and_a_negative_length_are_refused(lens, k, error):
    with pytest.raises(error):
        get_seqlen_balanced_partitions(lens, k, False)


@given(st.permutations(range(9)))
def test_the_reverse_index_undoes_a_permutation(order):
    values = [f"row {i}" for i in range(9)]
    moved = [values[i] for i in order]
    assert [moved[i] for i in get_reverse_idx(order)] == values


@pytest.mark.parametrize("idx_map", [[0, 0], [1, 2], [-1, 0]])
def test_an_index_that_is_no_permutation_is_refused(idx_map):
    with pytest.raises(InputError, match="exactly once"):
        get_reverse_idx(idx_map)


# --- micro-batches


@given(group_shapes, st.integers(1, 60))
@pytest.mark.filterwarnings("ignore:a row of")
def test_every_row_is_in_one_micro_batch_within_the_budget(groups, budget):
    batch, response_len = batch_of(groups)
    micro_batches, rows = rearrange_micro_batches_with_dedup(batch, response_len, budget)
    assert sorted(b for part in rows for b in part) == list(range(len(batch["input_ids"])))
    for micro_batch, part in zip(micro_batches, rows, strict=True):
        assert torch.equal(micro_batch["input_ids"], batch["input_ids"][part])
        assert micro_batch["dedup_input_ids"].numel() <= budget or len(part) == 1


@given(group_shapes)
def test_groups_that_fit_are_whole(groups):
    batch, response_len = batch_of(groups)
    budget = max(p + sum(lens) for p, lens in groups)
    _, rows = rearrange_micro_batches_with_dedup(batch, response_len, budget)
    found, _ = ZoRRoTrain.find_prompt_groups(batch["input_ids"], response_len, attention_mask=batch["attention_mask"])
    for group in found:
        assert sum(not set(group).isdisjoint(part) for part in rows) == 1


def test_five_rows_of_sixty_tokens_and_a_cap_of_a_hundred():
    batch, response_len = batch_of([(10, [50]) for _ in range(5)])
    micro_batches, rows = rearrange_micro_batches_with_dedup(batch, response_len, 100, min_num_micro_batch=3)
    assert [len(part) for part in rows] == [1] * 5
    assert all(micro_batch["dedup_input_ids"].numel() <= 100 for micro_batch in micro_batches)


def test_a_row_above_the_budget_is_alone_with_one_warning():
    batch, response_len = batch_of([(10, [50]), (4, [2, 2]), (12, [60])])
    with pytest.warns(UserWarning, match="a row of 72 tokens exceeds max_token_len=40 and runs alone") as caught:
        _, rows = rearrange_micro_batches_with_dedup(batch, response_len, 40)
    assert len(caught) == 1
    assert rows == [[3], [0], [1, 2]]


@pytest.mark.parametrize("budget", [0, -5])
def test_a_budget_below_one_is_refused(budget):
    with pytest.raises(ConfigError, match="must be 1 or more"):
        rearrange_micro_batches_with_dedup(dummy_batch(4, 2), R, budget)
    with pytest.raises(ConfigError, match="must be 1 or more"):
        reorg_global_batch(dummy_batch(4, 2), R, 2, budget)


def test_a_micro_batch_has_its_rows_and_their_deduplicated_form():
    batch = dummy_batch(6, 2, training=True) | {"names": np.array(list("abcdef")), "meta": {"step": 3}}
    micro_batches, rows = rearrange_micro_batches_with_dedup(batch, R, P + 2 * R)
    assert len(micro_batches) > 1
    for micro_batch, part in zip(micro_batches, rows, strict=True):
        assert torch.equal(micro_batch["advantages"], batch["advantages"][part])
        assert micro_batch["names"].tolist() == [batch["names"][b] for b in part]
        assert micro_batch["meta"] == {"step": 3}
        live = [batch["input_ids"][b][batch["attention_mask"][b].bool()] for b in part]
        info = micro_batch["reconstruction_info"]
        rebuilt = ZoRRoTrain.reconstruct_sequences(micro_batch["dedup_input_ids"], info)
        assert torch.equal(rebuilt[0], torch.cat(live))
        metrics = micro_batch["dedup_metrics"]
        assert metrics["orig_tokens"] == sum(map(len, live))
        assert metrics["tokens_saved"] == metrics["orig_tokens"] - metrics["dedup_tokens"] >= 0
        assert metrics["batch_size"] == len(part)


def test_left_pads_and_a_pad_id_that_is_a_token_do_not_make_prompts_equal():
    batch, response_len = batch_of([(4, [2]), (5, [2])])
    batch["input_ids"][1, P - 5] = 0
    batch["input_ids"][1, P - 4 : P] = 1
    micro_batches, _ = rearrange_micro_batches_with_dedup(batch, response_len, 100)
    assert micro_batches[0]["dedup_metrics"]["tokens_saved"] == 0


def test_a_batch_without_mask_and_positions_is_all_live():
    batch = {"input_ids": torch.arange(24).reshape(2, 12)}
    micro_batches, rows = rearrange_micro_batches_with_dedup(batch, 4, 12)
    assert sorted(rows) == [[0], [1]]
    assert micro_batches[0]["dedup_input_ids"].numel() == 12


def test_at_most_the_given_rows_of_a_prompt_are_in_a_micro_batch():
    batch, response_len = batch_of([(8, [2] * 7), (8, [3])])
    _, rows = rearrange_micro_batches_with_dedup(batch, response_len, 1000, max_group_length_threshold=3)
    assert len(rows) == 3
    assert all(len(set(part) & set(range(7))) <= 3 for part in rows)


@pytest.mark.parametrize(
    ("options", "count"),
    [({}, 2), ({"min_num_micro_batch": 5}, 5), ({"num_batches_divided_by": 3}, 3), ({"min_num_micro_batch": 12}, 12)],
)
def test_the_number_of_micro_batches_follows_what_is_asked_for(options, count):
    batch, response_len = batch_of([(8, [4, 4]) for _ in range(4)])
    micro_batches, rows = rearrange_micro_batches_with_dedup(batch, response_len, 32, **options)
    assert len(micro_batches) == len(rows) == count
    assert sorted(b for part in rows for b in part) == list(range(8))
    assert [bool(part) for part in rows] == sorted((bool(part) for part in rows), reverse=True)


def test_a_micro_batch_without_rows_takes_part_with_zero_loss_and_zero_gradients():
    batch = dummy_batch(4, 2, training=True)
    micro_batches, rows = rearrange_micro_batches_with_dedup(batch, R, 1000, min_num_micro_batch=3)
    assert [len(part) for part in rows] == [2, 2, 0]
    actor = DeduplicatedActor(build_qwen3(64, 2, 2, 1, 32, 128), device="cpu", dtype=torch.float32)
    output = actor.forward(micro_batches[2] | {"response_length": R})
    assert output.logprobs.shape == (0,)
    output.logprobs.sum().backward()
    layers = [param.grad for param in actor.model.model.parameters()]
    assert all(grad is not None and not grad.any() for grad in layers)
    metrics = actor.compute_policy_loss_and_backward(micro_batches[2] | {"response_length": R})
    assert metrics["actor/loss"] == 0.0


def test_a_batch_without_rows_has_no_micro_batches():
    empty = {"input_ids": torch.zeros(0, 12, dtype=torch.long)}
    assert rearrange_micro_batches_with_dedup(empty, 4, 10) == ([], [])
    reordered, order = reorg_global_batch(empty, 4, 2, 10)
    assert reordered["input_ids"].shape == (0, 12)
    assert order == []


@pytest.mark.parametrize("response_length", [0, 24, 30])
def test_a_response_region_that_does_not_fit_is_refused(response_length):
    with pytest.raises(InputError, match="response_length"):
        rearrange_micro_batches_with_dedup(dummy_batch(4, 2), response_length, 100)


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(InputError, match="one shape"):
        rearrange_micro_batches_with_dedup(dummy_batch(4, 2) | {"attention_mask": torch.ones(4, 3)}, R, 100)


# --- ranks


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What two real processes of a gloo group say, see `ranks.py`."""
    store = tmp_path_factory.mktemp("gloo") / "store"
    command = [sys.executable, "-m", "tests.zorro_train.ranks"]
    running = [
        subprocess.Popen([*command, str(rank), str(store)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=200) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], outputs
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


@pytest.mark.parametrize("agreed", ["default", "both", "tensordict"])
def test_all_ranks_of_a_group_have_the_largest_number_of_micro_batches_of_any(two_ranks, agreed):
    many, few = (told[agreed] for told in two_ranks)
    assert len(many) == len(few) == max(len(told["unequal"]) for told in two_ranks) == 5
    assert sorted(b for part in many for b in part) == list(range(10))
    assert sorted(b for part in few for b in part) == [0, 1]


@pytest.mark.parametrize("apart", ["alone", "unequal"])
def test_ranks_that_do_not_agree_have_their_own_numbers(two_ranks, apart):
    assert [len(told[apart]) for told in two_ranks] == [5, 1]


def test_a_collective_in_each_pass_comes_through_on_ranks_without_rows(two_ranks):
    assert [told["collectives"] for told in two_ranks] == [5, 5]


# --- TensorDicts


def as_tensordict(batch):
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    return TensorDict(tensors, batch_size=len(batch["input_ids"]))


@pytest.mark.parametrize("options", [{}, {"min_num_micro_batch": 5}])
def test_a_tensordict_is_cut_as_the_dict_of_its_entries(options):
    batch = dummy_batch(6, 2, training=True)
    plain, rows = rearrange_micro_batches_with_dedup(batch, R, P + 2 * R, **options)
    held, held_rows = rearrange_micro_batches_with_dedup(as_tensordict(batch), R, P + 2 * R, **options)
    assert held_rows == rows
    for ours, theirs in zip(held, plain, strict=True):
        for name in ("input_ids", "attention_mask", "advantages", "dedup_input_ids", "adapted_position_ids"):
            assert torch.equal(ours[name], theirs[name])
        assert ours["prompt_groups"] == theirs["prompt_groups"]
    assert all(isinstance(part, dict) for part in held)


def test_a_reordered_tensordict_is_a_tensordict_that_can_be_undone():
    batch = as_tensordict(dummy_batch(8, 3, training=True))
    reordered, order = reorg_global_batch(batch, R, 2, 1000)
    assert isinstance(reordered, TensorDict)
    assert reordered.batch_size == batch.batch_size
    undone = reordered[torch.tensor(get_reverse_idx(order))]
    assert all(torch.equal(undone[name], batch[name]) for name in batch.keys())  # noqa: SIM118
    assert reorg_global_batch(dict(batch.items()), R, 2, 1000)[1] == order


# --- global batches


def slices(order, num_ranks):
    return [part.tolist() for part in np.array_split(np.array(order), num_ranks)]


@given(group_shapes, st.integers(1, 9))
def test_a_reordered_batch_is_a_permutation_that_can_be_undone(groups, num_ranks):
    batch, response_len = batch_of(groups)
    reordered, order = reorg_global_batch(batch, response_len, num_ranks, 1000)
    assert sorted(order) == list(range(len(order)))
    for name, value in reordered.items():
        assert torch.equal(value, batch[name][order])
        assert torch.equal(value[get_reverse_idx(order)], batch[name])


def test_tensor_parallel_ranks_do_not_count_as_slices():
    """A world of tp=2 times dp=2 has two slices, and each of four equal groups is whole in one of them."""
    batch, response_len = batch_of([(8, [4] * 4) for _ in range(4)])
    _, order = reorg_global_batch(batch, response_len, 2, 1000)
    assert all({b // 4 for b in part} in ({0, 1}, {0, 2}, {0, 3}, {1, 2}, {1, 3}, {2, 3}) for part in slices(order, 2))
    assert sorted(len(part) for part in slices(order, 2)) == [8, 8]


def test_three_groups_over_two_slices_cut_one_of_them():
    batch, response_len = batch_of([(8, [4] * 4) for _ in range(3)])
    _, order = reorg_global_batch(batch, response_len, 2, 1000)
    in_both = set.intersection(*({b // 4 for b in part} for part in slices(order, 2)))
    assert len(in_both) == 1


@pytest.mark.parametrize(("num_rows", "num_ranks"), [(5, 4), (3, 8), (8, 8), (1, 1)])
def test_any_number_of_rows_goes_over_any_number_of_slices(num_rows, num_ranks):
    batch, response_len = batch_of([(8, [4]) for _ in range(num_rows)])
    _, order = reorg_global_batch(batch, response_len, num_ranks, 1000)
    assert sorted(order) == list(range(num_rows))


def test_slices_of_long_tailed_groups_cost_about_the_same():
    rng = np.random.default_rng(0)
    groups = [(int(rng.integers(4, P)), rng.lognormal(3, 0.8, 8).astype(int).clip(1, 300).tolist()) for _ in range(32)]
    batch, response_len = batch_of(groups)
    _, order = reorg_global_batch(batch, response_len, 4, 10**6)
    plain = slices(range(256), 4)

    def cost(part):
        prompts = {b // 8 for b in part}
        return int(batch["attention_mask"][part, P:].sum()) + sum(groups[g][0] for g in prompts)

    ours, naive = [cost(part) for part in slices(order, 4)], [cost(part) for part in plain]
    assert max(ours) <= 1.05 * np.mean(ours)
    assert max(ours) < max(naive)


# --- faults that users of other trainers have reported, and their neighbours


def counts_of(parts):
    return sorted(map(len, parts))


@pytest.mark.parametrize(("num_rows", "num_ranks"), [(5, 4), (4, 5), (1, 2), (7, 3), (8, 8), (9, 8), (1000, 7), (0, 3)])
def test_case_61_rows_that_do_not_divide_by_the_ranks_are_balanced(num_rows, num_ranks):
    lens = np.random.default_rng(num_rows).integers(1, 500, num_rows).tolist()
    equal = get_seqlen_balanced_partitions(lens, num_ranks, equal_size=True)
    assert counts_of(equal) == sorted(len(part) for part in np.array_split(np.arange(num_rows), num_ranks))
    free = get_seqlen_balanced_partitions(lens, num_ranks, equal_size=False)
    assert sorted(i for part in free for i in part) == list(range(num_rows))
    if num_rows:
        assert largest(lens, free) <= sum(lens) / num_ranks + max(lens)
        batch, response_len = batch_of([(8, [n % 12]) for n in lens])
        order = reorg_global_batch(batch, response_len, num_ranks, 1000)[1]
        assert sorted(order) == list(range(num_rows))


@pytest.mark.parametrize("cap", [59, 60, 61, 99, 100, 119, 120, 121, 180, 300, 10_000])
@pytest.mark.parametrize("num_batches", [1, 3, 5, 7])
@pytest.mark.filterwarnings("ignore:a row of")
def test_case_63_no_micro_batch_exceeds_the_cap_but_a_row_alone(cap, num_batches):
    batch, response_len = batch_of([(10, [50]) for _ in range(5)])
    micro_batches, rows = rearrange_micro_batches_with_dedup(batch, response_len, cap, min_num_micro_batch=num_batches)
    assert len(rows) >= max(num_batches, -(-5 // max(cap // 60, 1)))
    for micro_batch, part in zip(micro_batches, rows, strict=True):
        assert micro_batch["dedup_input_ids"].numel() <= cap or len(part) == 1


@pytest.mark.parametrize(("tensor_parallel", "data_parallel"), [(2, 2), (4, 1), (1, 4), (2, 3), (8, 2)])
def test_case_64_a_batch_is_cut_for_the_data_parallel_ranks_and_not_for_the_world(tensor_parallel, data_parallel):
    actor = {"strategy": "megatron", "megatron": {"tensor_model_parallel_size": tensor_parallel}}
    settings = verl_settings(
        {
            "actor_rollout_ref": {"actor": actor | {"ppo_micro_batch_size_per_gpu": 4}},
            "trainer": {"n_gpus_per_node": tensor_parallel * data_parallel, "nnodes": 1},
        }
    )
    assert settings.num_ranks == data_parallel
    batch, response_len = batch_of([(8, [4] * 4) for _ in range(2 * data_parallel)])
    _, order = reorg_global_batch(batch, response_len, settings.num_ranks, 1000)
    parts = slices(order, data_parallel)
    assert counts_of(parts) == [8] * data_parallel
    assert all(len({b // 4 for b in part}) == 2 for part in parts), "every group is whole in one slice"


@pytest.mark.parametrize(("num_groups", "num_ranks"), [(3, 2), (1, 2), (5, 4), (2, 4), (7, 8), (4, 3)])
@pytest.mark.parametrize("group_size", [1, 3, 4, 7])
def test_case_66_groups_that_do_not_divide_by_the_ranks_are_cut_with_bounded_loss(num_groups, num_ranks, group_size):
    batch, response_len = batch_of([(8, [4] * group_size) for _ in range(num_groups)])
    _, order = reorg_global_batch(batch, response_len, num_ranks, 1000)
    parts = slices(order, num_ranks)
    assert sorted(order) == list(range(num_groups * group_size))
    cuts = sum(len({b // group_size for b in part}) for part in parts) - num_groups
    assert cuts <= num_ranks - 1, "no more groups are cut than there are places between ranks"


@pytest.mark.parametrize(("num_rows", "num_parts"), [(8, 2), (8, 3), (8, 8), (2, 2), (7, 2), (16, 4), (5, 1)])
def test_case_67_a_group_that_is_cut_keeps_its_part_of_the_saving_and_reports_it(num_rows, num_parts):
    prompt_len, response_len = 12, 4
    batch, width = batch_of([(prompt_len, [response_len] * num_rows)])
    rows_of_part = -(-num_rows // num_parts)
    micro_batches, rows = rearrange_micro_batches_with_dedup(batch, width, prompt_len + rows_of_part * response_len)
    assert len(rows) == -(-num_rows // rows_of_part)
    saved = sum(micro_batch["dedup_metrics"]["tokens_saved"] for micro_batch in micro_batches)
    whole = prompt_len * (num_rows - 1)
    assert saved / whole == pytest.approx((num_rows - len(rows)) / (num_rows - 1))
