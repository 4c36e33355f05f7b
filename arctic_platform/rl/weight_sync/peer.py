"""The control connection of a sync: JSON lines with deadlines, raw bytes between them, and reasons for every end.

    {"kind": "bucket", ...}\\n<raw bytes>{"kind": "digests", ...}\\n

A wait ends after `timeout_seconds` in which nothing arrived or left. Whoever fails says why in an `abort` message
before it closes, and the other side raises with that reason wherever it is: while it reads, while it writes, and also
when its own writing failed first.
"""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from arctic_platform.errors import WeightSyncError

MAX_LINE_BYTES = 256 << 20
MAX_FIRST_LINE_BYTES = 4096  # Before the token is known to be right.
READ_BYTES = 1 << 16
FAREWELL_SECONDS = 1.0
REASON_SECONDS = 0.5


class GaveUpError(WeightSyncError):
    """The other side failed, and said why."""

    def __init__(self, name: str, reason: object) -> None:
        super().__init__(f"the {name} gave up: {reason}")


class LaneBrokenError(WeightSyncError):
    """What carries the weights, beside this connection, came to an end or to a stop."""


class Peer:
    """The other side, which is called `name` in errors ("sender", "receiver")."""

    def __init__(self, connection: socket.socket, *, name: str, timeout_seconds: float) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.name = name
        self.timeout_seconds = timeout_seconds
        self.max_line_bytes = MAX_FIRST_LINE_BYTES
        self._socket = connection
        self._read = bytearray()

    def trust(self) -> None:
        """The token was right: lines may be long now."""
        self.max_line_bytes = MAX_LINE_BYTES

    def send(self, kind: str, **fields: Any) -> None:
        """One message."""
        self.send_bytes(memoryview(json.dumps({"kind": kind, **fields}).encode() + b"\n"))

    def receive(self, *kinds: str) -> dict[str, Any]:
        """The next message, which must be of one of these kinds.

        Raises:
            WeightSyncError: the other side failed (with its reason), ended, was silent, or says something else.
        """
        waiting = f"waiting for its {kinds[0]!r}"
        while (end := self._read.find(b"\n")) < 0:
            if len(self._read) > self.max_line_bytes:
                raise WeightSyncError(f"the {self.name} sent a message of more than {self.max_line_bytes} bytes")
            self._fill(waiting)
        line = bytes(self._read[:end])
        del self._read[: end + 1]
        message = self._parsed(line)
        if message["kind"] == "abort":
            raise GaveUpError(self.name, message.get("reason"))
        if message["kind"] not in kinds:
            raise WeightSyncError(f"the {self.name} sent {message['kind']!r} to one that was {waiting}")
        return message

    def send_bytes(self, view: memoryview) -> None:
        """All of `view`; what the other side says meanwhile is kept, unless it is that it failed."""
        while view:
            try:
                view = view[self._socket.send(view) :]
            except BlockingIOError:
                self._wait_writable()
            except OSError as error:
                raise self._lost("while it was written to", error) from error

    def receive_into(self, view: memoryview) -> None:
        """Fill `view` with raw bytes."""
        kept = min(len(self._read), len(view))
        view[:kept] = self._read[:kept]
        del self._read[:kept]
        view = view[kept:]
        while view:
            try:
                num = self._socket.recv_into(view)
            except BlockingIOError:
                self._wait_readable("waiting for its weights")
                continue
            except OSError as error:
                raise self._lost("while waiting for its weights", error) from error
            if num == 0:
                raise self._lost("in the middle of its weights")
            view = view[num:]

    def abort_reason(self, wait_seconds: float = 0.0) -> str | None:
        """Why the other side gave up, if it has said so; nothing is taken away of what it said before."""
        ends = time.monotonic() + wait_seconds
        while True:
            is_open = self._fill_what_is_there()
            for line in bytes(self._read).split(b"\n")[:-1]:
                if line.startswith(b'{"kind": "abort"'):
                    return str(self._parsed(line).get("reason"))
            if not is_open or time.monotonic() >= ends:
                return None
            time.sleep(0.01)

    def abort(self, reason: str) -> None:
        """Say why this side gives up, and close. Waits shortly for the other side, so that the reason arrives."""
        try:
            patience = min(FAREWELL_SECONDS, self.timeout_seconds)
            self._socket.settimeout(patience)
            self._socket.sendall(json.dumps({"kind": "abort", "reason": reason}).encode() + b"\n")
            self._socket.shutdown(socket.SHUT_WR)
            ends = time.monotonic() + patience
            while time.monotonic() < ends and self._socket.recv(READ_BYTES):
                pass
        except OSError:
            pass  # It is gone, or does not listen: it will find the connection closed.
        finally:
            self.close()

    def close(self) -> None:
        """Without a word."""
        self._socket.close()

    def _wait_writable(self) -> None:
        ready = self._poll(select.POLLIN | select.POLLOUT)
        if not ready:
            raise self._silent("took nothing", "while it was written to")
        if ready & select.POLLIN and (reason := self.abort_reason()) is not None:
            raise GaveUpError(self.name, reason)
        if not ready & select.POLLOUT and not self._poll(select.POLLOUT):
            raise self._silent("took nothing", "while it was written to")

    def _wait_readable(self, doing: str) -> None:
        if not self._poll(select.POLLIN):
            raise self._silent("was silent", doing)

    def _poll(self, events: int) -> int:
        poll = select.poll()
        poll.register(self._socket, events)
        return sum(found for _, found in poll.poll(1000 * self.timeout_seconds))

    def _fill(self, doing: str) -> None:
        self._wait_readable(doing)
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise self._lost(doing, error) from error
        if not data:
            raise self._lost(doing)
        self._read += data

    def _fill_what_is_there(self) -> bool:
        """Whether more may come."""
        try:
            while data := self._socket.recv(READ_BYTES):
                self._read += data
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def _parsed(self, line: bytes) -> dict[str, Any]:
        try:
            message = json.loads(line)
        except ValueError as error:
            raise WeightSyncError(f"the {self.name} sent what is no message of a weight sync: {line[:40]!r}") from error
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise WeightSyncError(f"the {self.name} sent what is no message of a weight sync: {line[:40]!r}")
        return message

    def _silent(self, what: str, doing: str) -> WeightSyncError:
        return WeightSyncError(
            f"the {self.name} {what} for {self.timeout_seconds:g} s {doing}: it is stopped, hangs, or cannot be "
            "reached any more; raise weight_sync.timeout_seconds if it is only slow"
        )

    def _lost(self, doing: str, error: OSError | None = None) -> WeightSyncError:
        if (reason := self.abort_reason()) is not None:
            return GaveUpError(self.name, reason)
        why = f" ({error})" if error is not None else ""
        return WeightSyncError(f"the {self.name} closed the connection {doing}{why}: its process has ended")


@contextmanager
def conversation(peer: Peer) -> Generator[None]:
    """Whatever is raised inside reaches the other side, and the caller as WeightSyncError with the first reason."""
    try:
        yield
    except GaveUpError:
        peer.close()
        raise
    except LaneBrokenError as error:
        # A lane breaks as well when the other side gives up; then its reason is the one that counts.
        if (reason := peer.abort_reason(REASON_SECONDS)) is not None:
            peer.close()
            raise GaveUpError(peer.name, reason) from error
        peer.abort(str(error))
        raise
    except WeightSyncError as error:
        peer.abort(str(error))
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        peer.abort(text)
        raise WeightSyncError(f"the weight sync failed: {text}") from error
    except BaseException as error:
        peer.abort(f"it was interrupted ({type(error).__name__})")
        raise
    else:
        peer.close()
