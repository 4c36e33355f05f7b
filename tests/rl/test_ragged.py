"""Ragged rows read like lists of lists; the slow twin of every operation is the list of lists itself."""

import copy
import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from arctic_platform.errors import InputError
from arctic_platform.rl.protocol import FwdBwdResponse, GenerateRequest, Rollout, RolloutBatch
from arctic_platform.rl.ragged import FloatRows, IdRows, Ragged

INTS = st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5), max_size=6)
FLOATS = st.lists(st.lists(st.floats(allow_nan=False), max_size=5), max_size=6)


@given(INTS | FLOATS)
def test_ragged_reads_like_its_twin(twin: list[list]) -> None:
    rows = Ragged.from_rows(twin)
    assert len(rows) == len(twin)
    assert rows.tolist() == twin
    assert rows == twin and twin == rows and rows == Ragged.from_rows(twin)
    assert [list(row) for row in rows] == twin
    assert [[row[i] for i in range(-len(row), len(row))] for row in rows] == [row + row for row in twin]
    assert rows[1:] == twin[1:] and rows[::-1] == twin[::-1]
    assert rows + twin == twin + twin and twin + rows == twin + twin
    assert [row + [1] for row in rows] == [row + [1] for row in twin]
    assert [[1] + row for row in rows] == [[1] + row for row in twin]
    assert [row[1:] for row in rows] == [row[1:] for row in twin]
    assert rows.lens.tolist() == [len(row) for row in twin]
    assert repr(rows) == repr(twin)
    assert sum(len(row) for row in rows) == sum(map(len, twin)) == len(rows.values)
    assert pickle.loads(pickle.dumps(rows)) == twin and copy.deepcopy(rows) == twin


@given(INTS, st.data())
def test_selected_rows_are_those_of_the_twin(twin: list[list[int]], data: st.DataObject) -> None:
    rows = Ragged.from_rows(twin)
    chosen = data.draw(st.lists(st.sampled_from(range(len(twin))), max_size=8)) if twin else []
    assert rows.select(chosen) == [twin[b] for b in chosen]
    assert rows.gather(chosen).tolist() == [number for b in chosen for number in twin[b]]
    for at, b in enumerate(b for b, row in enumerate(twin) for _ in row):
        assert rows.row_of(at) == b


