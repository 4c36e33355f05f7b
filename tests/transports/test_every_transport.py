"""One suite for all transports: the same calls, the same numbers, the same errors."""

import asyncio
import functools
import threading
from collections.abc import Awaitable, Callable, Generator
from typing import Any

import numpy as np
import pytest

from arctic_platform.errors import (
    ArcticError,
    CallCancelledError,
    CheckpointError,
    ConfigError,
    InputError,
    NonFiniteError,
    ServerError,
    WeightSyncError,
)
from arctic_platform.rl import ArcticRLClient, ArcticRLClientConfig, SamplingParams, create_arctic_rl_client
from arctic_platform.rl.client import BlockingArcticRLClient
from arctic_platform.rl.protocol import FwdBwdRequest, StepRequest, WeightNormRequest
from arctic_platform.rl.server.states import CallState
from tests.ray_cluster import ray_server
from tests.rl import asleep
from tests.rl.engines import builders
from tests.rl.engines.builders import grouped_batch
from tests.transports.serving import SERVICES, running_server

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8, 20, 21]]
PARAMS = SamplingParams(n=3, max_tokens=6, seed=1, ignore_eos=True)
LONG = SamplingParams(n=8, max_tokens=3000, ignore_eos=True)

Configure = Callable[..., ArcticRLClientConfig]


@pytest.fixture(scope="module", params=["embedded", "http", "ray"])
def configure(request: pytest.FixtureRequest) -> Generator[Configure]:
    """The tiny model's config for one transport, with a server behind it where one is needed."""
    if request.param == "embedded":
        yield builders.config
        return
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
        with ray_server("suite") as settings:
            yield functools.partial(builders.config, transport="ray", ray=settings)
        return
    with running_server() as running:
        yield running.config


def with_client(configure: Configure, work: Callable[[ArcticRLClient], Awaitable[Any]], **settings: Any) -> Any:
    """Run `work(client)` against a fresh client."""

    async def main() -> Any:
        async with create_arctic_rl_client(configure(**settings)) as client:
            return await work(client)

    return asyncio.run(main())


def backend_of(client: ArcticRLClient) -> Any:
    """What executes the client's calls, where that is in this process."""
    transport: Any = client._transport
    if client.config.transport == "ray":
        pytest.skip("its server is in another process, where a test cannot reach into it")
    if client.config.transport == "embedded":
        return transport.service.backend(transport.job_id)
    assert client.config.server_url is not None
    return SERVICES[client.config.server_url].backend(transport.server_id)


async def smoke(client: ArcticRLClient) -> list[Any]:
    """The documented loop: generate, reward, log_probs, fwd_bwd, step, sync_weights; four steps."""
    seen: list[Any] = []
    for _ in range(4):
        answers = await client.generate(PROMPTS, PARAMS)
        rewards = np.array([float(sum(rollout.token_ids) % 5) for rollout in answers.rollouts]).reshape(2, 3)
        advantages = (rewards - rewards.mean(axis=1, keepdims=True)).reshape(-1)
        rows = {
            "prompts": [PROMPTS[rollout.prompt_index] for rollout in answers.rollouts],
            "responses": [rollout.token_ids for rollout in answers.rollouts],
            "rollout_logprobs": [rollout.logprobs for rollout in answers.rollouts],
            "advantages": advantages.tolist(),
        }
        scored = await client.log_probs(rows, {"calculate_entropy": True})
        trained = await client.fwd_bwd({**rows, "old_logprobs": scored.logprobs})
        stepped = await client.step()
        synced = await client.sync_weights()
        seen += [[list(one.token_ids) for one in answers.rollouts], answers.weight_version, synced.weight_version]
        seen += [[list(one.logprobs) for one in answers.rollouts], [list(row) for row in scored.logprobs]]
        seen += [[list(row) for row in scored.entropy or []], [list(row) for row in trained.logprobs]]
        seen += [[trained.metrics["loss"], stepped.metrics["grad_norm"], await client.weight_norm()]]
    return seen


def flat(value: Any) -> list[float]:
    if isinstance(value, (list, tuple)):
        return [number for item in value for number in flat(item)]
    return [float(value)]


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """What the smoke computes in this process."""
    return flat(with_client(builders.config, smoke))


def test_the_documented_loop_computes_the_same_numbers(configure: Configure, expected: list[float]) -> None:
    found = flat(with_client(configure, smoke))
    assert len(found) == len(expected)
    assert found == pytest.approx(expected, abs=1e-6)


