import numpy as np
import torch

from arctic_platform.rl.zorro_inference.cache import FIRST_CAPACITY, PrefixCache, SuffixCache
from arctic_platform.rl.zorro_inference.plan import plan_prompts, read_blocks
from tests.zorro_inference.models import forest_prompts


def fill(cache: SuffixCache, slot: int, value: float) -> None:
    """Append one token of a constant to a slot."""
    cache.make_room()
    token = torch.full((1, 1, 1, 2), value)
    cache.append(0, token, -token, torch.tensor([slot]), torch.tensor([cache.lens[slot]]))
    cache.lens[slot] += 1


def contents(cache: SuffixCache, slot: int) -> list[float]:
    keys, values = cache.read(0, int(cache.lens.max()))
    length = int(cache.lens[slot])
    assert torch.equal(keys[slot, :, :length], -values[slot, :, :length])
    return keys[slot, 0, :length, 0].tolist()


def test_prefix_cache_reads_back_every_lane():
    plan = plan_prompts([np.array(prompt) for prompt in forest_prompts()], n=1, share=True)
    cache = PrefixCache(plan, torch.device("cpu"))
    packed = torch.arange(plan.forest.num_tokens, dtype=torch.float32)[None, None, :, None].expand(1, 3, -1, 4)
    for step in plan.passes:
        part = packed[:, :, step.start : step.end]
        cache.store(2, part, -part, *cache.places(step))
    assert cache.layers == [2]
    for read in read_blocks(plan, np.arange(len(plan.last))):
        keys, values = cache.read(2, read)
        assert keys.shape == (read.num_lanes, 3, read.block.width, 4)
        assert (keys[:, 1, :, 3].numpy() == read.source).all()
        assert torch.equal(keys, -values)


def test_rollout_in_the_last_slot_moves_into_a_free_one():
    cache = SuffixCache(3)
    for slot in [cache.add() for _ in range(3)]:
        for i in range(slot + 2):
            fill(cache, slot, 10 * slot + i)
    assert cache.remove(0) == 2
    assert contents(cache, 0) == [20, 21, 22, 23]
    assert contents(cache, 1) == [10, 11, 12]
    assert cache.remove(1) == 1
    assert cache.num_used == 1


def test_slot_that_is_taken_again_starts_empty():
    cache = SuffixCache(1)
    fill(cache, cache.add(), 1)
    cache.remove(0)
    assert cache.add() == 0
    fill(cache, 0, 7)
    assert contents(cache, 0) == [7]


def test_capacity_grows_and_keeps_what_is_stored():
    cache = SuffixCache(2)
    cache.add()
    cache.add()
    for i in range(4 * FIRST_CAPACITY + 1):
        fill(cache, 1, i)
    assert contents(cache, 1) == list(range(4 * FIRST_CAPACITY + 1))
    assert contents(cache, 0) == []
