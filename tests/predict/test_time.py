"""How long what was not measured should take, from what was."""

import pytest

from dilabench.machine import Machine
from dilabench.predict.time import (
    budget_option,
    case_seconds,
    expected_seconds,
    expected_time,
    seconds_like,
    slow_dtypes,
)


def with_verification(row, seconds):
    verification = row.outcome.verification.model_copy(update={"duration_ns": int(seconds * 1e9)})
    return row.model_copy(update={"outcome": row.outcome.model_copy(update={"verification": verification})})


@pytest.fixture
def rows(make_row):
    """A short case, and one twice as long whose verification takes 3 s; a second of samples each."""
    short, longer = (make_row("strided", seq_len=n, ns=1e7, spread=0, rounds=20, samples=5) for n in (96, 192))
    return [short, with_verification(longer, 3.0)]


def test_cases_share_the_time_of_a_run_by_what_their_rows_took(rows):
    took_s = case_seconds(rows, 20.0)
    assert took_s == {rows[0].case.case_id: pytest.approx(4.0), rows[1].case.case_id: pytest.approx(16.0)}
    assert case_seconds([], 20.0) == {}


def test_a_longer_case_takes_as_long_as_the_longest_and_more_for_its_verification_and_calls(rows, make_row):
    took_s = case_seconds(rows, 20.0)
    alike, longest = (seconds_like(make_row("gather", seq_len=n).case, rows, took_s) for n in (192, 384))
    assert alike == pytest.approx(16.0)
    # Dense attention over twice the length is four times the work: one more verification and three times ten calls.
    assert longest == pytest.approx(16.0 + 3.0 + 3 * 10 * 0.01, rel=0.02)


@pytest.mark.parametrize(
    ("seconds", "option"), [(0.1, "10s"), (10.0, "10s"), (10.1, "20s"), (3601, "3610s"), (665_345, "185h")]
)
def test_a_budget_is_rounded_up(seconds, option):
    assert budget_option(seconds) == f"--budget {option}"


CPU = Machine(device="cpu", no_cuda="test")


def test_what_is_expected_stands_against_the_budget(make_row):
    cases = [make_row(seq_len=2**15, num_heads=8, num_kv_heads=8).case]
    seconds = expected_seconds(cases, CPU, 2)
    # Dense attention over 32K tokens takes longer than what surrounds it, and half as long on twice the cores.
    assert seconds > 20
    assert expected_seconds(cases, CPU, 4) - 6 == pytest.approx((seconds - 6) / 2)
    assert expected_time(cases, CPU, 2, None).endswith("no limit")
    assert "at most" in expected_time(cases, CPU, 2, 2 * seconds)
    assert expected_time(cases, CPU, 2, seconds / 2).endswith("some cases will be skipped (--budget 60s measures all)")


def test_half_precision_is_called_slow_on_a_cpu_only(make_row):
    cases = [make_row(dtype=dtype).case for dtype in ("float32", "bfloat16", "float16", "bfloat16")]
    assert slow_dtypes(cases, CPU) == "most processors are slow at bfloat16 and float16"
    assert slow_dtypes(cases[:1], CPU) is None
    assert slow_dtypes(cases, Machine(device="cuda")) is None
