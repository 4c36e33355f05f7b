import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from arctic_platform.errors import (
    ArcticError,
    CheckpointError,
    ConfigError,
    InputError,
    NonFiniteError,
    WeightSyncError,
)
from arctic_platform.rl import ArcticRLClient, Processing, RolloutBatch, SamplingParams, create_arctic_rl_client
from arctic_platform.rl.client import BlockingArcticRLClient
from arctic_platform.rl.protocol import FwdBwdRequest, StepRequest
from arctic_platform.rl.server.backend import Backend
from arctic_platform.rl.weight_sync import local
from tests.rl.engines.builders import config, grouped_batch

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8, 20, 21]]
PARAMS = SamplingParams(n=3, max_tokens=6, seed=1, ignore_eos=True)


def with_client(work: Callable[[ArcticRLClient], Awaitable[Any]], **settings: Any) -> Any:
    """Run `work(client)` against a fresh client of the tiny model."""

    async def main() -> Any:
        async with create_arctic_rl_client(config(**settings)) as client:
            return await work(client)

    return asyncio.run(main())


def backend_of(client: ArcticRLClient) -> Backend:
    transport: Any = client._transport
    return transport.service.backend(transport.job_id)


def test_the_five_calls_train_and_the_sampler_follows(caplog: pytest.LogCaptureFixture) -> None:
    async def work(client: ArcticRLClient) -> None:
        first = await client.generate(PROMPTS, PARAMS)
        assert [rollout.prompt_index for rollout in first.rollouts] == [0, 0, 0, 1, 1, 1]
        assert first.weight_version == 0
        rows = {
            "prompts": [PROMPTS[rollout.prompt_index] for rollout in first.rollouts],
            "responses": [rollout.token_ids for rollout in first.rollouts],
            "rollout_logprobs": [rollout.logprobs for rollout in first.rollouts],
            "advantages": [1.0, -1.0, 0.5, -0.5, 1.0, -1.0],
        }
        scored = await client.log_probs(rows)
        result = await client.fwd_bwd({**rows, "old_logprobs": scored.logprobs})
        assert result.metrics["sampler_diff_max"] < 1e-4
        assert (result.metrics["ppo_kl"], result.metrics["clip_fraction"]) == (0.0, 0.0)
        stepped = await client.step()
        assert stepped.metrics["step"] == 1.0
        assert not (await client.status()).is_sampler_current
        assert (await client.generate(PROMPTS, PARAMS)).rollouts == first.rollouts
        synced = await client.sync_weights()
        assert (synced.weight_version, synced.mechanism) == (1, "local")
        second = await client.generate(PROMPTS, PARAMS)
        assert second.weight_version == 1
        assert second.rollouts != first.rollouts

    with caplog.at_level(logging.INFO, "arctic_platform"):
        with_client(work)
    assert any("[weight-sync names validated] context=local sender=" in message for message in caplog.messages)


def test_after_a_sync_the_sampler_answers_as_a_fresh_one_with_these_weights(tmp_path: Path) -> None:
    async def train(client: ArcticRLClient) -> Any:
        await client.generate(PROMPTS, PARAMS)
        await client.fwd_bwd(grouped_batch())
        await client.step()
        await client.sync_weights()
        await client.export_model(tmp_path / "model")
        return await client.generate(PROMPTS, PARAMS)

    async def sample(client: ArcticRLClient) -> Any:
        return await client.generate(PROMPTS, PARAMS)

    trained, fresh = with_client(train), with_client(sample, model=str(tmp_path / "model"))
    assert trained.rollouts == fresh.rollouts


@pytest.mark.parametrize("low_memory", [True, False])
def test_low_memory_sync_is_said_and_done(low_memory: bool) -> None:
    async def work(client: ArcticRLClient) -> None:
        await client.fwd_bwd(grouped_batch())
        await client.step()
        expected = "local-low-memory" if low_memory else "local"
        assert (await client.sync_weights()).mechanism == expected
        assert (await client.sync_weights(low_memory=not low_memory)).mechanism != expected
        backend = backend_of(client)
        pairs = zip(backend.train.model.parameters(), backend.sample.model.parameters(), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)

    with_client(work, low_memory_weight_sync=low_memory)


def test_sync_over_cuda_handles_is_refused() -> None:
    async def work(client: ArcticRLClient) -> None:
        with pytest.raises(ConfigError, match="cuda_ipc"):
            await client.sync_weights(cuda_ipc=True)

    with_client(work)


