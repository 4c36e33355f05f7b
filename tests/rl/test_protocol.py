import json
import math

import numpy as np
import pytest

from arctic_platform.errors import InputError, NonFiniteError
from arctic_platform.rl.protocol import (
    FwdBwdRequest,
    GenerateRequest,
    GenerateResponse,
    Processing,
    Rollout,
    RolloutBatch,
    SamplingParams,
    SideBySideRequest,
    StepRequest,
)

PROMPTS = [[1, 2], [3], [4, 5, 6]]
RESPONSES = [[7], [8, 9], []]


def batch(**fields: object) -> RolloutBatch:
    return RolloutBatch(**{"prompts": PROMPTS, "responses": RESPONSES, **fields})


def test_batch_counts_its_loss_tokens_and_rows() -> None:
    assert (batch().num_rows, batch().num_loss_tokens, batch().num_loss_rows) == (3, 3, 2)
    masked = batch(response_mask=[[0], [0, 1], []])
    assert (masked.num_loss_tokens, masked.num_loss_rows) == (1, 1)


def test_one_advantage_per_row_is_spread_over_its_response() -> None:
    assert batch(advantages=[0.5, -1, 2]).advantages == [[0.5], [-1.0, -1.0], []]


def test_arrays_are_taken_as_lists() -> None:
    rows = RolloutBatch(
        prompts=[np.array([1, 2])],
        responses=[np.array([3, 4])],
        advantages=np.array([0.5]),
        response_mask=[[True, False]],
    )
    assert (rows.prompts, rows.responses, rows.advantages) == ([[1, 2]], [[3, 4]], [[0.5, 0.5]])
    assert rows.response_mask == [[1, 0]]


