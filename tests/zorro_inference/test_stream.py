import asyncio

import numpy as np
import pytest

from arctic_platform.errors import InputError
from arctic_platform.rl.protocol import SamplingParams
from arctic_platform.rl.zorro_inference import AsyncSampler, Sampler, SampleRequest
from tests.zorro_inference.models import EOS_ID, build_model, forest_prompts, token_lists

PARAMS = SamplingParams(n=2, max_tokens=10, seed=3)


@pytest.fixture
def served():
    sampler = AsyncSampler(Sampler(build_model("llama"), eos_token_ids=[EOS_ID]))
    yield sampler
    sampler.close()


def request(name: str, prompt: list[int], params: SamplingParams = PARAMS) -> SampleRequest:
    return SampleRequest(name, np.array(prompt), params)


async def collect(served: AsyncSampler, asked: SampleRequest) -> list[list[int]]:
    """The tokens of every rollout of one request."""
    rollouts = [[] for _ in range(asked.params.n)]
    async for delta in served.stream(asked):
        assert delta.request_id == asked.request_id
        rollouts[delta.rollout] += delta.token_ids
    return rollouts


def test_streams_give_each_reader_its_own_tokens(served):
    async def all_at_once():
        asked = [request(f"r{i}", prompt) for i, prompt in enumerate(forest_prompts()[:6])]
        return await asyncio.gather(*(collect(served, one) for one in asked))

    found = asyncio.run(all_at_once())
    alone = Sampler(build_model("llama"), eos_token_ids=[EOS_ID])
    assert found == [token_lists(alone.generate([prompt], PARAMS)) for prompt in forest_prompts()[:6]]


def test_reader_that_goes_away_aborts_its_request_and_no_other(served):
    endless = SamplingParams(n=2, max_tokens=400, seed=0, ignore_eos=True)

    async def leave_early():
        stream = served.stream(request("left", [1, 2, 3], endless))
        async for _ in stream:
            break
        other = asyncio.create_task(collect(served, request("stays", [1, 2], PARAMS)))
        await stream.aclose()
        return await other

    assert len(asyncio.run(leave_early())) == 2
    assert served.submit(lambda sampler: sampler.step()).result() is not None
    assert not served.submit(lambda sampler: sampler.has_work).result()


def test_request_that_cannot_be_sampled_is_refused_and_others_go_on(served):
    async def one_good_one_bad():
        good = asyncio.create_task(collect(served, request("good", [1, 2])))
        with pytest.raises(InputError, match="is empty"):
            await collect(served, request("bad", []))
        return await good

    assert len(asyncio.run(one_good_one_bad())) == 2


def test_closed_sampler_says_so():
    served = AsyncSampler(Sampler(build_model("llama"), eos_token_ids=[EOS_ID]))
    served.close()
    with pytest.raises(InputError, match="closed"):
        served.submit(lambda sampler: sampler.stats)


def test_step_that_fails_ends_its_streams_with_the_error_and_the_next_request_runs():
    model = build_model("llama")
    served = AsyncSampler(Sampler(model, eos_token_ids=[EOS_ID]))

    def fail(*_):
        raise MemoryError("no room")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(MemoryError, match="no room"):
        asyncio.run(collect(served, request("fails", forest_prompts()[0])))
    hook.remove()
    assert len(asyncio.run(collect(served, request("runs", forest_prompts()[0])))) == 2
    assert served.submit(lambda sampler: sampler.num_held).result() == 0
    served.close()


class Unreadable:
    """A tokenizer that cannot decode."""

    def decode(self, *_, **__):
        raise OSError("no such text")


def test_sampler_whose_tokenizer_fails_says_so_to_everybody_and_goes_on():
    served = AsyncSampler(Sampler(build_model("llama"), eos_token_ids=[EOS_ID], probe=False, tokenizer=Unreadable()))

    async def both():
        asked = [request(name, forest_prompts()[0]) for name in ("first", "second")]
        return await asyncio.gather(*(collect(served, one) for one in asked), return_exceptions=True)

    for _ in range(2):
        assert [str(error) for error in asyncio.run(both())] == ["no such text"] * 2
    assert served.submit(lambda sampler: (sampler.num_held, sampler.has_work)).result(30)[0] == 0
    served.close()


def test_weights_change_between_two_steps_of_a_stream(served):
    endless = SamplingParams(max_tokens=400, seed=0, ignore_eos=True)

    async def update_after_some_tokens():
        versions = []
        async for delta in served.stream(request("r", [1, 2, 3], endless)):
            versions.append(delta.weight_version)
            if len(versions) == 5:
                served.submit(lambda sampler: sampler.update_weights(1, in_flight="recompute"))
        return versions

    versions = asyncio.run(update_after_some_tokens())
    assert len(versions) == 400 and versions == sorted(versions) and set(versions) == {0, 1}
