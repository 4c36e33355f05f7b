"""Sampling parameters mean in vLLM what they mean in the embedded sampler, whose greedy rollouts are the same."""

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from transformers import AutoModelForCausalLM, AutoTokenizer

from arctic_platform.errors import InputError
from arctic_platform.rl.protocol import SamplingParams
from arctic_platform.rl.tiny_model import build_tiny_model
from arctic_platform.rl.zorro_inference.sampler import Sampler
from tests.vllm.engines import vllm_backend

QUESTION = "Q: Find the Greatest Common Divisor (GCD) of these numbers: 12, 18."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    build_tiny_model(folder, num_warmup_steps=60)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def embedded(folder, tokenizer):
    return Sampler(AutoModelForCausalLM.from_pretrained(folder), eos_token_ids=[], tokenizer=tokenizer)


@pytest.fixture(scope="module")
def engine(folder):
    with vllm_backend(model=str(folder)) as made:
        yield made.sample


def params_of(**settings):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, **settings})


def first_text(engine, prompt):
    return engine.generate([prompt], params_of()).rollouts[0].text


def settings_to_try(engine, tokenizer, prompt):
    free = engine.generate([prompt], params_of()).rollouts[0]
    tokens = list(free.token_ids)
    words = [free.text[4:7], free.text[9:11]]
    yield {}
    yield {"logit_bias": {tokens[0]: -100.0, tokens[3]: 2.0}}
    yield {"logit_bias": {tokens[0]: float("-inf")}}
    yield {"repetition_penalty": 1.4}
    yield {"presence_penalty": 1.5, "frequency_penalty": 0.5}
    yield {"stop": words}
    yield {"stop": words, "include_stop_str_in_output": True}
    yield {"stop_token_ids": [tokens[6]]}
    yield {"stop_token_ids": [tokens[2]], "min_tokens": 8}
    pairs = [tokenizer.decode(tokens[i : i + 2]) for i in range(len(tokens))]
    yield {"bad_words": [next(pair for pair in pairs if pair == pair.strip() and len(pair) > 1)]}


def test_every_parameter_draws_as_in_the_embedded_sampler(engine, embedded, tokenizer):
    prompt = tokenizer.encode(QUESTION)
    tried = set()
    for settings in settings_to_try(engine, tokenizer, prompt):
        ours = engine.generate([prompt], params_of(**settings)).rollouts[0]
        theirs = embedded.generate([prompt], params_of(**settings)).rollouts[0]
        assert list(ours.token_ids) == list(theirs.token_ids), settings
        np.testing.assert_allclose(list(ours.logprobs), list(theirs.logprobs), atol=1e-4)
        found = ours.finish_reason, ours.stop_reason, ours.text
        assert found == (theirs.finish_reason, theirs.stop_reason, theirs.text), settings
        tried.add((tuple(ours.token_ids), ours.text))
    assert len(tried) >= 7


@pytest.mark.parametrize("mode", ["processed", "raw"])
def test_reported_logprobs_are_those_of_the_embedded_sampler(engine, embedded, tokenizer, mode):
    prompts = [tokenizer.encode(QUESTION), tokenizer.encode("Q: numbers")]
    settings = {"logprobs": 3, "prompt_logprobs": 2, "logprobs_mode": mode, "temperature": 0.5, "top_k": 1, "n": 2}
    ours = engine.generate(prompts, params_of(**settings)).rollouts
    theirs = embedded.generate(prompts, params_of(**settings)).rollouts
    for one, other in zip(ours, theirs, strict=True):
        assert list(one.token_ids) == list(other.token_ids)
        for name in ("top_logprobs", "prompt_logprobs"):
            mine, expected = getattr(one, name), getattr(other, name)
            assert (mine is None) == (expected is None)
            for by_id, expected_by_id in zip(mine or (), expected or (), strict=True):
                assert by_id == (None if expected_by_id is None else pytest.approx(expected_by_id, abs=1e-4))


def test_what_vllm_refuses_is_an_error_of_the_caller_and_leaves_nothing(engine, tokenizer):
    with pytest.raises(InputError, match="bad_words"):
        engine.generate([tokenizer.encode(QUESTION)] * 2, params_of(bad_words=["\n\n"]))
    assert engine.num_blocks_in_use == 0
    assert not engine._llm.llm_engine.has_unfinished_requests()


def test_all_logprobs_can_be_asked_for(engine, tokenizer):
    rollout = engine.generate([tokenizer.encode(QUESTION)], params_of(logprobs=-1, max_tokens=2)).rollouts[0]
    assert [len(by_id) for by_id in rollout.top_logprobs] == [len(tokenizer)] * 2
    assert sum(np.exp(list(rollout.top_logprobs[0].values()))) == pytest.approx(1.0, abs=1e-4)


def test_none_for_max_tokens_fills_the_context(engine, tokenizer):
    prompt = tokenizer.encode(QUESTION)
    rollout = engine.generate([prompt], params_of(max_tokens=None)).rollouts[0]
    assert len(prompt) + len(rollout.token_ids) == engine.max_row_len
    assert rollout.finish_reason == "length"


def test_a_temperature_that_vllm_would_raise_is_refused(engine, tokenizer):
    with pytest.raises(InputError, match=r"below 0\.01"):
        engine.generate([tokenizer.encode(QUESTION)], params_of(temperature=0.001))
