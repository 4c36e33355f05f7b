"""Every sampling parameter through the sampler, against plain decoding of each row alone."""

from functools import cache

import numpy as np
import pytest
import torch

from arctic_platform.errors import InputError
from arctic_platform.rl.loop import make_batch
from arctic_platform.rl.protocol import Rollout, SamplingParams
from arctic_platform.rl.tasks import Question
from arctic_platform.rl.zorro_inference import Sampler, SampleRequest
from arctic_platform.rl.zorro_inference.stop_strings import decode
from tests.zorro_inference.models import (
    EOS_ID,
    VOCAB_SIZE,
    build_model,
    forest_prompts,
    plain_greedy,
    random_prompt,
    teacher_forced,
)
from tests.zorro_inference.text import byte_level, sentence_piece, slow_edits, word_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=10)
PROMPTS = forest_prompts()[:3]


@pytest.fixture(scope="module")
def llama():
    return build_model("llama")


def make_sampler(model, **options) -> Sampler:
    options = {"eos_token_ids": [EOS_ID], "tokenizer": word_tokenizer(VOCAB_SIZE), "probe": False, **options}
    return Sampler(model, **options)


def changed(params: SamplingParams, **updates) -> SamplingParams:
    return SamplingParams(**params.model_dump() | updates)


@torch.no_grad()
def next_logits(model, row: list[int]) -> list[float]:
    return model(input_ids=torch.tensor([row])).logits[0, -1].double().tolist()


@cache
def plain_answers(model) -> list[list[int]]:
    """Greedy answers without any edit."""
    return [plain_edited_greedy(model, prompt, GREEDY) for prompt in PROMPTS]


def plain_edited_greedy(model, prompt: list[int], params: SamplingParams) -> list[int]:
    """The whole row again for every token, and the slow twin's edits."""
    tokens: list[int] = []
    stop = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS_ID,))}
    while len(tokens) < params.max_tokens and not (tokens and tokens[-1] in stop):
        logits = slow_edits(params, prompt, tokens, next_logits(model, prompt + tokens), EOS_ID)
        tokens.append(int(np.argmax(logits)))
    return tokens


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(
    "edits",
    [
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.5},
        {"presence_penalty": 2.0, "logit_bias": {7: 6.5, 8: 6.0, 9: 5.5}},
        {"frequency_penalty": -1.5},
        {"logit_bias": {EOS_ID: 4.0, 3: -np.inf}},
        {"min_tokens": 7, "logit_bias": {EOS_ID: 50.0}},
        {"min_tokens": 3, "stop_token_ids": (9,), "logit_bias": {9: 50.0}},
        {"bad_words": "words of the plain answer"},
        {"repetition_penalty": 1.3, "frequency_penalty": 1.0, "min_tokens": 4, "logit_bias": {EOS_ID: 6.0}},
    ],
    ids="-".join,
)
def test_edits_change_greedy_tokens_as_they_change_plain_decoding(llama, edits, share):
    if "bad_words" in edits:
        words = plain_answers(llama)
        edits = {"bad_words": [f"w{word[0]}" for word in words[:2]] + [f"w{w[1]} w{w[2]}" for w in words[2:]]}
    params = changed(GREEDY, **edits)
    expected = [plain_edited_greedy(llama, prompt, params) for prompt in PROMPTS]
    rollouts = make_sampler(llama, share=share).generate(PROMPTS, params).rollouts
    assert [rollout.token_ids for rollout in rollouts] == expected
    assert expected != plain_answers(llama)
    for prompt, rollout in zip(PROMPTS, rollouts, strict=True):
        assert np.abs(teacher_forced(llama, prompt, rollout.token_ids, 1.0) - rollout.logprobs).max() < 1e-4


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}])
def test_filters_that_leave_one_token_are_greedy(llama, filters):
    found = make_sampler(llama).generate(PROMPTS, SamplingParams(max_tokens=10, seed=0, **filters))
    assert [r.token_ids for r in found.rollouts] == plain_answers(llama)


@pytest.mark.parametrize("mode", ["processed", "raw"])
def test_logprobs_follow_the_mode_and_nothing_else(llama, mode):
    params = SamplingParams(
        n=2, temperature=0.6, top_k=20, seed=1, max_tokens=8, logprobs=3, logprobs_mode=mode, repetition_penalty=1.4
    )
    temperature = 0.6 if mode == "processed" else 1.0
    for rollout in make_sampler(llama).generate(PROMPTS, params).rollouts:
        prompt = PROMPTS[rollout.prompt_index]
        expected = teacher_forced(llama, prompt, rollout.token_ids, temperature)
        assert np.abs(expected - rollout.logprobs).max() < 1e-4
        for at, report in enumerate(rollout.top_logprobs):
            logits = torch.tensor(next_logits(llama, prompt + rollout.token_ids[:at])) / temperature
            assert report[rollout.token_ids[at]] == pytest.approx(rollout.logprobs[at], abs=1e-5)
            assert set(logits.topk(3).indices.tolist()) | {rollout.token_ids[at]} == set(report)
            for token, logprob in report.items():
                assert logprob == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-4)