@pytest.mark.parametrize("name", ["advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_number_that_is_not_finite_is_named_by_row_and_position(name: str, value: float) -> None:
    with pytest.raises(NonFiniteError, match=rf"{name}\[1\]\[1\] is {value}"):
        batch(**{name: [[0.0], [0.0, value], []]})


def test_two_infinities_that_cancel_are_found() -> None:
    with pytest.raises(NonFiniteError, match=r"advantages\[1\]\[0\]"):
        batch(advantages=[[0.0], [math.inf, -math.inf], []])


@pytest.mark.parametrize("name", ["advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs", "response_mask"])
def test_length_that_does_not_match_is_named(name: str) -> None:
    with pytest.raises(InputError, match=rf"{name}\[1\] has 1 entries, responses\[1\] has 2 tokens"):
        batch(**{name: [[1], [1], []]})
    with pytest.raises(InputError, match=f"{name} has 2 rows, prompts has 3"):
        batch(**{name: [[1], [1, 1]]})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompts": [[1], [], [2]]}, r"prompts\[1\] is empty"),
        ({"prompts": [[1], [-1], [2]]}, r"prompts\[1\] has token id -1"),
        ({"responses": [[1], [-2, 4], []]}, r"responses\[1\] has token id -2"),
        ({"prompts": [[1], [10**30], [2]]}, r"prompts\[1\] has token id 10+; no vocabulary"),
        ({"content_keys": [[2**63, 1, 1], [1, 1, 1], [1]]}, r"content_keys\[0\] has a key beyond 64 bits"),
        ({"responses": [[1], [2]]}, "responses has 2 rows, prompts has 3"),
        ({"response_mask": [[2], [0, 1], []]}, r"response_mask\[0\] has a value other than 0 and 1"),
        ({"advantages": [1.0]}, "advantages has 1 rows, prompts has 3"),
        ({"advantage": [1.0]}, "unknown key 'advantage'; did you mean 'advantages'"),
        ({"prompts": [["a"], [1], [2]]}, r"RolloutBatch.prompts.0.0: .*valid integer.*'a'"),
        ({"prompts": "abc"}, r"RolloutBatch.prompts: .*valid list"),
    ],
)
def test_unusable_batch_is_one_line_that_names_the_place(fields: dict, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        batch(**fields)
    assert "\n" not in str(caught.value)


def test_fault_inside_a_request_keeps_its_class() -> None:
    with pytest.raises(NonFiniteError, match=r"batch: advantages\[0\]\[0\] is nan"):
        FwdBwdRequest(batch={"prompts": [[1]], "responses": [[2]], "advantages": [math.nan]})


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_new_tokens": 4}, "did you mean 'max_tokens'"),
        ({"min_p": 1.5}, "min_p"),
        ({"min_p": math.nan}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 17}, "min_tokens=17 is above max_tokens=16"),
        ({"stop": ["a", ""]}, "stop has an empty text"),
        ({"bad_words": [""]}, "bad_words has an empty text"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": [-1]}, "token id -1"),
        ({"logit_bias": {-3: 1.0}}, "token id -3"),
        ({"logit_bias": {3: math.inf}}, r"logit_bias\[3\] is inf"),
        ({"logit_bias": {3: math.nan}}, r"logit_bias\[3\] is nan"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias"),
        ({"seed": -2}, "seed"),
        ({"logprobs": -2}, "logprobs"),
        ({"prompt_logprobs": -2}, "prompt_logprobs"),
        ({"logprobs_mode": "raw_logits"}, "logprobs_mode"),
        ({"repetition_penality": 1.1}, "did you mean 'repetition_penalty'"),
        ({"stop_strings": ["a"]}, "did you mean 'stop"),
        ({"top_logprobs": 3}, "did you mean '(prompt_)?logprobs'"),
    ],
)
def test_sampling_parameter_out_of_range_is_named(params: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        SamplingParams(**params)


def test_sampling_parameters_have_the_names_and_defaults_of_vllm() -> None:
    ours = {"logprobs_mode": "processed"}
    of_vllm = {
        "n": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "max_tokens": 16, "min_tokens": 0, "stop": (),
        "stop_token_ids": (), "include_stop_str_in_output": False, "ignore_eos": False, "seed": None,
        "skip_special_tokens": True,
        "logprobs": None, "prompt_logprobs": None, "logit_bias": {}, "bad_words": (),
    }  # fmt: skip
    assert SamplingParams().model_dump() == of_vllm | ours


def test_short_forms_of_sampling_parameters_are_those_of_vllm() -> None:
    none = {"stop": None, "stop_token_ids": None, "bad_words": None, "logit_bias": None, "seed": -1}
    assert SamplingParams(**none) == SamplingParams()
    assert SamplingParams(stop="END", bad_words="x") == SamplingParams(stop=["END"], bad_words=["x"])
    assert SamplingParams(logit_bias={"7": 1}).logit_bias == {7: 1.0}
    assert SamplingParams(max_tokens=None, min_tokens=500).max_tokens is None


def test_rollout_with_a_banned_tokens_logprob_survives_json() -> None:
    tables: dict = {"top_logprobs": [{5: -0.1, 9: -math.inf}], "prompt_logprobs": [None, {3: -math.inf}]}
    rollout = Rollout(prompt_index=0, token_ids=[5], logprobs=[-math.inf], finish_reason="stop", **tables)
    text = rollout.model_dump_json()
    json.loads(text, parse_constant=pytest.fail)
    assert Rollout(**json.loads(text)) == rollout
    response = GenerateResponse(rollouts=[rollout], weight_version=1)
    assert GenerateResponse(**json.loads(response.model_dump_json())) == response
    params = SamplingParams(logit_bias={3: -math.inf})
    assert SamplingParams(**json.loads(params.model_dump_json())) == params


@pytest.mark.parametrize("reason", [None, 7, "7"])
def test_stop_reason_keeps_its_type(reason: int | str | None) -> None:
    rollout = Rollout(prompt_index=0, token_ids=[], logprobs=[], finish_reason="stop", stop_reason=reason)
    assert Rollout(**json.loads(rollout.model_dump_json())).stop_reason == reason


@pytest.mark.parametrize(
    "processing",
    [{"temperature": 0.0}, {"clip_low": -1.0}, {"kl_coef": math.inf}, {"num_loss_tokens": 0}, {"temprature": 1.0}],
)
def test_processing_out_of_range_is_refused(processing: dict) -> None:
    with pytest.raises(InputError, match=next(iter(processing))):
        Processing(**processing)


def test_prompts_of_a_request_are_checked() -> None:
    with pytest.raises(InputError, match=r"prompts\[1\] is empty"):
        GenerateRequest(prompts=[[1], []])
    with pytest.raises(InputError, match="valid list"):
        GenerateRequest(prompts=["hello"])


def test_every_request_has_an_id_of_its_own_and_a_method() -> None:
    assert StepRequest().request_id != StepRequest().request_id
    assert StepRequest.method == "step"
    assert SideBySideRequest.method == "side_by_side"


def test_messages_survive_json() -> None:
    request = FwdBwdRequest(batch=batch(advantages=[1, 2, 3]), processing=Processing(loss="dapo"))
    assert FwdBwdRequest.model_validate_json(request.model_dump_json()) == request
