"""A row that is cut into passes anywhere, and a pass that begins behind another, equal the row in one piece."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arctic_platform.forest import build_forest
from arctic_platform.forest.recurrent import ForestRecurrence
from arctic_platform.forest.states import ResumedRecurrence, StepRecurrence
from tests.forest.strategies import batches
from tests.forest.test_recurrent import CHANNELS, causal_conv, decayed_sum, fresh


def values(num_tokens):
    return [fresh(1, num_tokens, CHANNELS, seed=seed).detach() for seed in range(3)]


def of_rows(rows, table):
    """The inputs of a forest's tokens, a function of row prefix alone, so that equal tokens have equal inputs."""
    forest = build_forest(rows)
    keys = [0] * forest.num_tokens
    for token, parent in enumerate(forest.parent.tolist()):
        keys[token] = hash((keys[parent] if parent >= 0 else 0, int(forest.input_ids[token]))) % 10_007
    return forest, [x[:, keys] for x in table]


def run(recurrence, inputs, weight):
    x, g, q = inputs
    convolved = recurrence.convolve(causal_conv(weight), x.transpose(1, 2), weight.shape[1])
    return convolved.transpose(1, 2) + recurrence.scan(decayed_sum, [x, g, q])


@given(batches(), st.integers(1, 5))
@settings(max_examples=100)
def test_a_pass_that_begins_with_nothing_is_the_pass_of_training(rows, kernel_len):
    rows = [row for row in rows if len(row)]
    if not rows:
        return
    forest = build_forest(rows)
    inputs, weight = values(forest.num_tokens), fresh(CHANNELS, kernel_len, seed=4).detach()
    resumed = run(ResumedRecurrence(forest), inputs, weight)
    assert torch.allclose(resumed, run(ForestRecurrence(forest), inputs, weight), rtol=0, atol=1e-12)


@given(batches(), st.integers(1, 5), st.integers(1, 4))
@settings(max_examples=100)
def test_branches_go_on_from_the_end_of_their_prefix(rows, kernel_len, prefix_len):
    """Rows under one prefix: the prefix in a pass of its own, then the branches, then a token for each by itself."""
    prefix = [7] * prefix_len
    branches = list({tuple(row.tolist()) for row in map(np.asarray, rows) if len(row) > 1})
    if not branches:
        return
    table = values(10_007)
    weight = fresh(CHANNELS, kernel_len, seed=4).detach()
    whole, inputs = of_rows([prefix + list(row) for row in branches], table)
    expected = run(ForestRecurrence(whole), inputs, weight)

    first = ResumedRecurrence(build_forest([prefix]))
    run(first, [x[:, whole.row(0)[:prefix_len]] for x in inputs], weight)
    middle = build_forest([row[:-1] for row in branches])
    at = np.zeros(middle.num_tokens, np.int64)  # where each token of the middle pass lies in the whole forest
    for b in range(len(branches)):
        at[middle.row(b)] = whole.row(b)[prefix_len:-1]
    num_roots = int((middle.segment_parent < 0).sum())
    second = ResumedRecurrence(middle, initial=[x.expand(num_roots, *x.shape[1:]) for x in first.ends])
    out = run(second, [x[:, at] for x in inputs], weight)
    assert torch.allclose(out, expected[:, at], rtol=0, atol=1e-12)

    ends = [middle.segment_of_token[middle.row(b)[-1]] for b in range(len(branches))]
    slots = torch.arange(len(branches)).flip(0)
    states = [x[ends].flip(0).clone() for x in second.ends]
    last = [int(whole.row(b)[-1]) for b in range(len(branches))]
    stepped = run(StepRecurrence(states, slots), [x[:, last] for x in inputs], weight)
    assert torch.allclose(stepped, expected[:, last], rtol=0, atol=1e-12)


def test_a_step_changes_the_states_of_its_own_rows_only():
    weight = fresh(CHANNELS, 4, seed=4).detach()
    states = [torch.ones(3, CHANNELS, 3, dtype=torch.float64), torch.ones(3, CHANNELS, dtype=torch.float64)]
    run(StepRecurrence(states, torch.tensor([2, 0])), values(2), weight)
    assert all(torch.equal(x[1], torch.ones_like(x[1])) for x in states)
    assert all(not torch.equal(x[0], torch.ones_like(x[0])) for x in states)
