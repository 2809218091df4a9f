"""What several ranks answer becomes one answer."""

import pytest

from dilabench.engine.worker.replies import (
    Isolated,
    Prepared,
    RankState,
    Released,
    Sampled,
    Verified,
    WarmedUp,
    out_of_step,
)
from dilabench.metadata import BATCHED, LAUNCH_EXPOSED
from dilabench.record import Check, Memory, Slot, Verification


def isolated(peak, samples, passed=True, **counters):
    memory = Memory(peak_bytes=peak, inputs_bytes=1, workspace_bytes=peak - 1, isolated=True, method="test")
    verification = Verification(checks=(Check(name="out", passed=passed),), sampled_rows=24)
    return Isolated(
        verification=verification,
        why="" if passed else "out: wrong",
        memory=memory,
        slot=Slot(samples_ns=samples),
        counters=counters,
    )


def merged(ranks):
    return ranks[0].merged(ranks)


def test_an_isolated_case_is_as_slow_and_as_large_as_its_worst_rank():
    found = merged([isolated(10, (5, 9), sent=3), isolated(30, (7, 8), sent=4), isolated(20, (6, 6), sent=2)])
    assert found.slot.samples_ns == (7, 9)
    assert found.slot.rank_samples_ns == ((5, 9), (7, 8), (6, 6))
    assert found.memory.peak_bytes == 30
    assert found.counters == {"sent": 4}
    assert found.verification.passed


def test_an_isolated_case_is_wrong_when_one_rank_says_so_and_names_it():
    found = merged([isolated(10, (5,)), isolated(10, (5,), passed=False)])
    assert not found.verification.passed
    assert found.why == "rank 1: out: wrong"


def state(shared="a", sent=((0, 0), (2, 80)), received=((0, 0), (3, 90))):
    return RankState(shared=shared, sent=sent, received=received)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (state(sent=((3, 90), (0, 0)), received=((2, 80), (0, 0))), ""),
        (None, ""),
        (state(shared="b", sent=((3, 90), (0, 0)), received=((2, 80), (0, 0))), "drawn other numbers"),
        (
            state(sent=((3, 90), (0, 0)), received=((1, 40), (0, 0))),
            "has sent 2 messages of 80 bytes to rank 1, which has",
        ),
        (state(sent=((4, 99), (0, 0)), received=((2, 80), (0, 0))), "rank 1 has sent 4 messages of 99 bytes to rank 0"),
    ],
)
def test_ranks_are_out_of_step_when_draws_or_messages_of_a_pair_differ(other, why):
    assert why in out_of_step([state(), other])
    assert bool(why) == bool(out_of_step([state(), other]))


def test_a_timer_that_one_rank_cannot_use_is_used_by_none():
    ranks = [WarmedUp(samples_ns=(), settled=True, unusable=why) for why in (None, "no capture")]
    assert merged(ranks).unusable == "no capture"


def test_set_up_takes_as_long_as_on_the_slowest_rank_and_checks_fail_if_one_fails():
    ranks = [Prepared(setup_ns={"build": 3}, call_ns=1), Prepared(setup_ns={"build": 2, "inputs": 5}, call_ns=4)]
    assert (merged(ranks).setup_ns, merged(ranks).call_ns) == ({"build": 3, "inputs": 5}, 4)
    checks = [Verification(checks=(Check(name="out", passed=passed),)) for passed in (True, False)]
    found = merged([Verified(verification=check, why="off") for check in checks])
    assert (found.verification, found.why) == (checks[1], "rank 1: off")


def test_notes_of_every_rank_reach_the_row_and_name_the_rank_that_observed_most():
    hidden, exposed = (LAUNCH_EXPOSED.note(f"launching takes {ms} ms", observed=ms) for ms in (50, 68))
    batched = BATCHED.note("a sample is the mean of 2 calls", observed=2)
    reply = merged([Released(notes=(batched,)), Released(notes=(hidden, batched)), Released(notes=(exposed, batched))])
    assert [(note.code, note.message) for note in reply.notes] == [
        ("batched", "a sample is the mean of 2 calls"),
        ("launch_exposed", "rank 2: launching takes 68 ms"),
    ]
    warmed = [WarmedUp(samples_ns=(), settled=True, notes=notes) for notes in ((), (exposed,))]
    assert merged(warmed).notes[0].message == "rank 1: launching takes 68 ms"
    slots = [Sampled(slot=Slot(samples_ns=(1,)), notes=notes) for notes in ((), (exposed,))]
    assert merged(slots).notes[0].message == "rank 1: launching takes 68 ms"
