import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arctic_platform.rl.zorro_inference.cache import KvForest
from arctic_platform.rl.zorro_inference.pool import KvPool

LIMIT = 1000
ROWS = st.lists(st.integers(0, 2), min_size=1, max_size=8)


def make_forest(**options) -> KvForest:
    return KvForest(KvPool(LIMIT), **options)


def hold(forest: KvForest, ids: list[int], *, limit: int = LIMIT, **options):
    return forest.hold(np.array(ids), limit=limit, **options)


def compute(segment) -> None:
    """Pretend that a pass ran: all of a path is ready."""
    for part in segment.path():
        part.is_ready = True


def keep(forest: KvForest, ids: list[int]) -> None:
    """A prompt that came, was computed, and left."""
    segment = hold(forest, ids)
    compute(segment)
    forest.release(segment)


def ids_of(segment) -> list[int]:
    return np.concatenate([part.ids for part in segment.path()]).tolist()


def num_distinct(rows: list[list[int]]) -> int:
    return len({tuple(row[: i + 1]) for row in rows for i in range(len(row))})


@given(st.lists(st.tuples(ROWS, st.booleans()), max_size=12))
def test_every_token_has_one_place_and_holders_count_to_zero(steps):
    forest, held = make_forest(), []
    for ids, leaves in steps:
        held.append(hold(forest, ids))
        assert ids_of(held[-1]) == ids
        if leaves:
            compute(held[0])
            forest.release(held.pop(0))
    assert all(ids_of(segment)[-1] == segment.ids[-1] for segment in held)
    assert forest.num_held == len(held)
    everything = [ids for ids, _ in steps]
    assert forest.num_tokens <= num_distinct(everything)
    for segment in held:
        compute(segment)
        forest.release(segment)
    assert forest.num_held == 0
    assert forest.num_tokens == num_distinct(everything)
    forest.reset()
    assert forest.num_tokens == forest.num_segments == 0


@given(st.lists(ROWS, min_size=1, max_size=10), ROWS)
def test_what_is_found_is_the_longest_prefix_that_was_kept(rows, asked):
    forest = make_forest()
    for ids in rows:
        keep(forest, ids)
    expected = max(i for i in range(len(asked) + 1) if any(row[:i] == asked[:i] for row in rows))
    assert forest.num_found(np.array(asked)) == expected


def test_branch_inside_a_segment_cuts_it_into_views_of_the_same_places():
    forest = make_forest()
    first = hold(forest, [1, 2, 3, 4, 5])
    compute(first)
    places = [place for part in first.path() for place in range(*part.span)]
    second = hold(forest, [1, 2, 3, 9])
    assert [place for part in first.path() for place in range(*part.span)] == places
    assert [len(part.ids) for part in first.path()] == [3, 2]
    assert second.path()[0] is first.path()[0] and second.path()[0].is_ready
    assert not second.is_ready
    assert forest.num_tokens == 6
    for segment in (first, second):
        compute(segment)
        forest.release(segment)


def test_longest_unused_goes_first_and_what_is_held_stays():
    forest = make_forest()
    for ids in ([1, 1, 1], [2, 2, 2], [3, 3, 3]):
        keep(forest, ids)
    keep(forest, [1, 1, 1])  # used again
    held = hold(forest, [2, 2, 2])
    assert forest.make_room(0, 6)
    assert [forest.num_found(np.array([t, t, t])) for t in (1, 2, 3)] == [3, 3, 0]
    assert forest.make_room(0, 3)
    assert not forest.make_room(0, 2)
    assert [forest.num_found(np.array([t, t, t])) for t in (1, 2, 3)] == [0, 3, 0]
    forest.release(held)


def test_what_does_not_fit_is_not_held_and_changes_nothing_that_is():
    forest = make_forest()
    held = hold(forest, [1, 2, 3, 4])
    compute(held)
    assert hold(forest, [1, 2, 9, 9, 9], limit=6) is None
    assert ids_of(held) == [1, 2, 3, 4] and forest.num_held == 1 and forest.num_tokens == 4
    forest.release(held)


def test_prompt_that_was_not_computed_leaves_nothing_behind():
    forest = make_forest()
    keep(forest, [1, 2])
    forest.release(hold(forest, [1, 2, 3, 4]))
    assert forest.num_tokens == 2


