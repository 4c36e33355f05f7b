"""Processes that live and die together: called together, watched together, ended together.

    reader threads   one for each process: what arrives, and the end of a connection, which is noticed at once
    watcher          a process that says nothing for `heartbeat_seconds`, stopped or stuck in its kernel, is lost too

Once one is lost the whole crew is ended (SIGKILL, which stopped ones get too) and every call raises WorkerLostError.
No thread refers to a `Crew`, so that one that is forgotten is collected, and its processes end.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from arctic_platform.errors import ArcticError, ServerError, WorkerLostError
from arctic_platform.rl.engines.base import Progress
from arctic_platform.rl.protocol import ErrorInfo, Message
from arctic_platform.rl.workers.channel import Channel, ChannelClosedError, Listener, Packet
from arctic_platform.rl.workers.job import Job
from arctic_platform.rl.workers.launch import ForeignProcess, Launcher, Process

M = TypeVar("M", bound=Message)
OnWait = Callable[[str], None]
"""Told what a start waits for, whenever that is something else."""

CLOSE_SECONDS = 10.0
FATE_SECONDS = 2.0
LEAST_GRACE_SECONDS = 5.0
"""Others may answer so long after one has raised; they are stuck in a collective otherwise."""


@dataclass(eq=False)
class Member:
    """One process."""

    name: str
    process: Process
    channel: Channel | None = None
    pid: int = 0
    host: str = ""
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """`rank 1 (pid 123 on box)`."""
        return f"{self.name} (pid {self.pid} on {self.host})" if self.pid else self.name

    def end(self) -> None:
        """At once. The connection goes first: who did not start the process can end it by nothing else."""
        if self.channel is not None:
            self.channel.close()
        self.process.kill()


@dataclass(frozen=True)
class Answer:
    """What one process answered."""

    packet: Packet

    @property
    def error(self) -> ArcticError | None:
        """What it raised."""
        given = self.packet.header.get("error")
        return None if given is None else ErrorInfo(**given).to_error()

    @property
    def value(self) -> Any:
        """JSON beside the message."""
        return self.packet.header.get("value")

    @property
    def is_stopped(self) -> bool:
        """Whether it ended because it was told to."""
        return "stopped" in self.packet.header

    def message(self, message_type: type[M]) -> M:
        """The response."""
        return self.packet.message(message_type)


class _Watch:
    """The members of one start, and what arrives from them. It outlives neither them nor the crew."""

    def __init__(self, members: Sequence[Member], heartbeat_seconds: float) -> None:
        self.remedy = ""
        self.members = list(members)
        self.arrived: queue.SimpleQueue[tuple[int, Packet] | None] = queue.SimpleQueue()
        self.lost: WorkerLostError | None = None
        self.phase = "between calls"
        self._is_ending = threading.Event()
        self._lock = threading.RLock()  # a crew may be collected by a thread that is in here
        self._heartbeat_seconds = heartbeat_seconds

    def listen(self) -> None:
        """Every member has joined. A process that loads libraries may be silent for long, but its end is noticed."""
        for number in range(len(self.members)):
            threading.Thread(target=self._read, args=(number,), name="arctic-rank-reader", daemon=True).start()

    def watch_silence(self) -> None:
        """Every member has its engine: from now on each must be heard."""
        threading.Thread(target=self._look_for_silence, name="arctic-rank-watcher", daemon=True).start()

    def send(self, number: int, header: dict[str, Any], message: Message | None = None) -> None:
        """Raises WorkerLostError where it cannot be sent."""
        member = self.members[number]
        assert member.channel is not None
        try:
            member.channel.send(header, message)
        except ChannelClosedError as error:
            self.lose(member, str(error), has_ended=True)
            raise self.gone() from error

    def gone(self) -> WorkerLostError:
        """What to raise now that no call can be made: new each time, since an error keeps what it passed through."""
        return WorkerLostError(str(self.lost) if self.lost is not None else "these processes were ended by close()")

    def next(self, wait_seconds: float | None = None) -> tuple[int, Packet] | None:
        """The next message, none after so long. Raises WorkerLostError once a member is lost."""
        if self.lost is not None:
            raise self.gone()
        try:
            item = self.arrived.get(timeout=wait_seconds)
        except queue.Empty:
            return None
        if item is None:
            self.arrived.put(None)
            raise self.gone()
        return item

    def lose(self, member: Member, reason: str, *, has_ended: bool = False) -> None:
        """End all; the first reason counts. has_ended: the process must have, and says how in a moment."""
        with self._lock:
            if self.lost is not None or self._is_ending.is_set():
                return
            fate = member.process.fate(FATE_SECONDS if has_ended else 0.0)
            lines = member.process.last_lines()
            self.lost = WorkerLostError(
                f"{member.line} was lost {self.phase}: {fate or reason}{self.remedy}" + _quoted(lines)
            )
            self._end_members()
            logging.getLogger(__name__).error("%s", self.lost)
        self.arrived.put(None)

    def end(self, wait_seconds: float) -> None:
        """In peace if it can be: what holds memory of others, as vLLM does, gives it back."""
        with self._lock:
            if self._is_ending.is_set():
                return
            self._is_ending.set()
        if self.lost is None and wait_seconds:
            for member in self.members:
                with contextlib.suppress(ChannelClosedError):
                    assert member.channel is not None
                    member.channel.send({"call": "close"})
            deadline = time.monotonic() + wait_seconds
            for member in self.members:
                member.process.fate(max(deadline - time.monotonic(), 0.0))
        self._end_members()
        self.arrived.put(None)

    def _end_members(self) -> None:
        for member in self.members:
            member.end()

    def _read(self, number: int) -> None:
        member = self.members[number]
        assert member.channel is not None
        try:
            while True:
                packet = member.channel.receive()
                if "log" in packet.header:
                    name, level, text = packet.header["log"]
                    logging.getLogger(name).log(level, "%s", text)
                elif "beat" not in packet.header:
                    self.arrived.put((number, packet))
        except ChannelClosedError as error:
            self.lose(member, str(error), has_ended=True)

    def _look_for_silence(self) -> None:
        """A server that itself was stopped for a while must not take the silence of that time for a loss."""
        interval = self._heartbeat_seconds / 5
        looked_at = time.monotonic()
        while not self._is_ending.wait(interval) and self.lost is None:
            now = time.monotonic()
            was_away, looked_at = now - looked_at > 2 * interval, now
            for member in self.members:
                assert member.channel is not None
                if was_away:
                    member.channel.heard_at = max(member.channel.heard_at, now)
                elif now - member.channel.heard_at > self._heartbeat_seconds:
                    self.lose(member, f"it said nothing for {self._heartbeat_seconds:g} s")


class Crew:
    """A crew of processes, as one object.

    names: one for each process. job_of: what each is told, given its number, and where ranks meet. remedy: what the
    error of a loss says that can be done. on_wait: told what the start waits for.

    Raises what starting raises: what building an engine raised in a process, WorkerLostError for one that died,
    ConfigError for an address that is taken.
    """

    def __init__(
        self,
        names: Sequence[str],
        launcher: Launcher,
        job_of: Callable[[int, tuple[str, int] | None], Job],
        *,
        start_seconds: float,
        heartbeat_seconds: float,
        needs_store: bool,
        remedy: str,
        on_wait: OnWait | None = None,
    ) -> None:
        self._on_wait = on_wait or (lambda text: None)
        self._names = list(names)
        self._launcher = launcher
        self._job_of = job_of
        self._start_seconds = start_seconds
        self._heartbeat_seconds = heartbeat_seconds
        self._needs_store = needs_store
        self._remedy = remedy
        self._num_calls = 0
        self._store: Any = None
        self._last_state: dict[str, Any] = {}
        self._watches: list[_Watch] = []
        self._calling = threading.Lock()
        self._end = weakref.finalize(self, _end_all, self._watches)
        self.start()

    @property
    def lost(self) -> WorkerLostError | None:
        """Which process is gone."""
        return self._watch.lost

    @property
    def state(self) -> dict[str, Any]:
        """What the first process last said of its engine."""
        return self._watch.members[0].state or self._last_state

    @property
    def pids(self) -> list[int]:
        """Of all processes."""
        return [member.pid for member in self._watch.members]

    @property
    def host(self) -> str:
        """Where the processes reach this one."""
        channel = self._watch.members[0].channel
        assert channel is not None
        return channel.local_host

    @property
    def _watch(self) -> _Watch:
        return self._watches[-1]

    def start(self) -> None:
        """Start all processes, after ending those that there are; bounded by `start_seconds`."""
        if self._watches:
            self._last_state = self.state
            self._watch.end(0.0)
        deadline = time.monotonic() + self._start_seconds
        token = self._launcher.token()
        listener = Listener(self._launcher.listen, token)
        try:
            processes = self._launcher.start(self._names, listener.address, token)
            members = [Member(name, process) for name, process in zip(self._names, processes, strict=True)]
            watch = _Watch(members, self._heartbeat_seconds)
            self._watches[:] = [watch]
            self._await_all(listener, members, deadline)
        except BaseException:
            if self._watches:
                self._watch.end(0.0)
            raise
        finally:
            listener.close()
        try:
            self._tell_jobs(watch)
            watch.listen()
            self._await_engines(watch, deadline)
            watch.watch_silence()
        except BaseException:
            watch.end(0.0)
            raise

    def call(
        self,
        method: str,
        messages: Sequence[Message | None],
        options: Sequence[dict[str, Any]] | None = None,
        *,
        progress: Progress | None = None,
    ) -> list[Answer]:
        """One call of all processes, each with its own message; their answers.

        progress: called with (finished, all) rollouts as they come; what it raises stops the call and is raised.

        Raises:
            WorkerLostError: a process is gone, or the ranks disagree about what happened. What all of them raised.
        """
        with self._calling:
            watch = self._watch
            if watch.lost is not None:
                raise watch.gone()
            self._num_calls += 1
            number, watch.phase = self._num_calls, f"in {method}"
            try:
                self._send_all(watch, {"call": method, "id": number}, messages, options or [{}] * len(messages))
                answers = self._await_answers(watch, number, progress)
                self._raise_common(watch, answers)
            finally:
                watch.phase = "between calls"
            return answers

    @contextlib.contextmanager
    def starting_anew(self) -> Generator[None]:
        """Start all processes after a loss; what fails inside ends them again, and the crew stays lost."""
        was_lost = self.lost
        assert was_lost is not None
        try:
            self.start()
            yield
        except BaseException:
            self._watch.end(0.0)
            self._watch.lost = self._watch.lost or was_lost
            raise

    def close(self) -> None:
        """End all processes; closing twice is fine."""
        if self._watches:
            self._watch.end(CLOSE_SECONDS)
        self._store = None

    def _await_all(self, listener: Listener, members: list[Member], deadline: float) -> None:
        by_name = {member.name: member for member in members}
        while missing := [member for member in members if member.channel is None]:
            self._on_wait(self._awaited(listener.address, missing))
            channel = listener.accept(min(0.2, deadline - time.monotonic()))
            if channel is not None:
                self._greet(channel, by_name)
            for member in missing:
                if member.channel is None and (fate := member.process.fate(0.0)) is not None:
                    raise _not_started(member, f"died while starting: {fate}")
            if time.monotonic() > deadline:
                names = ", ".join(member.name for member in members if member.channel is None)
                raise WorkerLostError(
                    f"{names} of {len(members)} process(es) did not join {listener.address} within "
                    f"{self._start_seconds:g} s (ranks.start_seconds); "
                    f"{self._launcher.missing(self._names, listener.address)}"
                )

    def _awaited(self, address: str, missing: list[Member]) -> str:
        """What a person reads until these have joined: nothing to do, or, for torchrun's, the command to run."""
        names = ", ".join(member.name for member in missing)
        if not any(isinstance(member.process, ForeignProcess) for member in missing):
            return f"{names} to start"
        return f"{names} of {len(self._names)} to join; {self._launcher.missing(self._names, address)}"

    def _greet(self, channel: Channel, by_name: dict[str, Member]) -> None:
        """Who it is; one that is expected by nobody, or is there already, is sent away."""
        try:
            hello = channel.receive(CLOSE_SECONDS).header["hello"]
            member = by_name[hello["name"]]
            assert member.channel is None
        except (ChannelClosedError, KeyError, TypeError, AssertionError):
            channel.close()
            return
        member.channel, member.pid, member.host = channel, hello["pid"], hello["host"]

    def _tell_jobs(self, watch: _Watch) -> None:
        hosts = [member.channel.local_host for member in watch.members if member.channel is not None]
        port = self._open_store(hosts) if self._needs_store else None
        for number, host in enumerate(hosts):
            job = self._job_of(number, None if port is None else (host, port))
            watch.send(number, {"job": job.as_json()})

    def _open_store(self, hosts: list[str]) -> int:
        """Where ranks find each other, in this process: it waits for nobody and ends with the crew.

        hosts: of this machine, as each rank reaches it; only where these differ does it listen on all of them.
        """
        host = hosts[0] if len(set(hosts)) == 1 else ""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        place = socket.create_server((host, 0), family=family)
        port = place.getsockname()[1]
        self._store = dist.TCPStore(
            hosts[0], port, is_master=True, wait_for_workers=False, master_listen_fd=place.detach()
        )
        return port

    def _await_engines(self, watch: _Watch, deadline: float) -> None:
        watch.phase = "while building its engine"
        waiting = set(range(len(watch.members)))
        failures: list[ArcticError] = []
        grace = deadline
        while waiting:
            self._on_wait(f"the engine of {', '.join(self._names[at] for at in sorted(waiting))}")
            found = watch.next(max(min(deadline, grace) - time.monotonic(), 0.0))
            if found is None:
                break
            number, packet = found
            waiting.discard(number)
            if "failed" in packet.header:
                failures.append(ErrorInfo(**packet.header["failed"]).to_error())
                grace = time.monotonic() + LEAST_GRACE_SECONDS
            else:
                watch.members[number].state = packet.header["ready"]
        if failures:
            raise next((error for error in failures if type(error) is not ServerError), failures[0])
        if waiting:
            member = watch.members[min(waiting)]
            raise _not_started(member, f"had no engine after {self._start_seconds:g} s; raise ranks.start_seconds")
        watch.phase, watch.remedy = "between calls", f"; {self._remedy}"

    def _send_all(
        self,
        watch: _Watch,
        header: dict[str, Any],
        messages: Sequence[Message | None],
        options: Sequence[dict[str, Any]],
    ) -> None:
        """To all, or, where that breaks off, no call can follow: some would be a call ahead of the others."""
        for at, message in enumerate(messages):
            try:
                watch.send(at, {**header, **options[at]}, message)
            except BaseException as error:
                if at:
                    watch.lose(watch.members[at], f"it could not be told what the others do: {error}")
                raise

    def _await_answers(self, watch: _Watch, number: int, progress: Progress | None) -> list[Answer]:
        answers: dict[int, Answer] = {}
        stopped: BaseException | None = None
        deadline: float | None = None
        while len(answers) < len(watch.members):
            found = watch.next(None if deadline is None else max(deadline - time.monotonic(), 0.0))
            if found is None:
                self._end_divided(watch, answers)
                continue
            at, packet = found
            if "progress" in packet.header and progress is not None and stopped is None:
                stopped = self._note(watch, at, packet, progress)
            if packet.header.get("answer") != number:
                continue
            answers[at] = Answer(packet)
            watch.members[at].state = packet.header["state"]
            if answers[at].error is not None and deadline is None:
                deadline = time.monotonic() + max(self._heartbeat_seconds, LEAST_GRACE_SECONDS)
        if stopped is not None:
            raise stopped
        return [answers[at] for at in range(len(watch.members))]

    def _note(self, watch: _Watch, at: int, packet: Packet, progress: Progress) -> BaseException | None:
        try:
            progress(*packet.header["progress"])
        except BaseException as error:
            watch.send(at, {"stop": True})
            return error
        return None

    def _end_divided(self, watch: _Watch, answers: dict[int, Answer]) -> None:
        """One rank raised and others go on, or wait for it: nothing that follows would be in step."""
        at, error = next((at, answer.error) for at, answer in answers.items() if answer.error is not None)
        watch.lose(watch.members[at], f"it failed and the other ranks did not: {error}")

    def _raise_common(self, watch: _Watch, answers: Sequence[Answer]) -> None:
        errors = [answer.error for answer in answers]
        first = next((error for error in errors if error is not None), None)
        if first is None:
            return
        if isinstance(first, WorkerLostError):
            watch.lose(watch.members[errors.index(first)], str(first))
            raise watch.gone()
        is_agreed = all(type(error) is type(first) and str(error) == str(first) for error in errors)
        if len(errors) == 1 or is_agreed or all(_is_on_purpose(error) for error in errors):
            raise first
        at = min(range(len(errors)), key=lambda at: (errors[at] is None, _is_on_purpose(errors[at])))
        watch.lose(watch.members[at], f"the ranks disagree, it raised {errors[at]}")
        raise watch.gone()


def _is_on_purpose(error: ArcticError | None) -> bool:
    """Raised by this package, before anything was changed."""
    return error is not None and not isinstance(error, ServerError)


def _not_started(member: Member, what: str) -> WorkerLostError:
    return WorkerLostError(f"{member.line} {what}" + _quoted(member.process.last_lines()))


def _quoted(lines: str) -> str:
    return f"; its last lines: {' | '.join(lines.splitlines())}" if lines else ""


def _end_all(watches: list[_Watch]) -> None:
    for watch in watches:
        watch.end(0.0)
