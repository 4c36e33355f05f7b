"""The decoder against bytes of an enemy: one clear error, no hang, no memory beyond what the bytes explain."""

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arctic_platform.errors import InputError, WireError
from arctic_platform.rl import frames, protocol
from arctic_platform.rl.frames import RAW_SIZES, RawArray, decode_frame, encode_frame
from arctic_platform.rl.protocol import Message, Processing, Request, Response, Rollout, RolloutBatch
from arctic_platform.rl.wire import decode, encode
from tests.rl.messages import MESSAGES

FRAMES = [b"".join(encode(message)) for message in MESSAGES]
EXPLAINED = 64
"""Bytes of memory for each byte of a frame: what the JSON value `[]` and its place take for its two or three."""
SPARE = 2**18

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
SIZES = st.integers(-2, 40) | st.sampled_from([2**31, 2**47, 2**63, 2**70, True, None, 1.5, "8"])
DTYPES = st.sampled_from(["I64", "F32", "BOOL", "BF16", "C64", "F8_E4M3", "U64", "i8", "", None, 7])


def outcome(frame: bytes | bytearray, message_type: type[Message] = Message) -> Message | None:
    """What is decoded; none for a refusal, which must be ours and in one line. Memory is bounded either way."""
    tracemalloc.start()
    try:
        return decode(frame, message_type)
    except InputError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 1000
        return None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < EXPLAINED * len(frame) + SPARE


@settings(max_examples=150)
@given(st.binary(max_size=2000))
def test_random_bytes_are_refused(data: bytes) -> None:
    assert outcome(data) is None
    assert outcome(b"ZoRR" + (1).to_bytes(4, "little") + data) is None


@settings(max_examples=400)
@given(st.sampled_from(FRAMES), st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), min_size=1, max_size=4))
def test_flipped_bits_give_a_message_or_one_clear_error(frame: bytes, flips: list[tuple[int, int]]) -> None:
    damaged = bytearray(frame)
    for at, bits in flips:
        damaged[at % len(damaged)] ^= bits
    outcome(damaged)


@settings(max_examples=200)
@given(st.sampled_from(FRAMES), st.integers(0, 10**6), st.integers(0, 10**6), st.binary(max_size=40))
def test_pieces_cut_out_or_put_in_give_a_message_or_one_clear_error(frame: bytes, a: int, b: int, new: bytes) -> None:
    a, b = sorted((a % len(frame), b % len(frame)))
    outcome(frame[:a] + new + frame[b:])


@settings(max_examples=400)
@given(
    st.dictionaries(
        st.sampled_from(["batch.prompts", "batch.prompts#offsets", "prompts", "prompts#offsets", "x", "__metadata__"]),
        st.fixed_dictionaries(
            {"dtype": DTYPES, "shape": st.lists(SIZES, max_size=3), "data_offsets": st.lists(SIZES, max_size=3)}
        )
        | JSON,
        max_size=4,
    ),
    st.binary(max_size=100),
)
def test_headers_that_lie_are_refused(header: dict[str, Any], data: bytes) -> None:
    frame = framed({"message": "GenerateRequest", "fields": {}, "nonfinite": []}, header, data)
    outcome(frame, Request)


@settings(max_examples=300)
@given(
    st.sampled_from([type(message).__name__ for message in MESSAGES]) | JSON,
    JSON
    | st.dictionaries(st.sampled_from(["batch", "prompts", "rollouts", "metrics", "request_id"]), JSON, max_size=3),
    JSON | st.lists(st.tuples(st.lists(st.sampled_from(["metrics", "batch", 0, -1, "a", True]), max_size=3), JSON)),
)
def test_control_parts_of_any_form_give_a_message_or_one_clear_error(name: Any, fields: Any, nonfinite: Any) -> None:
    arrays = {"prompts": np.arange(3), "prompts#offsets": np.array([0, 3])} if name == "GenerateRequest" else {}
    control = {"message": name, "fields": fields, "nonfinite": nonfinite}
    header, data = json.dumps({}), b""
    if arrays:
        parts = encode_frame({}, arrays)
        data = b"".join(parts)[24:]
        header_len = int.from_bytes(data[:8], "little")
        header, data = data[8 : 8 + header_len].decode(), data[8 + header_len :]
    outcome(framed(control, json.loads(header), data))


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 6), max_size=6), st.sampled_from(["<i8", "<f4", "?"])
)
def test_offsets_that_lie_are_refused(offsets: list[int], dtype: str) -> None:
    values = np.ones(3, dtype)
    arrays = {"prompts": values, "prompts#offsets": np.array(offsets, np.int64)}
    frame = b"".join(encode_frame({"message": "GenerateRequest", "fields": {}, "nonfinite": []}, arrays))
    message = outcome(frame, Request)
    is_true = bool(offsets) and offsets[0] == 0 and offsets[-1] == 3 and offsets == sorted(set(offsets))
    assert (message is not None) == is_true


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 5000, "1" * 100_000, "[" + "[]," * 30_000 + "[]]", '{"a":NaN}', "[1e999]", "\x00", "{"],
    ids=["deep", "deep object", "long number", "wide", "NaN", "overflow", "zero", "open"],
)
def test_json_made_to_hurt_is_refused(text: str) -> None:
    control = text.encode()
    assert outcome(b"ZoRR" + (1).to_bytes(4, "little") + len(control).to_bytes(8, "little") + control) is None
    nested = f'{{"message":"SaveCheckpointRequest","fields":{{"client_state":{text}}},"nonfinite":[]}}'.encode()
    outcome(b"ZoRR" + (1).to_bytes(4, "little") + len(nested).to_bytes(8, "little") + nested + bytes(8))


