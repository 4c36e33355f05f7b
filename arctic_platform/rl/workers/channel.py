"""Messages between a server and the processes that work for it: JSON, and beside it a message of the protocol.

    bytes 0-3   b"ZoRW"        bytes 4-7   length of the header        bytes 8-15  length of the body
    header      a JSON object                body   nothing, or a frame of `wire.py`

Nothing is pickled. Before the first message both sides prove that they know the same token, which itself never
travels. No read or write waits without a limit once a message has begun.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from arctic_platform.errors import ConfigError
from arctic_platform.rl.frames import Part, chunks
from arctic_platform.rl.protocol import Message
from arctic_platform.rl.wire import decode, encode

M = TypeVar("M", bound=Message)

MAX_HEADER_BYTES = 16 << 20
MAX_BODY_BYTES = 64 << 30
MAX_PIECE = 1 << 20
STALL_SECONDS = 60.0
"""Longest silence within a message."""

HANDSHAKE_SECONDS = 5.0
TICK_SECONDS = 0.5
RETRY_SECONDS = 0.2

_MAGIC = b"ZoRW"
_PREFIX = struct.Struct("<4sIQ")
_NONCE_LEN = 32
_PROOF_LEN = 32


class ChannelClosedError(ConnectionError):
    """The other side is gone, fell silent within a message, or speaks something else."""


@dataclass(frozen=True, eq=False)
class Packet:
    """One message as it arrived."""

    header: dict[str, Any]
    body: bytearray

    def message(self, message_type: type[M]) -> M:
        """What the body holds. Raises WireError for anything else."""
        return decode(self.body, message_type)


class Channel:
    """A connected socket that carries messages. Any thread may send; one receives."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(TICK_SECONDS)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.heard_at = time.monotonic()
        self._sock = sock
        self._sending = threading.Lock()

    @property
    def local_host(self) -> str:
        """Where the other side's machine reaches this one."""
        return "127.0.0.1" if self._sock.family == socket.AF_UNIX else self._sock.getsockname()[0]

    def send(self, header: Mapping[str, Any], message: Message | None = None) -> None:
        """Send one message whole. Raises ChannelClosedError, InputError for values that have no form on the wire."""
        parts = [] if message is None else encode(message)
        text = json.dumps(header).encode()
        if len(text) > MAX_HEADER_BYTES:
            raise ChannelClosedError(f"a header has {len(text)} bytes; at most {MAX_HEADER_BYTES} travel")
        prefix = _PREFIX.pack(_MAGIC, len(text), sum(memoryview(part).nbytes for part in parts))
        with self._sending:
            for piece in chunks([prefix + text, *parts], MAX_PIECE):
                self._write(piece)

    def receive(self, wait_seconds: float | None = None) -> Packet:
        """The next message; its first byte may take `wait_seconds` (none: until the other side is gone).

        Raises ChannelClosedError.
        """
        magic, header_len, body_len = _PREFIX.unpack(self._read(_PREFIX.size, wait_seconds))
        if magic != _MAGIC or header_len > MAX_HEADER_BYTES or body_len > MAX_BODY_BYTES:
            raise ChannelClosedError("what arrived is no message of this version")
        text, body = self._read(header_len, STALL_SECONDS), self._read(body_len, STALL_SECONDS)
        try:
            header = json.loads(text)
        except ValueError as error:
            raise ChannelClosedError(f"a header is no JSON: {error}") from error
        if not isinstance(header, dict):
            raise ChannelClosedError("a header is no JSON object")
        return Packet(header, body)

    def close(self) -> None:
        """End the connection; a thread that receives raises ChannelClosedError. Closing twice is fine."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _write(self, piece: Part) -> None:
        view, moved_at = memoryview(piece), time.monotonic()
        while view.nbytes:
            try:
                view = view[self._sock.send(view) :]
                moved_at = time.monotonic()
            except TimeoutError:
                if time.monotonic() - moved_at > STALL_SECONDS:
                    raise ChannelClosedError(f"the other side took nothing for {STALL_SECONDS:.0f} s") from None
            except OSError as error:
                raise ChannelClosedError(f"the other side is gone: {error}") from error

    def _read(self, num_bytes: int, wait_seconds: float | None) -> bytearray:
        data = bytearray(num_bytes)
        view, moved_at = memoryview(data), time.monotonic()
        while view.nbytes:
            try:
                got = self._sock.recv_into(view)
            except TimeoutError:
                limit = wait_seconds if view.nbytes == num_bytes else STALL_SECONDS
                if limit is not None and time.monotonic() - moved_at > limit:
                    raise ChannelClosedError(f"the other side was silent for {limit:g} s") from None
                continue
            except OSError as error:
                raise ChannelClosedError(f"the other side is gone: {error}") from error
            if not got:
                raise ChannelClosedError("the other side is gone")
            view, moved_at = view[got:], time.monotonic()
            self.heard_at = moved_at
        return data


class Listener:
    """Awaits the processes that know the token.

    address: `unix` (a socket in a private folder, for this machine), or `host:port`; port 0 takes a free one.

    Raises ConfigError when the address cannot be listened on.
    """

    def __init__(self, address: str, token: str) -> None:
        self._token = token.encode()
        self._folder: str | None = None
        try:
            if address == "unix":
                self._folder = tempfile.mkdtemp(prefix="arctic-")
                self._sock = socket.socket(socket.AF_UNIX)
                self._sock.bind(str(Path(self._folder, "s")))
                self._sock.listen(128)
                self.address = f"unix:{Path(self._folder, 's')}"
            else:
                host, port = split_address(address)
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                self._sock = socket.create_server((host, port), family=family, backlog=128)
                self.address = f"{host}:{self._sock.getsockname()[1]}"
        except (OSError, OverflowError) as error:
            self._remove_folder()
            raise ConfigError(f"{address} cannot be listened on: {error}; choose another port") from error

    def accept(self, wait_seconds: float) -> Channel | None:
        """The next process that proves itself, none within so long. Who does not is turned away."""
        self._sock.settimeout(max(wait_seconds, 0.001))
        try:
            sock, _ = self._sock.accept()
        except TimeoutError:
            return None
        sock.settimeout(HANDSHAKE_SECONDS)
        try:
            nonce = secrets.token_bytes(_NONCE_LEN)
            sock.sendall(nonce)
            answer = _read_exactly(sock, _NONCE_LEN + _PROOF_LEN)
            theirs, proof = answer[:_NONCE_LEN], answer[_NONCE_LEN:]
            if not hmac.compare_digest(proof, _proof(self._token, b"join", nonce, theirs)):
                raise ConnectionError("wrong token")
            sock.sendall(_proof(self._token, b"welcome", theirs, nonce))
        except OSError:
            sock.close()
            return None
        return Channel(sock)

    def close(self) -> None:
        """Await nobody any more."""
        self._sock.close()
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def join(address: str, token: str, *, wait_seconds: float) -> Channel:
    """Connect to a listener, which may begin to listen within `wait_seconds`.

    Raises ConnectionError where nobody listens, or the tokens differ.
    """
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            sock = _connect(address)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConnectionError(f"nobody listens at {address} for {wait_seconds:.0f} s: {error}") from error
            time.sleep(RETRY_SECONDS)
    sock.settimeout(max(deadline - time.monotonic(), HANDSHAKE_SECONDS))
    secret, own = token.encode(), secrets.token_bytes(_NONCE_LEN)
    try:
        nonce = _read_exactly(sock, _NONCE_LEN)
        sock.sendall(own + _proof(secret, b"join", nonce, own))
        proof = _read_exactly(sock, _PROOF_LEN)
    except OSError as error:
        sock.close()
        raise ConnectionError(f"{address} turned this process away, which has another token: {error}") from error
    if not hmac.compare_digest(proof, _proof(secret, b"welcome", own, nonce)):
        sock.close()
        raise ConnectionError(f"who listens at {address} does not know the token")
    return Channel(sock)


def split_address(address: str) -> tuple[str, int]:
    """`host:port`, the host without the brackets of IPv6. Raises ConfigError for anything else."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"address {address!r} must look like 127.0.0.1:29400")
    return host.strip("[]"), int(port)


def _connect(address: str) -> socket.socket:
    if address.startswith("unix:"):
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(HANDSHAKE_SECONDS)
            sock.connect(address.removeprefix("unix:"))
        except OSError:
            sock.close()
            raise
        return sock
    return socket.create_connection(split_address(address), timeout=HANDSHAKE_SECONDS)


def _proof(token: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    """Only who knows the token can make it, and only for these two random numbers."""
    return hmac.digest(token, role + first + second, "sha256")


def _read_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        got = sock.recv(num_bytes - len(data))
        if not got:
            raise ConnectionError("it closed the connection")
        data += got
    return data