@pytest.mark.parametrize("low_memory", [True, False])
def test_failed_sync_never_serves_a_mixture(low_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(client: ArcticRLClient) -> None:
        before = await client.generate(PROMPTS, PARAMS)
        await client.fwd_bwd(grouped_batch())
        await client.step()
        with monkeypatch.context() as patched:
            patched.setattr(local, "digest", id)
            with pytest.raises(WeightSyncError, match="digests differ"):
                await client.sync_weights()
        if low_memory:
            with pytest.raises(WeightSyncError, match=r"call sync_weights\(\)"):
                await client.generate(PROMPTS, PARAMS)
        else:
            assert (await client.generate(PROMPTS, PARAMS)).rollouts == before.rollouts
        await client.sync_weights()
        assert (await client.generate(PROMPTS, PARAMS)).weight_version == 1

    with_client(work, low_memory_weight_sync=low_memory)


def test_calls_without_a_seed_differ_and_repeat_from_run_to_run() -> None:
    params = SamplingParams(n=2, max_tokens=8, ignore_eos=True)

    async def work(client: ArcticRLClient) -> list[Any]:
        return [(await client.generate(PROMPTS, params)).rollouts for _ in range(2)]

    first, second = with_client(work), with_client(work)
    assert first == second
    assert first[0] != first[1]
    assert with_client(work, seed=1)[0] != first[0]


def test_resumed_run_samples_and_trains_as_the_uninterrupted_one(tmp_path: Path) -> None:
    params = SamplingParams(n=4, max_tokens=5, ignore_eos=True)

    async def iterate(client: ArcticRLClient, count: int) -> list[Any]:
        seen = []
        for _ in range(count):
            answers = await client.generate(PROMPTS, params)
            rows = [rollout.token_ids for rollout in answers.rollouts]
            batch = RolloutBatch(
                prompts=[PROMPTS[rollout.prompt_index] for rollout in answers.rollouts],
                responses=rows,
                advantages=[float(sum(row) % 3 - 1) for row in rows],
            )
            seen.append((rows, (await client.fwd_bwd(batch)).metrics["loss"]))
            await client.step()
            await client.sync_weights()
        return seen

    async def first_half(client: ArcticRLClient) -> list[Any]:
        seen = await iterate(client, 2)
        await client.save_checkpoint(client_state={"position": 2})
        return seen

    async def second_half(client: ArcticRLClient) -> list[Any]:
        loaded = await client.load_checkpoint()
        assert (loaded.step, loaded.client_state) == (2, {"position": 2})
        assert (await client.status()).is_sampler_current
        return await iterate(client, 2)

    whole = with_client(lambda client: iterate(client, 4))
    folder = {"checkpoint_path": str(tmp_path)}
    assert with_client(first_half, **folder) + with_client(second_half, **folder) == whole


def test_sleeping_sampler_refuses_and_level_two_needs_a_sync() -> None:
    async def work(client: ArcticRLClient) -> None:
        expected = (await client.generate(PROMPTS, PARAMS)).rollouts
        await client.sleep_sampling()
        with pytest.raises(InputError, match="wake_sampling"):
            await client.generate(PROMPTS, PARAMS)
        with pytest.raises(InputError, match="wake_sampling"):
            await client.sync_weights()
        await client.wake_sampling()
        assert (await client.generate(PROMPTS, PARAMS)).rollouts == expected
        await client.sleep_sampling(level=2)
        assert (await client.status()).is_sampler_asleep
        assert sum(param.numel() for param in backend_of(client).sample.model.parameters()) == 0
        await client.wake_sampling()
        with pytest.raises(WeightSyncError, match="sync_weights"):
            await client.generate(PROMPTS, PARAMS)
        await client.sync_weights()
        assert (await client.generate(PROMPTS, PARAMS)).rollouts == expected
        await client.reset_prefix_cache()
        assert (await client.generate(PROMPTS, PARAMS)).rollouts == expected

    with_client(work)


def test_the_sampler_draws_while_the_trainer_sleeps_and_a_sync_waits_for_its_waking() -> None:
    async def work(client: ArcticRLClient) -> None:
        expected = (await client.generate(PROMPTS, PARAMS)).rollouts
        await client.sleep_training("disk")
        assert (await client.generate(PROMPTS, PARAMS)).rollouts == expected
        for call in (client.sync_weights(), client.side_by_side(grouped_batch(), None, PROMPTS, PARAMS)):
            with pytest.raises(InputError, match="wake_training"):
                await call
        await client.wake_training()
        assert (await client.sync_weights()).weight_version == 0
        assert (await client.generate(PROMPTS, PARAMS)).rollouts == expected

    with_client(work)


def test_checkpoint_loaded_while_the_sampler_sleeps_needs_a_sync(tmp_path: Path) -> None:
    async def work(client: ArcticRLClient) -> None:
        await client.save_checkpoint(tmp_path / "c")
        await client.sleep_sampling()
        await client.load_checkpoint(tmp_path / "c")
        await client.wake_sampling()
        assert not (await client.status()).is_sampler_current
        with pytest.raises(WeightSyncError, match="sync_weights"):
            await client.generate(PROMPTS, PARAMS)
        await client.sync_weights()
        assert (await client.status()).is_sampler_current

    with_client(work)


@pytest.mark.parametrize("name", ["use_zorro", "zorro_train_enable"])
def test_old_spelling_reaches_the_engine(name: str) -> None:
    async def work(client: ArcticRLClient) -> float:
        assert not (await client.status()).zorro_train
        return (await client.fwd_bwd(grouped_batch())).metrics["zorro_active"]

    with pytest.warns(FutureWarning):
        assert with_client(work, **{name: False}) == 0.0


def test_max_rollouts_reaches_the_engine() -> None:
    async def work(client: ArcticRLClient) -> None:
        assert (await client.status()).max_rollouts == 3
        assert (await client.fwd_bwd(grouped_batch())).metrics["num_micro_batches"] >= 3

    with_client(work, zorro_train={"max_rollouts": 3})


def test_inference_sharing_is_seen_in_the_tokens_that_are_computed() -> None:
    async def work(client: ArcticRLClient) -> tuple[float, list[Any]]:
        answers = await client.generate(PROMPTS, PARAMS.model_copy(update={"temperature": 0.0}))
        return answers.metrics["tokens_computed"], [rollout.token_ids for rollout in answers.rollouts]

    shared, plain = with_client(work), with_client(work, zorro_inference={"enable": False})
    assert shared[0] < plain[0]
    assert shared[1] == plain[1]


def test_side_by_side_measures_both_ways_and_leaves_everything() -> None:
    async def work(client: ArcticRLClient) -> None:
        batch = grouped_batch()
        await client.fwd_bwd(batch)
        trainer = backend_of(client).train
        before = [tensor.clone() for param in trainer.model.parameters() for tensor in (param, param.grad)]
        random = torch.get_rng_state()
        result = await client.side_by_side(batch, Processing(loss="dapo"), PROMPTS, PARAMS, repeats=2)
        after = [tensor for param in trainer.model.parameters() for tensor in (param, param.grad)]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(after, before, strict=True))
        assert torch.equal(torch.get_rng_state(), random)
        assert backend_of(client).num_generate_calls == 0
        assert result.train_loss_on == pytest.approx(result.train_loss_off, abs=1e-5)
        assert result.train_tokens_on < result.train_tokens_off
        assert result.sample_tokens_on < result.sample_tokens_off
        assert result.train_ratio == pytest.approx(result.train_seconds_off / result.train_seconds_on)
        assert result.repeats == 2
        await client.step()

    with_client(work)