def test_a_control_part_of_too_many_values_is_refused_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    message = protocol.SaveCheckpointRequest(client_state={"at": list(range(1000))})
    frame = b"".join(encode(message))
    monkeypatch.setattr(frames, "MAX_CONTROL_VALUES", 500)
    with pytest.raises(WireError, match="at most 500"):
        decode(frame, Request)
    with pytest.raises(InputError, match="at most 500"):
        encode(message)


def test_announced_lengths_cost_nothing() -> None:
    for length in (2**26, 2**40, 2**64 - 1):
        with pytest.raises(WireError, match=r"cut off|at most"):
            decode_frame(b"ZoRR" + (1).to_bytes(4, "little") + length.to_bytes(8, "little") + b"{}" * 20)


def framed(control: dict[str, Any], header: dict[str, Any], data: bytes) -> bytes:
    """A frame with whatever it is given; NaN literals included."""
    texts = [json.dumps(part).encode() for part in (control, header)]
    start = b"ZoRR" + (1).to_bytes(4, "little") + len(texts[0]).to_bytes(8, "little")
    return start + texts[0] + len(texts[1]).to_bytes(8, "little") + texts[1] + data


IDS = st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4), max_size=4)
ROW = st.lists(st.floats(), max_size=4)
METRICS = st.dictionaries(st.text(max_size=8), st.floats(), max_size=4)
STATE = st.dictionaries(st.text(max_size=5), JSON, max_size=4)


@st.composite
def batches(draw: st.DrawFn) -> RolloutBatch:
    """Rows of any lengths, each optional field there or not, in lists or in arrays of some type."""
    prompts = draw(IDS)
    lens = [draw(st.integers(0, 4)) for _ in prompts]

    def per_token(values: st.SearchStrategy) -> Any:
        rows = [draw(st.lists(values, min_size=num, max_size=num)) for num in lens]
        kept = draw(st.sampled_from(["lists", "arrays", "absent"]))
        return {"lists": rows, "arrays": [np.array(row) for row in rows], "absent": None}[kept]

    finite = st.floats(allow_nan=False, allow_infinity=False)
    fields = {name: per_token(finite) for name in ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs")}
    responses = [draw(st.lists(st.integers(0, 9), min_size=num, max_size=num)) for num in lens]
    keys = [[draw(st.integers(-(2**63), 2**63 - 1))] * (len(p) + num) for p, num in zip(prompts, lens, strict=True)]
    return RolloutBatch(
        prompts=prompts, responses=responses, response_mask=per_token(st.integers(0, 1)), content_keys=keys, **fields
    )


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    """One answer, with and without what was asked for beside it."""
    ids = draw(st.lists(st.integers(0, 2**31 - 1), max_size=4))
    top = st.none() | st.lists(st.dictionaries(st.integers(0, 99), st.floats(), max_size=3), max_size=3)
    return Rollout(
        prompt_index=draw(st.integers(0, 9)),
        token_ids=ids,
        logprobs=[draw(st.floats()) for _ in ids],
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        top_logprobs=draw(top),
        text=draw(st.none() | st.text(max_size=5)),
    )


ANY_MESSAGE = st.one_of(
    st.builds(protocol.FwdBwdRequest, batch=batches(), processing=st.just(Processing(loss="dapo"))),
    st.builds(protocol.LogProbsRequest, batch=batches(), reference=st.booleans()),
    st.builds(protocol.GenerateRequest, prompts=IDS, routing_key=st.none() | st.text(max_size=5)),
    st.builds(
        protocol.GenerateResponse,
        rollouts=st.lists(rollouts(), max_size=4),
        weight_version=st.integers(),
        metrics=METRICS,
    ),
    st.builds(protocol.FwdBwdResponse, logprobs=st.lists(ROW, max_size=4), metrics=METRICS),
    st.builds(protocol.SaveCheckpointRequest, path=st.none() | st.text(max_size=9), client_state=STATE),
    st.builds(protocol.StepResponse, metrics=METRICS),
    st.sampled_from(MESSAGES),
)


@settings(max_examples=300)
@given(ANY_MESSAGE)
def test_every_message_comes_back(message: Message) -> None:
    back = decode(b"".join(encode(message)), Request if isinstance(message, Request) else Response)
    assert type(back) is type(message)
    assert repr(back) == repr(message)


@given(
    st.sampled_from([*frames._NUMPY_DTYPES, *RAW_SIZES]), st.lists(st.integers(0, 3), max_size=3), st.text(max_size=9)
)
def test_arrays_of_every_type_come_back_under_any_name(dtype: str, shape: list[int], name: str) -> None:
    num = int(np.prod(shape, dtype=int))
    if dtype in RAW_SIZES:
        array: Any = RawArray(dtype, tuple(shape), bytes(range(num * RAW_SIZES[dtype])))
    else:
        array = (np.arange(num) % 2).astype(frames._NUMPY_DTYPES[dtype]).reshape(shape)
    name = f"model.layers.0.{name}"
    back = decode_frame(b"".join(encode_frame({}, {name: array}))).arrays[name]
    assert type(back) is type(array)
    assert back.shape == array.shape and back.dtype == array.dtype
    assert bytes(back.data) == bytes(array.data) if dtype in RAW_SIZES else np.array_equal(back, array)
