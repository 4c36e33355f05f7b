import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from arctic_platform.errors import InputError
from arctic_platform.rl.protocol import SamplingParams
from arctic_platform.rl.zorro_inference.rules import LogitEdits, RequestRules, RowRules
from tests.zorro_inference.text import slow_edits, word_tokenizer

VOCAB_SIZE, EOS = 40, 7
INF = float("inf")


def request_rules(params: SamplingParams, tokenizer=None) -> RequestRules:
    return RequestRules.of(
        params, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS], tokenizer=tokenizer or word_tokenizer(VOCAB_SIZE)
    )


def edited(params: SamplingParams, prompt: list[int], tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    """One row's logits as they are drawn from."""
    row = RowRules(request_rules(params), np.array(prompt), tokens=list(tokens))
    return LogitEdits([row], torch.device("cpu")).apply(logits[None])[0]


IDS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=12)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(20),
    min_tokens=st.sampled_from([0, 5]),
    stop_token_ids=st.sampled_from([(), (3, 9)]),
    repetition_penalty=st.sampled_from([1.0, 0.8, 1.4]),
    presence_penalty=st.sampled_from([0.0, -2.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.sampled_from([-INF, -2.0, 5.0]), max_size=4),
    bad_words=st.sampled_from([(), ("w4",), ("w1 w2", "w2 w2 w3")]),
)


@settings(max_examples=200)
@given(PARAMS, IDS.filter(len), IDS, st.integers(0, 100))
def test_edits_are_those_of_the_slow_twin(params, prompt, tokens, seed):
    logits = 3 * torch.randn(VOCAB_SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    logits[11] = -INF
    found = edited(params, prompt, tokens, logits)
    expected = torch.tensor(slow_edits(params, prompt, tokens, logits.tolist(), EOS), dtype=torch.float64)
    assert torch.equal(found.isinf(), expected.isinf())
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@given(IDS.filter(len), IDS)
def test_repetition_penalty_is_that_of_transformers(prompt, tokens):
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt + tokens]), logits.clone())
    found = edited(SamplingParams(repetition_penalty=1.3), prompt, tokens, logits[0])
    torch.testing.assert_close(found, expected[0], rtol=1e-6, atol=1e-6)


@given(IDS.filter(len))
def test_bad_words_are_those_of_transformers_over_what_was_drawn(tokens):
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    words = [[4], [1, 2], [2, 2, 3]]
    expected = NoBadWordsLogitsProcessor(words)(torch.tensor([tokens]), logits.clone())
    texts = tuple(" ".join(f"w{token}" for token in word) for word in words)
    assert torch.equal(edited(SamplingParams(bad_words=texts), [0], tokens, logits[0]), expected[0])


@pytest.mark.parametrize("num", [0, 3, 4, 5])
def test_min_tokens_ban_the_end_as_transformers_does(num):
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    processor = MinNewTokensLengthLogitsProcessor(1, 4, torch.tensor([EOS]))
    expected = processor(torch.zeros(1, 1 + num, dtype=torch.int64), logits.clone())
    assert torch.equal(edited(SamplingParams(min_tokens=4), [0], [1] * num, logits[0]), expected[0])


def test_rows_are_edited_by_their_own_rules_only():
    params = [SamplingParams(logit_bias={1: 2.0}), SamplingParams(presence_penalty=1.0), SamplingParams(min_tokens=2)]
    rows = [RowRules(request_rules(p), np.array([3]), tokens=[4]) for p in params]
    logits = torch.zeros(3, VOCAB_SIZE)
    changed = (LogitEdits(rows, torch.device("cpu")).apply(logits) != 0).nonzero().tolist()
    assert changed == [[0, 1], [1, 4], [2, EOS]]
    assert not logits.any()


def test_a_plain_request_keeps_no_history():
    row = RowRules(request_rules(SamplingParams(top_k=3, logprobs=2)), np.array([1]))
    row.append(5)
    assert not row.request.edits_logits and not row.tokens


@pytest.mark.parametrize("penalty", [1e-38, 1e38])
def test_no_penalty_makes_a_logit_infinite(penalty):
    found = edited(
        SamplingParams(repetition_penalty=penalty), [1, 2, 3], [], torch.tensor([0.0, 50.0, -50.0, -INF] * 10)
    )
    assert torch.isfinite(found[:3]).all()
    assert found[3] == -INF


def test_ignored_end_tokens_do_not_stop_and_wait_for_min_tokens():
    rules = request_rules(SamplingParams(ignore_eos=True, stop_token_ids=(3,), min_tokens=1))
    assert rules.stop_ids == {3}
    assert rules.banned_at_first.tolist() == [3, EOS]
    assert request_rules(SamplingParams(stop_token_ids=(3,))).stop_ids == {3, EOS}


def test_stop_reason_is_the_requests_own_token():
    rules = request_rules(SamplingParams(stop_token_ids=(3,)))
    assert (rules.stop_reason(3), rules.stop_reason(EOS)) == (3, None)


@pytest.mark.parametrize(
    ("params", "prompt_len", "context", "expected"),
    [({}, 10, 100, 16), ({"max_tokens": None}, 10, 100, 90), ({"max_tokens": 90}, 10, 100, 90), ({}, 5, None, 16)],
)
def test_max_tokens_none_takes_what_the_context_leaves(params, prompt_len, context, expected):
    assert request_rules(SamplingParams(**params)).max_new_tokens(prompt_len, context) == expected


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"stop_token_ids": (VOCAB_SIZE,)},
            f"stop_token_ids has {VOCAB_SIZE}; the model's ids are 0..{VOCAB_SIZE - 1}",
        ),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, f"logit_bias has {VOCAB_SIZE}"),
        ({"logprobs": VOCAB_SIZE + 1}, "logprobs=41 is above the model's 40 tokens"),
        ({"prompt_logprobs": 99}, "prompt_logprobs=99"),
        ({"logit_bias": dict.fromkeys(range(VOCAB_SIZE), -INF)}, "ban all 40 tokens"),
        ({"logit_bias": dict.fromkeys(set(range(VOCAB_SIZE)) - {EOS}, -INF), "min_tokens": 1}, "ban all 40 tokens"),
        ({"bad_words": ["w1", " "]}, "bad_words has ' ', which the tokenizer turns into no token"),
    ],
)
def test_what_a_model_cannot_do_is_refused(params, message):
    with pytest.raises(InputError, match=message):
        request_rules(SamplingParams(**params))


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_texts_without_a_tokenizer_are_refused(name):
    with pytest.raises(InputError, match=f"{name} needs a tokenizer"):
        RequestRules.of(SamplingParams(**{name: "x"}), vocab_size=5, eos_token_ids=[], tokenizer=None)


def test_a_prompt_beyond_the_context_is_refused():
    rules = request_rules(SamplingParams(max_tokens=8))
    with pytest.raises(InputError, match=r"the prompt has 95 tokens and max_tokens=8, .* lower max_tokens to 5"):
        rules.max_new_tokens(95, 100)
    with pytest.raises(InputError, match=r"takes 100 in all; shorten the prompt$"):
        request_rules(SamplingParams(max_tokens=None)).max_new_tokens(100, 100)
    with pytest.raises(InputError, match="names its context"):
        request_rules(SamplingParams(max_tokens=None)).max_new_tokens(100, None)