@given(
    st.lists(st.lists(st.one_of(st.integers(), st.booleans(), st.floats(), st.text(max_size=2), st.none())), max_size=4)
)
@pytest.mark.parametrize(("kind", "field"), [(int, IdRows), (float, FloatRows)])
def test_lists_are_taken_and_refused_as_pydantic_does(kind: type, field: object, rows: list[list]) -> None:
    def outcome(annotation: object) -> object:
        try:
            found = TypeAdapter(annotation).validate_python(rows)
            return repr(found if isinstance(found, list) else found.tolist())
        except ValueError as error:
            return [(fault["loc"], fault["msg"]) for fault in error.errors()]

    plain = {int: list[list[int]], float: list[list[float]]}[kind]
    expected = outcome(plain)
    if isinstance(expected, str) and kind is int:
        expected = repr([[int(number) for number in row] for row in rows])
    assert outcome(field) == expected


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64, ">i4", bool])
def test_integers_of_any_type_are_ids(dtype: object) -> None:
    flat = np.array([0, 1, 1, 0], dtype)
    for rows in ([flat[:3], flat[3:]], [flat[:3].tolist(), flat[3:]]):
        assert GenerateRequest(prompts=rows).prompts == [[0, 1, 1], [0]]
    assert GenerateRequest(prompts=flat.reshape(2, 2)).prompts == [[0, 1], [1, 0]]
    assert GenerateRequest(prompts=torch.tensor([[0, 1], [1, 0]])).prompts == [[0, 1], [1, 0]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_tensors_of_any_float_type_keep_their_values(dtype: torch.dtype) -> None:
    values = torch.tensor([-0.5, -1 / 3], dtype=dtype, requires_grad=True)
    batch = RolloutBatch(prompts=[[1]], responses=[[2, 3]], old_logprobs=[values])
    assert batch.old_logprobs == [values.tolist()]


def test_a_row_per_list_item_and_not_per_token_is_made() -> None:
    batch = RolloutBatch(prompts=np.ones((4, 8), np.int32), responses=np.ones((4, 6), np.int32), advantages=np.ones(4))
    assert batch.prompts.values.dtype == np.int32 and batch.prompts.values.shape == (32,)
    assert batch.advantages == [[1.0] * 6] * 4


def test_what_was_validated_cannot_be_changed() -> None:
    given = np.ones((2, 2), np.int64)
    batch = RolloutBatch(prompts=given, responses=[[1], [1]])
    given[:] = -1
    assert batch.prompts == [[1, 1], [1, 1]]
    with pytest.raises(ValueError, match="read-only"):
        batch.prompts.values[0] = 7
    with pytest.raises(ValueError, match="read-only"):
        batch.prompts[0].array[0] = 7


def test_rows_put_into_a_copy_may_be_lists() -> None:
    batch = RolloutBatch(prompts=[[1], [2]], responses=[[3], [4, 5]])
    masked = batch.model_copy(update={"response_mask": [[0], [0, 1]]})
    assert (masked.num_loss_tokens, masked.num_loss_rows) == (1, 1)
    assert batch.model_copy(update={"response_mask": None}) == batch


@pytest.mark.parametrize(
    ("values", "offsets"),
    [
        ([1, 2], [0, 1]),
        ([1, 2], [1, 2]),
        ([1, 2], [0, 3, 2]),
        ([1], [0, 2, 1]),
        ([[1]], [0, 1]),
        ([1], []),
        ([], [0.0]),
    ],
)
def test_offsets_that_lie_are_refused(values: list, offsets: list) -> None:
    with pytest.raises(InputError, match="offsets"):
        Ragged(np.array(values), np.array(offsets))


@pytest.mark.parametrize("rows", [[1, 2], "abc", [["a"]], [[[1]]], None, np.zeros(3), np.zeros((2, 2, 2)), [[1], 2]])
def test_what_is_no_rows_is_refused(rows: object) -> None:
    with pytest.raises(InputError, match="ragged rows must be"):
        Ragged.from_rows(rows)


def test_messages_with_rows_dump_to_lists() -> None:
    response = FwdBwdResponse(logprobs=[np.array([-0.5, -0.25], np.float32), []], metrics={})
    assert type(response.model_dump()["logprobs"][0]) is list
    assert json.loads(response.model_dump_json())["logprobs"] == [[-0.5, -0.25], []]
    rollout = Rollout(prompt_index=0, token_ids=np.array([1, 2]), logprobs=(-1, -2), finish_reason="stop")
    assert rollout.model_dump()["token_ids"] == [1, 2] == rollout.token_ids
    assert rollout.logprobs == [-1.0, -2.0] and np.asarray(rollout.logprobs, np.float32).dtype == np.float32
    assert response.model_json_schema()["properties"]["logprobs"]["items"]["items"] == {"type": "number"}


@given(INTS, st.sampled_from([np.int64, np.int32, np.int8, object]), st.integers(-3, 3), st.integers(-3, 2**31))
def test_bounds_are_those_of_the_twin(twin: list[list[int]], dtype: type, low: int, high: int) -> None:
    bits = {np.int64: 64, np.int32: 32, np.int8: 8, object: 200}[dtype]
    twin = [[(number + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1) for number in row] for row in twin]
    rows = Ragged(np.array([n for row in twin for n in row], dtype), Ragged.from_rows(twin).offsets)
    for _ in range(2):
        assert rows.is_within(low, high) == all(low <= number <= high for row in twin for number in row)


@given(st.lists(st.lists(st.floats(width=16), max_size=4), max_size=4), st.sampled_from(["f2", "f4", "f8"]))
def test_finite_is_what_it_is_for_the_twin(twin: list[list[float]], dtype: str) -> None:
    flat = np.array([number for row in twin for number in row], dtype)
    assert Ragged(flat, Ragged.from_rows(twin).offsets).is_finite() == all(map(np.isfinite, flat))
