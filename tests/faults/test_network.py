"""What networks do to calls over HTTP: cut requests, cut answers, lost answers, silence."""

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import torch

from arctic_platform.errors import (
    CallTimeoutError,
    InputError,
    NotFoundError,
    TransportError,
    WeightSyncError,
    WireError,
)
from arctic_platform.rl import create_arctic_rl_client
from arctic_platform.rl.client import BlockingArcticRLClient
from arctic_platform.rl.server.states import FRAME_TYPE
from arctic_platform.rl.transports import http
from tests.faults.proxy import Fault, FaultyProxy
from tests.faults.record import Witness, fault
from tests.rl.engines.builders import grouped_batch
from tests.transports.serving import SERVICES, Running

LONG = {"n": 8, "max_tokens": 1000, "ignore_eos": True}


def is_call(head: bytes) -> bool:
    """A POST or GET of a call, not of a job."""
    return b"/calls" in head.split(b"\r\n", 1)[0]


def is_submit(head: bytes) -> bool:
    return head.startswith(b"POST") and is_call(head)


@contextmanager
def client_behind(server: Running, **settings: Any) -> Generator[tuple[BlockingArcticRLClient, FaultyProxy]]:
    """A client that reaches the server through a proxy."""
    port = int(server.url.rpartition(":")[2])
    config = server.config(**settings)
    with FaultyProxy(port) as proxy:
        config = config.model_copy(update={"server_url": f"http://127.0.0.1:{proxy.port}"})
        with create_arctic_rl_client(config, blocking_calls=True) as client:
            yield client, proxy


def trained_once(client: BlockingArcticRLClient, strike: Callable[[], Fault]) -> None:
    """A step that meets the fault is made once: the counter and the weights say so."""
    client.fwd_bwd(grouped_batch())
    before = client.weight_norm()
    hit = strike()
    client.step()
    assert hit.done.is_set()
    after = client.weight_norm()
    assert (client.status().step, client.status().trainer_version) == (1, 1)
    assert after != before
    assert not client.status().has_pending_gradients


@fault("the network is cut while a request travels", saw="the call's answer: it is sent again")
@pytest.mark.parametrize("cut", [0, 1, 350])
def test_a_cut_request_is_sent_again_and_runs_once(server: Running, witness: Witness, cut: int) -> None:
    with client_behind(server) as (client, proxy), witness.sees():

        def strike() -> Fault:
            proxy.fault = Fault(is_submit, cut_request=cut)
            return proxy.fault

        trained_once(client, strike)


@fault("the network is cut while an answer travels", saw="the call's answer: it is fetched again")
@pytest.mark.parametrize("cut", [1, 300])
def test_a_cut_answer_is_fetched_again_and_the_step_is_made_once(server: Running, witness: Witness, cut: int) -> None:
    with client_behind(server) as (client, proxy), witness.sees():

        def strike() -> Fault:
            proxy.fault = Fault(is_submit, cut_answer=cut)
            return proxy.fault

        trained_once(client, strike)


@fault("answers are lost, three times in a row", saw="the call's answer: the step is made once")
def test_a_lost_answer_never_steps_twice(server: Running, witness: Witness) -> None:
    with client_behind(server) as (client, proxy), witness.sees():

        def strike() -> Fault:
            proxy.fault = Fault(is_call, cut_answer=0, times=3)
            return proxy.fault

        trained_once(client, strike)


@fault("a large batch is cut on its way, both ways", saw="the call's answer: equal to the undisturbed one")
def test_a_large_body_that_is_cut_arrives_whole_in_the_end(server: Running, witness: Witness) -> None:
    batch = {"prompts": [[1 + row % 50] * 40 for row in range(1024)], "responses": [[2] * 60] * 1024}
    with client_behind(server) as (client, proxy):
        plain = client.log_probs(batch)
        with witness.sees():
            for cut in ({"cut_request": 100_000}, {"cut_answer": 100_000}):
                proxy.fault = Fault(is_submit, **cut)
                assert client.log_probs(batch).logprobs == plain.logprobs
                assert proxy.fault.done.is_set()


