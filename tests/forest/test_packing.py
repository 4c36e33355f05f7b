import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arctic_platform.errors import InputError
from arctic_platform.forest import build_forest, find_targets, pad_rows, response_masks, rows_from_padded
from tests.forest.strategies import batches


@given(batches(), st.data())
def test_every_target_is_predicted_by_the_token_before_it_in_its_own_row(rows, data):
    masks = [np.array([False] + [data.draw(st.booleans()) for _ in row[1:]], bool)[: len(row)] for row in rows]
    forest = build_forest(rows)
    targets = find_targets(forest, masks)
    for b, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        values = targets.value_index[targets.value_offsets[b] : targets.value_offsets[b + 1]]
        assert targets.ids[values].tolist() == row[mask].tolist()
        predicted_at = targets.parents[targets.parent_slot[values]]
        assert predicted_at.tolist() == forest.row(b)[np.flatnonzero(mask) - 1].tolist()
    assert (np.diff(targets.parent_slot) >= 0).all(), "targets come in the order of their predicting positions"
    assert len(np.unique(targets.parents)) == len(targets.parents)


def test_one_hidden_state_predicts_the_first_token_of_every_answer():
    rows = [[1, 2, 5], [1, 2, 6], [1, 2, 7]]
    targets = find_targets(build_forest(rows), response_masks(rows, [1, 1, 1]))
    assert targets.parents.tolist() == [1]
    assert targets.ids[targets.value_index].tolist() == [5, 6, 7]


def test_a_first_token_cannot_be_a_target():
    with pytest.raises(InputError, match="nothing predicts it"):
        find_targets(build_forest([[1, 2]]), [[True, True]])


def test_a_mask_of_another_length_is_refused():
    with pytest.raises(InputError, match="one entry per token"):
        find_targets(build_forest([[1, 2]]), [[False]])


@given(batches(), st.data())
def test_padding_on_either_side_is_undone_by_the_mask_alone(rows, data):
    width = max(map(len, rows)) + 3
    lefts = [data.draw(st.integers(0, width - len(row))) for row in rows]
    ids, mask = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width), np.int64)
    for b, (row, left) in enumerate(zip(rows, lefts, strict=True)):
        ids[b, left : left + len(row)], mask[b, left : left + len(row)] = row, 1
    assert [row.tolist() for row in rows_from_padded(ids, mask)] == [row.tolist() for row in rows]


def test_pad_rows_pads_on_the_right_and_says_what_is_live():
    values, is_live = pad_rows([np.array([3, 4]), np.array([], np.int64), np.array([5])], pad_value=9)
    assert values.tolist() == [[3, 4], [9, 9], [5, 9]]
    assert is_live.tolist() == [[True, True], [False, False], [True, False]]


def test_a_response_longer_than_its_row_is_refused():
    with pytest.raises(InputError, match="cannot hold a response of 3"):
        response_masks([[1, 2]], [3])
