import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arctic_platform.rl.zorro_inference import plan as plan_module
from arctic_platform.rl.zorro_inference.plan import CALL_COST, plan_prompts, read_blocks

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=8)


def seen_tokens(plan, active) -> list[list[int]]:
    """What each active rollout reads through all its calls, packed tokens in ascending order."""
    seen = [[] for _ in active]
    for read in read_blocks(plan, active):
        visible = np.ones((*read.take.shape, read.block.width), bool) if read.visible is None else read.visible
        source = np.broadcast_to(read.source[:, None, :], visible.shape).reshape(-1, read.block.width)
        for row, place in zip(read.rows, read.place, strict=True):
            assert read.take.reshape(-1)[place] == row
            seen[row] += source[place][visible.reshape(-1, read.block.width)[place]].tolist()
    return [sorted(tokens) for tokens in seen]


@pytest.mark.parametrize("call_cost", [0, 3, 20, 10**6])
@given(prompts=PROMPTS, n=st.integers(1, 3), share=st.booleans(), data=st.data())
def test_active_rollouts_read_exactly_their_prompt_at_any_call_cost(call_cost, prompts, n, share, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "CALL_COST", call_cost)
        plan = plan_prompts([np.array(prompt) for prompt in prompts], n=n, share=share)
        is_active = np.array(data.draw(st.lists(st.booleans(), min_size=len(plan.last), max_size=len(plan.last))))
        active = np.flatnonzero(is_active)
        for place, seen in zip(active, seen_tokens(plan, active), strict=True):
            assert plan.forest.input_ids[seen].tolist() == prompts[plan.rollout[place] // n]


@given(prompts=PROMPTS, n=st.integers(1, 3), share=st.booleans())
def test_every_token_has_a_place_in_exactly_one_lane(prompts, n, share):
    plan = plan_prompts([np.array(prompt) for prompt in prompts], n=n, share=share)
    tokens = [np.arange(*lane) for block in plan.blocks for lane in block.lanes]
    assert sorted(np.concatenate(tokens).tolist()) == list(range(plan.forest.num_tokens))
    assert plan.forest.num_tokens == (
        len({tuple(prompt[: i + 1]) for prompt in prompts for i in range(len(prompt))})
        if share
        else n * sum(map(len, prompts))
    )


@given(prompts=PROMPTS, size=st.integers(1, 12))
def test_passes_cover_the_forest_in_whole_trees(prompts, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "MAX_PASS_TOKENS", size)
        plan = plan_prompts([np.array(prompt) for prompt in prompts], n=1, share=True)
        passes = plan.passes
    assert [step.start for step in passes] == [0, *(step.end for step in passes[:-1])]
    assert passes[-1].end == plan.forest.num_tokens
    for step in passes:
        assert (step.forest.input_ids == plan.forest.input_ids[step.start : step.end]).all()
        assert (step.forest.position_ids == plan.forest.position_ids[step.start : step.end]).all()
        assert step.forest.parent[0] == step.forest.segment_parent[0] == -1
        assert (step.forest.parent < np.arange(step.forest.num_tokens)).all()
        num_roots = np.count_nonzero(step.forest.segment_parent < 0)
        assert step.forest.num_tokens <= size or num_roots == 1


def test_long_shared_start_is_a_call_of_its_own_and_short_ends_share_one():
    start = np.arange(2000)
    prompts = [np.concatenate([start, np.arange(5000 + i, 5000 + i + 10 + i % 3)]) for i in range(0, 80, 10)]
    plan = plan_prompts(prompts, n=8, share=True)
    assert plan.blocks[0].lanes.tolist() == [[0, 2000]]
    assert [len(block.lanes) for block in plan.blocks] == [1, 8]


def test_short_forest_is_one_call():
    prompts = [np.array([1, 2, 3, *tail]) for tail in ([4, 5], [4, 6], [7], [])]
    assert len(plan_prompts(prompts, n=2, share=True).blocks) == 1


def test_unshared_rollouts_of_equal_prompts_are_one_padless_call():
    plan = plan_prompts([np.arange(3000)], n=4, share=False)
    (read,) = read_blocks(plan, np.arange(4))
    assert read.take.shape == (4, 1)
    assert read.visible is None


def test_prompts_of_very_different_lengths_are_not_padded_to_the_longest():
    plan = plan_prompts([np.full(length, i) for i, length in enumerate([4000, 3990, 50, 40])], n=8, share=True)
    places = sum(block.source.size for block in plan.blocks)
    assert places - plan.forest.num_tokens <= 2 * CALL_COST / 8
    assert len(plan.blocks) == 2


def test_lanes_without_readers_are_left_out():
    plan = plan_prompts([np.full(3000, i) for i in range(4)], n=1, share=True)
    (read,) = read_blocks(plan, np.array([1, 2]))
    assert (read.first_lane, read.num_lanes) == (1, 2)
    assert read_blocks(plan, np.array([], np.int64)) == []
