"""Reading and writing of lengths, durations, byte counts and percentages; figures as tables show them; widths of texts.

Suffixes of counts are binary, as in the names of context lengths: 4K = 4096, 1M = 1048576.
"""

import os
import re
import shutil
from math import floor, log10
from typing import IO

from dilabench.errors import ConfigError

KIBI = 1024
MIB = KIBI**2
NS_PER_MS = 1e6
MAX_COUNT = 2**48

_COUNT = re.compile(r"^\s*(?P<digits>\d[\d_,]*(?:\.\d+)?)(?:e(?P<exp>\d{1,2}))?\s*(?P<suffix>[kKmMgG]?)(?:i?[bB]?)\s*$")
_DURATION = re.compile(r"^\s*(?P<value>\d+(?:\.\d+)?)\s*(?P<unit>ms|s|m|min|h)?\s*$")
MAX_SECONDS = 1e9
_DURATION_SECONDS = {"ms": 1e-3, "s": 1.0, None: 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_ABOVE = "is above 2^48, which no machine can hold; use a smaller one"
# A smaller factor says less than its percentage.
FACTOR_SHOWN = 1.2
# A terminal is narrower; a table of this width is memory that is filled with blanks.
MAX_WIDTH = 10_000
# Longer numbers are no counts, and Python limits the number of digits of an integer.
MAX_DIGITS = 40
_TIME_UNITS = (("s", 1e9), ("ms", 1e6), ("µs", 1e3), ("ns", 1.0))
_DECIMAL_SUFFIXES = (("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))
_SUFFIX = {"": 1, "k": KIBI, "m": KIBI**2, "g": KIBI**3}


def parse_count(text: str | int, what: str = "value") -> int:
    """Read a positive whole number: 4096, '4K', '1_000_000', '1e6', '1M'.

    Raises ConfigError when it is no number, zero, negative, fractional or above 2^48.
    """
    if isinstance(text, bool):
        raise ConfigError(f"{what} {text!r:.80} is not a number; write a whole number such as 4096 or 4K")
    if isinstance(text, int):
        if abs(text) > 2**128:
            raise ConfigError(f"{what} is a number of {text.bit_length()} bits; it {_ABOVE}")
        count: float = text
    else:
        match = _COUNT.match(text)
        if match is None:
            rule = "must be at least 1" if text.strip().startswith("-") else "is not a number"
            raise ConfigError(f"{what} {text!r:.80} {rule}; write a whole number such as 4096, 4K or 1M (1K = 1024)")
        digits = match["digits"].replace("_", "").replace(",", "")
        if len(digits) > MAX_DIGITS:
            raise ConfigError(f"{what} '{digits[:20]}…' ({len(digits)} digits) {_ABOVE}")
        count = float(digits) if "." in digits else int(digits)
        count = count * 10 ** int(match["exp"] or 0) * _SUFFIX[match["suffix"].lower()]
    if count != int(count):
        raise ConfigError(f"{what} {text!r:.80} is not a whole number; {int(count)} or {int(count) + 1} would be")
    if count < 1:
        raise ConfigError(f"{what} {text!r:.80} must be at least 1")
    if count > MAX_COUNT:
        raise ConfigError(f"{what} {text!r:.80} {_ABOVE}")
    return int(count)


# Control characters except tab and line feed, and marks that change the direction of writing or end a line: a terminal
# would obey them.
_UNPRINTABLE = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]"
)


def printable(text: str) -> str:
    """The text with control characters spelt out as in JSON: what a record or a plug-in says moves no cursor."""
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def terminal_width(text: str) -> int:
    """The value of TERMINAL_WIDTH. Raises ConfigError for what is no width."""
    width = parse_count(text, "TERMINAL_WIDTH")
    if width > MAX_WIDTH:
        raise ConfigError(f"TERMINAL_WIDTH {text!r} is above {MAX_WIDTH}; no terminal is so wide, use a smaller one")
    return width


def output_width(stream: IO[str], piped: int) -> int:
    """The width for a stream: TERMINAL_WIDTH or COLUMNS if set, else the terminal's own, or `piped` in a pipe."""
    if pinned := os.environ.get("TERMINAL_WIDTH"):
        return terminal_width(pinned)
    asked = os.environ.get("COLUMNS", "")
    if not stream.isatty() and not (asked.isdecimal() and int(asked)):
        return piped
    return shutil.get_terminal_size().columns


def parse_duration(text: str) -> float:
    """Read a duration such as '60s', '500ms', '5m', '1h' or plain seconds; returns seconds (> 0)."""
    match = _DURATION.match(text)
    seconds = float(match["value"]) * _DURATION_SECONDS[match["unit"]] if match else 0.0
    if not 0 < seconds < MAX_SECONDS:
        raise ConfigError(f"duration {text!r:.40} is not a positive time; write for example 30s, 5m or 1h")
    return seconds


def parse_bytes(text: str) -> int:
    """Read a byte count such as '512MiB', '8G' or '1024' (binary units)."""
    return parse_count(text, what="size")


def parse_fraction(text: str) -> float:
    """Read '20%' or '0.2' as 0.2; the range is (0, 1)."""
    stripped = text.strip()
    try:
        value = float(stripped.rstrip("%")) / (100 if stripped.endswith("%") else 1)
    except ValueError:
        value = float("nan")
    if not 0 < value < 1:
        raise ConfigError(f"{text!r} is not a share between 0 and 1; write for example 5% or 0.05")
    return value


def counted(count: int, noun: str) -> str:
    """'1 case', '2 cases'."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def format_count(count: int) -> str:
    """4096 -> '4K', 1048576 -> '1M', 50000 -> '50000'; `parse_count` reads it back exactly."""
    for suffix, size in (("G", KIBI**3), ("M", KIBI**2), ("K", KIBI)):
        if count >= size and count % size == 0:
            return f"{count // size}{suffix}"
    return str(count)


def format_seconds(seconds: float) -> str:
    """A duration with a unit that leaves 1 to 3 digits before the point."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        # A value that rounds to the next unit is shown in it: "1e+03 ms" is no duration.
        if seconds >= 0.9995 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def format_bytes(count: float) -> str:
    """A byte count in binary units: 1536 -> '1.5 KiB'."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < KIBI:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= KIBI
    return f"{size:.1f} TiB"


def significant(value: float, digits: int) -> str:
    """A number with this many significant digits and no exponent: 0.01234, 1.234, 1234."""
    if value == 0:
        return "0"
    decimals = digits - 1 - floor(log10(abs(value)))
    # Rounding may carry into the next power of ten (9.9996 -> 10.00), which then has one decimal too many.
    decimals = digits - 1 - floor(log10(abs(round(value, decimals))))
    return f"{value:.{max(0, decimals)}f}"


def time_unit(time_ns: float) -> tuple[str, float]:
    """The unit in which a time is shown, and its size in ns."""
    return next(((unit, size) for unit, size in _TIME_UNITS if time_ns >= size), _TIME_UNITS[-1])


def format_latency(time_ns: float) -> str:
    """The time of a call with its unit, to four digits: 12.34 ms."""
    unit, size = time_unit(time_ns)
    return f"{significant(time_ns / size, 4)} {unit}"


def format_rate(value: float) -> str:
    """A rate with a decimal suffix: 1.23M is 1,230,000."""
    suffix, size = next(((s, z) for s, z in _DECIMAL_SUFFIXES if value >= z), ("", 1.0))
    return significant(value / size, 3) + suffix


def format_ratio(value: float) -> str:
    """A speed-up: 1.23x."""
    return f"{value:.2f}x" if value < 100 else f"{value:.0f}x"


def percent_text(fraction: float) -> str:
    """A fraction without its sign: 0.0031 -> '0.31 %', 0.02 -> '2 %', 0.066 -> '6.6 %', 0.25 -> '25 %'."""
    percent = 100 * abs(fraction)
    if percent >= 9.95:
        return f"{percent:.0f} %"
    return f"{percent:.2g} %" if percent < 0.995 else f"{percent:.1f}".removesuffix(".0") + " %"


def change_text(ratio: float) -> str:
    """How a time changed, from after / before: '-78 %, 4.5x faster', '+1.2 %'; the factor from 1.2 on."""
    percent = 100 * (ratio - 1)
    if abs(percent) < 0.05:
        return "0 %"
    text = f"{percent:+.0f} %" if abs(percent) >= 9.95 else f"{percent:+.1f} %"
    factor = max(ratio, 1 / ratio)
    if factor < FACTOR_SHOWN:
        return text
    return f"{text}, {significant(factor, 2)}x {'slower' if ratio > 1 else 'faster'}"


def tokens_per_second(tokens: int, time_ns: float) -> float:
    """Tokens (batch x length) per second. Raises ConfigError for a time that is not positive."""
    return tokens * 1e9 / _positive(time_ns)


def tflops_per_second(flops: float, time_ns: float) -> float:
    """10^12 floating-point operations per second; useful or dense-equivalent is the caller's choice of `flops`."""
    return flops / _positive(time_ns) / 1e3


def gigabytes_per_second(traffic_bytes: float, time_ns: float) -> float:
    """10^9 bytes per second."""
    return traffic_bytes / _positive(time_ns)


def speedup(baseline_ns: float, candidate_ns: float) -> float:
    """Baseline time / candidate time: above one the candidate is faster."""
    return _positive(baseline_ns) / _positive(candidate_ns)


def _positive(value: float) -> float:
    if not value > 0:
        raise ConfigError(f"{value} is not positive; a time or ratio that was not measured has no derived figures")
    return value
