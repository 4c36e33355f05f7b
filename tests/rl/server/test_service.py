"""Jobs, futures, order, retries, cancellation: the server without a wire."""

import threading
import time
from collections.abc import Generator
from typing import Any

import pytest

from arctic_platform.errors import (
    ArcticError,
    CallCancelledError,
    ConfigError,
    InputError,
    NotFoundError,
    ServerError,
    TransportError,
    WeightSyncError,
)
from arctic_platform.rl.protocol import (
    FwdBwdRequest,
    GenerateRequest,
    LogProbsRequest,
    Request,
    SamplingParams,
    StatusRequest,
    StepRequest,
)
from arctic_platform.rl.server import backend, calls, service
from arctic_platform.rl.server.calls import CallBook
from arctic_platform.rl.server.service import Service
from arctic_platform.rl.server.states import CallState, ErrorInfo
from tests.rl.engines.builders import config, grouped_batch

LONG = SamplingParams(n=8, max_tokens=3000, ignore_eos=True)


@pytest.fixture
def server() -> Generator[Service]:
    """An empty service."""
    running = Service()
    yield running
    running.close()


@pytest.fixture
def job(server: Service) -> str:
    """A loaded job of it."""
    job_id = server.create_job(config()).job_id
    assert server.job_info(job_id, None).state == "ready"
    return job_id


def finish(server: Service, job: str, call_id: str) -> CallState:
    state = server.poll(job, call_id, 30.0)
    assert not state.is_pending
    return state


def run(server: Service, job: str, request: Request, sequence: int | None = None, **options: Any) -> CallState:
    return finish(server, job, server.submit(job, request, sequence, **options))


class Gate:
    """Holds `fwd_bwd` of a job's trainer until it is opened."""

    def __init__(self, server: Service, job: str) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        trainer: Any = server.backend(job).train
        real = trainer.fwd_bwd

        def slow(*args: Any) -> Any:
            self.begun.set()
            self.go.wait(20)
            return real(*args)

        trainer.fwd_bwd = slow


def test_a_job_loads_in_the_background_and_then_answers(server: Service) -> None:
    info = server.create_job(config())
    assert info.state in ("loading", "ready")
    state = run(server, info.job_id, StatusRequest())
    assert (state.state, state.response.step) == ("done", 0)
    assert server.job_info(info.job_id).state == "ready"
    assert [one.job_id for one in server.jobs()] == [info.job_id]


def test_a_job_that_cannot_be_loaded_says_why_now_and_to_every_call(server: Service) -> None:
    job = server.create_job(config(model="no/such/folder")).job_id
    info = server.job_info(job, None)
    assert info.state == "failed"
    assert info.error is not None
    assert isinstance(info.error.to_error(), ConfigError)
    state = run(server, job, StatusRequest())
    assert state.error == info.error
    server.close_job(job)


def test_the_same_job_request_makes_one_job(server: Service) -> None:
    first = server.create_job(config(), request_id="a")
    assert server.create_job(config(), request_id="a").job_id == first.job_id
    assert server.create_job(config(), request_id="b").job_id != first.job_id


def test_jobs_are_limited_and_a_closed_one_makes_room() -> None:
    server = Service(max_jobs=1)
    job = server.create_job(config()).job_id
    with pytest.raises(TransportError, match="--max-jobs"):
        server.create_job(config())
    server.close_job(job)
    server.create_job(config())
    server.close()


def test_a_job_that_failed_takes_no_place_when_it_is_needed() -> None:
    server = Service(max_jobs=1)
    failed = server.create_job(config(model="no/such/folder")).job_id
    assert server.job_info(failed, None).state == "failed"
    job = server.create_job(config()).job_id
    assert [one.job_id for one in server.jobs()] == [job]
    server.close()


