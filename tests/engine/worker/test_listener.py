"""The listener between machines: whoever has the key comes in by name, and nobody waits for ever."""

import threading
import time
from multiprocessing import AuthenticationError

import pytest

from dilabench.engine.worker.listener import RankListener, address_towards, connect, disconnect


@pytest.fixture
def listener():
    made = RankListener()
    yield made
    made.close()


def test_who_has_the_key_is_known_by_name_and_bytes_pass_both_ways(listener):
    theirs = connect(("127.0.0.1", listener.port), listener.key, "rank 1")
    ours = listener.wait("rank 1", 10)
    theirs.send_bytes(b"hello")
    assert ours.recv_bytes() == b"hello"
    ours.send_bytes(b"to you")
    assert theirs.recv_bytes() == b"to you"
    assert listener.wait("rank 1", 0.0) is None, "it came once"
    for end in (ours, theirs):
        disconnect(end)
        disconnect(end)


def test_a_stranger_stays_outside_and_the_door_stays_open(listener):
    with pytest.raises(AuthenticationError):
        connect(("127.0.0.1", listener.port), b"another key", "stranger")
    assert listener.wait("stranger", 0.1) is None
    disconnect(connect(("127.0.0.1", listener.port), listener.key, "friend"))
    assert listener.wait("friend", 10) is not None


def test_disconnecting_wakes_a_waiting_receiver(listener):
    theirs = connect(("127.0.0.1", listener.port), listener.key, "rank 1")
    heard = []

    def listen():
        try:
            theirs.recv_bytes()
        except (EOFError, OSError) as error:
            heard.append(type(error))

    thread = threading.Thread(target=listen)
    thread.start()
    time.sleep(0.1)
    disconnect(listener.wait("rank 1", 10))
    thread.join(10)
    assert len(heard) == 1


def test_no_listener_is_an_error_after_the_time_allowed(listener):
    port = listener.port
    listener.close()
    with pytest.raises(OSError, match="refused"):
        connect(("127.0.0.1", port), listener.key, "late", timeout_s=0.3)


def test_a_host_that_is_this_machine_keeps_the_name_that_others_know(listener):
    assert address_towards("localhost", listener.port) == "localhost"
