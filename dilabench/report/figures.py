"""Numbers as readers see them: the only place where a figure is rounded."""

from math import floor, log10

from dilabench.stats.samples.location import Interval

ABSENT = "–"

_TIME_UNITS = (("s", 1e9), ("ms", 1e6), ("µs", 1e3), ("ns", 1.0))
_DECIMAL_SUFFIXES = (("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))
_CONFIDENCE = 0.95


def significant(value: float, digits: int) -> str:
    """A positive number with this many significant digits and no exponent: 0.01234, 1.234, 1234."""
    if value == 0:
        return "0"
    decimals = digits - 1 - floor(log10(abs(value)))
    # Rounding may carry into the next power of ten (9.9996 -> 10.00), which then has one decimal too many.
    decimals = digits - 1 - floor(log10(abs(round(value, decimals))))
    return f"{value:.{max(0, decimals)}f}"


def latency(median_ns: float) -> str:
    """A time with its unit: 12.34 ms."""
    unit, size = _time_unit(median_ns)
    return f"{significant(median_ns / size, 4)} {unit}"


def latency_interval(median_ns: float, interval: Interval | None) -> str:
    """The interval of a median in the median's unit and to its decimals; without one, the reason.

    A dagger marks an interval of less than 95 %: the whole range of samples from too few turns for more.
    """
    if interval is None:
        return "n<5, no CI"
    _, size = _time_unit(median_ns)
    decimals = len(significant(median_ns / size, 4).partition(".")[2])
    text = f"{interval.low / size:.{decimals}f}–{interval.high / size:.{decimals}f}"
    return text if is_certain(interval) else text + "†"


def is_certain(interval: Interval) -> bool:
    """Whether it is one of 95 %, and not the whole range of samples from too few turns."""
    return interval.confidence >= _CONFIDENCE


def decimal(value: float) -> str:
    """A rate with a decimal suffix: 1.23M is 1,230,000."""
    suffix, size = next(((s, z) for s, z in _DECIMAL_SUFFIXES if value >= z), ("", 1.0))
    return significant(value / size, 3) + suffix


def ratio(value: float) -> str:
    """A speed-up: 1.23x."""
    return f"{value:.2f}x" if value < 100 else f"{value:.0f}x"


def _time_unit(time_ns: float) -> tuple[str, float]:
    return next(((unit, size) for unit, size in _TIME_UNITS if time_ns >= size), _TIME_UNITS[-1])