def test_a_model_is_loaded_between_the_calls_of_other_jobs_and_never_beside_one(server: Service, job: str) -> None:
    gate = Gate(server, job)
    server.submit(job, FwdBwdRequest(batch=grouped_batch()))
    gate.begun.wait(10)
    other = server.create_job(config(dtype="float64")).job_id
    assert server.job_info(other, 0.3).state == "loading"
    step = server.submit(job, StepRequest())
    assert server.poll(job, step).is_pending
    gate.go.set()
    assert server.job_info(other, None).state == "ready"
    assert finish(server, job, step).state == "done"


def test_what_breaks_while_loading_is_a_server_error(server: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "TorchTrainEngine", lambda *args: 1 / 0)
    info = server.job_info(server.create_job(config()).job_id, None)
    assert info.error is not None
    assert (info.error.kind, info.error.message) == ("ServerError", "ZeroDivisionError: division by zero")


def test_the_same_request_is_executed_once_and_answered_again(server: Service, job: str) -> None:
    run(server, job, FwdBwdRequest(batch=grouped_batch()))
    step = StepRequest()
    first = run(server, job, step, 0, client_id="a")
    again = run(server, job, step, 0, client_id="a")
    assert first.response is again.response
    assert run(server, job, StatusRequest()).response.step == 1


def test_a_retry_while_the_call_runs_joins_it(server: Service, job: str) -> None:
    gate = Gate(server, job)
    request = FwdBwdRequest(batch=grouped_batch())
    server.submit(job, request, 0, client_id="a")
    gate.begun.wait(10)
    server.submit(job, request, 0, client_id="a")
    gate.go.set()
    assert finish(server, job, request.request_id).state == "done"
    assert server.status().jobs[0].num_waiting == 0


def test_a_repeated_request_with_a_number_of_its_own_holds_nothing_up(server: Service, job: str) -> None:
    request = StatusRequest()
    for number in (0, 1, 1, 2):
        assert run(server, job, request, number, client_id="a").state == "done"
    assert run(server, job, StatusRequest(), 3, client_id="a").state == "done"


def test_a_failed_call_answers_its_retry_alike_and_may_be_made_anew(server: Service, job: str) -> None:
    step = StepRequest()
    failed = run(server, job, step, 0, client_id="a")
    assert failed.error is not None
    assert failed.error.kind == "InputError"
    run(server, job, FwdBwdRequest(batch=grouped_batch()), 1, client_id="a")
    assert run(server, job, step, 0, client_id="a").error == failed.error
    assert run(server, job, step, 2, client_id="a").state == "done"


def test_an_id_belongs_to_one_kind_of_call(server: Service, job: str) -> None:
    run(server, job, StatusRequest(request_id="x"))
    with pytest.raises(InputError, match="belongs to a status call"):
        server.submit(job, StepRequest(request_id="x"))


def test_calls_run_in_the_order_of_their_numbers_however_they_arrive(server: Service, job: str) -> None:
    requests: list[Request] = []
    for _ in range(3):
        requests += [FwdBwdRequest(batch=grouped_batch()), StepRequest()]
    for number in (5, 3, 4, 1, 2, 0):
        server.submit(job, requests[number], number, client_id="a")
    steps = [finish(server, job, request.request_id) for request in requests]
    assert [state.response.metrics.get("step") for state in steps[1::2]] == [1.0, 2.0, 3.0]


def test_each_client_has_numbers_of_its_own(server: Service, job: str) -> None:
    for client in ("a", "b"):
        for number in range(2):
            assert run(server, job, StatusRequest(), number, client_id=client).state == "done"
    assert server.status().jobs[0].num_clients == 2
    with pytest.raises(InputError, match="the next is 2"):
        server.submit(job, StatusRequest(), 1, client_id="a")
    with pytest.raises(InputError, match="negative"):
        server.submit(job, StatusRequest(), -1, client_id="a")


def test_a_call_whose_predecessor_never_comes_fails_with_the_reason(
    server: Service, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "GAP_SECONDS", 0.05)
    late = server.submit(job, StatusRequest(), 3, client_id="a")
    assert "has not arrived" in server.poll(job, late).reason
    next_one = server.submit(job, StatusRequest(), 4, client_id="a")
    time.sleep(0.06)
    state = server.poll(job, late, 0.01)
    assert state.error is not None
    assert "call 0 never arrived" in state.error.message
    assert finish(server, job, next_one).state == "done"


