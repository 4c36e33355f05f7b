"""Every message comes back as it was sent; anything else is refused with one clear error."""

import json
import math

import numpy as np
import pytest

from arctic_platform.errors import InputError, WireError
from arctic_platform.rl.frames import chunks, decode_frame, encode_frame
from arctic_platform.rl.protocol import (
    GenerateRequest,
    GenerateResponse,
    LogProbsResponse,
    Message,
    Request,
    Response,
    Rollout,
    SaveCheckpointRequest,
    StepRequest,
    StepResponse,
)
from arctic_platform.rl.wire import decode, encode
from tests.rl.messages import MESSAGES


def names_below(base: type[Message]) -> set[str]:
    return {base.__name__}.union(*(names_below(below) for below in base.__subclasses__()))


def frame_of(message: Message) -> bytes:
    return b"".join(encode(message))


def test_the_examples_hold_every_message() -> None:
    known = (names_below(Request) | names_below(Response)) - {"Request", "Response"}
    assert {type(message).__name__ for message in MESSAGES} == known


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_comes_back_as_it_was_sent(message: Message) -> None:
    base = Request if isinstance(message, Request) else Response
    back = decode(frame_of(message), base)
    assert type(back) is type(message)
    assert repr(back) == repr(message)  # NaN is not equal to itself, its text is


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_control_part_is_strict_json(message: Message) -> None:
    frame = frame_of(message)
    length = int.from_bytes(frame[8:16], "little")
    json.loads(frame[16 : 16 + length], parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_frame_cut_off_anywhere_is_refused(message: Message) -> None:
    frame = frame_of(message)
    for length in range(len(frame)):
        with pytest.raises(WireError):
            decode(frame[:length], Message)
    with pytest.raises(WireError, match="8 bytes behind its last array"):
        decode(frame + bytes(8), Message)


@pytest.mark.parametrize(("version", "outdated"), [(0, "the sender"), (2, "this side"), (2**32 - 1, "this side")])
def test_other_version_is_refused_with_the_side_to_update(version: int, outdated: str) -> None:
    frame = bytearray(frame_of(StepRequest()))
    frame[4:8] = version.to_bytes(4, "little")
    with pytest.raises(WireError, match=f"format {version} arrived, this side reads 1; update {outdated}"):
        decode(frame, Request)


def test_message_of_another_class_is_refused_by_name() -> None:
    with pytest.raises(WireError, match="'StepRequest' arrived; expected GenerateRequest"):
        decode(frame_of(StepRequest()), GenerateRequest)
    with pytest.raises(WireError, match="'StepRequest' arrived; expected Response"):
        decode(frame_of(StepRequest()), Response)


def test_wrong_values_raise_what_building_the_message_raises() -> None:
    frame = frame_of(StepRequest())
    control = decode_frame(frame).control
    control["fields"] = {"request_idd": "a"}
    with pytest.raises(InputError, match="did you mean 'request_id'"):
        decode(b"".join(encode_frame(control, {})), Request)


@pytest.mark.parametrize("state", [{"a": object()}, {"a": {(1, 2): 3}}, {"a": b"bytes"}])
def test_value_without_a_form_on_the_wire_is_named(state: dict) -> None:
    with pytest.raises(InputError, match=r"client_state\.a"):
        encode(SaveCheckpointRequest(client_state=state))


def test_metric_called_like_a_number_stays_text() -> None:
    message = SaveCheckpointRequest(client_state={"nan": None, "x": "nan", "nested": [math.nan, None]})
    assert repr(decode(frame_of(message), Request)) == repr(message)
    assert decode(frame_of(StepResponse(metrics={"*": 1.0})), Response) == StepResponse(metrics={"*": 1.0})


def answer(tables: list) -> GenerateResponse:
    rollout = Rollout(prompt_index=0, token_ids=[1], logprobs=[-1.0], finish_reason="stop", top_logprobs=tables)
    return GenerateResponse(rollouts=[rollout, rollout], weight_version=1)


def test_tables_of_log_probs_travel_as_arrays() -> None:
    message = answer([{7: -0.5, 3: -math.inf}, {}, {2**40: 0.0}] * 50)
    frame = decode_frame(frame_of(message))
    assert "top_logprobs" not in frame.control["fields"]["rollouts"][0]
    assert len(frame.arrays["rollouts.*.top_logprobs.ids"]) == 2 * 150
    assert decode(frame_of(message), Response) == message


@pytest.mark.parametrize("counts", [[2, 1], [3, 0], [-2, 2], [2**62, 0]])
def test_counts_of_tables_that_lie_are_refused(counts: list[int]) -> None:
    frame = decode_frame(frame_of(answer([{1: 0.0}, {2: 0.0}])))
    frame.arrays["rollouts.*.top_logprobs.counts"] = np.array(counts * 2)
    with pytest.raises(WireError, match="do not fit together"):
        decode(b"".join(encode_frame(frame.control, frame.arrays)), Response)


def test_log_prob_of_a_banned_token_is_carried_and_no_number_stands_for_it() -> None:
    response = LogProbsResponse(logprobs=[[-math.inf, -1.0], [math.nan, 0.0, 1.0]], metrics={"least": -math.inf})
    back = decode(frame_of(response), Response)
    assert back.logprobs[0] == [-math.inf, -1.0]
    assert math.isnan(back.logprobs[1][0]) and back.logprobs[1][1:] == [0.0, 1.0]
    assert back.metrics == {"least": -math.inf}


def test_ids_are_carried_as_they_are_whatever_text_they_spell() -> None:
    ids = [[0, 0, 0], [1, 0], [2**31 - 1]]  # padding and end tokens are ids like others
    assert decode(frame_of(GenerateRequest(prompts=ids)), Request).prompts == ids


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_chunks_are_the_frame_and_neither_long_nor_many(message: Message, size: int) -> None:
    pieces = [bytes(chunk) for chunk in chunks(encode(message), size)]
    assert b"".join(pieces) == frame_of(message)
    assert all(0 < len(piece) <= size for piece in pieces)
    assert len(pieces) <= 5 * len(frame_of(message)) / size + 2 * len(encode(message))


def test_rollouts_are_sent_from_their_own_arrays() -> None:
    ids, logprobs = np.arange(50, dtype=np.int32), np.linspace(-1, 0, 50, dtype=np.float32)
    rollouts = [
        Rollout(prompt_index=0, token_ids=ids[:at], logprobs=logprobs[:at], finish_reason="stop") for at in (0, 50, 3)
    ]
    message = GenerateResponse(rollouts=rollouts, weight_version=1)
    assert any(np.shares_memory(np.asarray(part), rollouts[1].token_ids.array) for part in encode(message)[1:])
    back = decode(frame_of(message), Response)
    assert back == message
    assert (back.rollouts[1].token_ids.array.dtype, back.rollouts[1].logprobs.array.dtype) == (np.int32, np.float32)
