"""Figures derived from raw integers when a report is made: rates and speed-ups."""

from dilabench.errors import ConfigError


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
