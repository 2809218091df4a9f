import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilabench.report.columns import latency_interval
from dilabench.stats.samples.location import Interval
from dilabench.units import format_latency, format_rate, format_ratio, significant


@given(st.floats(min_value=1e-9, max_value=1e15), st.integers(min_value=2, max_value=6))
def test_significant_keeps_the_leading_digits(value: float, digits: int) -> None:
    text = significant(value, digits)
    assert "e" not in text
    assert math.isclose(float(text), value, rel_tol=0.5 * 10 ** (1 - digits) * 1.000001)


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (7.0, "7.000 ns"),
        (1_234.5, "1.234 µs"),
        (9_999_600.0, "10.00 ms"),
        (123_456_789.0, "123.5 ms"),
        (61e9, "61.00 s"),
        (12_345e9, "12345 s"),
    ],
)
def test_latency(nanoseconds: float, text: str) -> None:
    assert format_latency(nanoseconds) == text


def test_interval_has_the_unit_and_decimals_of_the_median() -> None:
    assert latency_interval(12.34e6, Interval(9.876e6, 13.2e6, 0.96)) == "9.88–13.20"


def test_interval_below_its_confidence_is_marked() -> None:
    assert latency_interval(12.34e6, Interval(12e6, 13e6, 0.9375)) == "12.00–13.00†"


def test_no_interval_says_why() -> None:
    assert latency_interval(12.34e6, None) == "n<5, no CI"


@pytest.mark.parametrize(("value", "text"), [(0.5, "0.500"), (12_345.0, "12.3k"), (1.5e6, "1.50M"), (2e9, "2.00G")])
def test_decimal(value: float, text: str) -> None:
    assert format_rate(value) == text


@pytest.mark.parametrize(("value", "text"), [(1.0, "1.00x"), (0.333, "0.33x"), (123.4, "123x")])
def test_ratio(value: float, text: str) -> None:
    assert format_ratio(value) == text
