"""Models that keep a recurrent state are sampled exactly: states fork, are cached, and go when they are not needed."""

import numpy as np
import pytest
import torch

from arctic_platform.rl.protocol import SamplingParams
from arctic_platform.rl.zorro_inference import Sampler, SampleRequest
from tests.zorro_inference.models import teacher_forced
from tests.zorro_train.architectures import VOCAB, build

FAMILIES = ["qwen3_next", "lfm2", "falcon_h1"]
LONG = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, seed=3)


def random_ids(length, seed=0):
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


def make_sampler(model, **options):
    return Sampler(model, eos_token_ids=[2], probe=False, **options)


def is_exact(model, prompt, rollout):
    return np.abs(teacher_forced(model, prompt, rollout.token_ids, 1.0) - rollout.logprobs).max() < 1e-5


def is_consistent(sampler):
    forest = sampler._scheduler.forest
    return forest.num_states == sum(segment.states is not None for segment in forest.segments)


def run_all(sampler, prompts, params=LONG, *, joins_at=()):
    """Requests that join at the given steps; their rows as (prompt, tokens, log-probs)."""
    waiting, rows, step = dict(enumerate(joins_at or [0] * len(prompts))), {}, 0
    while waiting or sampler.has_work:
        for number in [number for number, at in waiting.items() if at <= step]:
            waiting.pop(number)
            sampler.add(SampleRequest(f"r{number}", np.array(prompts[number]), params))
        for delta in sampler.step():
            tokens, logprobs = rows.setdefault((delta.request_id, delta.rollout), ([], []))
            tokens += delta.token_ids
            logprobs += delta.logprobs
        step += 1
    return {key: (prompts[int(key[0][1:])], *row) for key, row in rows.items()}


def rows_are_exact(model, rows):
    return all(
        np.abs(teacher_forced(model, prompt, tokens, 1.0) - logprobs).max() < 1e-5
        for prompt, tokens, logprobs in rows.values()
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_next_turn_goes_on_from_the_state_behind_the_answer(family):
    model = build(family)
    sampler = make_sampler(model)
    first = random_ids(10)
    answer = sampler.generate([first], LONG).rollouts[0]
    second = [*first, *answer.token_ids, *random_ids(5, seed=1)]
    reply = sampler.generate([second], LONG)
    assert reply.metrics["prefix_hit_tokens"] == len(first) + len(answer.token_ids) - 1
    assert is_exact(model, second, reply.rollouts[0])
    assert is_consistent(sampler)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_that_branches_where_no_state_is_kept_is_computed_from_the_last_state_before(family):
    model = build(family)
    sampler = make_sampler(model)
    stem, inside = random_ids(12), random_ids(12)[:7] + random_ids(4, seed=5)
    sampler.generate([stem], LONG)
    reply = sampler.generate([inside, stem], LONG)
    assert all(is_exact(model, [inside, stem][rollout.prompt_index], rollout) for rollout in reply.rollouts)
    assert reply.metrics["prefix_hit_tokens"] == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_chunked_prompts_that_join_between_steps_are_exact(family, chunk):
    model = build(family)
    sampler = make_sampler(model, prefill_chunk_tokens=chunk, max_batch_rows=3)
    stem = random_ids(11)
    prompts = [stem, stem + random_ids(4, seed=1), stem[:6] + random_ids(9, seed=2), stem]
    params = LONG.model_copy(update={"n": 2})
    assert rows_are_exact(model, run_all(sampler, prompts, params, joins_at=[0, 1, 7, 30]))
    assert is_consistent(sampler)
    assert not len(sampler._scheduler.states)


def test_states_behind_chunks_go_when_the_next_chunk_is_computed():
    sampler = make_sampler(build("qwen3_next"), prefill_chunk_tokens=2)
    sampler.add(SampleRequest("other", np.array(random_ids(3, seed=4)), LONG))  # decodes, so that chunks are short
    sampler.step()
    sampler.add(SampleRequest("long", np.array(random_ids(40)), LONG))
    most = 0
    while sampler.has_work:
        sampler.step()
        most = max(most, sampler._scheduler.forest.num_states)
    assert most <= 6  # the ends of two prompts and of two answers, a chunk and the one before it


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_sent_back_for_lack_of_room_are_exact(family):
    model = build(family)
    probe = make_sampler(model)
    probe.generate([random_ids(4)], LONG)
    places = probe._scheduler.forest.places_per_state
    sampler = make_sampler(model, kv_cache_tokens=90 + 5 * places)
    rows = run_all(sampler, [random_ids(10, seed=seed) for seed in range(4)], LONG)
    assert len(rows) == 4
    assert rows_are_exact(model, rows)
    assert is_consistent(sampler)


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_an_aborted_request_leaves_no_state_and_others_exact(num_steps):
    model = build("qwen3_next")
    sampler = make_sampler(model, prefill_chunk_tokens=4)
    sampler.add(SampleRequest("gone", np.array(random_ids(30)), LONG))
    for _ in range(num_steps):
        sampler.step()
    sampler.abort("gone")
    sampler.step()
    assert not len(sampler._scheduler.states)
    assert rows_are_exact(model, run_all(sampler, [random_ids(30), random_ids(9, seed=1)]))


@pytest.mark.parametrize("in_flight", ["recompute", "abort"])
def test_new_weights_start_from_no_state_of_the_old_ones(in_flight):
    model = build("qwen3_next")
    sampler = make_sampler(model)
    sampler.add(SampleRequest("r", np.array(random_ids(9)), LONG))
    for _ in range(4):
        sampler.step()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.9)
    sampler.update_weights(1, in_flight=in_flight)
    while sampler.has_work:
        sampler.step()
    again, fresh = (s.generate([random_ids(9)], LONG) for s in (sampler, make_sampler(model)))
    assert [r.token_ids for r in again.rollouts] == [r.token_ids for r in fresh.rollouts]
    assert is_consistent(sampler)
