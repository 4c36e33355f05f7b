"""What travels between a server and its processes, and who may speak."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from arctic_platform.errors import ConfigError
from arctic_platform.rl.protocol import FwdBwdRequest, LogProbsResponse, RolloutBatch
from arctic_platform.rl.workers import channel
from arctic_platform.rl.workers.channel import Channel, ChannelClosedError, Listener, join

TOKEN = "a-token-of-the-tests"


@pytest.fixture(params=["unix", "127.0.0.1:0"])
def pair(request):
    """The two ends of a channel: the server's and the process's."""
    listener = Listener(request.param, TOKEN)
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(join, listener.address, TOKEN, wait_seconds=5.0)
        server = listener.accept(5.0)
        listener.close()
        ends = server, joining.result()
    yield ends
    for end in ends:
        end.close()


def test_messages_arrive_whole_and_in_order(pair):
    server, process = pair
    batch = RolloutBatch(prompts=[[1, 2]] * 3, responses=[[3], [], [4, 5]], advantages=[1.0, 2.0, -1e-7])
    request = FwdBwdRequest(batch=batch)
    server.send({"call": "fwd_bwd", "id": 1}, request)
    server.send({"call": "close"})
    first, second = process.receive(5.0), process.receive(5.0)
    assert first.header == {"call": "fwd_bwd", "id": 1}
    assert first.message(FwdBwdRequest) == request
    assert (second.header, second.body) == ({"call": "close"}, b"")


def test_numbers_that_json_lacks_survive(pair):
    server, process = pair
    process.send({}, LogProbsResponse(logprobs=[[float("-inf"), -0.0]], metrics={"x": float("nan")}))
    answer = server.receive(5.0).message(LogProbsResponse)
    assert answer.logprobs[0][0] == float("-inf")
    assert answer.metrics["x"] != answer.metrics["x"]


def test_a_message_larger_than_every_buffer_arrives_while_others_wait_their_turn(pair):
    server, process = pair
    large = LogProbsResponse(logprobs=[[0.5] * 2_000_000])
    sender = threading.Thread(target=process.send, args=({"which": "large"}, large))
    sender.start()
    time.sleep(0.05)
    beats = threading.Thread(target=process.send, args=({"which": "beat"},))
    beats.start()
    assert server.receive(5.0).message(LogProbsResponse) == large
    assert server.receive(5.0).header == {"which": "beat"}
    sender.join()
    beats.join()


def test_the_end_of_the_other_side_is_noticed_at_once(pair):
    server, process = pair
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(server.receive)
        process.close()
        with pytest.raises(ChannelClosedError, match="gone"):
            waiting.result(5.0)
    with pytest.raises(ChannelClosedError):
        for _ in range(3):
            server.send({"call": "step"})


def test_silence_before_and_within_a_message_ends_the_wait(pair, monkeypatch):
    server, process = pair
    monkeypatch.setattr(channel, "STALL_SECONDS", 0.2)
    with pytest.raises(ChannelClosedError, match=r"silent for 0\.1 s"):
        server.receive(0.1)
    process._sock.sendall(channel._PREFIX.pack(b"ZoRW", 100, 0) + b'{"half')
    with pytest.raises(ChannelClosedError, match=r"silent for 0\.2 s"):
        server.receive(5.0)


def test_a_peer_that_takes_nothing_ends_the_send(pair, monkeypatch):
    server, _ = pair
    monkeypatch.setattr(channel, "STALL_SECONDS", 0.2)
    with pytest.raises(ChannelClosedError, match="took nothing"):
        server.send({}, LogProbsResponse(logprobs=[[0.5] * 4_000_000]))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        channel._PREFIX.pack(b"ZoRW", channel.MAX_HEADER_BYTES + 1, 0),
        channel._PREFIX.pack(b"ZoRW", 2, channel.MAX_BODY_BYTES + 1),
        channel._PREFIX.pack(b"ZoRW", 2, 0) + b"[]",
        channel._PREFIX.pack(b"ZoRW", 2, 0) + b"\xff\xff",
    ],
)
def test_other_bytes_are_refused_before_anything_is_allocated_for_them(pair, data):
    server, process = pair
    process._sock.sendall(data)
    with pytest.raises(ChannelClosedError):
        server.receive(5.0)


@pytest.mark.parametrize("address", ["unix", "127.0.0.1:0"])
def test_who_has_another_token_is_turned_away_and_the_next_is_served(address):
    listener = Listener(address, TOKEN)
    with ThreadPoolExecutor(1) as threads:
        wrong = threads.submit(join, listener.address, TOKEN + "x", wait_seconds=1.0)
        assert listener.accept(5.0) is None
        with pytest.raises(ConnectionError, match="another token"):
            wrong.result(10.0)
        right = threads.submit(join, listener.address, TOKEN, wait_seconds=1.0)
        assert listener.accept(5.0) is not None
        right.result(10.0).close()
    listener.close()


def test_a_server_that_does_not_know_the_token_is_not_worked_for():
    fake = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        sock, _ = fake.accept()
        sock.sendall(bytes(32))
        sock.recv(64)
        sock.sendall(bytes(32))
        sock.close()

    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(answer)
        with pytest.raises(ConnectionError, match="does not know the token"):
            join(f"127.0.0.1:{fake.getsockname()[1]}", TOKEN, wait_seconds=1.0)
        done.result(5.0)
    fake.close()


def test_one_that_connects_and_says_nothing_does_not_stop_the_next(monkeypatch):
    monkeypatch.setattr(channel, "HANDSHAKE_SECONDS", 0.2)
    listener = Listener("127.0.0.1:0", TOKEN)
    silent = socket.create_connection(channel.split_address(listener.address))
    assert listener.accept(5.0) is None
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(join, listener.address, TOKEN, wait_seconds=5.0)
        found = listener.accept(5.0)
        assert isinstance(found, Channel)
        joining.result(5.0).close()
    silent.close()
    listener.close()


def test_nobody_at_the_address_is_an_error_within_the_time_given():
    place = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{place.getsockname()[1]}"
    place.close()
    with pytest.raises(ConnectionError, match="nobody listens"):
        join(address, TOKEN, wait_seconds=0.3)


def test_a_port_that_is_taken_or_no_port_is_a_setting_to_correct():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="choose another port"):
        Listener(f"127.0.0.1:{taken.getsockname()[1]}", TOKEN)
    for address in ("127.0.0.1", "127.0.0.1:port", "127.0.0.1:99999", ":80"):
        with pytest.raises(ConfigError, match="must look like"):
            Listener(address, TOKEN)
