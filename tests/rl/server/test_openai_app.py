"""The stock `openai` client against a real server on loopback."""

import asyncio
import json

import httpx
import numpy as np
import openai
import pytest

from tests.rl.server.served import MODEL_NAME, WAIT_SECONDS
from tests.zorro_inference.models import plain_greedy, teacher_forced

MESSAGES = [{"role": "user", "content": "Find the GCD of 6 and 4"}]
CHAT = {"model": MODEL_NAME, "messages": MESSAGES, "seed": 3, "max_tokens": 6}
TEXT = {"model": MODEL_NAME, "prompt": "Q: Find the Greatest", "seed": 3, "max_tokens": 6}
IDS = {"extra_body": {"return_token_ids": True}}


def post(server, path: str, **body) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=WAIT_SECONDS)


def extra(choice, name: str):
    """A field that OpenAI's client does not know."""
    return choice.model_extra[name]


def test_models_lists_the_one_there_is_with_its_context(server):
    (card,) = server.client().models.list().data
    assert (card.id, card.model_extra["max_model_len"]) == (MODEL_NAME, 2048)
    assert server.client().models.retrieve(MODEL_NAME).id == MODEL_NAME
    with pytest.raises(openai.NotFoundError):
        server.client().models.retrieve("another")


def test_a_completion_is_what_plain_greedy_decoding_gives(server, texts):
    answer = server.client().completions.create(**TEXT | {"temperature": 0, "max_tokens": 8}, **IDS)
    (choice,) = answer.choices
    prompt = texts.encode(TEXT["prompt"])
    expected = plain_greedy(server.sampler.model, prompt, 8, eos_id=texts.tokenizer.eos_token_id)
    assert (extra(choice, "token_ids"), extra(choice, "prompt_token_ids")) == (expected, prompt)
    assert choice.text == texts.decode(expected, skip_special_tokens=True)
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(expected),
        "total_tokens": len(prompt) + len(expected),
    }


def test_a_chat_is_the_completion_of_its_rendered_template(server, texts):
    chat = server.client().chat.completions.create(**CHAT, **IDS)
    rendered = "user: Find the GCD of 6 and 4<|end|>\nassistant:"
    text = server.client().completions.create(**TEXT | {"prompt": rendered}, **IDS)
    assert extra(chat, "prompt_token_ids") == texts.encode(rendered)
    assert chat.choices[0].message.content == text.choices[0].text
    assert extra(chat.choices[0], "token_ids") == extra(text.choices[0], "token_ids")
    assert chat.choices[0].message.role == "assistant"


def test_every_spelling_of_a_prompt_gives_the_same_answers(server, texts):
    ids = [texts.encode("Q: Find"), texts.encode("A: 5")]
    client = server.client()
    one, other = (client.completions.create(**TEXT | {"prompt": row}, **IDS).choices[0] for row in ids)
    for prompt in (ids, ["Q: Find", "A: 5"]):
        answers = client.completions.create(**TEXT | {"prompt": prompt}, **IDS).choices
        assert [extra(choice, "token_ids") for choice in answers] == [
            extra(one, "token_ids"),
            extra(other, "token_ids"),
        ]
        assert [choice.index for choice in answers] == [0, 1]


def test_n_answers_come_in_order_and_differ(server):
    answers = server.client().chat.completions.create(**CHAT | {"n": 5, "temperature": 1.5}, **IDS).choices
    assert [choice.index for choice in answers] == list(range(5))
    assert len({tuple(extra(choice, "token_ids")) for choice in answers}) > 1


def test_the_choices_of_several_prompts_are_numbered_prompt_by_prompt(server):
    body = TEXT | {"prompt": ["Q: Find", "A: 5", "Q: 7"], "n": 2}
    answers = server.client().completions.create(**body, **IDS)
    lens = [len(extra(choice, "prompt_token_ids")) for choice in answers.choices]
    assert [choice.index for choice in answers.choices] == list(range(6))
    assert lens[0] == lens[1] and lens[2] == lens[3] and lens[4] == lens[5]
    assert answers.usage.prompt_tokens == lens[0] + lens[2] + lens[4]