def test_other_calls_over_the_transport() -> None:
    async def work(client: ArcticRLClient) -> None:
        model = backend_of(client).train.model
        expected = sum(param.double().square().sum().item() for param in model.parameters()) ** 0.5
        assert await client.weight_norm() == pytest.approx(expected)
        dry = await client.fwd_no_grad(grouped_batch())
        assert not (await client.status()).has_pending_gradients
        assert (await client.fwd_bwd(grouped_batch())).metrics["loss"] == pytest.approx(dry.metrics["loss"])
        status = await client.status()
        assert status.has_pending_gradients
        assert status.num_parameters == sum(param.numel() for param in model.parameters())

    with_client(work)


def test_fault_of_a_call_arrives_as_itself_and_the_client_lives_on(tmp_path: Path) -> None:
    async def work(client: ArcticRLClient) -> None:
        rows = {"prompts": [[5]], "responses": [[6]]}
        for call, error in [
            (client.fwd_bwd({**rows, "advantages": [float("nan")]}), NonFiniteError),
            (client.fwd_bwd({**rows, "advantages": [[1.0, 2.0]]}), InputError),
            (client.fwd_bwd({**rows, "advantages": [1.0]}, {"loss": "nope"}), ConfigError),
            (client.fwd_bwd({**rows, "adv": [1.0]}), InputError),
            (client.step(), InputError),
            (client.generate([[]]), InputError),
            (client.generate([[999]]), InputError),
            (client.generate([[5]], {"max_token": 3}), InputError),
            (client.load_checkpoint(str(tmp_path)), CheckpointError),
        ]:
            with pytest.raises(error) as caught:
                await call
            assert isinstance(caught.value, ArcticError)
            assert "\n" not in str(caught.value)
        assert (await client.fwd_bwd({**rows, "advantages": [1.0]})).logprobs

    with_client(work)


def test_request_sent_twice_is_executed_once() -> None:
    async def work(client: ArcticRLClient) -> None:
        request, step = FwdBwdRequest(batch=grouped_batch()), StepRequest()
        transport = client._transport
        assert await transport.call(request) is await transport.call(request)
        first, again = await asyncio.gather(transport.call(step), transport.call(step))
        assert first == again
        assert (await client.status()).step == 1

    with_client(work)