@pytest.mark.parametrize("share", [True, False])
def test_prompt_logprobs_are_those_of_a_plain_pass(llama, share):
    params = SamplingParams(n=2, temperature=0.5, max_tokens=2, seed=0, prompt_logprobs=2)
    rollouts = make_sampler(llama, share=share).generate(PROMPTS, params).rollouts
    for rollout, other in zip(rollouts[::2], rollouts[1::2], strict=True):
        prompt = PROMPTS[rollout.prompt_index]
        assert other.prompt_logprobs is None
        assert rollout.prompt_logprobs[0] is None and len(rollout.prompt_logprobs) == len(prompt)
        for at in range(1, len(prompt)):
            logits = torch.tensor(next_logits(llama, prompt[:at])) / 0.5
            report = rollout.prompt_logprobs[at]
            assert set(report) == {prompt[at], *logits.topk(2).indices.tolist()}
            assert report[prompt[at]] == pytest.approx(float(logits.log_softmax(-1)[prompt[at]]), abs=1e-4)


def test_nothing_extra_is_reported_unasked(llama):
    rollout = make_sampler(llama, tokenizer=None).generate(PROMPTS[:1], GREEDY).rollouts[0]
    assert (rollout.top_logprobs, rollout.prompt_logprobs, rollout.text, rollout.stop_reason) == (None,) * 4


def test_max_tokens_none_goes_on_to_the_context(llama):
    long = random_prompt(500, seed=3)
    params = changed(GREEDY, max_tokens=None, ignore_eos=True)
    assert len(make_sampler(llama).generate([long], params).rollouts[0].token_ids) == 12


def test_stop_text_ends_a_rollout_wherever_tokens_end(llama):
    free = make_sampler(llama).generate(PROMPTS[:1], changed(GREEDY, ignore_eos=True)).rollouts[0]
    assert (free.text, free.finish_reason) == ("".join(f" w{token}" for token in free.token_ids), "length")
    stop = f"w{free.token_ids[3]}"[-1] + f" w{free.token_ids[4]}"[:2]
    for include in (False, True):
        params = changed(GREEDY, ignore_eos=True, stop=stop, include_stop_str_in_output=include)
        rollout = make_sampler(llama).generate(PROMPTS[:1], params).rollouts[0]
        at = free.text.index(stop)
        assert rollout.text == free.text[: at + len(stop) if include else at]
        assert rollout.token_ids == free.token_ids[: free.text[: at + len(stop)].count(" ")]
        assert (rollout.finish_reason, rollout.stop_reason) == ("stop", stop)
        assert len(rollout.logprobs) == len(rollout.token_ids)


def test_min_tokens_let_a_stop_text_pass(llama):
    free = make_sampler(llama).generate(PROMPTS[:1], changed(GREEDY, ignore_eos=True)).rollouts[0]
    rollout = (
        make_sampler(llama).generate(PROMPTS[:1], changed(GREEDY, ignore_eos=True, stop="w", min_tokens=4)).rollouts[0]
    )
    assert rollout.token_ids == free.token_ids[:5]
    assert rollout.text == "".join(f" w{token}" for token in free.token_ids[:4]) + " "


def test_stop_reason_names_what_stopped(llama):
    free = plain_edited_greedy(llama, PROMPTS[0], changed(GREEDY, ignore_eos=True))
    stop = [free[2]]
    by_token = (
        make_sampler(llama).generate(PROMPTS[:1], changed(GREEDY, stop_token_ids=stop, ignore_eos=True)).rollouts[0]
    )
    by_end = make_sampler(llama, eos_token_ids=stop).generate(PROMPTS[:1], GREEDY).rollouts[0]
    assert by_token.token_ids == by_end.token_ids == free[: free.index(free[2]) + 1]
    assert (by_token.stop_reason, by_end.stop_reason) == (free[2], None)
    assert (by_token.finish_reason, by_end.finish_reason) == ("stop", "stop")
    assert by_token.text == by_end.text == "".join(f" w{token}" for token in by_token.token_ids[:-1])


@pytest.mark.parametrize("option", [{"stop": "x"}, {"bad_words": ["x"]}])
def test_texts_are_refused_where_there_is_no_tokenizer(llama, option):
    with pytest.raises(InputError, match="needs a tokenizer"):
        make_sampler(llama, tokenizer=None).generate(PROMPTS, changed(GREEDY, **option))


