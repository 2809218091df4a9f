"""How long what was not measured should take, from what was."""

import pytest

from dilabench.predict.time import budget_option, case_seconds, elapsed_seconds, seconds_like


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
    # dense attention over twice the length is four times the work: three more verifications and ten more calls each
    assert longest == pytest.approx(16.0 + 3 * (3.0 + 10 * 0.01), rel=0.02)


@pytest.mark.parametrize(("seconds", "option"), [(0.1, "10s"), (10.0, "10s"), (10.1, "20s"), (3601, "3610s")])
def test_a_budget_is_rounded_up(seconds, option):
    assert budget_option(seconds) == f"--budget {option}"


def test_a_run_whose_end_is_not_known_has_no_duration(make_record):
    assert elapsed_seconds(make_record([])) == 0.0
    assert elapsed_seconds(make_record([], finished_at="2026-01-02T03:05:00+00:00")) == 55.0
