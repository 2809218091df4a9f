"""Messages by the copy engines of real GPUs; their protocol is held to threads in test_ring_buffers."""

import itertools
import threading
import time
from concurrent.futures import BrokenExecutor
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from dilabench.distributed.transport import copies as transport
from dilabench.distributed.transport.copies import Copies
from dilabench.distributed.world import World


@pytest.fixture
def watched(monkeypatch):
    """Transfers whose device is a stand-in: what the watching thread sees comes from the test."""
    monkeypatch.setattr(transport, "_WATCH_S", 0.01)
    monkeypatch.setattr(transport, "_driver", Mock())
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    made = object.__new__(Copies)
    made.__dict__.update(
        _rank=3, _device=None, _under_way=[], _trouble="", _closed=threading.Event(), _rescue=None, timeout_s=1.0
    )
    released = threading.Event()
    made._buffers = SimpleNamespace(release=lambda _: released.set(), unsettled=lambda _: ["0 of 2 chunks came"])
    made._captures, made._since = False, 0.0
    made._counters = list
    made._watcher = threading.Thread(target=made._watch, daemon=True)
    yield made, released
    made._closed.set()


def failing_query():
    raise RuntimeError("CUDA error: invalid argument")


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (failing_query, "rank 3: its transfers cannot be watched: CUDA error: invalid argument"),
        (lambda: False, "rank 3: messages did not come within 1 s: 0 of 2 chunks came"),
    ],
)
def test_nothing_is_used_after_a_transfer_that_failed_or_could_not_be_watched(watched, query, message):
    copies, released = watched
    copies._under_way.append(transport._Transfer(0.0, 1.0, SimpleNamespace(query=query)))
    copies._watcher.start()
    assert released.wait(10)
    for use in (copies.check, copies.confirm_counts, lambda: copies.exchange({}, {}, ())):
        with pytest.raises(RuntimeError, match=message):
            use()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_watching_thread_that_died_is_noticed(watched):
    copies, _ = watched
    copies._watcher = threading.Thread(target=lambda: None)
    copies._watcher.start()
    copies._watcher.join()
    with pytest.raises(RuntimeError, match="rank 3: the thread that watches its transfers has ended"):
        copies.check()


@pytest.mark.parametrize(
    ("counts", "ends"),
    [
        ([(5, 4)], True),
        # Nothing under way; replay after replay; one exchange later than the other.
        ([(5, 5)], False),
        ([(n, n - 1) for n in range(1, 9)], False),
        ([(5, 4), (5, 5)], False),
    ],
)
def test_a_replay_without_its_messages_ends_the_process(watched, monkeypatch, counts, ends):
    copies, _ = watched
    copies.timeout_s, copies._captures = 0.05, True
    copies._exchanges = torch.zeros(2, dtype=torch.int64)
    copies._seen = torch.zeros(2, dtype=torch.int64)
    coming = itertools.cycle(counts)

    def copy(_target, _source, _nbytes):
        copies._seen.copy_(torch.tensor(next(coming)))

    copies._rescue = SimpleNamespace(copy=copy, stream=SimpleNamespace(synchronize=lambda: None))
    said = []
    monkeypatch.setattr(transport, "_end_process", said.append)
    copies._watcher.start()
    time.sleep(0.3)
    copies._closed.set()
    copies._watcher.join()
    copies.check()
    assert bool(said) == ends
    assert {*said} <= {"rank 3: messages of a replayed CUDA graph did not come within 0.05 s"}


on_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
pytestmark = pytest.mark.distributed


@pytest.mark.gpu
@on_two_gpus
def test_every_replay_of_a_graph_brings_the_messages_of_this_replay(launch):
    import copy_cases

    assert launch(copy_cases.captured, 2, [[1000, 90_000_001], 6], device="cuda") == [[], []]


@pytest.mark.gpu
@on_two_gpus
def test_attention_over_ranks_in_a_graph_gives_what_the_call_gives(launch):
    import copy_cases

    for carried, wrong in launch(copy_cases.graphed, 2, device="cuda"):
        assert carried.startswith("copy engines")
        assert wrong == []


@pytest.mark.gpu
@on_two_gpus
def test_messages_over_nccl_are_not_captured(monkeypatch, launch):
    import copy_cases

    monkeypatch.setenv("DILABENCH_TRANSPORT", "nccl")
    with pytest.raises(RuntimeError, match=r"messages over nccl.* cannot be captured in a CUDA graph"):
        launch(copy_cases.graphed, 2, device="cuda")


def test_messages_without_copy_engines_are_not_captured(monkeypatch):
    """The refusal comes before any message."""
    world = replace(World.single(), size=2, transport="nccl")
    sent = torch.ones(4)
    monkeypatch.setattr(
        "dilabench.distributed.world.is_captured",
        lambda x: x.untyped_storage().data_ptr() == sent.untyped_storage().data_ptr(),
    )
    for message in (
        lambda: world.send_recv({1: [sent]}, {1: [torch.empty(4)]}, "test"),
        lambda: world.all_to_all(sent, [2, 2], [2, 2], "test"),
    ):
        with pytest.raises(RuntimeError, match="messages over nccl cannot be captured in a CUDA graph"):
            message()


@pytest.mark.gpu
@on_two_gpus
def test_a_replay_whose_peer_does_not_come_ends(launch):
    import copy_cases

    with pytest.raises(BrokenExecutor):
        launch(copy_cases.stuck, 2, [2.0], device="cuda")


@pytest.mark.gpu
@on_two_gpus
def test_counters_that_were_set_back_end_the_rank(launch):
    import copy_cases

    answers, _ = launch(copy_cases.miscounted, 2, device="cuda")
    assert len(answers) == 3
    assert all("rank 0: messages were miscounted: 0 of " in answer for answer in answers)


@pytest.mark.gpu
@on_two_gpus
def test_messages_of_any_length_arrive_as_they_were_sent(launch):
    import copy_cases

    # The longest is as long as the ring buffer of an H200.
    found = launch(copy_cases.swapped, 2, [[1, 77, 1 << 20, 70_000_001, 300_000_000]], device="cuda")
    assert found == [("copy engines", [])] * 2


@pytest.mark.gpu
@on_two_gpus
def test_nccl_carries_them_where_it_is_asked_to(monkeypatch, launch):
    import copy_cases

    monkeypatch.setenv("DILABENCH_TRANSPORT", "nccl")
    found = launch(copy_cases.swapped, 2, [[1, 1 << 20]], device="cuda")
    assert found == [("nccl (DILABENCH_TRANSPORT=nccl)", [])] * 2


@pytest.mark.gpu
@on_two_gpus
def test_a_rank_that_comes_too_late_ends_the_wait(launch):
    import copy_cases

    with pytest.raises(
        RuntimeError, match=r"rank 0: messages did not come within 2 s: \d+ of \d+ chunks came from rank 1"
    ):
        launch(copy_cases.late, 2, [2.0], device="cuda")