def test_calls_without_a_seed_repeat_from_run_to_run(configure: Configure) -> None:
    params = SamplingParams(n=2, max_tokens=8, ignore_eos=True)

    async def work(client: ArcticRLClient) -> list[Any]:
        return [[list(one.token_ids) for one in (await client.generate(PROMPTS, params)).rollouts] for _ in range(2)]

    first, second = with_client(configure, work), with_client(configure, work)
    assert first == second
    assert first == with_client(builders.config, work)
    assert first[0] != first[1]


def test_every_other_call_arrives(configure: Configure, tmp_path: Any) -> None:
    async def work(client: ArcticRLClient) -> None:
        before = await client.generate(PROMPTS, PARAMS)
        dry = await client.fwd_no_grad(grouped_batch())
        assert (await client.fwd_bwd(grouped_batch())).metrics["loss"] == pytest.approx(dry.metrics["loss"])
        status = await client.status()
        assert (status.has_pending_gradients, status.kinds) == (True, ("training", "sampling", "log_prob"))
        await client.step()
        saved = await client.save_checkpoint(tmp_path / "c", {"position": 7})
        await client.fwd_bwd(grouped_batch(1))
        await client.step()
        loaded = await client.load_checkpoint(tmp_path / "c")
        assert (loaded.step, loaded.client_state, saved.step) == (1, {"position": 7}, 1)
        assert (await client.export_model(tmp_path / "m")).path == str(tmp_path / "m")
        assert (tmp_path / "m" / "config.json").is_file()
        await client.sleep_sampling(level=2)
        with pytest.raises(InputError, match="wake_sampling"):
            await client.generate(PROMPTS, PARAMS)
        await client.wake_sampling()
        with pytest.raises(WeightSyncError, match="sync_weights"):
            await client.generate(PROMPTS, PARAMS)
        await client.sync_weights(low_memory=True)
        await client.reset_prefix_cache()
        assert (await client.generate(PROMPTS, PARAMS)).rollouts != before.rollouts
        timed = await client.side_by_side(grouped_batch(), None, PROMPTS, PARAMS, repeats=1)
        assert timed.train_tokens_on < timed.train_tokens_off

    with_client(configure, work)


@pytest.mark.parametrize("target", ["cpu", "disk"])
def test_a_trainer_that_sleeps_refuses_what_needs_it_and_nothing_else(configure: Configure, target: Any) -> None:
    async def work(client: ArcticRLClient) -> None:
        norm, drawn = await client.weight_norm(), await client.generate(PROMPTS, PARAMS)
        await client.sleep_training(target)
        for name, call in asleep.CALLS.items():
            with pytest.raises(InputError, match=asleep.refusal(name)):
                await call(client)
        assert (await client.status()).is_trainer_asleep
        assert (await client.generate(PROMPTS, PARAMS)).rollouts == drawn.rollouts
        await client.wake_training()
        assert (await client.weight_norm(), (await client.status()).is_trainer_asleep) == (norm, False)
        await client.fwd_bwd(grouped_batch())
        with pytest.raises(InputError, match="gradients that wait for a step"):
            await client.sleep_training(target)
        await client.step()
        assert (await client.sync_weights()).weight_version == 1

    with_client(configure, work)


def test_a_reference_scores_as_the_first_weights(configure: Configure) -> None:
    async def work(client: ArcticRLClient) -> None:
        before = await client.log_probs(grouped_batch())
        await client.fwd_bwd(grouped_batch())
        await client.step()
        after = await client.log_probs(grouped_batch(), reference=True)
        pairs = zip(before.logprobs, after.logprobs, strict=True)
        assert [list(one) for one, _ in pairs] == [list(one) for one in after.logprobs]

    with_client(configure, work, reference=True)


def test_log_probs_of_minus_infinity_and_nan_arrive_as_they_are(configure: Configure) -> None:
    async def work(client: ArcticRLClient) -> None:
        trainer: Any = backend_of(client).train
        real = trainer.log_probs

        def banned(*args: Any, **options: Any) -> Any:
            response = real(*args, **options)
            rows = [[float("-inf"), float("nan"), float("inf")] for _ in response.logprobs]
            return type(response)(logprobs=rows, metrics=response.metrics | {"worst": float("-inf")})

        trainer.log_probs = banned
        scored = await client.log_probs(grouped_batch())
        assert [str(float(value)) for value in scored.logprobs[0]] == ["-inf", "nan", "inf"]
        assert scored.metrics["worst"] == float("-inf")

    with_client(configure, work)


