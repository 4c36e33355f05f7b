import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arctic_platform.errors import InputError
from arctic_platform.forest import build_forest, order_rows
from tests.forest.strategies import batches


def distinct_prefixes(rows):
    return {tuple(row[: i + 1].tolist()) for row in rows for i in range(len(row))}


def assert_rows_are_kept(forest, rows):
    assert forest.num_rows == len(rows)
    for b, row in enumerate(rows):
        path = forest.row(b)
        assert forest.input_ids[path].tolist() == row.tolist()
        assert forest.position_ids[path].tolist() == list(range(len(row)))
        assert forest.parent[path].tolist() == [-1, *path.tolist()][: len(row)]


def assert_segments_tile_the_pack(forest):
    assert forest.start.tolist() == [0, *forest.end.tolist()][: forest.num_segments]
    assert forest.end.tolist()[-1:] == ([forest.num_tokens] if forest.num_tokens else [])
    for n in range(forest.num_segments):
        parent = forest.segment_parent[n]
        before = forest.parent[forest.start[n]]
        assert parent == (-1 if before < 0 else forest.segment_of_token[before])
        assert parent < 0 or forest.end[parent] == before + 1, "children hang at the end of a segment"
        below = forest.segment_rows(n)
        assert all(set(range(forest.start[n], forest.end[n])) <= set(forest.row(b).tolist()) for b in below)


@given(batches())
def test_every_distinct_prefix_is_stored_once_and_every_row_can_be_read_back(rows):
    forest = build_forest(rows)
    assert_rows_are_kept(forest, rows)
    assert_segments_tile_the_pack(forest)
    assert forest.num_tokens == len(distinct_prefixes(rows))


@given(batches(), st.integers(1, 4))
def test_min_shared_keeps_rows_and_leaves_no_short_shared_segment_above_a_branch(rows, min_shared):
    forest = build_forest(rows, min_shared=min_shared)
    assert_rows_are_kept(forest, rows)
    assert_segments_tile_the_pack(forest)
    assert forest.num_tokens >= len(distinct_prefixes(rows))


@given(batches(), st.data())
def test_prompt_granularity_shares_whole_equal_prompts_and_nothing_else(rows, data):
    lens = [data.draw(st.integers(0, len(row))) for row in rows]
    forest = build_forest(rows, granularity="prompt", prompt_lens=lens)
    assert_rows_are_kept(forest, rows)
    prompts = {tuple(row[:n].tolist()) for row, n in zip(rows, lens, strict=True)}
    answers = sum(len(row) - n for row, n in zip(rows, lens, strict=True))
    assert forest.num_tokens == sum(map(len, prompts)) + answers


@given(batches())
def test_row_order_does_not_change_what_is_stored(rows):
    forward, backward = build_forest(rows), build_forest(rows[::-1])
    assert forward.input_ids.tolist() == backward.input_ids.tolist()
    assert forward.start.tolist() == backward.start.tolist()


def test_the_forest_of_the_readme():
    rows = [[1, 1, 1, 2, 2, 5, 5, 5], [1, 1, 1, 2, 2, 6, 6], [1, 1, 1, 3, 7, 7, 7, 7], [1, 1, 1, 2, 2, 6, 6, 8]]
    forest = build_forest(rows)
    assert forest.start.tolist() == [0, 3, 5, 8, 10, 11]
    assert forest.end.tolist() == [3, 5, 8, 10, 11, 16]
    assert forest.subtree_end.tolist() == [16, 11, 8, 11, 11, 16]
    assert forest.segment_parent.tolist() == [-1, 0, 1, 1, 3, 0]
    assert [forest.segment_rows(n).tolist() for n in range(6)] == [[0, 1, 2, 3], [0, 1, 3], [0], [1, 3], [3], [2]]


def test_equal_placeholder_ids_in_front_of_different_content_are_not_shared():
    rows = [[1, 9, 9, 2], [1, 9, 9, 2]]
    same = build_forest(rows, content_keys=[[0, 7, 7, 0], [0, 7, 7, 0]])
    other = build_forest(rows, content_keys=[[0, 7, 7, 0], [0, 8, 8, 0]])
    assert same.num_tokens == 4
    assert other.num_tokens == 7


def test_min_shared_moves_a_sliver_up_to_the_cut_above():
    rows = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 9, 9, 9]]
    assert build_forest(rows, min_shared=1).num_tokens == 8
    assert build_forest(rows, min_shared=2).num_tokens == 9
    assert build_forest(rows, min_shared=4).num_tokens == 12


