"""What several ranks answer becomes one answer."""

from dilabench.engine.worker.protocol import IsolatedResult, Reply
from dilabench.engine.worker.rank_group import _merged
from dilabench.record import Check, Memory, Slot, Verification


def isolated(peak, samples, passed=True, **counters):
    memory = Memory(peak_bytes=peak, inputs_bytes=1, workspace_bytes=peak - 1, isolated=True, method="test")
    verification = Verification(checks=(Check(name="out", passed=passed),), sampled_rows=24)
    return Reply(
        isolated=IsolatedResult(
            verification=verification,
            why="" if passed else "out: wrong",
            memory=memory,
            slot=Slot(samples_ns=samples),
            counters=counters,
        )
    )


def test_an_isolated_case_is_as_slow_and_as_large_as_its_worst_rank():
    found = _merged([isolated(10, (5, 9), sent=3), isolated(30, (7, 8), sent=4), isolated(20, (6, 6), sent=2)]).isolated
    assert found.slot.samples_ns == (7, 9)
    assert found.slot.rank_samples_ns == ((5, 9), (7, 8), (6, 6))
    assert found.memory.peak_bytes == 30
    assert found.counters == {"sent": 4}
    assert found.verification.passed


def test_an_isolated_case_is_wrong_when_one_rank_says_so_and_names_it():
    found = _merged([isolated(10, (5,)), isolated(10, (5,), passed=False)]).isolated
    assert not found.verification.passed
    assert found.why == "rank 1: out: wrong"