def test_a_fault_arrives_as_its_own_class_in_one_line_and_the_client_lives_on(
    configure: Configure, tmp_path: Any
) -> None:
    async def work(client: ArcticRLClient) -> None:
        rows = {"prompts": [[5]], "responses": [[6]]}
        for call, error in [
            (client.fwd_bwd({**rows, "advantages": [float("nan")]}), NonFiniteError),
            (client.fwd_bwd({**rows, "advantages": [[1.0, 2.0]]}), InputError),
            (client.fwd_bwd({**rows, "advantages": [1.0]}, {"loss": "nope"}), ConfigError),
            (client.step(), InputError),
            (client.generate([[999]]), InputError),
            (client.sync_weights(cuda_ipc=True), ConfigError),
            (client.load_checkpoint(str(tmp_path)), CheckpointError),
        ]:
            with pytest.raises(error) as caught:
                await call
            assert isinstance(caught.value, ArcticError)
            assert "\n" not in str(caught.value)
        assert (await client.fwd_bwd({**rows, "advantages": [1.0]})).logprobs

    with_client(configure, work)


def test_what_breaks_inside_the_server_is_a_server_error(configure: Configure) -> None:
    async def work(client: ArcticRLClient) -> None:
        backend_of(client).train.weight_norm = lambda: 1 / 0
        with pytest.raises(ServerError, match="ZeroDivisionError"):
            await client.weight_norm()
        assert (await client.status()).step == 0

    with_client(configure, work)


def test_a_model_that_is_not_there_is_a_config_error(configure: Configure) -> None:
    with pytest.raises(ConfigError, match="no/such/model"):
        create_arctic_rl_client(configure(model="no/such/model"))


def test_the_same_request_is_executed_once(configure: Configure) -> None:
    async def work(client: ArcticRLClient) -> None:
        request, step = FwdBwdRequest(batch=grouped_batch()), StepRequest()
        call = client._transport.call
        assert (await call(request)).metrics == (await call(request)).metrics
        first, again = await asyncio.gather(call(step), call(step))
        assert first == again
        assert (await client.status()).step == 1

    with_client(configure, work)


def test_a_call_that_failed_may_be_made_again(configure: Configure) -> None:
    async def work(client: ArcticRLClient) -> None:
        step = StepRequest()
        with pytest.raises(InputError):
            await client._transport.call(step)
        await client.fwd_bwd(grouped_batch())
        assert (await client._transport.call(step)).metrics["step"] == 1.0

    with_client(configure, work)


def test_a_call_that_is_refused_on_its_way_holds_nothing_up(configure: Configure) -> None:
    async def work(client: ArcticRLClient) -> None:
        norm = WeightNormRequest()
        await client._transport.call(norm)
        with pytest.raises(InputError, match="belongs to a weight_norm call"):
            await client._transport.call(StepRequest(request_id=norm.request_id))
        assert (await asyncio.wait_for(client.status(), 10)).step == 0

    with_client(configure, work)


def test_calls_run_in_the_order_in_which_they_are_made(configure: Configure) -> None:
    async def work(client: ArcticRLClient) -> None:
        batch = grouped_batch()
        results = await asyncio.gather(*[call for _ in range(5) for call in (client.fwd_bwd(batch), client.step())])
        assert [result.metrics["step"] for result in results[1::2]] == [1.0, 2.0, 3.0, 4.0, 5.0]

    with_client(configure, work)


def test_cancelled_sampling_stops_there_too_and_later_calls_work(configure: Configure) -> None:
    async def work(client: ArcticRLClient) -> None:
        call = asyncio.create_task(client.generate(PROMPTS, LONG))
        await asyncio.sleep(0.3)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.wait_for(client.status(), timeout=20)
        assert backend_of(client).num_generate_calls == 0

    with_client(configure, work)


def test_a_call_cancelled_at_once_leaves_no_gap(configure: Configure) -> None:
    async def work(client: ArcticRLClient) -> None:
        for delay in (0.0, 0.001, 0.005):
            calls = [asyncio.create_task(client.step()) for _ in range(3)]
            await asyncio.sleep(delay)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        assert (await asyncio.wait_for(client.status(), timeout=10)).step == 0

    with_client(configure, work)


def test_a_training_call_that_began_is_finished_whole(configure: Configure) -> None:
    async def work(client: ArcticRLClient) -> None:
        trainer = backend_of(client).train
        begun, go, real = threading.Event(), threading.Event(), trainer.fwd_bwd

        def slow(*args: Any) -> Any:
            begun.set()
            go.wait(10)
            return real(*args)

        trainer.fwd_bwd = slow
        call = asyncio.create_task(client.fwd_bwd(grouped_batch()))
        await asyncio.to_thread(begun.wait, 10)
        call.cancel()
        await asyncio.sleep(0.05)
        go.set()
        await asyncio.gather(call, return_exceptions=True)
        assert (await client.status()).has_pending_gradients

    with_client(configure, work)


