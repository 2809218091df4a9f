"""Ranks in different calls are found by what they wrote into the store, and ranks that are late are not."""

import pytest
import torch
import torch.distributed as dist

from dilabench.distributed import calls as calls_module
from dilabench.distributed.calls import Calls, disagreement
from dilabench.distributed.failures import RanksDisagreeError

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ONE, OTHER = {"scale": None, "rows": (4, 4)}, {"scale": 0.5, "rows": (4, 4)}


class Group:
    """A process group of which only the store is there."""

    def __init__(self, store):
        self.get_group_store = lambda: store


@pytest.fixture
def ranks(monkeypatch):
    """The calls of two ranks that look at once, and how often each ended waits."""
    monkeypatch.setattr(calls_module, "PATIENCE_S", 0.0)
    monkeypatch.setattr(calls_module, "_watch", lambda _calls: None)
    monkeypatch.setattr(Calls, "_end_waits", lambda _self, _peer: None)
    store = dist.HashStore()
    groups = [Group(store), Group(store)]
    several = [Calls(group, rank, 2) for rank, group in enumerate(groups)]
    for one in several:
        one.met("token")
    # The groups live as long as the test.
    yield several
    del groups


def waiting(calls, *requests):
    """Make these calls; the last one has not ended."""
    for request in requests[:-1]:
        with calls.numbered(request, CPU):
            pass
    calls.numbered(requests[-1], CPU)


def ended_by(calls):
    """What a rank's waiting call raises when its connections close."""
    error = RuntimeError("Connection closed by peer")
    try:
        calls.__exit__(RuntimeError, error, None)
    except RanksDisagreeError as found:
        return str(found)
    return None


@pytest.mark.parametrize(
    ("of_first", "of_second", "found"),
    [
        ([ONE], [ONE], False),
        ([ONE], [OTHER], True),
        ([ONE, ONE], [ONE, OTHER], True),
        # One is late.
        ([ONE, ONE, OTHER], [ONE], False),
        ([ONE, OTHER, ONE], [ONE, OTHER], False),
        # The first only sent, and is ahead.
        ([ONE, ONE, ONE], [ONE, OTHER], True),
        ([ONE] * 90, [ONE] * 80 + [OTHER], True),
        # It has forgotten what it did then.
        ([ONE] * 90, [OTHER], False),
    ],
)
def test_calls_with_one_number_that_differ_are_found(ranks, of_first, of_second, found):
    for calls, requests in zip(ranks, (of_first, of_second), strict=True):
        waiting(calls, *requests)
    for _ in range(2):
        for calls in ranks:
            calls.look()
    texts = {ended_by(calls) for calls in ranks}
    assert len(texts) == 1
    assert (texts != {None}) == found
    if found:
        assert "scale null" in (text := texts.pop())
        assert "scale 0.5" in text
        assert "rows" not in text


def test_a_rank_that_does_not_wait_writes_nothing(ranks):
    first, second = ranks
    with first.numbered(ONE, CPU):
        pass
    waiting(second, OTHER)
    first.look()
    second.look()
    assert ended_by(second) is None


class Device:
    """A GPU that has, or has not, come to the end of the last call."""

    def __init__(self, monkeypatch, done):
        self.done, self.said = done, []
        monkeypatch.setattr(torch.cuda, "Event", lambda: self)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
        monkeypatch.setattr(calls_module, "current_stream", lambda _device: None)
        self.record = lambda _stream: None

    def query(self):
        return self.done


@pytest.mark.parametrize("first_waits", ["host", "device"])
@pytest.mark.parametrize(("other", "done", "found"), [(OTHER, False, True), (OTHER, True, False), (ONE, False, False)])
def test_a_device_that_waits_is_told_although_its_host_went_on(ranks, monkeypatch, other, done, found, first_waits):
    first, second = ranks
    device = Device(monkeypatch, done)
    for calls in ranks:
        calls.ends[GPU] = device.said.append
    for calls, request in ((first, ONE), (second, other)):
        for asked in (ONE, request, ONE):
            with calls.numbered(asked, GPU):
                pass
    if first_waits == "host":
        first.numbered(ONE, GPU)
    for _ in range(2):
        for calls in ranks:
            calls.look()
    assert len(device.said) == 2 * found
    for calls in ranks:
        if found:
            assert "scale 0.5" in device.said[0]
            for use in (calls.check, lambda calls=calls: calls.numbered(ONE, GPU)):
                with pytest.raises(RanksDisagreeError, match="scale"):
                    use()
        else:
            calls.check()


def test_entries_of_an_earlier_group_do_not_count(ranks):
    first, second = ranks
    waiting(first, ONE)
    first.look()
    store = second._group_store
    later = Calls(group := Group(store), 1, 2)
    later.met("another token")
    waiting(later, OTHER)
    later.look()
    assert ended_by(later) is None
    assert group is not None


def test_only_the_fields_that_differ_are_named():
    assert disagreement({0: ONE, 1: dict(ONE)}) is None
    text = disagreement({0: ONE, 1: OTHER, 2: ONE})
    assert text == (
        "ranks disagree on the workload: rank 0 has scale null; rank 1 has scale 0.5; rank 2 has scale null; "
        "give every rank the same request"
    )


def test_a_rank_without_rows_may_have_another_algorithm():
    requests = {0: ONE | {"algorithm": "BlockExchange"}, 1: ONE | {"algorithm": "NoRows"}}
    assert disagreement(requests) is None
    assert '"NoRows"' in disagreement(requests | {1: OTHER | {"algorithm": "NoRows"}})
