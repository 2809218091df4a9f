"""Ranks in different calls are found by the counts that they write into the store, and ranks that are late are not."""

import pytest
import torch
import torch.distributed as dist

from dilabench.distributed import calls as calls_module
from dilabench.distributed.calls import Calls, Request, disagreement
from dilabench.distributed.failures import RanksDisagreeError

GPU = torch.device("cuda", 0)
REMEMBERED = 64
ONE, OTHER = Request.of({"scale": None, "rows": (4, 4)}), Request.of({"scale": 0.5, "rows": (4, 4)})


class Group:
    """A process group of which only the store is there."""

    def __init__(self, store):
        self.get_group_store = lambda: store


class Ranks:
    """A stand-in for `World`, with the facts of all ranks."""

    def __init__(self, several):
        self.share = lambda _fact: [(calls.fact.made, calls._remembered()) for calls in several]


def ranks_of(store, size):
    groups = [Group(store) for _ in range(size)]
    return groups, [Calls(group, rank, size) for rank, group in enumerate(groups)]


def meet(several):
    """Let ranks exchange their facts, and return what each is told."""
    facts = [calls.fact for calls in several]
    return [calls.met(facts) for calls in several]


@pytest.fixture
def three(monkeypatch):
    """The calls of three ranks that have met."""
    monkeypatch.setattr(calls_module, "REMEMBERED", REMEMBERED)
    monkeypatch.setattr(calls_module, "_watch", lambda _calls: None)
    monkeypatch.setattr(calls_module, "is_alive", lambda _group: True)
    monkeypatch.setattr(Calls, "_end_waits", lambda _self, _group: None)
    groups, several = ranks_of(dist.HashStore(), 3)
    assert meet(several) == [False] * 3
    # The groups live as long as the test.
    yield several
    del groups


def make(calls, *requests):
    for request in requests:
        with calls.numbered(request):
            pass


def look(several):
    for _ in range(3):
        for calls in several:
            calls.look()


def said(calls):
    """What a rank raises at its next use of the group."""
    try:
        calls.check()
    except RanksDisagreeError as error:
        return str(error)
    return None


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize(
    ("usual", "of_odd", "found"),
    [
        ([ONE], [ONE], False),
        ([ONE], [OTHER], True),
        ([ONE, ONE], [ONE, OTHER], True),
        # The odd rank is late.
        ([ONE, ONE, OTHER], [ONE], False),
        ([ONE, OTHER, ONE], [ONE, OTHER], False),
        # It only sent, and is ahead.
        ([ONE, OTHER], [ONE, ONE, ONE], True),
        ([ONE] * 80 + [OTHER], [ONE] * 90, True),
        # The others have forgotten what they did then.
        ([ONE] * (REMEMBERED + 9), [OTHER], False),
        # All ranks have forgotten it.
        ([ONE] * (REMEMBERED + 9), [OTHER] + [ONE] * (REMEMBERED + 8), True),
    ],
)
def test_calls_with_one_number_that_differ_are_found(three, usual, of_odd, found, odd):
    for rank, calls in enumerate(three):
        make(calls, *(of_odd if rank == odd else usual))
    look(three)
    texts = {said(calls) for calls in three}
    assert len(texts) == 1
    assert (texts != {None}) == found
    if found:
        text = texts.pop()
        assert ("scale null" in text and "scale 0.5" in text) or "made calls of hash" in text
        assert "rows" not in text


def test_a_call_that_ends_with_an_error_raises_the_disagreement_instead(three):
    first, second, third = three
    make(first, ONE)
    make(third, ONE)
    second.numbered(OTHER)
    look(three)
    with pytest.raises(RanksDisagreeError, match=r"scale 0\.5"):
        second.__exit__(RuntimeError, RuntimeError("Connection closed by peer"), None)


def test_devices_end_their_waits(three):
    ends = []
    for rank, calls in enumerate(three):
        calls.ends[GPU] = ends.append
        make(calls, OTHER if rank == 1 else ONE)
    look(three)
    assert len(ends) == 3
    for calls in three:
        for use in (calls.check, lambda calls=calls: calls.numbered(ONE)):
            with pytest.raises(RanksDisagreeError, match="scale"):
                use()


