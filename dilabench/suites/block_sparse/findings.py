"""Suite `block-sparse`: time against the share of pairs computed, and the density below which skipping pays."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dilabench.comparison.view import RowView, measured_view, pair_views, view_of
from dilabench.metadata import STEPS, STEPS_OF
from dilabench.patterns.pattern import Pattern
from dilabench.record import Row, RunRecord
from dilabench.report.columns import ABSENT
from dilabench.report.columns import COLUMNS as ROW_COLUMNS
from dilabench.report.findings import Curve, CurvePlot, Point, Section
from dilabench.units import format_latency, format_ratio
from dilabench.workload.spec import Workload

COLUMNS = ("implementation", "block", "asked", "density", "median", "of dense", "speed-up", "TFLOP/s", "peak memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A measured row at one density, the share of visible blocks, or pairs, that is computed.

    `speedup`: time of the fastest unranked reference of its shape / this time, None if there is none.
    """

    row: Row
    density: float
    median_ns: float
    speedup: float | None

    @property
    def pattern(self) -> Pattern:
        """The row's pattern."""
        return self.row.case.workload.pattern

    @property
    def who(self) -> str:
        """The implementation, with its number of ranks if above one."""
        case = self.row.case
        return case.implementation if case.world_size == 1 else f"{case.implementation} on {case.world_size} ranks"

    @property
    def name(self) -> str:
        """The name of its curve: implementation and block size."""
        size = self.pattern.block_length
        return self.who if size is None else f"{self.who} block {size}"


def analyse(record: RunRecord) -> tuple[Section, ...]:
    """One section per pattern and shape: the figures per density, the break-even density of each implementation, and
    the times of selecting and planning."""
    shapes: dict[tuple[str, str, str], list[Step]] = {}
    for step in steps_of(record):
        workload = step.row.case.workload
        shapes.setdefault((workload.pattern.kind, workload.label(), workload.mode), []).append(step)
    return tuple(_section(steps) for steps in shapes.values())


def steps_of(record: RunRecord) -> tuple[Step, ...]:
    """Every measured row of a pattern that skips something, in the order of the record."""
    dense: dict[str, RowView] = {}
    for view in filter(None, map(view_of, record.rows)):
        if view.row.planned.role == "yardstick" and view.row.case.workload.is_dense:
            known = dense.setdefault(_shape(view.row), view)
            dense[_shape(view.row)] = min(known, view, key=lambda candidate: candidate.median_ns)
    densities: dict[Workload, float] = {}
    steps: list[Step] = []
    for row in record.rows:
        workload = row.case.workload.replace(mode="forward")
        if workload.is_dense or (timed := view_of(row)) is None:
            continue
        if workload not in densities:
            # A mask is generated, or read from its file, once.
            densities[workload] = workload.density
        full = dense.get(_shape(row))
        speedup = pair_views([(row, full.row)], record.device)[0].ratio if full else None
        steps.append(Step(row=row, density=densities[workload], median_ns=timed.median_ns, speedup=speedup))
    return tuple(steps)


def break_even(points: Sequence[tuple[float, float]]) -> float | None:
    """The density at which the speed-up is 1, interpolated between neighbouring measured points.

    `points`: (density, speed-up). None if no two neighbours are on different sides of 1. Times are about linear in
    density, so 1 / speed-up is interpolated.
    """
    for (low, fast), (high, slow) in pairwise(sorted(points)):
        if fast >= 1 > slow:
            share = (1 - 1 / fast) / (1 / slow - 1 / fast)
            return low + share * (high - low)
    return None


def _shape(row: Row) -> str:
    """A key that is equal for rows that differ only in pattern or number of ranks."""
    dense = row.case.workload.as_dense()
    return row.case.model_copy(update={"workload": dense, "world_size": 1}).group_id


def _section(steps: Sequence[Step]) -> Section:
    workload = steps[0].row.case.workload
    kind = workload.pattern.kind.replace("_", "-")
    curves: dict[str, list[Step]] = {}
    for step in steps:
        curves.setdefault(step.name, []).append(step)
    return Section(
        title=f"{kind.capitalize()} {workload.mode}, {workload.label()}",
        sentence=" ".join(
            [
                *_verdicts(curves),
                *_steps_of_calls(steps),
                *_what_counts(steps),
            ]
        ),
        columns=COLUMNS,
        rows=tuple(_figures(step) for step in steps),
        numeric=frozenset(COLUMNS[1:]),
        plots=tuple(_plots(kind, curves)),
    )


