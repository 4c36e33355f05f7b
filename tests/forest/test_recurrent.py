import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from arctic_platform.forest import ForestPlan, RowsPlan, build_forest
from arctic_platform.forest.packing import group_by_length
from tests.forest.strategies import batches

PLANS = {"segments": ForestPlan, "rows": RowsPlan}
CHANNELS = 3


def fresh(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def decayed_sum(inputs, initial, keep_state):
    """state = exp(-g * g) * state + x, token by token; zeros leave it alone. The output is state * q."""
    x, g, q = inputs
    state = torch.zeros_like(x[:, 0]) if initial is None else initial
    out = []
    for t in range(x.shape[1]):
        state = torch.exp(-(g[:, t] ** 2)) * state + x[:, t]
        out.append(state * q[:, t])
    return torch.stack(out, dim=1), state if keep_state else None


def causal_conv(weight):
    return lambda x: F.conv1d(x, weight.unsqueeze(1), padding=weight.shape[1] - 1, groups=len(weight))[
        ..., : x.shape[2]
    ]


def along_parents(forest, x, g, q):
    """The recurrence by its meaning: every token goes on from the state of its parent."""
    states = []
    for token, parent in enumerate(forest.parent.tolist()):
        before = states[parent] if parent >= 0 else torch.zeros_like(x[0, 0])
        states.append(torch.exp(-(g[0, token] ** 2)) * before + x[0, token])
    return torch.stack(states).unsqueeze(0) * q


def gradients_equal(out, expected, inputs):
    weights = fresh(*out.shape, seed=9).detach()
    ours = torch.autograd.grad(out, inputs, weights)
    theirs = torch.autograd.grad(expected, inputs, weights)
    return all((a - b).abs().max() < 1e-13 * b.abs().max().clamp(min=10) for a, b in zip(ours, theirs, strict=True))


@given(batches(), st.sampled_from(sorted(PLANS)), st.integers(1, 3))
@settings(max_examples=100)
def test_states_go_on_from_the_parent_token_forward_and_backward(rows, kind, min_shared):
    forest = build_forest(rows, min_shared=min_shared)
    if not forest.num_tokens:
        return
    inputs = [fresh(1, forest.num_tokens, CHANNELS, seed=seed) for seed in range(3)]
    expected = along_parents(forest, *inputs)
    out = PLANS[kind](forest).recurrence.scan(decayed_sum, inputs)
    assert (out - expected).abs().max() < 1e-12
    assert gradients_equal(out, expected, inputs)


@given(batches(), st.sampled_from(sorted(PLANS)), st.integers(1, 6))
@settings(max_examples=100)
def test_a_convolution_reads_the_tokens_of_its_own_row(rows, kind, kernel_len):
    forest = build_forest(rows)
    if not forest.num_tokens:
        return
    x, weight = fresh(1, CHANNELS, forest.num_tokens), fresh(CHANNELS, kernel_len, seed=1)
    conv = causal_conv(weight)
    out = PLANS[kind](forest).recurrence.convolve(conv, x, kernel_len)
    expected = torch.zeros_like(x)
    for b in range(forest.num_rows):
        row = torch.from_numpy(forest.row(b))
        if len(row):
            expected = expected.index_copy(2, row, conv(x[:, :, row]))
    assert (out - expected).abs().max() < 1e-12
    assert gradients_equal(out, expected, [x, weight])


def test_siblings_are_scanned_together_and_only_inner_segments_keep_a_state():
    rng = np.random.default_rng(0)
    trunk = np.arange(40)
    rows = [np.concatenate([trunk, [50 + group], rng.integers(60, 90, 20 + i)]) for group in range(4) for i in range(8)]
    forest = build_forest(rows)
    calls = []

    def scan(inputs, initial, keep_state):
        calls.append((tuple(inputs[0].shape[:2]), initial is not None, keep_state))
        return decayed_sum(inputs, initial, keep_state)

    inputs = [fresh(1, forest.num_tokens, CHANNELS, seed=seed) for seed in range(3)]
    out = ForestPlan(forest).recurrence.scan(scan, inputs)
    assert (out - along_parents(forest, *inputs)).abs().max() < 1e-12
    assert calls[0] == ((1, 40), False, True)
    assert len(calls) <= 6
    assert sum(shape[0] for shape, _, _ in calls) == forest.num_segments
    assert all(has_initial for _, has_initial, _ in calls[1:])
    assert not calls[-1][2]


@pytest.mark.parametrize("cut", [1, 3, 7])
def test_going_on_from_a_prefix_state_equals_the_whole_row(cut):
    """Several tokens at once, from a state that is not zero."""
    row = np.arange(10)
    forest = build_forest([row, np.append(row[:cut], 99)])
    inputs = [fresh(1, forest.num_tokens, CHANNELS, seed=seed) for seed in range(3)]
    out = ForestPlan(forest).recurrence.scan(decayed_sum, inputs)
    at = torch.from_numpy(forest.row(0))
    alone, _ = decayed_sum([x[:, at] for x in inputs], None, False)
    assert (out[:, at] - alone).abs().max() < 1e-12


def test_changing_one_row_leaves_the_others_bit_for_bit():
    forest = build_forest([[1, 2, 3, 4, 5], [1, 2, 6, 7], [8, 9]])
    inputs = [fresh(1, forest.num_tokens, CHANNELS, seed=seed).detach() for seed in range(3)]
    x, weight = fresh(1, CHANNELS, forest.num_tokens).detach(), fresh(CHANNELS, 4, seed=1).detach()
    recurrence = ForestPlan(forest).recurrence
    before = recurrence.scan(decayed_sum, inputs), recurrence.convolve(causal_conv(weight), x, 4)
    own = int(forest.row(1)[-1])
    others = np.setdiff1d(np.arange(forest.num_tokens), [own])
    for tensor in inputs:
        tensor[0, own] += 1
    x[0, :, own] += 1
    after = recurrence.scan(decayed_sum, inputs), recurrence.convolve(causal_conv(weight), x, 4)
    assert torch.equal(before[0][:, others], after[0][:, others])
    assert torch.equal(before[1][:, :, others], after[1][:, :, others])
    assert not torch.equal(before[0][:, own], after[0][:, own])


@given(st.lists(st.integers(1, 40), max_size=30))
def test_groups_hold_every_length_once_and_at_most_a_third_is_padding(lens):
    lens = np.array(lens, np.int64)
    groups = group_by_length(lens)
    assert sorted(np.concatenate([np.empty(0, np.int64), *groups]).tolist()) == list(range(len(lens)))
    for group in groups:
        padded = len(group) * lens[group].max()
        assert 3 * (padded - lens[group].sum()) <= padded
