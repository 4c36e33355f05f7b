"""How a run outlives what it runs on: a process of the trainer or the sampler, or the whole server.

    a process is lost  -> the job starts its group anew and loads the newest checkpoint
    the server is lost -> it is sought for `retry_timeout`, a new job loads the newest checkpoint
    no checkpoint yet  -> a new job, from the beginning
    a sync failed      -> it is made again, since the sampler kept its weights; no step is lost

Everything random is a function of the seed and the step, so the run has the losses of one that nothing befell.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from arctic_platform.errors import (
    AccessError,
    ArcticError,
    CallTimeoutError,
    NotFoundError,
    TransportError,
    WeightSyncError,
    WorkerLostError,
)
from arctic_platform.rl.client import ArcticRLClient
from arctic_platform.rl.progress import StopRequest, View
from arctic_platform.rl.records import Restart
from arctic_platform.rl.run_folder import RunFolder

SERVER_SECONDS = 60.0
PAUSE_SECONDS = 0.5
SYNC_RETRIES = 2
"""How often a call whose weight sync failed is made again, before the run ends with its error."""

T = TypeVar("T")
Connect = Callable[[], ArcticRLClient]


def is_loss(error: ArcticError) -> bool:
    """Whether something that the run needs is gone; a call that took too long, or a wrong key, is none of that."""
    is_gone = isinstance(error, (WorkerLostError, NotFoundError, TransportError))
    return is_gone and not isinstance(error, (CallTimeoutError, AccessError))


async def with_synced_weights(call: Callable[[], Awaitable[T]], view: View, stop: StopRequest) -> T:
    """What `call` returns, one that brings the trainer's weights to the sampler and may be made again.

    Raises the WeightSyncError of the last try, or, once the run was asked to stop, of the first.
    """
    for retry in range(1, SYNC_RETRIES + 1):
        try:
            return await call()
        except WeightSyncError as error:
            if stop.is_set:
                raise
            view.say(f"warning: the weight sync failed and is made again ({retry} of {SYNC_RETRIES}): {error}")
            await asyncio.sleep(PAUSE_SECONDS)
    return await call()


class Restarts:
    """Counts the losses of one run and finds the client with which it goes on.

    A loss that comes no later than the one before counts twice, so that a run which cannot get further ends soon.
    """

    def __init__(self, limit: int, run: RunFolder, view: View, stop: StopRequest) -> None:
        self._limit = limit
        self._run = run
        self._view = view
        self._stop = stop
        self._used = 0
        self._furthest = -1
        self._first: ArcticError | None = None

    async def after(self, error: ArcticError, client: ArcticRLClient, connect: Connect) -> ArcticRLClient:
        """The client to go on with after `error` came; the old one is let go of where it can do no more.

        Raises the first error since the run last got further, when it may not be restarted again.
        """
        steps = self._run.steps()
        step, from_step = steps[-1].step + 1 if steps else 1, self._run.checkpoint_step()
        self._count(error, step)
        self._view.say(f"step {step} was lost: {error}")
        self._view.say(f"restart {self._used} of {self._limit}: going on after step {from_step}")
        self._run.append_restart(Restart(step, from_step, str(error)))
        is_server_there = isinstance(error, WorkerLostError)
        if is_server_there and self._run.has_checkpoint():
            return client
        await (client.shutdown() if is_server_there else client.disconnect())
        return await self._seek(connect, client.config.retry_timeout or SERVER_SECONDS)

    def _count(self, error: ArcticError, step: int) -> None:
        is_further = step > self._furthest
        if self._first is None or is_further:
            self._first = error
        self._furthest = max(self._furthest, step)
        self._used += 1 if is_further else 2
        if self._used > self._limit or self._stop.is_set:
            raise self._first

    async def _seek(self, connect: Connect, seconds: float) -> ArcticRLClient:
        deadline = time.monotonic() + seconds
        while True:
            try:
                return await asyncio.to_thread(connect)
            except TransportError as error:
                if not is_loss(error) or time.monotonic() > deadline or self._stop.is_set:
                    raise
            self._view.waiting("the server is sought")
            await asyncio.sleep(PAUSE_SECONDS)