def drain(sampler: Sampler, requests: list[SampleRequest]) -> dict[str, Rollout]:
    """Step until all is done; the single rollout of each request, put together from its deltas."""
    for request in requests:
        sampler.add(request)
    deltas = []
    while sampler.has_work:
        deltas += sampler.step()
    out = {}
    for request in requests:
        own = [delta for delta in deltas if delta.request_id == request.request_id]
        out[request.request_id] = Rollout(
            prompt_index=0,
            token_ids=[token for delta in own for token in delta.token_ids],
            logprobs=[logprob for delta in own for logprob in delta.logprobs],
            text=None if own[0].text is None else "".join(delta.text or "" for delta in own),
            top_logprobs=None
            if own[0].top_logprobs is None
            else [report for delta in own for report in delta.top_logprobs],
            prompt_logprobs=own[0].prompt_logprobs,
            finish_reason=own[-1].finish_reason,
            stop_reason=own[-1].stop_reason,
        )
    return out


MIXED = {
    "greedy": GREEDY,
    "free": SamplingParams(max_tokens=9, seed=1),
    "filtered": SamplingParams(max_tokens=7, seed=2, top_k=5, top_p=0.8, temperature=0.7, logprobs=2),
    "penalised": SamplingParams(max_tokens=9, seed=3, repetition_penalty=1.3, presence_penalty=1.0, min_tokens=5),
    "stopped": SamplingParams(max_tokens=12, seed=4, stop="7", ignore_eos=True, prompt_logprobs=0),
    "raw": SamplingParams(max_tokens=6, seed=5, min_p=0.1, temperature=1.5, logprobs_mode="raw", logprobs=0),
}


def test_requests_of_all_kinds_in_one_batch_are_what_each_is_alone(llama):
    prompt = np.array(PROMPTS[0])
    together = drain(make_sampler(llama), [SampleRequest(name, prompt, params) for name, params in MIXED.items()])
    for name, params in MIXED.items():
        alone = make_sampler(llama).generate([PROMPTS[0]], params).rollouts[0]
        close = {"logprobs", "top_logprobs", "prompt_logprobs"}
        assert together[name].model_dump(exclude=close) == alone.model_dump(exclude=close)
        assert np.abs(np.subtract(together[name].logprobs, alone.logprobs)).max() < 1e-4
        for table in ("top_logprobs", "prompt_logprobs"):
            assert (getattr(together[name], table) is None) == (getattr(alone, table) is None)


@pytest.fixture(scope="module", params=["byte_level", "sentence_piece"])
def speaker(request):
    """A sampler whose vocabulary is that of a tokenizer, with random weights: it says anything."""
    tokenizer = {"byte_level": byte_level, "sentence_piece": sentence_piece}[request.param]()
    model = build_model("llama", vocab_size=tokenizer.get_vocab_size())
    return Sampler(model, eos_token_ids=[tokenizer.token_to_id("</s>")], tokenizer=tokenizer, probe=False)


def encode(sampler: Sampler, text: str) -> list[int]:
    return sampler.tokenizer.encode(text, add_special_tokens=False).ids


def test_ids_are_carried_into_training_where_encoding_their_text_would_give_others(speaker):
    prompt = encode(speaker, "the cat")
    answers = speaker.generate([prompt], SamplingParams(n=6, max_tokens=12, seed=0, ignore_eos=True))
    assert any(encode(speaker, rollout.text) != rollout.token_ids for rollout in answers.rollouts)
    batch = make_batch([Question("the cat", prompt, {})], answers, np.zeros((1, 6)))
    assert batch.responses == [rollout.token_ids for rollout in answers.rollouts]
    for ids, logprobs in zip(batch.responses, batch.rollout_logprobs, strict=True):
        assert np.abs(teacher_forced(speaker.model, prompt, ids, 1.0) - logprobs).max() < 1e-4


def test_special_tokens_have_no_text_and_stay_in_the_ids_of_the_next_turn(speaker):
    start = speaker.tokenizer.token_to_id("<s>")
    prompt, suffix = encode(speaker, "the cat"), encode(speaker, " sat")
    params = SamplingParams(max_tokens=12, seed=0, ignore_eos=True, logit_bias={start: 5.0})
    first = speaker.generate([prompt], params).rollouts[0]
    assert start in first.token_ids and "<s>" not in first.text
    second = [*prompt, *first.token_ids, *suffix]
    answer = speaker.generate([second], changed(GREEDY, ignore_eos=True)).rollouts[0]
    assert answer.token_ids == plain_greedy(speaker.model, second, 10, eos_id=None)


def test_text_of_a_turn_continues_the_text_before_it_without_a_space_more_or_less(speaker):
    hello = speaker.tokenizer.encode("hello hello", add_special_tokens=False).ids[-1]
    row, text = encode(speaker, "the cat"), "the cat"
    for bias in ({hello: 1e3}, {}, {hello: 1e3}):
        params = SamplingParams(n=1, temperature=0, max_tokens=3, logit_bias=bias, ignore_eos=True)
        rollout = speaker.generate([row], params).rollouts[0]
        row, text = row + rollout.token_ids, text + rollout.text
    assert decode(speaker.tokenizer, row) == text
