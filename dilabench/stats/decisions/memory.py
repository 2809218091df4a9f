"""The memory gate: peaks are deterministic, so no statistics, one exact limit (measurement.md §5.2)."""

from dataclasses import dataclass
from enum import StrEnum

from dilabench.errors import ConfigError

RELATIVE_LIMIT = 0.01
ABSOLUTE_LIMIT_BYTES = 2 * 2**20
"""Limits of an allocator's own count, which is the same in every run."""

RESIDENT_RELATIVE_LIMIT = 0.10
RESIDENT_ABSOLUTE_LIMIT_BYTES = 8 * 2**20
"""Limits of a process's resident set, in older records of CPUs: identical runs were seen 4 MiB and 7 % apart."""


class MemoryCode(StrEnum):
    """The claim about the candidate's peak."""

    LARGER = "LARGER"
    SMALLER = "SMALLER"
    SAME = "SAME"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryVerdict:
    """Peak against peak."""

    code: MemoryCode
    baseline_bytes: int
    candidate_bytes: int
    reason: str
    hint: str = ""

    @property
    def fails_gate(self) -> bool:
        return self.code is MemoryCode.LARGER


def judge_memory(
    baseline_bytes: int,
    candidate_bytes: int,
    *,
    relative_limit: float = RELATIVE_LIMIT,
    absolute_limit_bytes: int = ABSOLUTE_LIMIT_BYTES,
) -> MemoryVerdict:
    """Compare two peaks of the same case. Raises ConfigError for a negative peak."""
    if min(baseline_bytes, candidate_bytes) < 0:
        raise ConfigError(f"peak of {min(baseline_bytes, candidate_bytes)} bytes is negative; measure memory again")
    change = candidate_bytes - baseline_bytes
    threshold = max(relative_limit * baseline_bytes, absolute_limit_bytes)
    code = MemoryCode.SAME
    if abs(change) > threshold:
        code = MemoryCode.LARGER if change > 0 else MemoryCode.SMALLER
    return MemoryVerdict(
        code=code,
        baseline_bytes=baseline_bytes,
        candidate_bytes=candidate_bytes,
        reason=f"peak {baseline_bytes} -> {candidate_bytes} bytes ({change:+d}), limit {threshold:.0f} bytes",
        hint="look for buffers kept alive longer, or saved for backward" if code is MemoryCode.LARGER else "",
    )
