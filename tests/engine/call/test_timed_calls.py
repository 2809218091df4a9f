"""What timed calls are given: whatever changes after a kept call can be taken back."""

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