def test_a_call_whose_predecessor_never_comes_delays_no_drain(server: Service, job: str) -> None:
    late = server.submit(job, StatusRequest(), 3, client_id="a")
    assert server.drain(5.0)
    assert "never arrived" in str(finish(server, job, late).error)


def test_a_job_whose_client_left_in_the_middle_of_its_numbers_becomes_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "GAP_SECONDS", 0.05)
    server = Service(idle_seconds=0.2)
    job = server.create_job(config()).job_id
    server.job_info(job, None)
    server.submit(job, StatusRequest(), 3, client_id="gone")
    deadline = time.monotonic() + 20
    while server.jobs() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not server.jobs()
    server.close()


def test_a_call_that_arrives_while_it_is_cancelled_as_unseen_is_the_one_cancelled(server: Service, job: str) -> None:
    gate = Gate(server, job)
    server.submit(job, FwdBwdRequest(batch=grouped_batch()))
    gate.begun.wait(10)
    step = StepRequest()
    server.submit(job, step, 0, client_id="a")
    cancelled = server._job(job).cancel_unseen(calls.Call(step.request_id, "call", None, "a", 0))
    gate.go.set()
    assert cancelled.method == "step"
    assert isinstance(cancelled.error, CallCancelledError)


def test_a_waiting_call_can_be_taken_back(server: Service, job: str) -> None:
    gate = Gate(server, job)
    server.submit(job, FwdBwdRequest(batch=grouped_batch()))
    step = server.submit(job, StepRequest())
    gate.begun.wait(10)
    waiting = server.poll(job, step)
    assert (waiting.state, waiting.calls_ahead) == ("waiting", 1)
    assert "fwd_bwd runs since" in waiting.reason
    state = server.cancel(job, step)
    assert state.error is not None
    assert isinstance(state.error.to_error(), CallCancelledError)
    assert finish(server, job, step).state == "failed"
    gate.go.set()
    assert run(server, job, StatusRequest()).response.step == 0


def test_a_training_call_that_began_is_finished_whole(server: Service, job: str) -> None:
    gate = Gate(server, job)
    call = server.submit(job, FwdBwdRequest(batch=grouped_batch()))
    gate.begun.wait(10)
    assert server.cancel(job, call).state == "running"
    gate.go.set()
    assert finish(server, job, call).state == "done"


def test_sampling_stops_when_cancelled_and_reports_how_far_it_was(server: Service, job: str) -> None:
    call = server.submit(job, GenerateRequest(prompts=[[5, 6, 7]], sampling_params=LONG))
    deadline = time.monotonic() + 10
    while server.poll(job, call).num_total == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.poll(job, call).num_total == 8
    assert "of 8 rollouts finished" in server.poll(job, call).reason
    server.cancel(job, call)
    state = finish(server, job, call)
    assert state.error is not None
    assert state.error.kind == "CallCancelledError"
    assert server.backend(job).num_generate_calls == 0


def test_a_call_cancelled_before_it_arrives_is_refused_then_and_holds_nothing_up(server: Service, job: str) -> None:
    early = StepRequest()
    server.cancel(job, early.request_id, 0, client_id="a", method="step")
    assert run(server, job, StatusRequest(), 1, client_id="a").state == "done"
    assert run(server, job, early, 0, client_id="a").state == "failed"
    with pytest.raises(NotFoundError):
        server.cancel(job, "never")


def test_unknown_jobs_and_calls_are_named(server: Service, job: str) -> None:
    with pytest.raises(NotFoundError, match="no job 'x'"):
        server.submit("x", StatusRequest())
    with pytest.raises(NotFoundError, match="no call 'y'"):
        server.poll(job, "y")
    server.close_job(job)
    with pytest.raises(NotFoundError):
        server.submit(job, StatusRequest())


