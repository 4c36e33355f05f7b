"""Tokens as they come: one thread steps the sampler, any number of coroutines read what is theirs."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from arctic_platform.errors import InputError
from arctic_platform.rl.zorro_inference.requests import SampleRequest, TokenDelta
from arctic_platform.rl.zorro_inference.sampler import Sampler

T = TypeVar("T")
Put = Callable[[TokenDelta | BaseException], None]


class AsyncSampler:
    """Serves a sampler to coroutines. While it is open only its own thread touches the sampler; `close` ends it.

    All methods may be called from any thread, `stream` from any event loop.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._readers: dict[str, Put] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    async def stream(self, request: SampleRequest) -> AsyncIterator[TokenDelta]:
        """The deltas of a request until all its rollouts have finished; closing the iterator aborts the request.

        Raises InputError for a request that cannot be sampled, and what a step raises.
        """
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue()

        def put(item: TokenDelta | BaseException) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(arrived.put_nowait, item)

        num_open = request.params.n
        opened = self.submit(lambda sampler: self._open(sampler, request, put))
        try:
            await asyncio.wrap_future(opened)
            while num_open:
                item = await arrived.get()
                if isinstance(item, BaseException):
                    num_open = 0
                    raise item
                num_open -= item.finish_reason is not None
                yield item
        finally:
            if not self._is_closed:
                self.submit(lambda sampler: self._end(sampler, request.request_id, put))

    def submit(self, function: Callable[[Sampler], T]) -> Future[T]:
        """Run `function(sampler)` between two steps: pause, resume, update the weights, reset the cache, read stats.

        Raises InputError where the sampler was closed.
        """
        future: Future[T] = Future()

        def job() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(self.sampler))
                except Exception as error:
                    future.set_exception(error)

        with self._lock:
            if self._is_closed:
                raise InputError("the sampler was closed; open another")
            self._jobs.put(job)
        return future

    def close(self) -> None:
        """End the thread; requests are aborted, and their streams raise InputError."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._jobs.put(None)
        self._thread.join()

    def _open(self, sampler: Sampler, request: SampleRequest, put: Put) -> None:
        sampler.add(request)
        self._readers[request.request_id] = put

    def _end(self, sampler: Sampler, request_id: str, put: Put) -> None:
        """The reader is done, or went away before its rollouts were."""
        if self._readers.get(request_id) is put:
            del self._readers[request_id]
            sampler.abort(request_id)

    def _run(self) -> None:
        """Jobs first; with nothing to step, wait for one. The model is the sampler's while there is work."""
        while self._do_jobs():
            try:
                with self.sampler.session():
                    while self.sampler.has_work and self._jobs.empty():
                        self._step()
            except Exception as error:
                self._fail_all(error)

    def _do_jobs(self) -> bool:
        """False when the sampler is to be closed."""
        while not (self.sampler.has_work and self._jobs.empty()):
            job = self._jobs.get()
            if job is None:
                self._fail_all(InputError("the sampler was closed"))
                return False
            job()
        return True

    def _step(self) -> None:
        for delta in self.sampler.step():
            put = self._readers.get(delta.request_id)
            if put is not None:
                put(delta)

    def _fail_all(self, error: Exception) -> None:
        readers, self._readers = self._readers, {}
        for request_id, put in readers.items():
            put(error)
            with suppress(Exception):  # the same fault again, while its last text is read; nothing is held by then
                self.sampler.abort(request_id)
