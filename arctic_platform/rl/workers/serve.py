"""What a working process does: join, build the engine it is told, answer calls, say that it lives.

main thread    builds the engine and runs one call at a time (a device belongs to one thread)
reader         takes messages; the end of the connection ends the process at once, whatever it computes
beats          tells the server a few times per heartbeat that this process lives
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import queue
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Mapping
from typing import Any

from arctic_platform.errors import ArcticError
from arctic_platform.rl.protocol import ErrorInfo, Message
from arctic_platform.rl.workers.channel import Channel, ChannelClosedError, Packet
from arctic_platform.rl.workers.job import Job

JOB_SECONDS = 600.0
BEATS_PER_HEARTBEAT = 5
PROGRESS_SECONDS = 0.05
CLOSE_SECONDS = 30.0
FAILED = 1


class Stopped(Exception):
    """Ends a sampling call that nobody waits for any more."""


class Worker:
    """This process, once it joined."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._calls: queue.SimpleQueue[Packet] = queue.SimpleQueue()
        self._stop = threading.Event()

    def run(self, name: str) -> None:
        """Until the server says that it is over; a fault while starting is told to the server and ends the process."""
        self._channel.send({"hello": {"name": name, "pid": os.getpid(), "host": socket.gethostname()}})
        job = Job(**self._channel.receive(JOB_SECONDS).header["job"])
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        seconds = job.config.ranks.heartbeat_seconds / BEATS_PER_HEARTBEAT
        threading.Thread(target=self._beat, args=(seconds,), name="beats", daemon=True).start()
        if job.rank == 0:
            logging.getLogger().addHandler(_Forwarding(self._channel))
            logging.getLogger("arctic_platform").setLevel(logging.INFO)
        try:
            calls = _build(job, self._channel.local_host)
        except Exception as error:
            self._fail(error)
            return
        self._channel.send({"ready": calls.state()})
        while (packet := self._calls.get()).header.get("call") != "close":
            self._answer(calls, packet)
        calls.close()

    def _answer(self, calls: Any, packet: Packet) -> None:
        """Run one call; whatever it raises is the answer."""
        header = packet.header
        self._stop.clear()
        try:
            message, value = calls.run(header["call"], packet, self._progress)
        except Stopped:
            self._reply({"stopped": True}, header, calls)
        except Exception as error:
            if not isinstance(error, ArcticError):
                traceback.print_exc()
            self._reply({"error": ErrorInfo.of(error).model_dump()}, header, calls)
        else:
            self._reply({"value": value}, header, calls, message)

    def _reply(
        self, answer: Mapping[str, Any], header: Mapping[str, Any], calls: Any, message: Message | None = None
    ) -> None:
        self._channel.send({"answer": header["id"], "state": calls.state(), **answer}, message)

    def _fail(self, error: Exception) -> None:
        traceback.print_exc()
        self._channel.send({"failed": ErrorInfo.of(error).model_dump()})
        with contextlib.suppress(ChannelClosedError):  # the server ends the connection once it has read why
            self._calls.get(timeout=JOB_SECONDS)

    def _progress(self) -> Any:
        """What a sampler calls between its steps. It sends a little at most, and stops what is no longer wanted."""
        told_at = 0.0

        def note(num_finished: int, num_total: int) -> None:
            nonlocal told_at
            if self._stop.is_set():
                raise Stopped
            if time.monotonic() - told_at >= PROGRESS_SECONDS:
                told_at = time.monotonic()
                self._channel.send({"progress": [num_finished, num_total]})

        return note

    def _read(self) -> None:
        try:
            while True:
                packet = self._channel.receive()
                if "stop" in packet.header:
                    self._stop.set()
                    continue
                self._calls.put(packet)
                if packet.header.get("call") == "close":
                    break
        except ChannelClosedError:
            os._exit(FAILED)  # nobody will ever ask for what this process computes
        time.sleep(CLOSE_SECONDS)
        os._exit(FAILED)  # whatever does not end in peace

    def _beat(self, seconds: float) -> None:
        with contextlib.suppress(ChannelClosedError):
            while True:
                self._channel.send({"beat": 1})
                time.sleep(seconds)


class _Forwarding(logging.Handler):
    """What this package says, and what warns, is said by the server as well."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(logging.INFO)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("arctic_platform") or record.levelno >= logging.WARNING:
            with contextlib.suppress(ChannelClosedError):
                self._channel.send({"log": [record.name, record.levelno, record.getMessage()]})


def serve(channel: Channel, name: str) -> None:
    """Work until it is over, then leave without waiting for threads of libraries that may hang."""
    faulthandler.enable()
    printed = logging.StreamHandler(sys.stderr)
    printed.setLevel(logging.WARNING)  # What is below it reaches the server's log; these are the last lines of a loss.
    logging.basicConfig(handlers=[printed], level=logging.WARNING)
    warnings.showwarning = _say_warning  # ty: ignore[invalid-assignment]
    code = FAILED
    try:
        Worker(channel).run(name)
        code = 0
    except ChannelClosedError as error:
        print(f"the connection to the server ended: {error}", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        channel.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _say_warning(message: Warning | str, *_: object, **__: object) -> None:
    """One line, without the place in the code, which is no place of the reader's."""
    logging.getLogger("py.warnings").warning("%s", " ".join(str(message).split()))


def _build(job: Job, host: str) -> Any:
    """torch and the engines are loaded only here, after the server knows that this process lives."""
    from arctic_platform.rl.workers.engine_calls import build

    return build(job, host)