def test_what_breaks_in_the_server_is_a_server_error_and_the_job_lives_on(
    server: Service, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer: Any = server.backend(job).train
    trainer.weight_norm = lambda: 1 / 0
    from arctic_platform.rl.protocol import WeightNormRequest

    state = run(server, job, WeightNormRequest())
    assert state.error is not None
    assert isinstance(state.error.to_error(), ServerError)
    assert "ZeroDivisionError" in state.error.message
    assert "weight_norm failed" in caplog.text
    assert run(server, job, StatusRequest()).state == "done"


def test_jobs_do_not_mix(server: Service) -> None:
    jobs = [server.create_job(config(seed=seed)).job_id for seed in (0, 0, 1)]
    for number in range(3):
        for job in jobs[1:]:
            server.submit(job, FwdBwdRequest(batch=grouped_batch(number)))
            server.submit(job, StepRequest())
    alone = Service()
    twin = alone.create_job(config(seed=1)).job_id
    for number in range(3):
        alone.submit(twin, FwdBwdRequest(batch=grouped_batch(number)))
        alone.submit(twin, StepRequest())
    score = LogProbsRequest(batch=grouped_batch())
    scores = [run(server, job, score).response.logprobs for job in jobs]
    assert run(alone, twin, score).response.logprobs == scores[2]
    assert len({str(one) for one in scores}) == 3
    assert [run(server, job, StatusRequest()).response.step for job in jobs] == [0, 3, 3]
    alone.close()


@pytest.mark.parametrize(
    ("kinds", "works", "refused"),
    [
        (("sampling",), GenerateRequest(prompts=[[5]]), LogProbsRequest(batch=grouped_batch())),
        (("log_prob",), LogProbsRequest(batch=grouped_batch()), FwdBwdRequest(batch=grouped_batch())),
        (("training",), FwdBwdRequest(batch=grouped_batch()), GenerateRequest(prompts=[[5]])),
    ],
)
def test_a_job_does_what_its_kinds_say(server: Service, kinds: Any, works: Request, refused: Request) -> None:
    job = server.create_job(config(), kinds).job_id
    assert run(server, job, works).state == "done"
    state = run(server, job, refused)
    assert state.error is not None
    assert isinstance(state.error.to_error(), InputError)
    assert "kinds" in state.error.message
    status = run(server, job, StatusRequest()).response
    assert (status.training_engine is None, status.sampling_engine is None) == (
        kinds == ("sampling",),
        kinds != ("sampling",),
    )


def test_status_says_whether_tokens_are_shared_and_why_not(server: Service) -> None:
    job = server.create_job(config()).job_id
    off = server.create_job(config(zorro_train={"enable": False})).job_id

    def effect(job: str) -> str:
        run(server, job, StatusRequest())
        loaded = next(one.backend for one in server.status().jobs if one.info.job_id == job)
        assert loaded is not None
        return loaded.zorro_train_effect

    assert effect(job) == "on; no batch was run yet"
    assert effect(off) == "off: zorro_train.enable is false"
    run(server, job, LogProbsRequest(batch=grouped_batch()))
    assert effect(job).startswith("on: the last batch computed")
    lonely = {"prompts": [[1, 2, 3], [4, 5, 6]], "responses": [[7], [8]]}
    run(server, job, LogProbsRequest(batch=lonely))
    assert "less than zorro_train.min_saving=0.05" in effect(job)
    run(server, job, LogProbsRequest(batch=grouped_batch(), processing={"zorro": False}))
    assert "asked for zorro=false" in effect(job)


def test_draining_refuses_new_work_finishes_the_old_and_still_answers(server: Service, job: str) -> None:
    gate = Gate(server, job)
    call = server.submit(job, FwdBwdRequest(batch=grouped_batch()))
    gate.begun.wait(10)
    assert not server.drain(0.01)
    assert server.status().state == "draining"
    with pytest.raises(TransportError, match="stopping"):
        server.submit(job, StepRequest())
    with pytest.raises(TransportError, match="stopping"):
        server.create_job(config())
    gate.go.set()
    assert server.drain(10)
    assert finish(server, job, call).state == "done"


def test_closing_stops_sampling_and_takes_back_what_waits(server: Service, job: str) -> None:
    first = server.submit(job, GenerateRequest(prompts=[[5]], sampling_params=LONG))
    server.submit(job, StepRequest())
    assert server.poll(job, first, 0.05).is_pending
    started = time.monotonic()
    server.close()
    assert time.monotonic() - started < 20
    assert server.jobs() == []


def test_an_idle_job_is_closed_and_a_busy_one_is_not() -> None:
    server = Service(idle_seconds=0.2)
    idle = server.create_job(config()).job_id
    busy = server.create_job(config()).job_id
    server.job_info(idle, None)
    call = server.submit(busy, GenerateRequest(prompts=[[5]], sampling_params=LONG))
    deadline = time.monotonic() + 20
    while len(server.jobs()) > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [one.job_id for one in server.jobs()] == [busy]
    server.cancel(busy, call)
    server.close()


def test_answers_are_kept_until_delivered_and_then_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "ANSWERS_KEPT", 2)
    server = Service()
    job = server.create_job(config()).job_id
    asked = [StatusRequest() for _ in range(6)]
    for request in asked:
        server.submit(job, request)
    assert all(finish(server, job, request.request_id).state == "done" for request in asked)
    old = finish(server, job, asked[0].request_id)
    assert old.error is not None
    assert "no longer kept" in old.error.message
    assert run(server, job, asked[0]).error == old.error
    assert finish(server, job, asked[-1].request_id).state == "done"
    server.close()