def test_no_rows_and_empty_rows_make_an_empty_forest():
    assert build_forest([]).num_tokens == 0
    forest = build_forest([[], []])
    assert (forest.num_rows, forest.num_tokens, forest.num_segments) == (2, 0, 0)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([[1, -100]], {}, "row 0 holds a token id outside"),
        ([[1], [2**31]], {}, "row 1 holds a token id outside"),
        ([np.array([3, -1], np.int32)], {}, "row 0 holds a token id outside"),
        ([np.array([2**31], np.uint64)], {}, "row 0 holds a token id outside"),
        ([[1.5]], {}, "row 0 must be a flat list of integer"),
        ([[[1]]], {}, "row 0 must be a flat list of integer"),
        ([[1]], {"granularity": "word"}, "choose trie or prompt"),
        ([[1]], {"granularity": "prompt"}, "needs prompt_lens"),
        ([[1]], {"granularity": "prompt", "prompt_lens": [2]}, "between 0 and the row's own length"),
        ([[1]], {"min_shared": 0}, "must be 1 or more"),
        ([[1, 2]], {"content_keys": [[1]]}, "one integer per token"),
    ],
)
def test_unusable_rows_are_refused_with_the_reason(rows, options, message):
    with pytest.raises(InputError, match=message):
        build_forest(rows, **options)


def test_a_thousand_long_rows_keep_exact_index_maps():
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 1000, 500)
    rows = [np.concatenate([trunk, rng.integers(0, 1000, rng.integers(0, 40))]) for _ in range(1000)]
    forest = build_forest(rows)
    assert (forest.input_ids[forest.row_index] == np.concatenate(rows)).all()
    assert forest.num_tokens < forest.num_row_tokens / 10


def order_and_shared(rows):
    """The slow twin: rows sorted as tuples, neighbours compared token by token."""
    order = sorted(range(len(rows)), key=lambda b: tuple(rows[b].tolist()))
    shared = [0] * len(rows)
    for i in range(1, len(order)):
        pairs = zip(rows[order[i - 1]].tolist(), rows[order[i]].tolist(), strict=False)
        shared[i] = next(
            (n for n, (a, b) in enumerate(pairs) if a != b), min(map(len, (rows[order[i - 1]], rows[order[i]])))
        )
    return order, shared


def assert_in_order(rows):
    visits = order_rows(rows)
    order, shared = order_and_shared(rows)
    assert visits.order.tolist() == order
    assert visits.shared.tolist() == shared
    assert visits.lens.tolist() == [len(rows[b]) for b in order]


@given(batches(), st.integers(1, 40), st.sampled_from([np.int64, np.int32, np.uint16]))
def test_rows_are_ordered_as_tuples_and_share_what_neighbours_have_in_common(rows, stretch, dtype):
    assert_in_order([row.repeat(stretch).astype(dtype) for row in rows])


@pytest.mark.parametrize("kind", ["chain", "comb", "equal", "nested pairs", "nothing shared"])
def test_deep_flat_and_equal_batches_are_ordered_without_recursion(kind):
    rng = np.random.default_rng(0)
    rows = {
        "chain": [np.arange(3 * n) for n in range(400)],
        "comb": [np.r_[np.arange(n), 9000 + n] for n in range(400)],
        "equal": [np.arange(700)] * 50,
        "nested pairs": [np.array([b >> n & 1 for n in range(9)]).repeat(37) for b in range(512)],
        "nothing shared": [np.r_[n, np.arange(20)] for n in range(300)],
    }[kind]
    assert_in_order([rows[b] for b in rng.permutation(len(rows))])


@given(batches(min_size=2), st.data(), st.integers(1, 3))
def test_the_order_of_some_rows_is_read_from_that_of_all(rows, data, min_shared):
    chosen = data.draw(st.lists(st.sampled_from(range(len(rows))), unique=True))
    some = [rows[b] for b in chosen]
    visits = order_rows(rows).select(chosen)
    afresh, again = build_forest(some, min_shared=min_shared), build_forest(some, min_shared=min_shared, visits=visits)
    assert again.input_ids.tolist() == afresh.input_ids.tolist()
    assert again.start.tolist() == afresh.start.tolist()
    assert_rows_are_kept(again, some)


@given(batches(min_size=2), st.data())
def test_the_order_of_some_prompts_is_read_from_that_of_all(rows, data):
    lens = [data.draw(st.integers(0, len(row))) for row in rows]
    chosen = sorted(data.draw(st.lists(st.sampled_from(range(len(rows))), unique=True)))
    some, some_lens = [rows[b] for b in chosen], [lens[b] for b in chosen]
    options = {"granularity": "prompt", "prompt_lens": some_lens}
    visits = order_rows(rows, granularity="prompt", prompt_lens=lens).select(chosen)
    again = build_forest(some, visits=visits, **options)
    assert again.num_tokens == build_forest(some, **options).num_tokens
    assert_rows_are_kept(again, some)
