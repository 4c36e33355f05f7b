import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arctic_platform.errors import ConfigError
from arctic_platform.forest import build_forest
from arctic_platform.rl.zorro_train.schedule import cut_micro_batches
from tests.forest.strategies import batches


@given(batches(), st.integers(10, 40))
def test_every_row_is_in_one_micro_batch_and_no_micro_batch_exceeds_the_budget(rows, budget):
    cut = cut_micro_batches(rows, budget)
    assert sorted(b for batch in cut for b in batch) == list(range(len(rows)))
    for batch in cut:
        assert build_forest([rows[b] for b in batch]).num_tokens <= max(budget, *(len(rows[b]) for b in batch))


def test_rows_of_a_group_stay_together_while_they_fit():
    prompts = [np.full(50, p) for p in range(4)]
    rows = [np.concatenate([prompts[b % 4], [100 + b] * 5]) for b in range(32)]
    cut = cut_micro_batches(rows, 90)
    assert sorted({b % 4 for b in batch} for batch in cut) == [{0}, {1}, {2}, {3}]


def test_a_row_above_the_budget_runs_alone_with_a_warning():
    rows = [np.arange(5), np.arange(30, 60), np.arange(5) + 7]
    with pytest.warns(UserWarning, match="30 tokens exceeds max_token_len=10"):
        cut = cut_micro_batches(rows, 10)
    assert [1] in cut
    assert sorted(map(len, cut)) == [1, 2]


def test_no_budget_is_one_micro_batch_and_no_rows_are_none():
    assert cut_micro_batches([[1], [2]], None) == [[0, 1]]
    assert cut_micro_batches([], 5) == []


@pytest.mark.parametrize("budget", [0, -1])
def test_a_budget_below_one_is_refused(budget):
    with pytest.raises(ConfigError, match="must be 1 or more"):
        cut_micro_batches([[1]], budget)