def test_private_path_is_found_by_nobody_and_finds_nothing():
    forest = make_forest()
    keep(forest, [1, 2, 3])
    held = hold(forest, [1, 2, 3], is_private=True)
    assert not held.is_ready and forest.num_tokens == 6
    compute(held)
    forest.release(held)
    assert forest.num_tokens == 3


def test_path_in_several_pieces_is_one_path():
    forest = KvForest(KvPool(12))
    keep(forest, [1] * 4)
    held = hold(forest, [2] * 4, limit=12)
    keep(forest, [3] * 4)
    forest.make_room(8, 12)
    long = hold(forest, list(range(10, 18)), limit=12)
    assert ids_of(long) == list(range(10, 18)) and len(long.path()) == 2
    for segment in (held, long):
        compute(segment)
        forest.release(segment)


def test_reset_forgets_all_that_nobody_holds_and_nobody_finds_the_rest():
    forest = make_forest()
    keep(forest, [1, 2])
    held = hold(forest, [3, 4, 5])
    compute(held)
    forest.update(1, "reset")
    assert forest.num_tokens == 3
    assert forest.num_found(np.array([3, 4, 5])) == 0
    forest.release(held)
    assert forest.num_tokens == 0


def test_version_policy_finds_what_the_same_weights_computed_and_nothing_else():
    forest = make_forest()
    keep(forest, [1, 2, 3])
    forest.update(1, "version")
    assert forest.num_found(np.array([1, 2, 3])) == 0
    keep(forest, [1, 2])
    assert forest.num_tokens == 5
    forest.update(0, "version")
    assert forest.num_found(np.array([1, 2, 3])) == 3
    assert forest.make_room(0, 2) and forest.num_tokens == 2  # those of version 0 are older


def test_keep_policy_goes_on_with_what_is_cached():
    forest = make_forest()
    keep(forest, [1, 2, 3])
    forest.update(1, "keep")
    assert forest.num_found(np.array([1, 2, 3])) == 3
    forest.update(1, "keep")
    assert forest.num_found(np.array([1, 2, 3])) == 3


def test_forgotten_path_goes_at_once_but_not_what_others_need():
    forest = make_forest()
    held = [hold(forest, ids) for ids in ([1, 2, 3], [1, 2, 4])]
    for segment in held:
        compute(segment)
    forest.release(held[0], forget=True)
    assert forest.num_tokens == 3
    forest.release(held[1])
    assert forest.num_tokens == 3


def test_answer_is_added_behind_a_path_unless_somebody_is_about_to_compute_it():
    forest = make_forest()
    prompt = hold(forest, [1, 2])
    compute(prompt)
    answer = forest.append(prompt, np.array([3, 4]), limit=LIMIT)
    assert ids_of(answer) == [1, 2, 3, 4]
    assert forest.append(prompt, np.array([3, 4, 5]), limit=LIMIT) is None
    compute(answer)
    for segment in (prompt, answer):
        forest.release(segment)
    assert forest.num_found(np.array([1, 2, 3, 4, 5])) == 4


def test_with_states_a_path_goes_on_only_where_they_are_kept_and_before_its_last_token():
    forest = make_forest(needs_states=True)
    first = hold(forest, [1, 2, 3, 4])
    compute(first)
    first.states = "behind 4"
    forest.release(first)
    assert forest.num_found(np.array([1, 2, 3, 4, 5])) == 4
    assert forest.num_found(np.array([1, 2, 3, 4])) == 0
    assert forest.num_found(np.array([1, 2, 9])) == 0
    branch = hold(forest, [1, 2, 9])
    assert ids_of(branch) == [1, 2, 9] and not branch.path()[0].is_ready
    compute(branch)
    forest.release(branch)
    assert forest.num_found(np.array([1, 2, 3, 4, 5])) == 4
    assert forest.num_tokens == 4


@pytest.mark.parametrize("policy", ["reset", "version"])
def test_holders_of_old_weights_go_on(policy):
    forest = make_forest()
    held = hold(forest, [1, 2, 3])
    compute(held)
    forest.update(1, policy)
    again = hold(forest, [1, 2, 3])
    assert again is not held and not again.is_ready and held.is_ready
    compute(again)
    forest.release(held)
    forest.release(again)