def test_answers_that_nobody_fetches_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "UNFETCHED_KEPT", 2)
    book = CallBook()
    made = [calls.Call(str(number), "status", StatusRequest()) for number in range(6)]
    for call in made[:5]:
        book.admit(call)
        book.finish(call)
        call.future.set_exception(InputError("no"))
    book.admit(made[5])
    assert [call.is_forgotten for call in made] == [True, True, True, False, False, False]
    assert book.num_unfetched == 2


def test_a_failed_call_that_is_made_anew_is_not_forgotten_in_place_of_the_old_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls, "ANSWERS_KEPT", 1)
    book = CallBook()
    made = [calls.Call(call_id, "status", StatusRequest()) for call_id in ("a", "a", "b")]
    for call in made:
        assert book.admit(call)[0] is call
        book.finish(call)
        call.future.set_exception(InputError("no"))
        if call is not made[1]:
            book.deliver(call)
    assert not made[1].is_forgotten


def test_the_book_keeps_a_bounded_number_of_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "IDS_KEPT", 5)
    book = CallBook()
    for number in range(20):
        call, due = book.admit(calls.Call(str(number), "status", StatusRequest()))
        assert due == [call]
        book.finish(call)
        call.future.set_exception(InputError("no"))
        book.deliver(call)
    assert book.find("19")
    with pytest.raises(NotFoundError):
        book.find("3")


@pytest.mark.parametrize("name", sorted(one.__name__ for one in ArcticError.__subclasses__()))
def test_every_error_travels_as_its_own_class(name: str) -> None:
    from arctic_platform import errors

    info = ErrorInfo.of(getattr(errors, name)("a\nb"))
    assert type(info.to_error()).__name__ == name
    assert str(info.to_error()) == "a b"


def test_an_error_of_a_private_class_travels_as_the_public_one_that_it_is() -> None:
    class GaveUpError(WeightSyncError):
        def __init__(self, name: str, reason: str) -> None:
            super().__init__(f"{name}: {reason}")

    error = ErrorInfo.of(GaveUpError("receiver", "no memory")).to_error()
    assert (type(error), str(error)) == (WeightSyncError, "receiver: no memory")


def test_a_class_of_a_newer_version_is_a_server_error() -> None:
    assert isinstance(ErrorInfo(kind="FutureError", message="x").to_error(), ServerError)
    assert isinstance(ErrorInfo(kind="ArcticErro", message="x").to_error(), ServerError)
