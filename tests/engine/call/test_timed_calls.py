"""What timed calls are given, and that what changes after a kept call can be taken back; what calls leave running."""

import threading

import pytest
import torch

from dilabench.engine.call.inputs import InputSet
from dilabench.engine.call.timed_calls import TimedCalls


def test_all_numbers_change_only_at_the_first_use_in_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that becomes due after a kept call would leave it with a result of numbers that nobody has any more."""
    length = 40
    q, k, v = (torch.randn(2, length, 3, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    inputs = InputSet(q, k, v)
    calls = TimedCalls(0, length, row_dim=1)
    due = iter([False, False, *[True] * 40])
    monkeypatch.setattr(TimedCalls, "_due", lambda *_: next(due))
    calls.begin(last=False)
    kept = calls.before(inputs)
    assert kept is not None
    given = [x.clone() for x in (q, k, v)]
    kept.keep(q * 2)
    monkeypatch.setattr(calls._choice, "random", lambda: 1.0)
    for _ in range(9):
        assert calls.before(inputs) is None
    assert not torch.equal(q, given[0])
    found = calls.end()
    assert found is kept
    kept.restore_inputs()
    for now, then in zip((q, k, v), given, strict=True):
        assert torch.equal(now, then)


def test_a_thread_of_a_call_that_is_not_kept_is_told_though_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(1, 8, 1, 4)
    inputs = InputSet(q, q.clone(), q.clone())
    calls = TimedCalls(0, 8, row_dim=1)
    may_end = threading.Event()
    calls.begin()
    kept = calls.before(inputs)
    assert kept is not None
    kept.keep(q)
    monkeypatch.setattr(calls._choice, "random", lambda: 1.0)
    assert calls.before(inputs) is None
    thread = threading.Thread(target=may_end.wait)
    thread.start()
    assert calls.before(inputs) is None
    may_end.set()
    thread.join()
    assert calls.end() is kept
    assert kept.threads == 1
