"""Lengths, durations, sizes and shares: what is read, what is refused and with which words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilabench.errors import ConfigError
from dilabench.units import (
    MAX_COUNT,
    format_bytes,
    format_count,
    format_seconds,
    parse_bytes,
    parse_count,
    parse_duration,
    parse_fraction,
)


@given(st.integers(1, MAX_COUNT))
def test_format_count_is_read_back(count):
    assert parse_count(format_count(count)) == count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096),
        ("4K", 4096),
        ("16k", 16384),
        ("1M", 1048576),
        ("1_000_000", 1000000),
        ("1,000", 1000),
        ("1e6", 1000000),
        ("1.5K", 1536),
        (" 12 ", 12),
        ("2G", 2**31),
        (7, 7),
    ],
)
def test_parse_count(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("0", "at least 1"),
        (0, "at least 1"),
        ("-5", "at least 1"),
        (-5, "at least 1"),
        ("abc", "not a number"),
        ("", "not a number"),
        ("4X", "not a number"),
        ("1.0001K", "not a whole number"),
        ("2.5", "not a whole number; 2 or 3"),
        (True, "not a number"),
        ("1e20", "above 2^48"),
        ("9" * 30, "above 2^48"),
        ("1e99", "above 2^48"),
        (2**48 + 1, "above 2^48"),
    ],
)
def test_parse_count_refuses_with_value_and_rule(text, rule):
    with pytest.raises(ConfigError, match="length") as refusal:
        parse_count(text, "length")
    assert rule in str(refusal.value)
    assert str(text) in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "seconds"), [("60s", 60), ("500ms", 0.5), ("5m", 300), ("2min", 120), ("1h", 3600), ("3", 3)]
)
def test_parse_duration(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "0", "0s", "-3s", "soon", "5 weeks", "inf"])
def test_parse_duration_refuses(text):
    with pytest.raises(ConfigError, match="write for example 30s"):
        parse_duration(text)


@pytest.mark.parametrize(("text", "share"), [("20%", 0.2), ("0.05", 0.05), (" 1% ", 0.01)])
def test_parse_fraction(text, share):
    assert parse_fraction(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["0", "100%", "1", "-3%", "nan", "x", "%"])
def test_parse_fraction_refuses(text):
    with pytest.raises(ConfigError, match="between 0 and 1"):
        parse_fraction(text)


def test_parse_bytes_is_binary():
    assert parse_bytes("512MiB") == 512 * 2**20
    assert parse_bytes("8G") == 8 * 2**30
    assert parse_bytes("3 kb") == 3072


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *[(3.2e-9, "3.2 ns"), (4.5e-5, "45 µs"), (0.0123, "12.3 ms"), (59.0, "59 s"), (180.0, "3.0 min")],
        *[(7199.0, "120.0 min"), (7200.0, "2.0 h"), (86_400.0, "24.0 h"), (665_350.0, "7.7 days")],
        (0.0, "0 ns"),
        *[(0.9996, "1 s"), (0.0009996, "1 ms"), (9.999e-7, "1 µs"), (0.9994, "999 ms")],
    ],
)
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**40, "1.0 TiB"), (2**51, "2048.0 TiB")]
)
def test_format_bytes(count, text):
    assert format_bytes(count) == text
