"""Requests that come and go between steps: exact at any composition, nothing lost, nothing leaked."""

import numpy as np
import pytest

from arctic_platform.errors import InputError, NonFiniteError
from arctic_platform.rl.protocol import SamplingParams
from arctic_platform.rl.zorro_inference import Sampler, SampleRequest
from tests.zorro_inference.models import (
    EOS_ID,
    build_model,
    forest_prompts,
    plain_greedy,
    random_prompt,
    teacher_forced,
    token_lists,
)
from tests.zorro_inference.text import byte_level

GREEDY = SamplingParams(temperature=0, max_tokens=12)
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def llama():
    return build_model("llama")


def make_sampler(model, **options):
    return Sampler(model, **{"eos_token_ids": [EOS_ID], "probe": False, **options})


class Client:
    """Steps a sampler and collects what each request got."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.deltas = {}

    def add(self, name: str, prompt: list[int], params: SamplingParams = GREEDY) -> None:
        self.sampler.add(SampleRequest(name, np.array(prompt), params))

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for delta in self.sampler.step():
                self.deltas.setdefault((delta.request_id, delta.rollout), []).append(delta)

    def finish(self) -> None:
        while self.sampler.has_work:
            self.step()

    def tokens(self, name: str, rollout: int = 0) -> list[int]:
        return [token for delta in self.deltas[name, rollout] for token in delta.token_ids]

    def logprobs(self, name: str, rollout: int = 0) -> list[float]:
        return [value for delta in self.deltas[name, rollout] for value in delta.logprobs]

    def reason(self, name: str, rollout: int = 0) -> str | None:
        return self.deltas[name, rollout][-1].finish_reason


@pytest.mark.parametrize("options", [{}, {"share": False}, {"max_batch_rows": 2}, {"prefill_chunk_tokens": 3}])
def test_requests_that_join_between_steps_get_the_tokens_that_they_get_alone(llama, options):
    client = Client(make_sampler(llama, **options))
    for i, prompt in enumerate(forest_prompts()):
        client.add(f"r{i}", prompt)
        client.step(i % 3)
    client.finish()
    for i, prompt in enumerate(forest_prompts()):
        assert client.tokens(f"r{i}") == plain_greedy(llama, prompt, 12)
        errors = np.abs(teacher_forced(llama, prompt, client.tokens(f"r{i}"), 0.0) - client.logprobs(f"r{i}"))
        assert errors.max() < 1e-4
    assert sum(delta.finish_reason is not None for deltas in client.deltas.values() for delta in deltas) == 8


def test_seeded_rollouts_are_the_same_whatever_else_is_in_the_batch(llama):
    params = SamplingParams(n=3, max_tokens=14, seed=11, temperature=0.8)
    alone = Client(make_sampler(llama))
    alone.add("mine", forest_prompts()[0], params)
    alone.finish()
    crowd = Client(make_sampler(llama, max_batch_rows=7))
    for i, prompt in enumerate(forest_prompts()[1:]):
        crowd.add(f"other{i}", prompt, SamplingParams(n=2, max_tokens=9 + i, seed=i))
        crowd.step(2)
    crowd.add("mine", forest_prompts()[0], params)
    crowd.finish()
    for j in range(3):
        assert crowd.tokens("mine", j) == alone.tokens("mine", j)
        assert np.allclose(crowd.logprobs("mine", j), alone.logprobs("mine", j), atol=1e-5)


def test_rows_with_other_parameters_share_one_step(llama):
    client = Client(make_sampler(llama))
    client.add("greedy", forest_prompts()[0])
    client.add("warm", forest_prompts()[0], SamplingParams(max_tokens=12, seed=0, top_k=5))
    client.step(4)
    assert len(client.deltas["greedy", 0]) == len(client.deltas["warm", 0]) == 4
    client.finish()
    assert client.tokens("greedy") == plain_greedy(llama, forest_prompts()[0], 12)


def test_long_prompt_comes_in_pieces_and_rows_decode_in_between(llama):
    sampler = make_sampler(llama, prefill_chunk_tokens=16)
    client = Client(sampler)
    client.add("first", random_prompt(5, seed=0), LONG)
    client.step(3)
    before = len(client.tokens("first"))
    client.add("long", random_prompt(200, seed=1))
    while ("long", 0) not in client.deltas:
        client.step()
    assert len(client.tokens("first")) - before >= 200 // 20
    client.finish()
    assert client.tokens("long") == plain_greedy(llama, random_prompt(200, seed=1), 12)
    assert client.tokens("first") == plain_greedy(llama, random_prompt(5, seed=0), 40, eos_id=None)


def test_prompt_that_comes_later_computes_only_what_is_new(llama):
    sampler = make_sampler(llama)
    base = random_prompt(60, seed=5)
    sampler.generate([base + [1]], GREEDY)
    for tail, num_new in (([1, 2, 3], 3), ([2, 2], 2), ([1], 1)):
        response = sampler.generate([base + tail], SamplingParams(temperature=0, max_tokens=1))
        assert token_lists(response) == [plain_greedy(llama, base + tail, 1)]
        assert response.metrics["tokens_computed"] <= num_new
        assert response.metrics["prefix_hit_tokens"] == len(base + tail) - response.metrics["tokens_computed"]


def test_next_turn_finds_the_last_answer_too(llama):
    sampler, prompt = make_sampler(llama), random_prompt(50, seed=2)
    answer = token_lists(sampler.generate([prompt], LONG))[0]
    second = [*prompt, *answer, 7, 8, 9]
    response = sampler.generate([second], GREEDY)
    assert token_lists(response) == [plain_greedy(llama, second, 12)]
    assert response.metrics["prefix_hit_tokens"] == len(prompt) + len(answer) - 1


def test_requests_that_run_share_a_prefix_before_it_is_computed(llama):
    sampler = make_sampler(llama, prefill_chunk_tokens=16)
    client, base = Client(sampler), random_prompt(100, seed=3)
    client.add("runs", random_prompt(4, seed=9), LONG)
    client.step(2)
    client.add("a", [*base, 1])
    client.step()
    client.add("b", [*base, 2])
    client.finish()
    assert sampler.stats.tokens_computed <= 4 + 39 + 102 + 2 * 11
    for name, last in (("a", 1), ("b", 2)):
        assert client.tokens(name) == plain_greedy(llama, [*base, last], 12)


@pytest.mark.parametrize("after", [0, 1, 2, 5, 9])
def test_abort_in_any_phase_frees_what_it_held_and_disturbs_nobody(llama, after):
    sampler = make_sampler(llama, prefill_chunk_tokens=8, max_batch_rows=3)
    client = Client(sampler)
    client.add("stays", random_prompt(6, seed=0), LONG)
    client.add("goes", random_prompt(40, seed=1), SamplingParams(n=4, max_tokens=30, seed=0, ignore_eos=True))
    client.add("waits", random_prompt(30, seed=2), LONG)
    client.step(after)
    sampler.abort("goes")
    sampler.abort("never seen")
    client.finish()
    assert [client.reason("goes", j) for j in range(4)] == ["abort"] * 4
    assert client.tokens("stays") == plain_greedy(llama, random_prompt(6, seed=0), 40, eos_id=None)
    assert client.tokens("waits") == plain_greedy(llama, random_prompt(30, seed=2), 40, eos_id=None)
    assert sampler.num_held == 0


def test_paused_sampler_does_nothing_and_goes_on_where_it_was(llama):
    sampler = make_sampler(llama)
    client = Client(sampler)
    client.add("r", forest_prompts()[0], LONG)
    client.step(4)
    sampler.pause()
    assert not sampler.has_work and sampler.step() == []
    client.add("late", forest_prompts()[1])
    sampler.abort("late")
    assert [delta.finish_reason for delta in sampler.step()] == ["abort"]
    sampler.resume()
    client.finish()
    assert client.tokens("r") == plain_greedy(llama, forest_prompts()[0], 40, eos_id=None)


@pytest.mark.parametrize("budget", [64, 80, 120, 200])
def test_small_memory_sends_rows_back_and_loses_none_of_their_tokens(llama, budget):
    sampler = make_sampler(llama, kv_cache_tokens=budget)
    client = Client(sampler)
    for i in range(6):
        client.add(f"r{i}", random_prompt(5 + i, seed=i), SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))
    most = 0
    while sampler.has_work:
        client.step()
        most = max(most, sampler.stats.cached_tokens)
    assert most <= budget
    for i in range(6):
        assert client.tokens(f"r{i}") == plain_greedy(llama, random_prompt(5 + i, seed=i), 32, eos_id=None)


def test_request_that_can_never_fit_is_refused_and_one_that_just_fits_runs(llama):
    sampler = make_sampler(llama, kv_cache_tokens=64)
    with pytest.raises(InputError, match="kv_cache_tokens=64 are all"):
        sampler.add(SampleRequest("big", np.array(random_prompt(40, seed=0)), LONG))
    fits = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    assert token_lists(sampler.generate([random_prompt(32, seed=0)], fits)) == [
        plain_greedy(llama, random_prompt(32, seed=0), 32, eos_id=None)
    ]


def test_cache_keeps_to_its_budget_over_many_calls(llama):
    sampler = make_sampler(llama, kv_cache_tokens=300)
    for i in range(12):
        sampler.generate([random_prompt(60, seed=i), random_prompt(61, seed=50 + i)], GREEDY)
        assert sampler.stats.cached_tokens <= 300
    hit = sampler.generate([random_prompt(60, seed=11)], GREEDY)
    assert hit.metrics["prefix_hit_tokens"] == 59


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("prompt_logprobs", [None, 1])
def test_row_that_is_not_finite_ends_alone(prompt_logprobs, share):
    model = build_model("llama")
    model.model.embed_tokens.weight.data[77] = float("nan")
    model.lm_head.weight.data.copy_(build_model("llama").lm_head.weight)
    plain = build_model("llama")
    client = Client(make_sampler(model, share=share))
    shared = [token for token in random_prompt(20, seed=0) if token != 77]
    client.add("good", [*shared, 1, 2])
    client.add("bad", [*shared, 77, 3], GREEDY.model_copy(update={"prompt_logprobs": prompt_logprobs}))
    client.finish()
    assert client.reason("bad") == "abort"
    (failed,) = client.deltas["bad", 0]
    assert isinstance(failed.error, NonFiniteError) and failed.token_ids == []
    expected = plain_greedy(plain, [*shared, 1, 2], 12)
    assert 77 not in expected and client.tokens("good") == expected
    client.add("after", [*shared, 4])
    client.finish()
    assert client.tokens("after") == plain_greedy(plain, [*shared, 4], 12)


class FailsOnce:
    """A tokenizer whose first decoding fails."""

    def __init__(self, tokenizer) -> None:
        self._tokenizer = tokenizer
        self._has_failed = False

    def __getattr__(self, name: str):
        return getattr(self._tokenizer, name)

    def decode(self, *args, **options) -> str:
        if self._has_failed:
            return self._tokenizer.decode(*args)
        self._has_failed = True
        raise OSError("no such text")


@pytest.mark.parametrize("n", [1, 3])
def test_step_that_fails_while_tokens_are_drawn_holds_nothing_once_it_is_aborted(llama, n):
    client = Client(make_sampler(llama, tokenizer=FailsOnce(byte_level())))
    client.add("fails", random_prompt(20, seed=0), SamplingParams(n=n, max_tokens=4, seed=0))
    with pytest.raises(OSError, match="no such text"):
        client.finish()
    client.sampler.abort("fails")
    assert client.sampler.num_held == 0


def test_equal_request_ids_are_refused_while_one_is_in_work(llama):
    client = Client(make_sampler(llama))
    client.add("same", [1, 2])
    with pytest.raises(InputError, match="'same' is in work already"):
        client.add("same", [1, 2])
    with pytest.raises(InputError, match="use AsyncSampler"):
        client.sampler.generate([[1]], GREEDY)
    client.finish()
    client.add("same", [1, 2])
    client.finish()


@pytest.mark.parametrize("share", [True, False])
def test_prompt_logprobs_are_whole_also_where_the_prompt_is_cached(llama, share):
    prompt = random_prompt(40, seed=4)
    sampler = make_sampler(llama, share=share, prefill_chunk_tokens=16)
    sampler.generate([prompt], GREEDY)
    params = GREEDY.model_copy(update={"prompt_logprobs": 0, "n": 2})
    first, second = sampler.generate([prompt], params).rollouts
    found = [next(iter(report.values())) for report in first.prompt_logprobs[1:]]
    expected = teacher_forced(llama, prompt[:1], prompt[1:], 0.0)
    assert first.prompt_logprobs[0] is None and second.prompt_logprobs is None
    assert np.abs(np.array(found) - expected).max() < 1e-4


@pytest.mark.parametrize(
    ("num_prompts", "shared_len", "prompt_len", "n"), [(1, 0, 400, 16), (4, 0, 200, 8), (6, 300, 380, 4)]
)
def test_keys_read_are_counted_and_within_five_percent_of_the_forest(llama, num_prompts, shared_len, prompt_len, n):
    shared = random_prompt(shared_len, seed=0)
    prompts = [shared + random_prompt(prompt_len - shared_len, seed=1 + i) for i in range(num_prompts)]
    params = SamplingParams(n=n, max_tokens=24, seed=0, ignore_eos=True)
    metrics = make_sampler(llama).generate(prompts, params).metrics
    assert metrics["forest_tokens_read"] <= metrics["kv_tokens_read"] <= 1.05 * metrics["forest_tokens_read"]
    alone = make_sampler(llama, share=False).generate(prompts, params).metrics
    assert alone["kv_tokens_read"] > 3 * metrics["kv_tokens_read"]


def test_keys_read_stay_near_the_forest_when_rows_join_one_by_one(llama):
    sampler = make_sampler(llama)
    client, base = Client(sampler), random_prompt(300, seed=0)
    for i in range(8):
        client.add(f"r{i}", [*base, i], SamplingParams(n=2, max_tokens=100, seed=0, ignore_eos=True))
        client.step(6)
    client.finish()
    assert sampler.stats.kv_tokens_read <= 1.15 * sampler.stats.forest_tokens_read


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mistral_window"])
def test_windows_sinks_and_caps_are_exact_under_a_cached_prefix(family):
    model = build_model(family)
    sampler, base = make_sampler(model), random_prompt(30, seed=1)
    for tail in ([], [3], [3, 4, 5, 6, 7, 8, 9], random_prompt(20, seed=2)):
        assert token_lists(sampler.generate([base + tail], GREEDY)) == [plain_greedy(model, base + tail, 12)]


def test_memory_is_freed_between_calls_and_answers_do_not_change(llama):
    sampler = make_sampler(llama)
    before = token_lists(sampler.generate(forest_prompts(), GREEDY))
    sampler.free_memory()
    again = sampler.generate(forest_prompts(), GREEDY)
    assert token_lists(again) == before
    assert again.metrics["prefix_hit_tokens"] == 0
    client = Client(sampler)
    client.add("r", [1, 2], LONG)
    with pytest.raises(InputError, match="in work"):
        sampler.free_memory()
    client.finish()


@pytest.mark.parametrize("seed", range(6))
def test_any_life_of_a_sampler_ends_with_the_right_tokens_and_nothing_held(llama, seed):
    """Requests, aborts, pauses and resets in random order, in a cache that is too small for all of them."""
    random = np.random.default_rng(seed)
    sampler = make_sampler(
        llama, share=bool(seed % 3), kv_cache_tokens=160, max_batch_rows=5, prefill_chunk_tokens=7 + 10 * seed
    )
    client, asked, aborted = Client(sampler), {}, set()
    stems = [random_prompt(24, seed=i) for i in range(3)]
    for i in range(60):
        action = random.choice(["add", "step", "step", "step", "abort", "pause", "resume", "reset"])
        if action == "add" and len(asked) < 12:
            prompt = stems[random.integers(3)][: random.integers(1, 25)] + random_prompt(random.integers(1, 9), seed=i)
            params = GREEDY.model_copy(
                update={"n": int(random.integers(1, 4)), "max_tokens": int(random.integers(1, 25))}
            )
            asked[f"r{i}"] = (prompt, params)
            client.add(f"r{i}", prompt, params)
        elif action == "abort" and asked:
            name = random.choice(list(asked))
            aborted.add(name)
            sampler.abort(name)
        elif action in ("pause", "resume"):
            getattr(sampler, action)()
        elif action == "reset":
            sampler.reset_prefix_cache()
        else:
            client.step()
        assert sampler.stats.cached_tokens <= 160
    sampler.resume()
    client.finish()
    for name, (prompt, params) in asked.items():
        expected = plain_greedy(llama, prompt, params.max_tokens)
        for j in range(params.n):
            assert client.tokens(name, j) == expected[: len(client.tokens(name, j))]
            assert client.reason(name, j) == "abort" or len(client.tokens(name, j)) == len(expected)
            assert name in aborted or client.reason(name, j) != "abort"
    assert sampler.num_held == 0 and sampler.stats.running == sampler.stats.waiting == 0


def test_row_that_was_sent_back_at_its_last_token_still_fits(llama):
    sampler = make_sampler(llama, kv_cache_tokens=96)
    client = Client(sampler)
    for i in range(2):
        client.add(f"r{i}", random_prompt(48, seed=i), SamplingParams(temperature=0, max_tokens=48, ignore_eos=True))
    client.finish()
    for i in range(2):
        assert client.tokens(f"r{i}") == plain_greedy(llama, random_prompt(48, seed=i), 48, eos_id=None)


def test_default_budget_is_measured_and_not_guessed():
    sampler = Sampler(build_model("llama"), eos_token_ids=[EOS_ID])
    num_bytes = 2 * 2 * 2 * 32 * 4  # layers, keys and values, heads, head size, fp32
    assert sampler.kv_cache_tokens == 4 * 2**30 // num_bytes
