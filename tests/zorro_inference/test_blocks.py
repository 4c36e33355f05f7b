import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arctic_platform.rl.zorro_inference.blocks import plan_cascade


def plan(tables, call_cost=1, block_size=1):
    rows = np.arange(len(tables)) + 10
    return plan_cascade([np.array(t, np.int64) for t in tables], rows, block_size=block_size, call_cost=call_cost)


def as_sets(found):
    return {tuple(read.blocks.tolist()): found.rows[read.readers].tolist() for read in found.reads}


def test_a_run_of_blocks_is_read_once_for_all_requests_below_it():
    found = plan([[7, 8, 9, 3, 11], [7, 8, 9, 3, 12], [7, 8, 9, 4]])
    assert as_sets(found) == {(7, 8, 9): [10, 11, 12], (3,): [10, 11]}
    assert found.tail_start.tolist() == [4, 4, 3]
    assert [read.level for read in found.reads] == [0, 1]


def test_requests_that_share_nothing_are_left_out():
    found = plan([[1, 2], [3, 4], [1, 5], []])
    assert found.rows.tolist() == [10, 12]
    assert plan([[1, 2], [3, 4]]) is None
    assert plan([[]]) is None


def test_requests_with_equal_tables_have_only_their_tails_apart():
    found = plan([[1, 2], [1, 2]])
    assert as_sets(found) == {(1, 2): [10, 11]}
    assert found.tail_start.tolist() == [2, 2]


def test_a_request_may_end_where_others_go_on():
    found = plan([[1, 2], [1, 2, 3], [1, 2, 4]])
    assert as_sets(found) == {(1, 2): [10, 11, 12]}


def test_a_run_that_saves_too_little_is_left_to_those_below_it():
    tables = [[1, 2, 3, 4, 5, 20], [1, 2, 3, 4, 5, 21], [1, 6]]
    assert as_sets(plan(tables, call_cost=3)) == {(1, 2, 3, 4, 5): [10, 11]}
    assert as_sets(plan(tables, call_cost=2)) == {(1, 2, 3, 4, 5): [10, 11]}
    assert plan(tables, call_cost=6) is None


def test_the_cost_of_a_call_counts_tokens_not_blocks():
    assert plan([[1, 2, 8], [1, 2, 9]], call_cost=64, block_size=32) is not None
    assert plan([[1, 2, 8], [1, 2, 9]], call_cost=65, block_size=32) is None


def test_what_is_read_is_counted():
    found = plan([[7, 8, 9, 3, 11], [7, 8, 9, 3, 12], [7, 8, 9, 4]], block_size=16)
    assert found.shared_tokens == 4 * 16
    assert found.repeated_tokens == (3 * 3 + 2) * 16


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=8), st.integers(1, 6))
@pytest.mark.filterwarnings("ignore")
def test_every_block_of_a_request_is_in_one_read_or_in_its_tail(paths, call_cost):
    tables = [[hash(tuple(path[: i + 1])) % (2**31) for i in range(len(path))] for path in paths]
    found = plan(tables, call_cost)
    for place, row in enumerate([] if found is None else (found.rows - 10).tolist()):
        mine = [read for read in found.reads if place in read.readers]
        assert [read.level for read in mine] == list(range(len(mine)))
        blocks = [block for read in mine for block in read.blocks.tolist()]
        assert blocks == tables[row][: found.tail_start[place]]