def test_progress_is_told_while_a_call_runs(configure: Configure) -> None:
    told: list[CallState] = []

    async def work() -> None:
        async with create_arctic_rl_client(configure(), on_progress=told.append) as client:
            call = asyncio.create_task(client.generate(PROMPTS, LONG))
            deadline = asyncio.get_running_loop().time() + 20
            while not any(state.num_total for state in told) and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(0.05)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    asyncio.run(work())
    assert [state.num_total for state in told if state.num_total][:1] == [16]
    assert {state.method for state in told} - {"loading"} == {"generate"}


def test_a_second_client_takes_over(configure: Configure) -> None:
    async def work() -> None:
        client = create_arctic_rl_client(configure())
        await client.fwd_bwd(grouped_batch())
        again = client.reconnect_config()
        await client.disconnect()
        async with create_arctic_rl_client(again) as other:
            await other.step()
            assert (await other.status()).step == 1

    asyncio.run(work())


def test_shutdown_ends_the_job_and_says_so_afterwards(configure: Configure) -> None:
    async def main() -> None:
        client = create_arctic_rl_client(configure())
        again = client.reconnect_config()
        await client.shutdown()
        await client.shutdown()
        with pytest.raises(InputError, match="was shut down"):
            await client.status()
        with pytest.raises(ConfigError, match="is not running"):
            create_arctic_rl_client(again)

    asyncio.run(main())


def test_two_clients_do_not_mix(configure: Configure) -> None:
    async def train(client: ArcticRLClient, seed: int) -> float:
        await client.fwd_bwd(grouped_batch(seed))
        await client.step()
        return await client.weight_norm()

    async def side_by_side() -> list[float]:
        async with (
            create_arctic_rl_client(configure(seed=1)) as first,
            create_arctic_rl_client(configure(seed=2)) as second,
        ):
            return await asyncio.gather(train(first, 1), train(second, 2))

    alone = [with_client(builders.config, functools.partial(train, seed=seed), seed=seed) for seed in (1, 2)]
    assert asyncio.run(side_by_side()) == alone


def test_the_blocking_face_has_the_same_calls(configure: Configure) -> None:
    with create_arctic_rl_client(configure(), blocking_calls=True) as client:
        assert isinstance(client, BlockingArcticRLClient)
        assert len(client.generate(PROMPTS, PARAMS).rollouts) == 6
        client.fwd_bwd(grouped_batch())
        assert client.step().metrics["step"] == 1.0
        with pytest.raises(InputError, match="call fwd_bwd"):
            client.step()


@pytest.mark.parametrize("name", ["use_zorro", "zorro_train_enable"])
def test_an_old_spelling_takes_effect_and_the_status_shows_it(configure: Configure, name: str) -> None:
    async def work(client: ArcticRLClient) -> float:
        metrics = (await client.fwd_bwd(grouped_batch())).metrics
        status = await client.status()
        assert (status.zorro_train, status.zorro_train_effect) == (False, "off: zorro_train.enable is false")
        return metrics["zorro_active"]

    with pytest.warns(FutureWarning):
        assert with_client(configure, work, **{name: False}) == 0.0


def test_max_rollouts_reaches_the_engine_and_the_status(configure: Configure) -> None:
    async def work(client: ArcticRLClient) -> None:
        assert (await client.status()).max_rollouts == 3
        assert (await client.fwd_bwd(grouped_batch())).metrics["num_micro_batches"] >= 3

    with_client(configure, work, zorro_train={"max_rollouts": 3})


def test_kinds_load_only_what_they_say(configure: Configure) -> None:
    async def work(client: ArcticRLClient) -> None:
        assert len((await client.generate(PROMPTS, PARAMS)).rollouts) == 6
        with pytest.raises(InputError, match="kinds"):
            await client.fwd_bwd(grouped_batch())
        with pytest.raises(InputError, match="kinds"):
            await client.sleep_training()
        assert (await client.status()).training_engine is None

    with_client(configure, work, kinds=["sampling"])


def test_a_client_cancelled_by_the_end_of_its_job_hears_it(configure: Configure) -> None:
    async def main() -> None:
        client = create_arctic_rl_client(configure())
        waiting = [asyncio.create_task(client.generate(PROMPTS, LONG)) for _ in range(2)]
        await asyncio.sleep(0.3)
        other = create_arctic_rl_client(client.reconnect_config())
        await other.shutdown()
        for outcome in await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 20):
            assert isinstance(outcome, (CallCancelledError, InputError))

    asyncio.run(main())
