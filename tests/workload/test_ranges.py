"""The sequence ranges, pinned to the catalogue."""

import pytest

from dilabench.errors import ConfigError
from dilabench.workload.ranges import RANGES, range_lengths


def test_ranges_are_those_of_the_catalogue():
    assert RANGES == {
        "production": (1024, 2048, 4096, 8192, 12288, 16384),
        "medium": (32768, 49152, 65536, 98304, 131072),
        "long": (262144, 393216, 524288, 786432, 1048576),
        "document": (512, 1024, 2048, 4096),
        "context": (4096, 8192, 16384, 32768),
        "book": (50000, 100000, 200000),
    }


def test_all_is_every_length_once_rising():
    lengths = range_lengths("all")
    assert len(lengths) == 20
    assert list(lengths) == sorted(set(lengths))
    assert set(lengths) == {length for found in RANGES.values() for length in found}


def test_custom_keeps_the_given_order():
    assert range_lengths("custom", (8192, 777)) == (8192, 777)


@pytest.mark.parametrize(
    ("name", "custom", "text"),
    [
        ("custom", (), "range 'custom' has no lengths; write for example --range custom --lengths 2K,4K,8K"),
        ("book", (5,), "range 'book' fixes its lengths but 5 are given too; use --range custom or omit one of the two"),
        ("produktion", (), "unknown range 'produktion'; did you mean production"),
    ],
)
def test_wrong_ranges_are_refused(name, custom, text):
    with pytest.raises(ConfigError) as refusal:
        range_lengths(name, custom)
    assert text in str(refusal.value)
