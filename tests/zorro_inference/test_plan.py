import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arctic_platform.rl.zorro_inference import plan as plan_module
from arctic_platform.rl.zorro_inference.cache import KvForest
from arctic_platform.rl.zorro_inference.plan import CALL_COST, lay_out
from arctic_platform.rl.zorro_inference.pool import KvPool

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=8)
LIMIT = 10**6


class Paths:
    """Prompts in a forest, the path of each rollout, and the prompt tokens by place; they are released at the end."""

    def __init__(self, prompts: list, *, n: int = 1, share: bool = True, forest: KvForest | None = None) -> None:
        self.forest = forest or KvForest(KvPool(LIMIT))
        rows = [np.array(prompt) for prompt in prompts for _ in range(n)]
        self.ends = [self.forest.hold(row, limit=LIMIT, is_private=not share) for row in rows]
        self.rows = [row.tolist() for row in rows]
        self.token_at = {}
        for end in self.ends:
            for segment in end.path():
                segment.is_ready = True
                self.token_at.update(zip(range(*segment.span), segment.ids.tolist(), strict=True))

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        for end in self.ends:
            self.forest.release(end)


def seen_tokens(live, num_rows: int) -> list[list[int]]:
    """The places that each row reads through all its calls, in the order of their positions."""
    position_at = dict(zip(live.place.tolist(), live.position.tolist(), strict=True))
    seen = [[] for _ in range(num_rows)]
    for read in live.reads:
        visible = np.ones((*read.take.shape, read.block.width), bool) if read.visible is None else read.visible
        places = np.broadcast_to(read.places[:, None, :], visible.shape).reshape(-1, read.block.width)
        for row, place in zip(read.rows, read.place, strict=True):
            assert read.take.reshape(-1)[place] == row
            seen[live.row[row]] += places[place][visible.reshape(-1, read.block.width)[place]].tolist()
    return [sorted(places, key=position_at.get) for places in seen]


@pytest.mark.parametrize("call_cost", [0, 3, 20, 10**6])
@given(prompts=PROMPTS, n=st.integers(1, 3), share=st.booleans(), data=st.data())
def test_rows_read_exactly_their_prompt_at_any_call_cost(call_cost, prompts, n, share, data):
    with pytest.MonkeyPatch.context() as patch, Paths(prompts, n=n, share=share) as paths:
        patch.setattr(plan_module, "CALL_COST", call_cost)
        chosen = data.draw(st.lists(st.integers(0, len(paths.ends) - 1), min_size=1, max_size=9))
        live = lay_out([paths.ends[i] for i in chosen])
        for i, places in zip(chosen, seen_tokens(live, len(chosen)), strict=True):
            assert [paths.token_at[place] for place in places] == paths.rows[i]
        assert (live.path_lens == [len(paths.rows[chosen[row]]) for row in live.row]).all()


@given(prompts=PROMPTS, n=st.integers(1, 3))
def test_layout_holds_every_needed_token_once_and_rows_in_its_order(prompts, n):
    with Paths(prompts, n=n) as paths:
        live = lay_out(paths.ends)
        assert len(set(live.place.tolist())) == live.num_tokens == paths.forest.num_tokens
        assert (np.diff(live.last) >= 0).all()
        assert (live.segment_parent < np.arange(len(live.start))).all()


def test_layout_leaves_out_what_no_row_needs():
    with Paths([[1, 2, 3], [1, 2, 4], [7, 8]]) as paths:
        assert lay_out(paths.ends[:1]).num_tokens == 3
        assert lay_out(paths.ends[1:]).num_tokens == 5


@given(prompts=PROMPTS, n=st.integers(1, 3), share=st.booleans())
def test_grids_name_the_same_places(prompts, n, share):
    with pytest.MonkeyPatch.context() as patch, Paths(prompts, n=n, share=share) as paths:
        patch.setattr(plan_module, "CALL_COST", 3)
        for read in lay_out(paths.ends).reads:
            if read.grid is not None:
                num, width = read.places.shape
                grid = read.grid.start + np.arange(num)[:, None] * read.grid.stride + np.arange(width)
                assert (grid == read.places).all()


def test_pieces_that_follow_each_other_are_read_as_one():
    with Paths([list(range(3000))]) as paths:
        for at in (1000, 500, 700):
            paths.forest.cut(paths.ends[0], at)
        (read,) = lay_out(paths.ends).reads
        assert read.grid is not None and read.places.shape == (1, 3000)


def test_long_shared_start_is_a_call_of_its_own_and_short_ends_share_one():
    start = np.arange(2000)
    prompts = [np.concatenate([start, np.arange(5000 + i, 5000 + i + 10 + i % 3)]) for i in range(0, 80, 10)]
    with Paths(prompts, n=8) as paths:
        reads = lay_out(paths.ends).reads
        assert [read.places.shape[0] for read in reads] == [1, 8]
        assert reads[0].places.shape == (1, 2000)


def test_short_forest_is_one_call():
    with Paths([[1, 2, 3, *tail] for tail in ([4, 5], [4, 6], [7], [])], n=2) as paths:
        assert len(lay_out(paths.ends).reads) == 1


def test_unshared_rollouts_of_equal_prompts_are_one_call_in_place():
    with Paths([np.arange(3000)], n=4, share=False) as paths:
        (read,) = lay_out(paths.ends).reads
        assert read.take.shape == (4, 1)
        assert read.visible is None and read.grid is not None


def test_prompts_of_very_different_lengths_are_not_padded_to_the_longest():
    with Paths([np.full(length, i) for i, length in enumerate([4000, 3990, 50, 40])], n=8) as paths:
        live = lay_out(paths.ends)
        assert sum(read.num_keys for read in live.reads) - live.num_tokens <= 2 * CALL_COST / 8


def test_long_segments_are_read_where_they_lie_and_not_copied():
    """Of different lengths, so that they cannot be one grid."""
    with Paths([np.full(2000 + 300 * i, i) for i in range(4)], n=8) as paths:
        assert all(read.grid is not None for read in lay_out(paths.ends).reads)


SHAPES = {
    "one prompt of 2,049": ([(2049,)], 16),
    "four of 2,049": ([(2049, i) for i in range(4)], 8),
    "a system prompt under groups": ([(1500, 300 + 17 * i) for i in range(12)], 8),
    "three levels": ([(1200, 400 + 31 * (i // 3), 50 + 13 * i) for i in range(9)], 4),
    "lengths from 100 to 8,000": ([(100 * 2 ** (i % 7) + 31 * i,) for i in range(16)], 4),
    "turns of a conversation": ([(900, *(120 + 11 * turn for turn in range(i))) for i in range(1, 9)], 2),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_keys_read_are_within_five_percent_of_the_forest(shape):
    lengths, n = SHAPES[shape]
    is_alone = len({pieces[0] for pieces in lengths}) == len(lengths) or shape == "four of 2,049"
    prompts = []
    for i, pieces in enumerate(lengths):
        parts = [np.full(length, 100 * level + length) for level, length in enumerate(pieces)]
        prompts.append(np.concatenate([[10_000 + i if is_alone else 0], *parts]))
    with Paths(prompts, n=n) as paths:
        live = lay_out(paths.ends)
        assert sum(read.num_keys for read in live.reads) <= 1.05 * live.num_tokens + 64
