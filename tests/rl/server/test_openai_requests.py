"""Bodies are read strictly: what has no effect here is refused by its name, what nobody knows with the nearest name."""

import json

import pytest

from arctic_platform.errors import RequestError
from arctic_platform.rl.server.openai_body import _REFUSED
from arctic_platform.rl.server.openai_schema import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    TokenizeRequest,
    read_prompts,
)

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"prompt": "hi"}
GENERATE = {"token_ids": [1, 2], "sampling_params": {}}


def parse(model, /, **body):
    return model.parse(json.dumps(body).encode())


def refusal(model, /, **body) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(model, **body)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("raw", [b"", b"{", b'{"prompt": NaN}', b"\xff", b"{'prompt': 1}", b'{"prompt": "a"} x'])
def test_what_is_not_json_is_refused(raw):
    with pytest.raises(RequestError, match="not JSON"):
        CompletionRequest.parse(raw)


@pytest.mark.parametrize("raw", [b"[]", b"3", b'"text"', b"null"])
def test_what_is_no_object_is_refused(raw):
    with pytest.raises(RequestError, match="must be a JSON object"):
        CompletionRequest.parse(raw)


@pytest.mark.parametrize(
    ("model", "body", "nearest"),
    [
        (CompletionRequest, COMPLETION | {"temprature": 1}, "temperature"),
        (ChatRequest, CHAT | {"max_completion_token": 1}, "max_completion_tokens"),
        (ChatRequest, CHAT | {"top_logprob": 1}, "top_logprobs"),
        (ChatRequest, CHAT | {"chat_template_kwarg": {}}, "chat_template_kwargs"),
        (GenerateRequest, GENERATE | {"token_id": [1]}, "token_ids"),
        (GenerateRequest, GENERATE | {"sampling_params": {"max_token": 1}}, "max_tokens"),
        (CompletionRequest, COMPLETION | {"bestof": 2}, "best_of"),
    ],
)
def test_an_unknown_parameter_is_refused_with_the_nearest_name(model, body, nearest):
    error = refusal(model, **body)
    assert f"did you mean {nearest}?" in str(error)
    assert error.code == "unknown_parameter"
    assert error.status == 400


@pytest.mark.parametrize("name", _REFUSED)
@pytest.mark.parametrize(("model", "body"), [(CompletionRequest, COMPLETION), (ChatRequest, CHAT)])
def test_what_is_not_supported_is_refused_by_name_and_taken_where_it_asks_for_nothing(name, model, body):
    error = refusal(model, **body, **{name: "something"})
    assert str(error).startswith(f"{name} is not supported: ")
    assert (error.param, error.code) == (name, "unsupported_parameter")
    for harmless in (*_REFUSED[name].harmless, None):
        parse(model, **body, **{name: harmless})


@pytest.mark.parametrize("name", ["user", "metadata", "safety_identifier", "prompt_cache_key", "session_id"])
def test_names_of_callers_are_taken(name):
    parse(ChatRequest, **CHAT, **{name: "me"})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": True}, "n"),
        ({"n": 1.5}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1000}}, "logit_bias.5"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"seed": 2**80}, "seed"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"prompt_logprobs": 1000}, "prompt_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"request_id": "a b"}, "request_id"),
        ({"model": 3}, "model"),
    ],
)
@pytest.mark.parametrize(("model", "base"), [(CompletionRequest, COMPLETION), (ChatRequest, CHAT)])
def test_values_out_of_range_are_refused_by_their_name(model, base, body, param):
    assert refusal(model, **base, **body).param == param


@pytest.mark.parametrize(
    ("prompt", "rows"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_all_four_spellings_of_a_prompt_are_read(prompt, rows):
    assert read_prompts(prompt) == rows
    assert parse(CompletionRequest, prompt=prompt).prompt == rows


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [""],
        ["a", ""],
        [[]],
        [[1], []],
        None,
        3,
        {"a": 1},
        [1, "a"],
        [[1], "a"],
        ["a", [1]],
        [1.5],
        [True],
        [[[1]]],
    ],
)
def test_every_other_prompt_is_refused(prompt):
    assert refusal(CompletionRequest, prompt=prompt).param == "prompt"


@pytest.mark.parametrize("ids", [[], None, "text", [[1]], [1, None], ["a"], 5])
def test_generate_takes_one_row_of_ids(ids):
    assert refusal(GenerateRequest, **GENERATE | {"token_ids": ids}).param == "token_ids"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "tool", "tool_call_id": "a", "content": None}]}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "user", "contents": "hi"}]}, "messages.0.contents"),
        (CHAT | {"top_logprobs": 2}, "top_logprobs"),
        (CHAT | {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        (CHAT | {"tool_choice": "required"}, "tool_choice"),
        (CHAT | {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        (CHAT | {"max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT | {"echo": True}, "echo"),
        (CHAT | {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_chats_that_make_no_sense_are_refused_by_name(body, param):
    assert refusal(ChatRequest, **body).param == param


def test_parts_of_text_are_one_text():
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert parse(ChatRequest, messages=[message]).messages[0].content == "a\nb"


@pytest.mark.parametrize(
    ("limits", "budget"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 3}, 3),
    ],
)
def test_no_answer_is_longer_than_any_limit_that_is_given(limits, budget):
    assert parse(ChatRequest, **CHAT, **limits).budget == budget


def test_sampling_parameters_reach_the_sampler_under_their_names():
    given = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "min_tokens": 1,
        "stop": ["x"],
        "stop_token_ids": [3],
        "bad_words": ["y"],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "seed": 5,
        "prompt_logprobs": 2,
    }
    params = parse(CompletionRequest, **COMPLETION, **given, logit_bias={"4": -1}).params(max_tokens=9, logprobs=3)
    told = params.model_dump()
    assert {name: list(told[name]) if isinstance(told[name], tuple) else told[name] for name in given} == given
    assert (params.logit_bias, params.max_tokens, params.logprobs) == ({4: -1}, 9, 3)


def test_a_negative_seed_is_a_seed_of_its_own():
    seeds = [
        parse(CompletionRequest, **COMPLETION, seed=seed).params(max_tokens=1, logprobs=None).seed
        for seed in (-1, -2, 1)
    ]
    assert len(set(seeds)) == 3
    assert min(seeds) >= 0


def test_null_is_the_same_as_leaving_a_parameter_out():
    nothing = {
        "temperature": None,
        "stop": None,
        "tools": None,
        "logit_bias": None,
        "seed": None,
        "stream_options": None,
    }
    assert parse(ChatRequest, **CHAT, **nothing) == parse(ChatRequest, **CHAT)


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": CHAT["messages"]}])
def test_tokenize_takes_a_text_or_a_chat(body):
    refusal(TokenizeRequest, **body)
