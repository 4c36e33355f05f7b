"""A weight update between two steps or two calls: what of the old weights goes on, and what is forgotten."""

import numpy as np
import pytest

from arctic_platform.errors import ConfigError
from arctic_platform.rl.protocol import SamplingParams
from arctic_platform.rl.zorro_inference import Sampler
from tests.zorro_inference.models import EOS_ID, build_model, forest_prompts, plain_greedy, teacher_forced, token_lists
from tests.zorro_inference.test_batching import LONG, Client

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPT = forest_prompts()[0]


class Updated:
    """A sampler whose weights can be exchanged for those of another seed."""

    def __init__(self, **options) -> None:
        self.model, self.version = build_model("llama"), 0
        self.sampler = Sampler(self.model, eos_token_ids=[EOS_ID], probe=False, **options)

    def update(self, seed: int, *, version: int | None = None, **options) -> None:
        self.model.load_state_dict(build_model("llama", seed=seed).state_dict())
        self.version = self.version + 1 if version is None else version
        self.sampler.update_weights(self.version, **options)


@pytest.mark.parametrize("policy", ["reset", "version"])
def test_two_calls_around_an_update_equal_a_fresh_sampler(policy):
    updated = Updated(prefix_cache_policy=policy)
    before = updated.sampler.generate(forest_prompts(), GREEDY)
    updated.update(1)
    after = updated.sampler.generate(forest_prompts(), GREEDY)
    fresh = Sampler(build_model("llama", seed=1), eos_token_ids=[EOS_ID]).generate(forest_prompts(), GREEDY)
    assert token_lists(after) == token_lists(fresh) != token_lists(before)
    assert [list(r.logprobs) for r in after.rollouts] == [list(r.logprobs) for r in fresh.rollouts]
    assert after.metrics["prefix_hit_tokens"] == 0
    assert (before.weight_version, after.weight_version) == (0, 1)


def test_keep_policy_uses_old_keys_and_says_so_in_its_hits():
    updated = Updated(prefix_cache_policy="keep")
    updated.sampler.generate([PROMPT], GREEDY)
    updated.update(1)
    after = updated.sampler.generate([PROMPT], GREEDY)
    assert after.metrics["prefix_hit_tokens"] == len(PROMPT) - 1
    assert token_lists(after) != [plain_greedy(updated.model, PROMPT, 12)]


def test_version_policy_finds_a_prefix_again_when_its_weights_come_back():
    updated = Updated(prefix_cache_policy="version")
    first = updated.sampler.generate([PROMPT], GREEDY)
    updated.update(1)
    updated.sampler.generate([PROMPT], GREEDY)
    updated.update(0, version=0)
    again = updated.sampler.generate([PROMPT], GREEDY)
    assert again.metrics["prefix_hit_tokens"] == len(PROMPT) - 1
    assert token_lists(again) == token_lists(first)


def test_weights_that_change_unannounced_reset_the_cache():
    updated = Updated(prefix_cache_policy="keep")
    updated.sampler.generate([PROMPT], LONG)
    updated.model.load_state_dict(build_model("llama", seed=1).state_dict())
    assert token_lists(updated.sampler.generate([PROMPT], LONG)) == [
        plain_greedy(updated.model, PROMPT, 40, eos_id=None)
    ]


@pytest.mark.parametrize("policy", ["reset", "keep", "version"])
@pytest.mark.parametrize("in_flight", ["keep", "recompute", "abort"])
def test_tokens_name_the_weights_that_drew_them(policy, in_flight):
    updated = Updated(prefix_cache_policy=policy, max_batch_rows=2)
    client = Client(updated.sampler)
    client.add("r", PROMPT, LONG.model_copy(update={"n": 3}))
    client.step(6)
    updated.update(1, in_flight=in_flight)
    client.finish()
    for j in range(3):
        versions = [delta.weight_version for delta in client.deltas["r", j] if delta.token_ids]
        assert versions == sorted(versions)
        assert client.reason("r", j) == ("abort" if in_flight == "abort" else "length")
        if in_flight != "abort":
            assert set(versions) == {0, 1} and len(client.tokens("r", j)) == 40


@pytest.mark.parametrize("policy", ["reset", "version"])
def test_recomputed_rows_go_on_as_the_new_weights_would_from_their_tokens(policy):
    updated = Updated(prefix_cache_policy=policy)
    client = Client(updated.sampler)
    client.add("r", PROMPT, LONG)
    client.step(9)
    old = client.tokens("r")
    updated.update(1, in_flight="recompute")
    client.finish()
    tokens = client.tokens("r")
    assert tokens[: len(old)] == old == plain_greedy(build_model("llama"), PROMPT, 9, eos_id=None)
    assert tokens[len(old) :] == plain_greedy(updated.model, PROMPT + old, 40 - len(old), eos_id=None)
    expected = teacher_forced(updated.model, PROMPT + old, tokens[len(old) :], 0.0)
    assert np.abs(expected - client.logprobs("r")[len(old) :]).max() < 1e-4


def test_kept_rows_go_on_over_their_old_keys_and_their_answers_are_not_cached():
    updated = Updated()
    client = Client(updated.sampler)
    client.add("r", PROMPT, LONG)
    client.step(9)
    updated.update(1, in_flight="keep")
    client.finish()
    assert client.tokens("r")[9:] != plain_greedy(updated.model, PROMPT + client.tokens("r")[:9], 31, eos_id=None)
    after = updated.sampler.generate([PROMPT + client.tokens("r")], GREEDY)
    assert after.metrics["prefix_hit_tokens"] == 0
    assert token_lists(after) == [plain_greedy(updated.model, PROMPT + client.tokens("r"), 12)]


@pytest.mark.parametrize("in_flight", ["keep", "recompute", "abort"])
def test_request_without_tokens_is_sampled_by_the_new_weights_alone(in_flight):
    updated = Updated(prefill_chunk_tokens=8)
    client = Client(updated.sampler)
    client.add("runs", [1, 2], LONG)
    client.step(2)
    client.add("half", forest_prompts()[2] * 3)
    client.step(3)
    assert ("half", 0) not in client.deltas
    updated.update(1, in_flight=in_flight)
    client.finish()
    assert client.tokens("half") == plain_greedy(updated.model, forest_prompts()[2] * 3, 12)


def test_reset_while_rows_run_changes_none_of_their_tokens():
    updated = Updated(prefill_chunk_tokens=8)
    client = Client(updated.sampler)
    client.add("r", PROMPT, LONG)
    client.step(3)
    client.add("half", forest_prompts()[2] * 3)
    client.step(2)
    updated.sampler.reset_prefix_cache()
    client.finish()
    assert client.tokens("r") == plain_greedy(updated.model, PROMPT, 40, eos_id=None)
    assert client.tokens("half") == plain_greedy(updated.model, forest_prompts()[2] * 3, 12)


@pytest.mark.parametrize("option", ["in_flight", "prefix_cache_policy"])
def test_unknown_policies_are_refused_by_name(option):
    with pytest.raises(ConfigError, match=f"{option}='some'"):
        if option == "in_flight":
            Updated().update(1, in_flight="some")
        else:
            Updated(prefix_cache_policy="some")
