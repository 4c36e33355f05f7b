import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arctic_platform.rl.zorro_inference.pool import KvPool, Span


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=40), st.integers(10, 40))
def test_places_in_use_are_disjoint_and_free_ones_are_handed_out_again(steps, max_places):
    pool, used = KvPool(max_places), []
    for size, gives_back in steps:
        if gives_back and used:
            for span in used.pop(0):
                pool.release(span)
        elif pool.num_used + size <= max_places:
            used.append(pool.allocate(size))
            assert sum(span.num_places for span in used[-1]) == size
        taken = [place for spans in used for span in spans for place in range(*span)]
        assert len(taken) == len(set(taken)) == pool.num_used
        assert all(0 <= place < max_places for place in taken)


def test_span_is_whole_while_there_is_one_and_split_rather_than_refused():
    pool = KvPool(10)
    parts = [pool.allocate(2)[0] for _ in range(5)]
    for span in parts[::2]:
        pool.release(span)
    assert [span.num_places for span in pool.allocate(5)] == [2, 2, 1]


def test_stored_tokens_survive_growth_and_are_read_as_views():
    pool = KvPool(5000)
    first = pool.allocate(3)[0]
    k = torch.randn(1, 2, 3, 4)
    pool.store(0, k, k[..., :3], torch.arange(*first))
    pool.allocate(2000)
    keys, values = pool.view(0, first)
    assert torch.equal(keys, k) and torch.equal(values, k[..., :3])
    assert keys.data_ptr() == pool.view(0, first)[0].data_ptr()


def test_grid_and_gather_read_the_same():
    pool = KvPool(100)
    pool.allocate(100)
    k = torch.randn(1, 2, 100, 4)
    pool.store(1, k, -k, torch.arange(100))
    places = torch.arange(3)[:, None] * 20 + 5 + torch.arange(7)
    for ours, copy in zip(pool.grid(1, 5, 20, 3, 7), pool.gather(1, places), strict=True):
        assert torch.equal(ours, copy)
    assert torch.equal(pool.grid(1, 5, 20, 3, 7)[0][2, :, 6], k[0, :, 51])


def test_memory_is_freed_when_nothing_is_in_use():
    pool = KvPool(100)
    span = pool.allocate(4)[0]
    pool.store(0, *torch.ones(2, 1, 1, 4, 2), torch.arange(4))
    with pytest.raises(AssertionError):
        pool.free_memory()
    pool.release(span)
    pool.free_memory()
    assert pool.layers == []
    assert pool.allocate(4) == [Span(0, 4)]
