"""Jobs and futures: the server without a wire. HTTP, Ray and the in-process transport all stand on it.

    create_job(config) -> JobInfo                  submit(job, request) -> call id     poll(job, call) -> CallState
    job_info(job), jobs(), close_job(job)          cancel(job, call)                   status(), drain(), close()

A job is one loaded backend and one worker thread. Its calls run one at a time, in the order in which they were
submitted; where a client numbers its calls, in the order of its numbers, however they arrive. The same request id is
the same call, executed once. Calls of different jobs run side by side and share nothing.

Every method may be called from any thread. Importing this module loads neither torch nor a web server.
"""

import asyncio
import contextlib
import importlib.metadata
import logging
import platform
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import arctic_platform
from arctic_platform.errors import (
    ArcticError,
    CallCancelledError,
    InputError,
    MissingDependencyError,
    NotFoundError,
    ServerError,
    TransportError,
)
from arctic_platform.rl.config import ArcticRLClientConfig, Kind
from arctic_platform.rl.protocol import GenerateRequest, Request, Response, StatusResponse
from arctic_platform.rl.server.calls import Call, CallBook, Stopped
from arctic_platform.rl.server.gate import GATE
from arctic_platform.rl.server.states import CallState, ErrorInfo, JobInfo, JobStatus, OnProgress, ServiceStatus

if TYPE_CHECKING:
    from arctic_platform.rl.server.backend import Backend

log = logging.getLogger(__name__)

MAX_JOBS = 8
GAP_SECONDS = 30.0
PROGRESS_SECONDS = 0.5
CLOSED_JOBS_KEPT = 256
COMPUTING_PACKAGES = ("torch", "transformers", "numpy")

Observer = Callable[[str, Call, float], None]
"""Told of every call that ran, with its job's id and its seconds; from the worker's thread."""


