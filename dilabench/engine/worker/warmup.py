"""Adaptive warm-up: call until the time has settled, and return the samples. No torch."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dilabench.validation import Model

SETTLED_CHANGE = 0.01
SETTLED_WINDOWS = 2
WINDOW_NS = 20_000_000
MIN_WINDOW = 3
MAX_WINDOW = 50
KEPT_SAMPLES = 1000


class WarmUpLimits(Model):
    """Shortest and longest warm-up, the shortest of a device that was idle: one that has just been busy is warm as soon
    as the times have settled. A call too long for a window in the longest is warm after its first call.

    `runs`: exactly this many calls instead, without a time limit.
    """

    min_s: float
    max_s: float
    runs: int | None = None


@dataclass(frozen=True, slots=True)
class WarmUpResult:
    """Samples in order, and whether the last windows agreed."""

    samples_ns: tuple[int, ...]
    settled: bool


def warm_up(
    take: Callable[[int], Sequence[int]],
    call_ns: int,
    limits: WarmUpLimits,
    clock: Callable[[], float] = time.monotonic,
) -> WarmUpResult:
    """Take windows of samples until their lower quartile changed by less than 1 % twice in a row, within the limits.

    A window that would end beyond the longest time, going by the one before, is not begun.
    """
    if limits.runs is not None:
        return WarmUpResult(tuple(take(limits.runs)) if limits.runs else (), settled=True)
    window = max(MIN_WINDOW, min(MAX_WINDOW, WINDOW_NS // max(1, call_ns)))
    samples: list[int] = []
    started, previous, calm = clock(), 0.0, 0
    if call_ns * 1e-9 * window > limits.max_s:
        return WarmUpResult((), settled=False)
    while True:
        taken = take(window)
        samples += taken
        current = lower_quartile(taken)
        calm = calm + 1 if previous and abs(current - previous) < SETTLED_CHANGE * previous else 0
        previous = current
        spent = max(0.0, clock() - started)
        settled = calm >= SETTLED_WINDOWS
        next_s = sum(taken) * 1e-9
        if (settled and spent >= limits.min_s) or spent + next_s >= limits.max_s:
            return WarmUpResult(tuple(samples[-KEPT_SAMPLES:]), settled)


def lower_quartile(samples_ns: Sequence[int]) -> float:
    """The 25 % quantile, the location that measurement.md §5.1 found steadiest between runs."""
    ordered = sorted(samples_ns)
    return float(ordered[(len(ordered) - 1) // 4])