def test_failed_request_may_be_sent_again() -> None:
    async def work(client: ArcticRLClient) -> None:
        step = StepRequest()
        with pytest.raises(InputError):
            await client._transport.call(step)
        await client.fwd_bwd(grouped_batch())
        assert (await client._transport.call(step)).metrics["step"] == 1.0

    with_client(work)


def test_cancelled_sampling_stops_and_later_calls_work() -> None:
    async def work(client: ArcticRLClient) -> None:
        call = asyncio.create_task(client.generate(PROMPTS, SamplingParams(n=8, max_tokens=3000, ignore_eos=True)))
        await asyncio.sleep(0.3)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.wait_for(client.status(), timeout=20)
        assert backend_of(client).num_generate_calls == 0

    with_client(work)


def test_cancelled_training_call_is_finished_whole() -> None:
    async def work(client: ArcticRLClient) -> None:
        trainer = backend_of(client).train
        begun, go = threading.Event(), threading.Event()
        real = trainer.fwd_bwd

        def slow(*args: Any) -> Any:
            begun.set()
            go.wait(10)
            return real(*args)

        trainer.fwd_bwd = slow
        call = asyncio.create_task(client.fwd_bwd(grouped_batch()))
        await asyncio.to_thread(begun.wait, 10)
        waiting = asyncio.create_task(client.step())
        await asyncio.sleep(0)
        call.cancel()
        waiting.cancel()
        await asyncio.sleep(0)
        go.set()
        status = await client.status()
        assert status.has_pending_gradients
        assert status.step == 0

    with_client(work)


def test_calls_are_executed_in_the_order_in_which_they_are_made() -> None:
    async def work(client: ArcticRLClient) -> None:
        batch = grouped_batch()
        results = await asyncio.gather(*[call for _ in range(3) for call in (client.fwd_bwd(batch), client.step())])
        assert [result.metrics["step"] for result in results[1::2]] == [1.0, 2.0, 3.0]

    with_client(work)


def test_second_client_joins_the_running_server() -> None:
    async def work(client: ArcticRLClient) -> None:
        other = create_arctic_rl_client(client.reconnect_config())
        await other.fwd_bwd(grouped_batch())
        await other.step()
        assert (await client.status()).step == 1

    with_client(work)


def test_client_that_was_shut_down_says_so() -> None:
    async def main() -> None:
        client = create_arctic_rl_client(config())
        again = client.reconnect_config()
        await client.shutdown()
        await client.shutdown()
        with pytest.raises(InputError, match="was shut down"):
            await client.status()
        with pytest.raises(ConfigError, match="is not running in this process"):
            create_arctic_rl_client(again)

    asyncio.run(main())


def test_blocking_client_has_the_same_calls_without_await() -> None:
    with create_arctic_rl_client(config(), blocking_calls=True) as client:
        assert isinstance(client, BlockingArcticRLClient)
        assert len(client.generate(PROMPTS, PARAMS).rollouts) == 6
        client.fwd_bwd(grouped_batch())
        assert client.step().metrics["step"] == 1.0
        assert client.sync_weights().weight_version == 1
        assert client.reconnect_config().model == client.config.model
        assert "generate" in dir(client)
        with pytest.raises(InputError, match=r"call fwd_bwd"):
            client.step()
        with pytest.raises(AttributeError):
            client.generat(PROMPTS)
    with pytest.raises(InputError, match="was shut down"):
        create_and_close().status()


def create_and_close() -> BlockingArcticRLClient:
    client = create_arctic_rl_client(config(), blocking_calls=True)
    client.shutdown()
    return client


def test_blocking_client_inside_a_running_loop_says_what_to_do() -> None:
    client = create_arctic_rl_client(config(), blocking_calls=True)

    async def main() -> None:
        with pytest.raises(ConfigError, match="blocking_calls=False"):
            client.status()

    asyncio.run(main())
    client.shutdown()


def test_without_torch_the_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from arctic_platform.rl import create_arctic_rl_client\n"
        "from arctic_platform.errors import MissingDependencyError\n"
        "try: create_arctic_rl_client({'model': 'tiny-random'})\n"
        "except MissingDependencyError as error: assert 'zorro-rl[torch]' in str(error), error\n"
        "else: raise SystemExit('no error')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_config_may_be_a_dict_and_a_wrong_one_is_refused() -> None:
    with create_arctic_rl_client({"model": "tiny-random"}, blocking_calls=True) as client:
        assert client.status().model == "tiny-random"
    with pytest.raises(ConfigError, match="did you mean 'model'"):
        create_arctic_rl_client({"modell": "tiny-random"})
    with pytest.raises(ConfigError, match="arctic-rl fetch"):
        create_arctic_rl_client({"model": "models/not-here"})