class Job:
    """One backend, the thread that runs it, and its calls."""

    def __init__(self, config: ArcticRLClientConfig, kinds: tuple[Kind, ...], observer: Observer) -> None:
        self.job_id = uuid.uuid4().hex
        self.config = config
        self.kinds = kinds
        self.created_at = self.used_at = time.monotonic()
        self.status: StatusResponse | None = None
        self._waits_for = ""
        self.is_closed = False
        self._observer = observer
        self._book = CallBook()
        self._lock = threading.RLock()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=f"arctic-job-{self.job_id[:8]}")
        self.loading: Future[Backend] = self._worker.submit(self._load)

    def info(self) -> JobInfo:
        """Where the job stands."""
        error = self.loading.exception() if self.loading.done() and not self.loading.cancelled() else None
        state = "closed" if self.is_closed else "failed" if error else "ready" if self.loading.done() else "loading"
        return JobInfo(
            job_id=self.job_id,
            state=state,
            kinds=self.kinds,
            model=self.config.model,
            seconds=time.monotonic() - self.created_at,
            waits_for="" if self.loading.done() else self._waits_for,
            error=None if error is None else ErrorInfo.of(error),
        )

    def submit(self, call: Call) -> Call:
        """Queue the call, or find the one that it repeats; the number of one that is refused is used up too.

        Raises NotFoundError once the job is closed, and what the book raises.
        """
        with self._lock:
            self.used_at = time.monotonic()
            if self.is_closed:
                raise NotFoundError(f"job {self.job_id} was closed; create a new one")
            try:
                admitted, due = self._book.admit(call)
            except ArcticError:
                self._enqueue(self._book.pass_over(call))
                raise
            self._enqueue(due)
            return admitted

    def find(self, call_id: str) -> Call:
        """The call of this id; asking for it keeps the job from being idle. Raises NotFoundError."""
        with self._lock:
            self.used_at = time.monotonic()
            return self._book.find(call_id)

    def state(self, call: Call) -> CallState:
        """Where a call stands. An answer that is handed over counts as delivered."""
        with self._lock:
            self._give_up_if_alone(call)
            if call.future.done():
                error = call.error
                self._book.deliver(call)
                return CallState(
                    call_id=call.call_id,
                    method=call.method,
                    state="failed" if error else "done",
                    seconds=time.monotonic() - call.submitted_at,
                    num_finished=call.num_finished,
                    num_total=call.num_total,
                    error=ErrorInfo.of(error) if error else None,
                    response=None if error else call.future.result(),
                )
            return self._pending_state(call)

    def deliver(self, call: Call) -> None:
        """Its answer is in the caller's hands."""
        with self._lock:
            self._book.deliver(call)

    def cancel(self, call: Call) -> None:
        """Take it back if it waits; stop it if it samples; a training call that began runs to its end."""
        call.stop.set()
        with self._lock:
            if call.future.cancel():
                call.future.set_running_or_notify_cancel()
                self._book.finish(call)

    def cancel_unseen(self, call: Call) -> Call:
        """Cancel a call that has not arrived: its number is used up, and it is refused when it comes.

        Returns the call itself where it arrived at this very moment.
        """
        with self._lock:
            if (arrived := self._book.known(call.call_id)) is not None:
                self.cancel(arrived)
                return arrived
            admitted, due = self._book.admit(call)
            self.cancel(admitted)
            self._enqueue([one for one in due if one is not admitted])
            return admitted

    def job_status(self) -> JobStatus:
        """Everything about the job."""
        with self._lock:
            calls = list(self._book.open.values())
            running = next((call for call in calls if call.future.running()), None)
            return JobStatus(
                info=self.info(),
                backend=self._backend_status(),
                running=self._pending_state(running) if running else None,
                num_waiting=len(calls) - (running is not None),
                num_clients=self._book.num_clients,
                idle_seconds=0.0 if calls else time.monotonic() - self.used_at,
            )

    def close(self) -> None:
        """Take back what waits, stop what samples, let a training call end, and free the models."""
        with self._lock:
            self.is_closed = True
            calls = list(self._book.open.values())
            for call in calls:
                self.cancel(call)
        self._worker.shutdown(wait=True, cancel_futures=True)
        loading, self.loading = self.loading, Future()
        if loading.done() and not loading.cancelled() and loading.exception() is None:
            loading.result().close()

    def _backend_status(self) -> StatusResponse | None:
        """As of the last call, and whether a process was lost since."""
        is_loaded = self.loading.done() and not self.loading.cancelled() and self.loading.exception() is None
        if self.status is None or not is_loaded:
            return self.status
        return self.status.model_copy(update={"lost": self.loading.result().lost})

    def num_unfetched(self) -> int:
        """Answers that nobody has asked for yet."""
        with self._lock:
            return self._book.num_unfetched

    def give_up_held(self, seconds: float) -> None:
        """Fail the calls whose predecessors have not come for so long: their client may be gone and ask no more."""
        with self._lock:
            for call in list(self._book.open.values()):
                if self._book.is_held(call) and time.monotonic() - call.submitted_at >= seconds:
                    self._enqueue(self._book.give_up(call))

    def open_futures(self) -> list["Future[Response]"]:
        """Of the calls that run or wait."""
        with self._lock:
            return [call.future for call in self._book.open.values()]

    def _note_wait(self, text: str) -> None:
        self._waits_for = text

    def _load(self) -> "Backend":
        try:
            from arctic_platform.rl.server.backend import create_backend
        except ModuleNotFoundError as error:
            raise MissingDependencyError(
                f"loading a model needs {error.name}; install it with: pip install 'zorro-rl[torch]'"
            ) from error
        try:
            backend = create_backend(self.config, self.kinds, on_wait=self._note_wait)
        except ArcticError:
            raise
        except Exception as error:
            log.exception("loading failed", extra={"job_id": self.job_id})
            raise ServerError(ErrorInfo.of(error).message) from error
        self.status = backend.status()
        return backend

    def _enqueue(self, calls: Sequence[Call]) -> None:
        for call in calls:
            self._worker.submit(self._run, call)

    def _run(self, call: Call) -> None:
        with GATE.call():
            self._run_beside_others(call)

    def _run_beside_others(self, call: Call) -> None:
        with self._lock:
            if call.future.done():
                return
            call.future.set_running_or_notify_cancel()
        call.started_at = time.monotonic()
        result: Response | None = None
        try:
            result = self._execute(call)
        except Stopped:
            fault: BaseException = CallCancelledError(
                f"{call.method} was cancelled after {call.num_finished} of {call.num_total} rollouts"
            )
        except ArcticError as error:
            fault = error
        except Exception as error:
            log.exception("%s failed", call.method, extra={"job_id": self.job_id, "request_id": call.call_id})
            fault = ServerError(ErrorInfo.of(error).message)
            fault.__cause__ = error
        with self._lock:
            self._book.finish(call)
            self.used_at = time.monotonic()
        if result is not None:
            call.future.set_result(result)
        else:
            call.future.set_exception(fault)
        self._observer(self.job_id, call, time.monotonic() - call.started_at)

    def _execute(self, call: Call) -> Response:
        assert call.request is not None
        backend = self.loading.result()
        progress = call.note_progress if isinstance(call.request, GenerateRequest) else None
        try:
            return backend.handle(call.request, progress)
        finally:
            self.status = backend.status()

    def _give_up_if_alone(self, call: Call) -> None:
        """A call whose predecessors never arrive must not wait for ever."""
        if self._book.is_held(call) and time.monotonic() - call.submitted_at > GAP_SECONDS:
            self._enqueue(self._book.give_up(call))

    def _pending_state(self, call: Call) -> CallState:
        before = [one for one in self._book.open.values() if one is not call and one.submitted_at <= call.submitted_at]
        is_running = call.future.running()
        return CallState(
            call_id=call.call_id,
            method=call.method,
            state="running" if is_running else "waiting",
            seconds=time.monotonic() - call.submitted_at,
            calls_ahead=0 if is_running else len(before),
            num_finished=call.num_finished,
            num_total=call.num_total,
            reason=self._reason(call, before),
        )

    def _reason(self, call: Call, before: list[Call]) -> str:
        now = time.monotonic()
        if call.started_at is not None:
            part = f", {call.num_finished} of {call.num_total} rollouts finished" if call.num_total else ""
            return f"it runs since {now - call.started_at:.1f} s{part}"
        if not self.loading.done():
            return f"the model is being loaded since {now - self.created_at:.1f} s"
        if self._book.is_held(call):
            return "a call that its client numbered before it has not arrived"
        running = next((one for one in before if one.started_at is not None), None)
        if running is None or running.started_at is None:
            return "it is about to run, unless a model is being loaded for somebody"
        return f"it waits behind {len(before)}: {running.method} runs since {now - running.started_at:.1f} s"


