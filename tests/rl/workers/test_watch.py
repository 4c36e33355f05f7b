"""Processes that are called, watched and ended together; none of them needs an engine for that."""

import gc
import os
import signal
import threading
import time

import pytest

from arctic_platform.errors import InputError, ServerError, WorkerLostError
from tests.rl.workers.crews import light_crew
from tests.rl.workers.processes import alive_of, all_end


@pytest.fixture(scope="module")
def shared():
    """Two processes, for the tests that leave them alive."""
    crew = light_crew(2)
    yield crew
    pids = crew.pids
    crew.close()
    assert all_end(pids)


@pytest.fixture
def crew():
    """Two processes that a test may lose."""
    crew = light_crew(2)
    yield crew
    pids = crew.pids
    crew.close()
    assert all_end(pids)


def call(crew, name, **options):
    return crew.call(name, [None, None], [options, options])


def test_each_answers_and_its_state_is_known_afterwards(shared):
    before = shared.state["num_calls"]
    assert [answer.value for answer in call(shared, "count")] == [0, 1]
    assert shared.state["num_calls"] == before + 1


def test_what_all_refuse_is_raised_once_and_they_go_on(shared):
    with pytest.raises(InputError, match="rank 0 refuses"):
        call(shared, "refuse")
    with pytest.raises(ServerError, match="RuntimeError: something broke"):
        call(shared, "break_down")
    assert shared.lost is None
    call(shared, "count")


def test_what_a_process_says_is_said_by_the_server(shared, caplog):
    with caplog.at_level("INFO", "arctic_platform"):
        call(shared, "say")
        call(shared, "count")
    assert [record.message for record in caplog.records if "said by" in record.message] == ["said by rank 0"]
    assert [record.message for record in caplog.records if "a warning" in record.message] == ["a warning"]


def test_what_progress_raises_stops_the_call_and_is_raised(shared):
    seen = []

    def progress(num_finished: int, num_total: int) -> None:
        seen.append((num_finished, num_total))
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        shared.call("go_on", [None, None], [{"only": 0}] * 2, progress=progress)
    assert seen == [(1, 2)]
    call(shared, "count")


def test_calls_from_several_threads_run_one_at_a_time(shared):
    before = shared.state["num_calls"]
    threads = [threading.Thread(target=call, args=(shared, "count")) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    call(shared, "count")
    assert shared.state["num_calls"] == before + 9


@pytest.mark.parametrize("name", ["refuse", "break_down"])
def test_one_that_fails_alone_ends_the_group(crew, name):
    with pytest.raises(WorkerLostError, match=r"rank 1 .*lost in .*(refuses|something broke)"):
        call(crew, name, only=1)
    assert all_end(crew.pids)


def test_one_that_fails_while_the_others_wait_for_it_ends_the_group(crew, monkeypatch):
    monkeypatch.setattr("arctic_platform.rl.workers.watch.LEAST_GRACE_SECONDS", 0.1)
    monkeypatch.setattr(crew, "_heartbeat_seconds", 0.1)
    with pytest.raises(WorkerLostError, match=r"rank 0 .*it failed and the other ranks did not: rank 0 refuses"):
        crew.call("refuse", [None, None], [{"only": 0}, {"call": "hang"}])
    assert all_end(crew.pids)


def test_one_that_leaves_is_told_with_its_code_and_its_last_lines(crew):
    for _ in range(2):
        with pytest.raises(
            WorkerLostError, match=r"rank 1 .*lost in leave: exit code 3; do something; its last lines: "
        ):
            call(crew, "leave", only=1)
    assert "a last line" in str(crew.lost)


def test_one_that_is_stopped_between_calls_is_lost_after_a_heartbeat(crew):
    os.kill(crew.pids[0], signal.SIGSTOP)
    deadline = time.monotonic() + 30.0
    while crew.lost is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert "rank 0" in str(crew.lost)
    assert "lost between calls: it said nothing for 2 s" in str(crew.lost)
    assert all_end(crew.pids)
    with pytest.raises(WorkerLostError):
        call(crew, "count")


def test_silence_while_the_server_itself_was_stopped_is_no_loss(crew, monkeypatch):
    real, offset = time.monotonic, [0.0]
    monkeypatch.setattr("arctic_platform.rl.workers.watch.time.monotonic", lambda: real() + offset[0])
    call(crew, "count")
    offset[0] = 1000.0
    time.sleep(1.2)
    assert crew.lost is None
    call(crew, "count")


def test_a_crew_starts_anew_after_a_loss_and_stays_lost_where_what_follows_fails(crew):
    before = crew.pids
    os.kill(before[0], signal.SIGKILL)
    assert all_end(before)
    with pytest.raises(KeyError), crew.starting_anew():
        raise KeyError("no checkpoint")
    with pytest.raises(WorkerLostError, match=rf"pid {before[0]}"):
        call(crew, "count")
    with crew.starting_anew():
        call(crew, "count")
    assert crew.lost is None
    assert not set(crew.pids) & set(before)


def test_a_crew_that_is_forgotten_leaves_no_process():
    crew = light_crew(2)
    pids = crew.pids
    assert alive_of(pids) == pids
    del crew
    gc.collect()
    assert all_end(pids)


def test_a_crew_that_was_closed_says_so():
    crew = light_crew(1)
    crew.close()
    crew.close()
    with pytest.raises(WorkerLostError, match="ended by close"):
        crew.call("count", [None])


def test_a_loss_that_is_told_again_and_again_keeps_nothing_of_what_was_called(crew):
    os.kill(crew.pids[0], signal.SIGKILL)
    for _ in range(3):
        with pytest.raises(WorkerLostError):
            call(crew, "count")
    assert crew.lost.__traceback__ is None
