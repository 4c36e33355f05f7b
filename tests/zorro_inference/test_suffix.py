import pytest
import torch

from arctic_platform.rl.zorro_inference.suffix import FIRST_CAPACITY, SuffixCache, capacity_for, next_capacity


def fill(cache: SuffixCache, row: str, value: float) -> None:
    """Append one token of a constant to a row."""
    cache.make_room()
    bank = cache.bank_of(row)
    slot = bank.rows.index(row)
    token = torch.full((1, 1, 2), float(value))
    bank.append(0, token, -token, torch.tensor([slot]), torch.tensor([bank.lens[slot]]))
    bank.lens[slot] += 1


def contents(cache: SuffixCache, row: str) -> list[float]:
    bank = cache.bank_of(row)
    slot, length = bank.rows.index(row), cache.length(row)
    if not length:
        return []
    keys, values = bank.read(0, bank.max_len)
    assert torch.equal(keys[slot, :, :length], -values[slot, :, :length])
    return keys[slot, 0, :length, 0].tolist()


def test_row_in_the_last_slot_moves_into_a_free_one():
    cache = SuffixCache()
    cache.add(["a", "b", "c"])
    for i, row in enumerate("abc"):
        for j in range(i + 2):
            fill(cache, row, 10 * i + j)
    cache.remove("a")
    assert contents(cache, "c") == [20, 21, 22, 23]
    assert contents(cache, "b") == [10, 11, 12]
    cache.remove("b")
    assert [bank.rows for bank in cache.banks] == [["c"]]


def test_slot_that_is_taken_again_starts_empty():
    cache = SuffixCache()
    cache.add(["a"])
    fill(cache, "a", 1)
    cache.remove("a")
    cache.add(["b"])
    assert cache.length("b") == 0
    fill(cache, "b", 7)
    assert contents(cache, "b") == [7]


def test_rows_move_to_a_larger_bank_and_keep_what_is_stored():
    cache = SuffixCache()
    cache.add(["short", "long", "other"])
    for i in range(4 * FIRST_CAPACITY + 1):
        fill(cache, "long", i)
        if i < 20:
            fill(cache, "other", -i)
    assert contents(cache, "long") == list(range(4 * FIRST_CAPACITY + 1))
    assert contents(cache, "other") == [-i for i in range(20)]
    assert contents(cache, "short") == []
    assert [bank.capacity for bank in cache.banks] == [16, 32, 96]
    assert cache.num_places == 16 + 32 + 96


def test_banks_take_more_rows_than_they_were_made_for():
    cache = SuffixCache()
    cache.add(["a"])
    fill(cache, "a", 5)
    cache.add([f"more {i}" for i in range(20)])
    fill(cache, "more 19", 6)
    assert (contents(cache, "a"), contents(cache, "more 19")) == ([5], [6])


def test_values_that_are_not_finite_are_cleared_with_their_row():
    cache = SuffixCache()
    cache.add(["good", "bad"])
    fill(cache, "good", 1)
    fill(cache, "bad", float("nan"))
    fill(cache, "bad", float("nan"))
    cache.remove("bad", clear=True)
    cache.add(["next"])
    assert torch.isfinite(cache.banks[0].read(0, FIRST_CAPACITY)[0]).all()


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 47, 48, 49, 1000])
def test_capacity_is_the_smallest_that_fits_and_wastes_no_more_than_half(num_tokens):
    capacity = capacity_for(num_tokens)
    assert num_tokens <= capacity <= max(1.5 * num_tokens, 2 * FIRST_CAPACITY)
    assert next_capacity(capacity) <= 2 * capacity