class Service:
    """Any number of jobs and of clients.

    max_jobs: jobs at the same time. idle_seconds: close a job that nobody called or asked about for so long, and that
    has nothing to do; none: keep it until `close_job`.
    """

    def __init__(self, *, max_jobs: int = MAX_JOBS, idle_seconds: float | None = None) -> None:
        self.max_jobs = max_jobs
        self.idle_seconds = idle_seconds
        self.observers: list[Observer] = []
        self._started_at = time.monotonic()
        self._jobs: dict[str, Job] = {}
        self._requested: dict[str, str] = {}
        self._lock = threading.Lock()
        self._is_draining = False
        self._closed = threading.Event()
        if idle_seconds is not None:
            threading.Thread(target=self._close_idle_jobs, name="arctic-idle-jobs", daemon=True).start()

    @property
    def is_draining(self) -> bool:
        """Whether new jobs and calls are refused."""
        return self._is_draining

    def create_job(
        self, config: ArcticRLClientConfig, kinds: Sequence[Kind] | None = None, *, request_id: str | None = None
    ) -> JobInfo:
        """Start loading; `job_info` says when it is ready. The same request id again: the same job again.

        Raises TransportError when `max_jobs` are there, and while draining.
        """
        with self._lock:
            self._refuse_if_stopping()
            known = self._jobs.get(self._requested.get(request_id or "", ""))
            if known is not None:
                return known.info()
            self._drop_failed_jobs()
            if len(self._jobs) >= self.max_jobs:
                raise TransportError(
                    f"{len(self._jobs)} jobs run here and no more are allowed; close one, or serve with more --max-jobs"
                )
            job = Job(config, tuple(kinds or config.kinds), self._observe)
            self._jobs[job.job_id] = job
            if request_id is not None:
                self._requested[request_id] = job.job_id
                while len(self._requested) > CLOSED_JOBS_KEPT:
                    self._requested.pop(next(iter(self._requested)))
        log.info("job created", extra={"job_id": job.job_id, "model": config.model, "kinds": ",".join(job.kinds)})
        return job.info()

    def job_info(self, job_id: str, wait_seconds: float | None = 0.0) -> JobInfo:
        """Where a job stands, after at most so long (none: until it is loaded). Raises NotFoundError."""
        job = self._job(job_id)
        wait([job.loading], wait_seconds)
        return job.info()

    async def job_info_async(self, job_id: str, wait_seconds: float = 0.0) -> JobInfo:
        """`job_info` without a thread that waits."""
        job = self._job(job_id)
        await _wait_async(job.loading, wait_seconds)
        return job.info()

    def jobs(self) -> list[JobInfo]:
        """All jobs, oldest first."""
        with self._lock:
            return [job.info() for job in self._jobs.values()]

    def backend(self, job_id: str) -> "Backend":
        """The loaded backend of a job, for code in this process. Raises what loading raised."""
        return self._job(job_id).loading.result()

    def submit(self, job_id: str, request: Request, sequence: int | None = None, *, client_id: str = "") -> str:
        """Queue a call and return its id, the request's own. The same request again is the same call again.

        sequence: 0, 1, 2 ... of this `client_id`; calls run in this order. None: in order of arrival.
        Raises NotFoundError, InputError for a number that was used, TransportError while draining.
        """
        return self._submit(self._job(job_id), request, sequence, client_id).call_id

    async def call(self, job_id: str, request: Request, on_progress: OnProgress | None = None) -> Response:
        """Submit and wait, for code in this process; cancelling the task cancels the call.

        Raises an ArcticError, whatever went wrong.
        """
        job = self._job(job_id)
        call = self._submit(job, request, None, "")
        try:
            while on_progress and not call.future.done():
                on_progress(job.state(call))
                await _wait_async(call.future, PROGRESS_SECONDS)
            await _wait_async(call.future, None)
        except asyncio.CancelledError:
            job.cancel(call)
            raise
        error = call.error
        response = None if error else call.future.result()
        job.deliver(call)
        if response is None:
            raise error or ServerError(f"{request.method} ended without an answer")
        return response

    def poll(self, job_id: str, call_id: str, wait_seconds: float = 0.0) -> CallState:
        """Where a call stands, after at most so long. Raises NotFoundError."""
        job = self._job(job_id)
        call = job.find(call_id)
        wait([call.future], wait_seconds)
        return job.state(call)

    async def poll_async(self, job_id: str, call_id: str, wait_seconds: float = 0.0) -> CallState:
        """`poll` without a thread that waits."""
        job = self._job(job_id)
        call = job.find(call_id)
        await _wait_async(call.future, wait_seconds)
        return job.state(call)

    def cancel(
        self, job_id: str, call_id: str, sequence: int | None = None, *, client_id: str = "", method: str = "call"
    ) -> CallState:
        """Take a call back if it waits, stop it if it samples; a training call that began runs to its end.

        With the sequence number, also a call that has not arrived: it is refused when it does. Raises NotFoundError.
        """
        job = self._job(job_id)
        try:
            call = job.find(call_id)
            job.cancel(call)
        except NotFoundError:
            if sequence is None:
                raise
            call = job.cancel_unseen(Call(call_id, method, None, client_id, sequence))
        return job.state(call)

    def close_job(self, job_id: str) -> None:
        """End a job and free its memory, after a training call that runs. Raises NotFoundError."""
        job = self._job(job_id)
        job.close()
        with self._lock:
            self._jobs.pop(job_id, None)
        log.info("job closed", extra={"job_id": job_id})

    def status(self) -> ServiceStatus:
        """What is loaded, what is in effect, what runs and what waits."""
        with self._lock:
            jobs = list(self._jobs.values())
        return ServiceStatus(
            state="closed" if self._closed.is_set() else "draining" if self._is_draining else "serving",
            version=arctic_platform.__version__,
            versions={"python": platform.python_version()} | _versions(),
            seconds=time.monotonic() - self._started_at,
            max_jobs=self.max_jobs,
            jobs=tuple(job.job_status() for job in jobs),
        )

    def drain(self, timeout: float | None = None) -> bool:
        """Refuse new jobs and calls and wait for those that are there; returns whether all of them ended in time.

        Answers can still be fetched afterwards; `close` ends that.
        """
        self._is_draining = True
        with self._lock:
            for job in self._jobs.values():
                job.give_up_held(0.0)  # what they wait for is refused from now on
            futures = [future for job in self._jobs.values() for future in job.open_futures()]
        return not wait(futures, timeout).not_done

    def num_unfetched(self) -> int:
        """Answers that nobody has asked for yet."""
        with self._lock:
            return sum(job.num_unfetched() for job in self._jobs.values())

    def close(self) -> None:
        """Close every job. Closing twice is fine."""
        self._is_draining = True
        self._closed.set()
        with self._lock:
            jobs = list(self._jobs.values())
            self._jobs.clear()
        for job in jobs:
            job.close()

    def _submit(self, job: Job, request: Request, sequence: int | None, client_id: str) -> Call:
        with self._lock:
            self._refuse_if_stopping()
        if sequence is not None and sequence < 0:
            raise InputError(f"sequence number {sequence} is negative; number calls 0, 1, 2 ...")
        return job.submit(Call(request.request_id, request.method, request, client_id, sequence))

    def _job(self, job_id: str) -> Job:
        with self._lock:
            if job_id not in self._jobs:
                raise NotFoundError(f"there is no job {job_id[:64]!r} here; it was closed, or is another server's")
            return self._jobs[job_id]

    def _drop_failed_jobs(self) -> None:
        """Those that could not be loaded take no place when it is needed."""
        failed = [job for job in self._jobs.values() if job.info().state == "failed"]
        for job in failed[: max(len(self._jobs) - self.max_jobs + 1, 0)]:
            del self._jobs[job.job_id]
            threading.Thread(target=job.close, name="arctic-failed-job").start()  # its last calls may take a moment

    def _refuse_if_stopping(self) -> None:
        if self._is_draining:
            raise TransportError("this server is stopping and takes no new work; connect to another, or wait for it")

    def _observe(self, job_id: str, call: Call, seconds: float) -> None:
        error = call.error
        which = {"job_id": job_id, "request_id": call.call_id, "call": call.method, "seconds": round(seconds, 4)}
        log.info("call ended", extra=which | {"outcome": type(error).__name__ if error else "done"})
        for observer in self.observers:
            observer(job_id, call, seconds)

    def _close_idle_jobs(self) -> None:
        assert self.idle_seconds is not None
        while not self._closed.wait(min(self.idle_seconds / 4, 10.0)):
            with self._lock:
                jobs = list(self._jobs.values())
            for job in jobs:
                job.give_up_held(GAP_SECONDS)
                status = job.job_status()
                if status.idle_seconds > self.idle_seconds and status.info.state != "loading":
                    log.warning("job was idle for too long", extra={"job_id": job.job_id})
                    with contextlib.suppress(NotFoundError):  # somebody else closed it at this very moment
                        self.close_job(job.job_id)


async def _wait_async(future: "Future[Any]", seconds: float | None) -> None:
    """Until the future is done, or so long; the future itself is left alone."""
    if future.done() or (seconds is not None and seconds <= 0):
        return
    loop, is_done = asyncio.get_running_loop(), asyncio.Event()
    future.add_done_callback(lambda _: _call_soon(loop, is_done.set))
    try:
        async with asyncio.timeout(seconds):
            await is_done.wait()
    except TimeoutError:
        return


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(function)


def _versions() -> dict[str, str]:
    found = {}
    for name in COMPUTING_PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
