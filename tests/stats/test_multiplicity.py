"""Corrections for many cells."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilabench.errors import ConfigError
from dilabench.stats.decisions.decide import Policy, control_family, holm, judge_many
from dilabench.stats.decisions.verdicts import Cause, Code

p_values = st.lists(st.floats(0, 1), min_size=1, max_size=20)
NO_MARGIN = Policy(user_margin=0.0, resolution=0.0, min_change_ns=0)


def holm_by_definition(p):
    """The smallest family-wise level at which the step-down procedure rejects each hypothesis."""
    order = sorted(range(len(p)), key=p.__getitem__)
    adjusted, running = [0.0] * len(p), 0.0
    for rank, i in enumerate(order):
        running = max(running, min(1.0, (len(p) - rank) * p[i]))
        adjusted[i] = running
    return adjusted


@given(p_values)
def test_holm_is_its_definition(p):
    assert holm(p) == pytest.approx(holm_by_definition(p))


def test_p_outside_its_range_is_refused():
    with pytest.raises(ConfigError, match=r"1\.5"):
        holm([0.1, 1.5])


def test_one_cell_alone_is_judged_as_before(round_noise):
    verdicts = judge_many([round_noise(1, effect=0.05)], NO_MARGIN)
    (controlled,) = control_family(verdicts, NO_MARGIN)
    assert controlled.code is verdicts[0].code is Code.SLOWER
    assert controlled.numbers.p_adjusted == verdicts[0].numbers.p_slower


def test_chance_among_many_cells_is_not_claimed_and_real_changes_are(round_noise):
    """Without any margin identical cells are called different now and then; the correction takes that back."""
    same = [round_noise(seed) for seed in range(900)]
    real = [round_noise(seed, effect=0.05) for seed in range(1000, 1004)]
    plain = judge_many(same + real, NO_MARGIN)
    controlled = control_family(plain, NO_MARGIN)
    claims = [v for v in plain[:900] if v.code in (Code.SLOWER, Code.FASTER)]
    assert claims
    assert not any(v.fails_gate for v in controlled[:900])
    assert all(v.fails_gate for v in controlled[900:])
    demoted = [v for v in controlled if v.cause is Cause.MULTIPLICITY]
    assert demoted
    assert all(v.numbers.p_adjusted > 0.005 for v in demoted)


def test_a_cell_without_p_value_stays_as_it_is(round_noise):
    verdicts = judge_many([round_noise(0, rounds=2), round_noise(1, effect=0.3)], NO_MARGIN)
    thin, slower = control_family(verdicts, NO_MARGIN)
    assert (thin.code, thin.cause, thin.numbers.p_adjusted) == (Code.UNDECIDED, Cause.TOO_FEW_ROUNDS, None)
    assert slower.code is Code.SLOWER


def test_no_verdicts():
    assert control_family([], NO_MARGIN) == []
