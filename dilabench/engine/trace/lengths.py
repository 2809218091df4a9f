"""The memory of a case at any length: traced, or along a straight line where a trace would take too long (torch)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from dilabench.engine.call.specs import CaseSpec
from dilabench.engine.trace.storages import TooLongError
from dilabench.engine.trace.traced_memory import trace
from dilabench.record import MemoryPlan
from dilabench.workload.cuts import uncut_step
from dilabench.workload.spec import Workload

# How many operators a trace may run: two seconds' worth on an idle core, and more where shorter lengths are no guide.
EFFORTS = (20000, 60000)
# Seconds of the processor: tables that are made without torch take time that no operator shows.
MOST_S = 20.0
SHORTEST = 64
# Largest deviation of the longest of three lengths from the line through the others.
STRAIGHT = 0.02

_Point = tuple[int, MemoryPlan]


@dataclass(slots=True)
class _Family:
    """Traces of a case at other lengths. effort: the limit of a trace. too_long: the shortest length above it."""

    effort: int = 0
    too_long: float = inf
    line: tuple[_Point, _Point] | None = None


_families: dict[str, _Family] = {}


def traced(spec: CaseSpec, device: str) -> MemoryPlan:
    """The memory of a case; if its trace takes too long, extrapolated from shorter lengths that grow linearly.

    Exceptions of the implementation pass through. Raises TooLongError if shorter lengths do not help.
    """
    if spec.case.workload.has_given_length or spec.case.optimizations.query_chunk:
        return trace(spec, device)
    length = spec.case.workload.seq_len
    family = _families.setdefault(device + _at(spec, 1).model_dump_json(), _Family())
    while True:
        if length < family.too_long:
            try:
                return _traced_at(spec, length, device, family.effort)
            except TooLongError:
                family.too_long = length
        family.line = family.line or _line(spec, length, device, family.effort)
        if family.line is not None:
            return _along(*family.line, length)
        if family.effort + 1 == len(EFFORTS):
            raise TooLongError("it takes too long to trace, and the memory of shorter lengths does not grow linearly")
        family.effort, family.too_long = family.effort + 1, inf


def _line(spec: CaseSpec, length: int, device: str, effort: int) -> tuple[_Point, _Point] | None:
    """Two lengths that took not too long, if a third shows that memory grows in proportion by then."""
    # If ranks cut no segment at this length, they cut none at neighbouring lengths.
    alike = uncut_step(spec.case.workload, spec.case.world_size)
    unit = alike if length % alike == 0 else 1
    far = length // 2
    while far // 4 >= max(SHORTEST, unit):
        try:
            lengths = [part // unit * unit for part in (far, far // 2, far // 4)]
            points = [(at, _traced_at(spec, at, device, effort)) for at in lengths]
        except TooLongError:
            far //= 4
            continue
        expected = _along(points[2], points[1], lengths[0]).peak_bytes
        straight = abs(expected / points[0][1].peak_bytes - 1) <= STRAIGHT
        return (points[1], points[0]) if straight else None
    return None


def _along(near: _Point, far: _Point, length: int) -> MemoryPlan:
    times = (length - near[0]) / (far[0] - near[0])
    ends = {name: (getattr(near[1], name), getattr(far[1], name)) for name in MemoryPlan.model_fields}
    return MemoryPlan(**{name: max(0, round(a + times * (b - a))) for name, (a, b) in ends.items()})


def _traced_at(spec: CaseSpec, length: int, device: str, effort: int) -> MemoryPlan:
    try:
        with _within(MOST_S):
            return trace(_at(spec, length), device, EFFORTS[effort])
    except (MemoryError, DataDependentOutputException, DynamicOutputShapeException) as error:
        # Tables that are too long to be computed have no numbers to read.
        raise TooLongError(str(error)) from error


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    def late(_number: int, _frame: object) -> None:
        raise TooLongError(f"its trace took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _at(spec: CaseSpec, length: int) -> CaseSpec:
    workload: Workload = spec.case.workload.model_copy(update={"seq_len": length})
    return spec.model_copy(update={"case": spec.case.model_copy(update={"workload": workload})})