@fault(
    "the server accepts and never answers",
    saw="TransportError: weight_norm: no answer from http://<host> (ReadTimeout <how long>); is the server running "
    "there?",
)
def test_a_server_that_never_answers_is_given_up(
    server: Running, witness: Witness, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client_behind(server, retry_timeout=1.0) as (client, proxy):
        monkeypatch.setattr(http, "SILENCE_SECONDS", 0.3)  # 30 s, scaled
        proxy.fault = Fault(is_call, silent=True, times=100)
        with witness.sees(TransportError):
            client.weight_norm()
        monkeypatch.undo()
        proxy.fault = None
        with create_arctic_rl_client(client.reconnect_config(), blocking_calls=True) as again:
            assert again.weight_norm() > 0


@fault(
    "nobody listens at the address",
    saw="TransportError: create_arctic_rl_client: no answer from http://<host> (<reason>); is the server running "
    "there?",
)
def test_a_server_that_is_not_there_is_said_within_seconds(server: Running, witness: Witness) -> None:
    with FaultyProxy(1) as proxy:
        free = proxy.port
    with witness.sees(TransportError):
        create_arctic_rl_client(server.config().model_copy(update={"server_url": f"http://127.0.0.1:{free}"}))


@fault("a call takes longer than any single request may", saw="the call's answer: it is asked for until it is there")
def test_a_long_call_outlives_every_time_out_and_runs_once(
    server: Running, witness: Witness, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, scaled in (("SILENCE_SECONDS", 0.5), ("SUBMIT_WAIT", 0.05), ("POLL_WAIT", 0.05)):
        monkeypatch.setattr(http, name, scaled)
    with client_behind(server) as (client, proxy), witness.sees():
        proxy.fault = Fault(is_call, cut_answer=0, times=3)
        answers = client.generate([[1, 2, 3]], LONG | {"n": 2, "max_tokens": 100})
        assert proxy.fault.times == 0
        assert [len(one.token_ids) for one in answers.rollouts] == [100] * 2


@fault(
    "a call takes longer than the caller allows",
    saw="CallTimeoutError: generate was not finished within call_timeout=0.2 s and was cancelled; the server says: "
    "<how far it was>",
)
def test_a_call_beyond_the_callers_time_is_taken_back(server: Running, witness: Witness) -> None:
    config = server.config(call_timeout=0.2)
    with create_arctic_rl_client(config, blocking_calls=True) as client:
        with witness.sees(CallTimeoutError):
            client.generate([[1, 2, 3]], LONG | {"n": 64})
        with create_arctic_rl_client(
            client.reconnect_config().model_copy(update={"call_timeout": None}), blocking_calls=True
        ) as patient:
            assert patient.weight_norm() > 0


@fault(
    "another client ended the job",
    saw="NotFoundError: there is no job <id> here; <why>",
)
def test_a_job_that_another_client_ended_is_named(server: Running, witness: Witness) -> None:
    with create_arctic_rl_client(server.config(), blocking_calls=True) as client:
        create_arctic_rl_client(client.reconnect_config(), blocking_calls=True).shutdown()
        with witness.sees(NotFoundError):
            client.step()


@fault("a frame of another version arrives", saw="WireError: <what this server speaks>")
def test_an_old_frame_is_refused_by_name(server: Running, witness: Witness) -> None:
    with create_arctic_rl_client(server.config(), blocking_calls=True) as client:
        job = client.reconnect_config().server_id
        frame = b"ZoRR" + (0).to_bytes(4, "little") + (2).to_bytes(8, "little") + b"{}"
        answer = httpx.post(f"{server.url}/v1/jobs/{job}/calls", content=frame, headers={"content-type": FRAME_TYPE})
        with witness.sees(WireError):
            raise http.Answer(answer.status_code, "application/json", memoryview(answer.content)).error(server.url)
        assert client.status().step == 0


@fault(
    "a call of the caller's own fails in the middle of others", saw="InputError: <which row is wrong, and what to do>"
)
def test_a_failing_call_leaves_the_others_alone(server: Running, witness: Witness) -> None:
    async def several() -> None:
        async with create_arctic_rl_client(server.config()) as client:
            first = asyncio.create_task(client.fwd_bwd(grouped_batch()))
            wrong = asyncio.create_task(client.generate([[1] * 5000], {"n": 1}))
            last = asyncio.create_task(client.step())
            with witness.sees(InputError):
                await wrong
            assert (await first).metrics["num_loss_tokens"] > 0
            assert (await last).metrics["step"] == 1.0

    asyncio.run(several())


@fault(
    "the sampler's side of a weight sync fails",
    saw="WeightSyncError: <which tensor, and both shapes>",
    lost="nothing: the sampler keeps its weights, and a retry works",
)
def test_a_sync_that_fails_on_the_server_is_said_and_can_be_tried_again(server: Running, witness: Witness) -> None:
    with create_arctic_rl_client(server.config(), blocking_calls=True) as client:
        model: Any = SERVICES[server.url].backend(client.reconnect_config().server_id or "").sample.model
        client.fwd_bwd(grouped_batch())
        client.step()
        whole = model.model.norm.weight
        model.model.norm.weight = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        with witness.sees(WeightSyncError):
            client.sync_weights()
        model.model.norm.weight = whole
        assert client.status().sampler_version == 0
        assert client.sync_weights().weight_version == 1


@fault(
    "a weight sync is asked of a job that has no trainer",
    saw="InputError: sync_weights needs a job that trains, this one's kinds are ['sampling']; <what to do>",
)
def test_a_sync_without_two_sides_is_refused_at_once(server: Running, witness: Witness) -> None:
    with (
        create_arctic_rl_client(server.config(kinds=["sampling"]), blocking_calls=True) as client,
        witness.sees(InputError),
    ):
        client.sync_weights()