def test_a_seed_repeats_an_answer_and_none_does_not(server):
    client = server.client()
    body = {key: value for key, value in CHAT.items() if key != "seed"} | {"temperature": 2.0, "max_tokens": 12}
    seeded = [client.chat.completions.create(**body, seed=7).choices[0].message.content for _ in range(2)]
    free = [client.chat.completions.create(**body).choices[0].message.content for _ in range(4)]
    assert seeded[0] == seeded[1]
    assert len(set(free)) > 1


def joined_chat(events) -> tuple[dict[int, str], dict[int, list[int]], dict[int, str]]:
    texts, ids, reasons = {}, {}, {}
    for event in events:
        for choice in event.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            ids.setdefault(choice.index, []).extend((choice.model_extra or {}).get("token_ids") or [])
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return texts, ids, reasons


@pytest.mark.parametrize("n", [1, 3])
def test_a_streamed_chat_adds_up_to_the_whole_one(server, n):
    client = server.client()
    whole = client.chat.completions.create(**CHAT, n=n, **IDS)
    options = {"include_usage": True}
    events = list(client.chat.completions.create(**CHAT, n=n, stream=True, stream_options=options, **IDS))
    texts, ids, reasons = joined_chat(events)
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert ids == {choice.index: extra(choice, "token_ids") for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert events[0].choices[0].delta.role == "assistant"
    assert extra(events[0], "prompt_token_ids") == extra(whole, "prompt_token_ids")
    assert events[-1].choices == []
    assert events[-1].usage == whole.usage
    assert all(event.usage is None for event in events[:-1])


def test_a_streamed_completion_adds_up_to_the_whole_one(server):
    client, body = server.client(), TEXT | {"prompt": ["Q: Find", "A: 5"], "n": 2, "logprobs": 2}
    whole = client.completions.create(**body, **IDS)
    texts, ids, offsets = {}, {}, {}
    for event in client.completions.create(**body, stream=True, **IDS):
        (choice,) = event.choices
        texts[choice.index] = texts.get(choice.index, "") + choice.text
        ids.setdefault(choice.index, []).extend(extra(choice, "token_ids"))
        offsets.setdefault(choice.index, []).extend(choice.logprobs.text_offset)
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert ids == {choice.index: extra(choice, "token_ids") for choice in whole.choices}
    assert offsets == {choice.index: choice.logprobs.text_offset for choice in whole.choices}


def test_the_asynchronous_client_gets_the_same(server):
    async def both() -> tuple[str, str]:
        async with server.async_client() as client:
            whole = await client.chat.completions.create(**CHAT)
            events = [event async for event in await client.chat.completions.create(**CHAT, stream=True)]
        return whole.choices[0].message.content, joined_chat(events)[0][0]

    whole, streamed = asyncio.run(both())
    assert whole == streamed == server.client().chat.completions.create(**CHAT).choices[0].message.content


def test_continuous_usage_counts_up(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = list(server.client().completions.create(**TEXT, stream=True, stream_options=options))
    counts = [event.usage.completion_tokens for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2]


def test_logprobs_of_a_chat_are_the_models_own_one_per_token(server):
    body = CHAT | {"logprobs": True, "top_logprobs": 3, "temperature": 0.7}
    answer = server.client().chat.completions.create(**body, **IDS)
    (choice,), prompt = answer.choices, extra(answer, "prompt_token_ids")
    ids, entries = extra(choice, "token_ids"), choice.logprobs.content
    expected = teacher_forced(server.sampler.model, prompt, ids, 0.7)
    assert len(entries) == len(ids)
    assert np.abs(np.array([entry.logprob for entry in entries]) - expected).max() < 1e-4
    for entry in entries:
        tops = [top.logprob for top in entry.top_logprobs]
        assert len(tops) == 3
        assert tops == sorted(tops, reverse=True)
        assert entry.logprob <= tops[0] + 1e-6
    joined = b"".join(bytes(entry.bytes) for entry in entries)
    assert joined.startswith(choice.message.content.encode()[:3])


def test_logprobs_without_others_have_an_empty_list_of_them(server):
    answer = server.client().chat.completions.create(**CHAT | {"logprobs": True})
    assert all(entry.top_logprobs == [] for entry in answer.choices[0].logprobs.content)
    assert server.client().chat.completions.create(**CHAT).choices[0].logprobs is None


def test_tokens_can_be_named_by_their_ids(server):
    more = {"extra_body": {"return_tokens_as_token_ids": True, "return_token_ids": True}}
    chat = server.client().chat.completions.create(**CHAT | {"logprobs": True}, **more).choices[0]
    text = server.client().completions.create(**TEXT | {"logprobs": 1}, **more).choices[0]
    assert [entry.token for entry in chat.logprobs.content] == [f"token_id:{one}" for one in extra(chat, "token_ids")]
    assert text.logprobs.tokens == [f"token_id:{one}" for one in extra(text, "token_ids")]


def test_an_echo_scores_the_prompt(server, texts):
    prompt = texts.encode(TEXT["prompt"])
    answer = server.client().completions.create(**TEXT | {"echo": True, "logprobs": 1, "max_tokens": 0})
    (choice,) = answer.choices
    expected = teacher_forced(server.sampler.model, prompt[:1], prompt[1:], 1.0)
    assert choice.text == TEXT["prompt"]
    assert choice.logprobs.token_logprobs[0] is None
    assert np.abs(np.array(choice.logprobs.token_logprobs[1:]) - expected).max() < 1e-4
    assert choice.logprobs.text_offset == [len("".join(choice.logprobs.tokens[:i])) for i in range(len(prompt))]
    assert answer.usage.completion_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_puts_the_prompt_before_the_answer(server, stream):
    client = server.client()
    alone = client.completions.create(**TEXT).choices[0].text
    answer = client.completions.create(**TEXT, echo=True, stream=stream)
    text = "".join(event.choices[0].text for event in answer) if stream else answer.choices[0].text
    assert text == TEXT["prompt"] + alone


def test_a_message_can_be_continued_and_echoed(server):
    messages = [*MESSAGES, {"role": "assistant", "content": "A: "}]
    more = {"extra_body": {"continue_final_message": True, "add_generation_prompt": False, "echo": True}}
    answer = server.client().chat.completions.create(**CHAT | {"messages": messages}, **more)
    assert answer.choices[0].message.content.startswith("A: ")


def test_prompt_logprobs_come_in_vllms_shape(server, texts):
    ids = texts.encode(TEXT["prompt"])
    answer = post(server, "/v1/completions", **TEXT, prompt_logprobs=2).json()["choices"][0]["prompt_logprobs"]
    assert answer[0] is None
    for token_id, entry in zip(ids[1:], answer[1:], strict=True):
        assert entry[str(token_id)]["logprob"] <= 0
        assert {one["rank"] for one in entry.values()} >= {1, 2}


def test_a_prompt_of_one_token_has_no_logprob_to_report(server):
    reply = post(server, "/v1/completions", prompt=[5], prompt_logprobs=2, max_tokens=1)
    assert reply.json()["choices"][0]["prompt_logprobs"] == [None]


def test_a_stop_text_ends_an_answer_and_is_left_out(server):
    client = server.client()
    whole = client.completions.create(**TEXT | {"temperature": 0, "max_tokens": 12}).choices[0].text
    stop = whole[4:7]
    cut = client.completions.create(**TEXT | {"temperature": 0, "max_tokens": 12}, stop=stop).choices[0]
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"
    assert extra(cut, "stop_reason") == stop
    kept = {"extra_body": {"include_stop_str_in_output": True}}
    cut = client.completions.create(**TEXT | {"temperature": 0, "max_tokens": 12}, stop=[stop], **kept).choices[0]
    assert cut.text == whole[: whole.index(stop) + len(stop)]


def test_special_tokens_are_left_out_of_the_text_unless_asked_for(server, texts):
    end = texts.tokenizer.eos_token_id
    body = TEXT | {"logit_bias": {str(end): 100}, "max_tokens": 3}
    client = server.client()
    for skip in (True, False):
        more = {"ignore_eos": True, "return_token_ids": True, "skip_special_tokens": skip}
        choice = client.completions.create(**body, extra_body=more).choices[0]
        assert extra(choice, "token_ids") == [end] * 3
        assert choice.text == ("" if skip else "<|end|>" * 3)


def test_max_tokens_of_a_chat_reaches_to_the_end_of_the_context(server):
    long = [{"role": "user", "content": "7 " * 1015}]
    body = {"model": MODEL_NAME, "messages": long, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    answer = server.client().chat.completions.create(**body)
    assert answer.usage.total_tokens == 2048
    assert answer.choices[0].finish_reason == "length"


def test_generate_takes_and_gives_ids(server, texts):
    prompt = texts.encode("Q: Find the")
    sampling = {"temperature": 0, "max_tokens": 5, "logprobs": 1, "stop_token_ids": [3], "skip_special_tokens": False}
    body = {"model": MODEL_NAME, "token_ids": prompt, "sampling_params": sampling, "request_id": "mine"}
    answer = post(server, "/inference/v1/generate", **body).json()
    (choice,) = answer["choices"]
    expected = plain_greedy(server.sampler.model, prompt, 5, eos_id=texts.tokenizer.eos_token_id)
    assert answer["request_id"] == "mine"
    assert (choice["token_ids"], choice["index"]) == (expected, 0)
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{one}" for one in expected]
    assert (
        np.abs([e["logprob"] for e in entries] - teacher_forced(server.sampler.model, prompt, expected, 1)).max() < 1e-4
    )
    assert all(len(entry["top_logprobs"]) == 1 for entry in entries)


def test_generate_streams_what_it_gives_whole(server):
    body = {"token_ids": [40, 41, 42], "sampling_params": {"max_tokens": 4, "n": 2, "seed": 1}}
    whole = {one["index"]: one["token_ids"] for one in post(server, "/inference/v1/generate", **body).json()["choices"]}
    streamed: dict[int, list[int]] = {}
    reply = post(server, "/inference/v1/generate", **body, stream=True, stream_options={"include_usage": True})
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    for choice in (choice for line in lines[:-1] for choice in json.loads(line)["choices"]):
        streamed.setdefault(choice["index"], []).extend(choice["token_ids"])
    assert streamed == whole
    assert json.loads(lines[-2])["usage"]["completion_tokens"] == 8


def test_ids_are_carried_and_never_encoded_again(server, texts):
    """A split that no tokenizer would make, with a special token inside, goes in and comes back as it is."""
    split = [texts.encode(char)[0] for char in "the"] + [texts.tokenizer.eos_token_id] + texts.encode(" Greatest")
    assert texts.encode(texts.decode(split)) != split
    answer = server.client().completions.create(**TEXT | {"prompt": split}, **IDS)
    assert extra(answer.choices[0], "prompt_token_ids") == split
    follow = [*split, *extra(answer.choices[0], "token_ids"), texts.tokenizer.eos_token_id]
    second = server.client().completions.create(**TEXT | {"prompt": follow}, **IDS)
    assert extra(second.choices[0], "prompt_token_ids") == follow


def test_a_banned_token_has_a_logprob_that_json_can_say(server):
    client = server.client()
    body = TEXT | {"temperature": 0, "logprobs": 20, "max_tokens": 2}
    first = client.completions.create(**body, **IDS).choices[0]
    banned = extra(first, "token_ids")[0]
    again = client.completions.create(**body | {"logit_bias": {str(banned): -100}}, **IDS).choices[0]
    assert extra(again, "token_ids")[0] != banned
    assert all(np.isfinite(value) for tops in again.logprobs.top_logprobs for value in tops.values())


def test_tokenize_and_detokenize_are_inverse(server, texts):
    told = post(server, "/tokenize", prompt="Q: Find 17", return_token_strs=True).json()
    assert told["tokens"] == texts.encode("Q: Find 17")
    assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), 2048)
    assert "".join(told["token_strs"]) == "Q: Find 17"
    assert post(server, "/detokenize", tokens=told["tokens"]).json() == {"prompt": "Q: Find 17"}
    chat = server.client().chat.completions.create(**CHAT, **IDS)
    assert post(server, "/tokenize", messages=MESSAGES).json()["tokens"] == extra(chat, "prompt_token_ids")


def test_tools_reach_the_template(server, texts):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    client = server.client()
    shown = client.chat.completions.create(**CHAT, tools=tools, **IDS)
    hidden = client.chat.completions.create(**CHAT, tools=tools, tool_choice="none", **IDS)
    assert texts.decode(extra(shown, "prompt_token_ids")).startswith('tools: [{"type": "function"')
    assert texts.decode(extra(hidden, "prompt_token_ids")).startswith("user: ")


async def drawn_at_once(server, bodies: list[dict]) -> list[list[list[int]]]:
    async with server.async_client() as client:
        answers = await asyncio.gather(*(client.completions.create(**body, **IDS) for body in bodies))
    return [[extra(choice, "token_ids") for choice in answer.choices] for answer in answers]


def test_thirty_two_requests_at_once_equal_the_same_one_by_one(server):
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 300, 40).tolist()
    bodies = [
        {
            "model": MODEL_NAME,
            "prompt": shared[: rng.integers(1, 40)] + rng.integers(0, 300, rng.integers(0, 6)).tolist(),
            "seed": number,
            "n": 1 + number % 3,
            "max_tokens": 2 + number % 7,
            "temperature": (0.0, 0.7, 1.3)[number % 3],
            "top_p": (1.0, 0.8)[number % 2],
        }
        for number in range(32)
    ]
    client = server.client()
    alone = [
        [extra(choice, "token_ids") for choice in client.completions.create(**body, **IDS).choices] for body in bodies
    ]
    assert asyncio.run(drawn_at_once(server, bodies)) == alone