def _verdicts(curves: dict[str, list[Step]]) -> Iterable[str]:
    alone = []
    for name, steps in curves.items():
        points = [(step.density, step.speedup) for step in steps if step.speedup is not None]
        if points:
            yield _verdict(name, points)
        else:
            alone.append(name)
    if alone:
        yield f"No dense row was measured to compare with {', '.join(alone)}."


def _verdict(name: str, points: Sequence[tuple[float, float]]) -> str:
    even = break_even(points)
    if even is not None:
        return f"{name} breaks even with dense attention at a density of about {even:.0%}."
    (sparsest, _), (densest, speedup) = min(points), max(points)
    if len(points) == 1:
        return f"{name} {'beats' if speedup >= 1 else 'is slower than'} dense attention at a density of {densest:.0%}."
    if speedup >= 1:
        return f"{name} beats dense attention at every density measured, up to {densest:.0%}."
    return f"{name} is slower than dense attention at every density measured, down to {sparsest:.0%}."


def _what_counts(steps: Sequence[Step]) -> Iterable[str]:
    """Explain densities above 100 %."""
    if any(step.density > 1 for step in steps):
        yield (
            "Density counts a pair in each part of the pattern that attends to it: "
            "over 100 %, more pairs are computed than in full attention."
        )


def _steps_of_calls(steps: Sequence[Step]) -> Iterable[str]:
    """The times of a call's steps, from the difference between rows of one workload with and without each."""
    by_method: dict[tuple[str | None, Workload], dict[tuple[str, ...], float]] = {}
    asked: dict[Workload, str] = {}
    for step in steps:
        asked.setdefault(step.row.case.workload, step.pattern.setting())
        done = tuple((STEPS.of(step.row.planned) or "").split())
        rows = by_method.setdefault((STEPS_OF.of(step.row.planned), step.row.case.workload), {})
        rows[done] = min(step.median_ns, rows.get(done, step.median_ns))
    for (method, workload), rows in by_method.items():
        shares = [
            f"{done[0]} {format_latency(max(0.0, median_ns - rows[done[1:]]))}"
            for done, median_ns in rows.items()
            if len(done) > 1 and done[1:] in rows
        ]
        if shares:
            longest = max(rows, key=len)
            parts = f"attend {format_latency(rows[longest[-1:]])}, " if longest[-1:] in rows else ""
            whole = format_latency(rows[longest])
            call = f"With {asked[workload]}, a call{f' of {method}' if method else ''}"
            yield f"{call} that does all of it takes {whole}: {parts}{', '.join(shares)}."


def _figures(step: Step) -> tuple[str, ...]:
    view = measured_view(step.row)
    return (
        step.who,
        ABSENT if step.pattern.block_length is None else str(step.pattern.block_length),
        step.pattern.setting(),
        f"{step.density:.1%}",
        ROW_COLUMNS["median"].value_text(view),
        ABSENT if step.speedup is None else f"{1 / step.speedup:.1%}",
        ABSENT if step.speedup is None else format_ratio(step.speedup),
        ROW_COLUMNS["TFLOP/s"].value_text(view),
        ROW_COLUMNS["peak mem."].value_text(view),
    )


def _plots(kind: str, curves: dict[str, list[Step]]) -> Iterable[CurvePlot]:
    drawn = [
        Curve(label=name, points=tuple(Point(100 * step.density, step.speedup) for step in by_density if step.speedup))
        for name, steps in curves.items()
        if len(by_density := sorted(steps, key=lambda step: step.density)) > 1
    ]
    if any(curve.points for curve in drawn):
        yield CurvePlot(
            name=f"density_{kind.replace('-', '_')}",
            title=f"Speed-up of {kind} over dense attention",
            y_label="dense time / time",
            x_label="density: visible blocks or pairs computed (%)",
            curves=tuple(curve for curve in drawn if curve.points),
        )
