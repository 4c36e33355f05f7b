"""A TCP proxy that does to a connection what networks do: cut it after so many bytes, or lose one answer."""

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

CHUNK = 1 << 14


@dataclass
class Fault:
    """What is done to the next connections whose request matches; `times` runs down.

    matches: whether a connection's first bytes are the request that is meant. cut_request: bytes of it that still reach
    the server. cut_answer: bytes of its answer that still reach the client (0: the answer is lost). silent: accept and
    never pass anything on. done: set when the fault has struck.
    """

    matches: Callable[[bytes], bool] = lambda head: True
    cut_request: int | None = None
    cut_answer: int | None = None
    silent: bool = False
    times: int = 1
    done: threading.Event = field(default_factory=threading.Event)


class FaultyProxy:
    """Listens on a free loopback port and passes everything on to `target`, except what `fault` says."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.fault: Fault | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        for connection in list(self._open):
            _break(connection)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._open.append(client)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """One connection; a kept-alive one carries many requests, and each may meet the fault."""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.target)) as server:
            self._open.append(server)
            pair = _Pair(client, server)
            threading.Thread(target=self._pump_answers, args=(pair,), daemon=True).start()
            self._pump_requests(pair)

    def _pump_requests(self, pair: "_Pair") -> None:
        sent = 0
        while data := pair.client.recv(CHUNK):
            fault = self._meets(data)
            if fault is not None:
                pair.fault, sent = fault, 0
                pair.answered = 0
            if pair.fault is not None and pair.fault.silent:
                pair.fault.done.set()
                continue
            if pair.fault is not None and pair.fault.cut_request is not None:
                data = data[: max(pair.fault.cut_request - sent, 0)]
                sent += len(data)
                if data:
                    pair.server.sendall(data)
                if sent >= pair.fault.cut_request:
                    pair.fault.done.set()
                    pair.cut()
                    return
                continue
            pair.server.sendall(data)
        pair.cut()

    def _pump_answers(self, pair: "_Pair") -> None:
        with contextlib.suppress(OSError):
            while data := pair.server.recv(CHUNK):
                fault = pair.fault
                if fault is None or fault.cut_answer is None:
                    pair.client.sendall(data)
                    continue
                pair.client.sendall(data[: max(fault.cut_answer - pair.answered, 0)])
                pair.answered += len(data)
                if pair.answered > fault.cut_answer:
                    fault.done.set()
                    break
        pair.cut()

    def _meets(self, data: bytes) -> Fault | None:
        with self._lock:
            fault = self.fault
            if fault is None or fault.times <= 0 or not data.startswith((b"GET ", b"POST ", b"DELETE ", b"PUT ")):
                return None
            if not fault.matches(data):
                return None
            fault.times -= 1
            return fault


@dataclass
class _Pair:
    client: socket.socket
    server: socket.socket
    fault: Fault | None = None
    answered: int = 0

    def cut(self) -> None:
        _break(self.client)
        _break(self.server)


def _break(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