def test_metrics_count_answers_and_how_long_they_took(server):
    before = metrics_of(server)
    server.client().completions.create(**TEXT | {"n": 4, "max_tokens": 5, "extra_body": {"ignore_eos": True}})
    after = metrics_of(server)
    assert after["arctic_time_to_first_token_seconds_count"] - before["arctic_time_to_first_token_seconds_count"] == 4
    assert after["arctic_inter_token_seconds_count"] - before["arctic_inter_token_seconds_count"] == 16
    assert after['arctic_rollouts_finished_total{reason="length"}'] >= 4
    assert after["arctic_running"] == after["arctic_waiting"] == 0


def test_metrics_count_tokens(server):
    before = metrics_of(server)
    server.client().completions.create(**TEXT | {"n": 4, "max_tokens": 5, "extra_body": {"ignore_eos": True}})
    after = metrics_of(server)
    assert after["arctic_generated_tokens_total"] - before["arctic_generated_tokens_total"] == 20
    assert after["arctic_prompt_tokens_total"] > before["arctic_prompt_tokens_total"]
    assert after["arctic_kv_tokens_read_total"] > before["arctic_kv_tokens_read_total"]


def test_metrics_show_prefix_hits_of_later_requests(server):
    prompt = np.random.default_rng(5).integers(0, 300, 100).tolist()
    server.client().completions.create(**TEXT | {"prompt": prompt})
    before = metrics_of(server)["arctic_prefix_hit_tokens_total"]
    server.client().completions.create(**TEXT | {"prompt": [*prompt, 5]})
    assert metrics_of(server)["arctic_prefix_hit_tokens_total"] - before >= 99


def metrics_of(server) -> dict[str, float]:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def test_health_answers(server):
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
