"""Which slots make a round: only those that took different turns in the same one."""

import pytest

from dilabench.comparison.pairing import is_throttled, pair_many, sessions_of
from dilabench.record import Slot, Timing


def timing(slots):
    return Timing(timer="wall", proves="elapsed time", slots=tuple(slots))


def slot(index, position, session=0, ns=100, **fields):
    return Slot(session=session, round=index, position=position, samples_ns=(ns,), **fields)


def sizes(pairing):
    return [len(session) for session in pairing.rounds.rounds]


def pair(timings):
    return pair_many([timings])[0]


def test_slots_of_one_round_pair():
    a, b = [slot(i, 0, ns=100 + i) for i in range(3)], [slot(i, 1, ns=200 + i) for i in range(3)]
    found = pair([(timing(a), timing(b))])
    assert found.rounds.rounds == [[((100,), (200,)), ((101,), (201,)), ((102,), (202,))]]
    assert (found.left_out, found.throttled) == (0, False)


def test_order_in_the_record_does_not_matter():
    a, b = [slot(i, 0) for i in (2, 0, 1)], [slot(i, 1, ns=200 + i) for i in range(3)]
    assert [pair_[1] for pair_ in pair([(timing(a), timing(b))]).rounds.rounds[0]] == [(202,), (200,), (201,)]


@pytest.mark.parametrize("rounds", [range(10, 15), (10, 11, 13, 17), (12, 10, 11)], ids=["later", "gaps", "any order"])
def test_rounds_may_begin_anywhere(rounds):
    a, b = [slot(i, 0, ns=i) for i in rounds], [slot(i, 1, ns=100 + i) for i in rounds]
    found = pair([(timing(a), timing(b))])
    assert found.rounds.rounds == [[((i,), (100 + i,)) for i in rounds]]
    # One further round of one side takes the general way.
    general = pair([(timing([*a, slot(99, 0)]), timing(b))])
    assert (general.rounds.rounds, general.left_out) == (found.rounds.rounds, found.left_out + 1)


def test_rounds_that_one_side_lacks_are_counted():
    found = pair([(timing(slot(i, 0) for i in range(7)), timing(slot(i, 1) for i in range(2, 9)))])
    assert (sizes(found), found.left_out) == ([5], 2)


def test_equal_positions_were_no_common_round():
    """Two cases measured one after the other both number their rounds from zero."""
    found = pair([(timing(slot(i, 0) for i in range(5)), timing(slot(i, 0) for i in range(5)))])
    assert (found.rounds, found.left_out) == (None, 5)


def test_a_session_that_began_in_mid_run_on_one_side_still_pairs():
    a = [slot(i, 0, session=int(i >= 3)) for i in range(6)]
    b = [slot(i, 1) for i in range(6)]
    assert sizes(pair([(timing(a), timing(b))])) == [3, 3]


def test_each_record_adds_its_sessions():
    one = timing(slot(i, 0) for i in range(4)), timing(slot(i, 1) for i in range(4))
    two = timing(slot(i, 1) for i in range(5)), timing(slot(i, 0) for i in range(5))
    assert sizes(pair([one, two])) == [4, 5]


def test_sessions_that_number_their_rounds_alike_pair_by_both():
    a = [slot(i, 0, session=s, ns=100 + s) for s in range(2) for i in range(3)]
    b = [slot(i, 1, session=s, ns=200 + s) for s in range(2) for i in range(3)]
    found = pair([(timing(a), timing(b))])
    assert [session[0] for session in found.rounds.rounds] == [((100,), (200,)), ((101,), (201,))]


@pytest.mark.parametrize(("faulty", "kept", "throttled"), [(0, 10, False), (2, 8, False), (3, 10, True)])
def test_rounds_slowed_by_heat_are_left_out_while_they_are_few(faulty, kept, throttled):
    a = [slot(i, 0, throttle=("hw_thermal",) if i < faulty else ("sw_power_cap",)) for i in range(10)]
    found = pair([(timing(a), timing(slot(i, 1) for i in range(10)))])
    assert (sizes(found), found.throttled) == ([kept], throttled)
    assert is_throttled([timing(a)]) is throttled


def test_sessions_of_several_records():
    one, two = timing([slot(0, 0, session=0), slot(0, 0, session=1)]), timing([slot(0, 0, session=0)])
    assert sessions_of([one, two]).counts.tolist() == [1, 1, 1]


COMPARISONS = {
    "one session": [
        (timing(slot(i, 0, ns=100 + i) for i in range(6)), timing(slot(i, 1, ns=200 + i) for i in range(6)))
    ],
    "nothing in common": [(timing(slot(i, 0) for i in range(5)), timing(slot(i, 0) for i in range(5)))],
    "no record": [],
    "two records": [
        (timing(slot(i, 0, ns=7) for i in range(4)), timing(slot(i, 1, ns=8) for i in range(3))),
        (
            timing(slot(i, 1) for i in range(5)),
            timing(slot(i, 0) for i in range(5)),
        ),
    ],
    "heat": [(timing(slot(i, 0, throttle=("hw_thermal",)) for i in range(9)), timing(slot(i, 1) for i in range(9)))],
}


@pytest.mark.parametrize("chosen", [tuple(COMPARISONS), tuple(COMPARISONS)[::-1], ("no record", "nothing in common")])
def test_many_comparisons_are_paired_as_each_is(chosen):
    for found, name in zip(pair_many(COMPARISONS[name] for name in chosen), chosen, strict=True):
        alone = pair(COMPARISONS[name])
        assert (found.left_out, found.throttled) == (alone.left_out, alone.throttled), name
        assert (found.rounds is None) == (alone.rounds is None), name
        if alone.rounds is not None:
            assert found.rounds.rounds == alone.rounds.rounds, name