@pytest.mark.parametrize("last", [ONE, OTHER])
def test_a_new_call_finds_what_differed_before(three, last):
    """Without the thread."""
    for rank, calls in enumerate(three):
        make(calls, *((ONE, last, ONE) if rank == 1 else (ONE, ONE, ONE)))
    differ = last is OTHER
    assert meet(three) == [differ] * 3
    if differ:
        texts = {calls.differ(Ranks(three)) for calls in three}
        assert [*texts] == [said(three[0])]
        assert "rank 0 has scale null; rank 1 has scale 0.5; rank 2 has scale null" in texts.pop()


def test_a_rank_that_made_more_calls_is_found_at_a_new_one(three):
    for rank, calls in enumerate(three):
        make(calls, *[ONE] * (2 + (rank == 1)))
    assert meet(three) == [True] * 3
    assert "rank 0 has made 2 calls after 0 that failed; rank 1 has made 3" in three[0].differ(Ranks(three))


FAILURES = [torch.OutOfMemoryError, KeyboardInterrupt]


@pytest.mark.parametrize("kind", FAILURES)
def test_after_a_call_that_failed_on_all_ranks_they_count_again(three, kind):
    """On some of them in the backward pass."""
    for rank, calls in enumerate(three):
        make(calls, *[ONE] * rank)
        with pytest.raises(kind), calls.numbered(OTHER):
            raise kind("no memory is left")
    look(three)
    assert meet(three) == [False] * 3
    for calls in three:
        make(calls, ONE, ONE)
    look(three)
    assert [said(calls) for calls in three] == [None] * 3
    for rank, calls in enumerate(three):
        make(calls, ONE if rank else OTHER)
    look(three)
    assert all("scale" in said(calls) for calls in three)


@pytest.mark.parametrize("kind", FAILURES)
def test_a_call_that_failed_on_one_rank_is_found_at_a_new_one(three, kind):
    with pytest.raises(kind), three[1].numbered(ONE):
        raise kind("no memory is left")
    for calls in three:
        make(calls, ONE)
    assert meet(three) == [True] * 3
    text = three[0].differ(Ranks(three))
    assert "rank 1 has made 1 calls after 1 that failed" in text


def test_a_refused_call_counts_on_all_ranks(three):
    for calls in three:
        with pytest.raises(ValueError, match="shapes"), calls.numbered(ONE):
            raise ValueError("shapes")
    assert meet(three) == [False] * 3
    assert three[0].fact.made.number == 1


def test_entries_of_an_earlier_group_do_not_count(three):
    make(three[0], ONE)
    three[0].look()
    groups, later = ranks_of(three[0]._group_store, 3)
    meet(later)
    make(later[1], OTHER)
    look(later)
    assert [said(calls) for calls in later] == [None] * 3
    assert groups


def test_the_store_keeps_as_many_entries_however_many_calls_there_are(three):
    counts = []
    for _ in range(3):
        for calls in three:
            make(calls, ONE, OTHER)
        look(three)
        counts.append(three[0]._group_store.num_keys())
    assert len({*counts}) == 1


def test_a_group_whose_store_is_gone_is_left(three, monkeypatch):
    def gone(_self, _store):
        raise RuntimeError("Broken pipe")

    monkeypatch.setattr(Calls, "_compared", gone)
    look(three)
    assert [calls._store for calls in three] == [None] * 3


def test_hashes_and_tags_are_those_of_every_process(three):
    assert Request.of({"rows": [4, 4], "scale": None}).hash == ONE.hash != OTHER.hash
    tags = []
    for calls in three:
        with calls.numbered(ONE):
            tags.append(calls.tag)
        assert calls.tag == calls_module.NO_CALL
    assert len({*tags}) == 1
    assert calls_module.NO_MESSAGE < tags[0] < 2**31


def test_only_the_fields_that_differ_are_named():
    assert disagreement({0: ONE.text, 1: ONE.text}) is None
    text = disagreement({0: ONE.text, 1: OTHER.text, 2: ONE.text})
    assert text == (
        "ranks disagree on the workload: rank 0 has scale null; rank 1 has scale 0.5; rank 2 has scale null; "
        "give every rank the same request"
    )


def test_of_long_values_that_differ_only_at_their_ends_little_is_kept():
    long = [Request.of({"rows": 4, "cu_seqlens": [*range(5000), last]}) for last in (6000, 7000)]
    assert long[0].hash != long[1].hash
    assert len(long[0].text) < 2 * calls_module.MOST_CHARACTERS
    text = disagreement({rank: request.text for rank, request in enumerate(long)})
    assert text.count("cu_seqlens") == 2
    assert "rows" not in text
