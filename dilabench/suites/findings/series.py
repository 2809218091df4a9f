"""Series of a record: the measured rows of one implementation and configuration in ascending length, under one name.

Records with more than one length have plots of latency, tokens per second and peak memory over it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from dilabench.comparison.view import RowView, locate_rows, view_of
from dilabench.record import Case, Row, RunRecord
from dilabench.report.columns import row_name
from dilabench.report.findings import Bars, Curve, CurvePlot, Point, Span
from dilabench.units import MIB, NS_PER_MS
from dilabench.workload.spec import Workload

VARIES_ALONG_A_RANGE = {"seq_len", "batch_size", "cu_seqlens"}

# Fields that distinguish rows of one name, in the order in which they are added to the name.
TOLD_APART_BY: tuple[Callable[[Workload], str], ...] = (
    lambda workload: workload.dtype,
    lambda workload: workload.mode,
    lambda workload: workload.pattern.label(),
    lambda workload: f"H{workload.num_heads}/{workload.num_kv_heads} {workload.dim_label()}",
    lambda workload: workload.queries_label(),
    lambda workload: "causal" if workload.causal else "not causal",
    lambda workload: f"softcap {workload.softcap or 'none'}",
    lambda workload: f"batch {workload.batch_size}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """All rows of a record that differ only in length, in ascending length; `label` is unique in the record.

    `rivals` is equal for series that compute the same function of the same inputs, which may be compared.
    `measured`: the figures of the rows that have a time.
    """

    label: str
    rivals: str
    rows: tuple[Row, ...]
    measured: tuple[RowView, ...]


def series_of(record: RunRecord) -> tuple[Series, ...]:
    """The series of a record, in its order."""
    locate_rows(record.rows)
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in record.rows:
        fixed = row.case.model_dump_json(exclude={"workload": VARIES_ALONG_A_RANGE})
        groups.setdefault((fixed, _batch(row), row.planned.role), []).append(row)
    ordered = [sorted(rows, key=lambda row: row.case.workload.seq_len) for rows in groups.values()]
    labels = _labels([rows[0] for rows in ordered])
    return tuple(
        Series(label=label, rivals=_rivals(rows[0]), rows=tuple(rows), measured=tuple(filter(None, map(view_of, rows))))
        for label, rows in zip(labels, ordered, strict=True)
    )


def families(series: Sequence[Series]) -> dict[str, list[Series]]:
    """The series that may be compared with each other, by their `rivals`."""
    found: dict[str, list[Series]] = {}
    for member in series:
        found.setdefault(member.rivals, []).append(member)
    return found


def _rivals(row: Row) -> str:
    fixed = row.case.workload.model_dump_json(exclude=VARIES_ALONG_A_RANGE)
    # An unranked reference is compared with no other row, not even with other references of its record.
    alone = row.case.case_id if row.planned.role == "yardstick" else ""
    return "|".join((fixed, _batch(row), row.planned.takes, str(row.case.world_size), alone))


def _batch(row: Row) -> str:
    """The requested batch size: 'auto' varies along a range but forms one series."""
    asked = row.planned.requested_workload
    return str(asked.batch_size if asked else row.case.workload.batch_size)


def batch_text(row: Row) -> str:
    """The batch size that ran, with a star if `auto` chose it."""
    return f"{row.case.workload.batch_size}{'*' if _batch(row) == 'auto' else ''}"


def _labels(firsts: Sequence[Row]) -> list[str]:
    """One name per series; shared names get the fields that distinguish them."""
    labels = [row_name(row) for row in firsts]
    for tell in TOLD_APART_BY:
        by_label: dict[str, list[int]] = {}
        for index, label in enumerate(labels):
            by_label.setdefault(label, []).append(index)
        marks = [tell(row.case.workload) for row in firsts]
        for name, members in by_label.items():
            if len({marks[index] for index in members}) > 1:
                for index in members:
                    labels[index] = f"{name} {marks[index]}"
    return labels


def ns_per_sequence(case: Case, time_ns: float) -> float:
    """The time of a call divided by the number of sequences of its batch."""
    return time_ns / case.workload.batch_size


def plots_over_length(series: Sequence[Series]) -> tuple[CurvePlot, ...]:
    """The three plots; a plot without a curve of at least two points is omitted."""
    batches = batch_spans(series)
    intervals = [view.interval for member in series for view in member.measured if view.interval]
    ranges = any(not interval.is_certain for interval in intervals)
    plots = (
        CurvePlot(
            name="latency",
            title="Latency of one call",
            y_label="latency (ms)",
            curves=tuple(Curve(label=member.label, points=_latencies(member)) for member in series),
            spans=batches,
            ranges=ranges,
        ),
        CurvePlot(
            name="throughput",
            title="Throughput",
            y_label="throughput (tokens/s)",
            curves=tuple(Curve(label=member.label, points=_throughputs(member)) for member in series),
            spans=batches,
            ranges=ranges,
        ),
        CurvePlot(
            name="memory",
            title="Peak memory of one call",
            y_label="peak memory (MiB)",
            curves=tuple(Curve(label=member.label, points=_peaks(member)) for member in series),
            spans=batches,
        ),
    )
    return tuple(plot for plot in map(_drawable, plots) if plot.curves)


def _drawable(plot: CurvePlot) -> CurvePlot:
    if max((len(curve.points) for curve in plot.curves), default=0) < 2:
        curves: tuple[Curve, ...] = ()
    else:
        curves = tuple(curve for curve in plot.curves if curve.points)
    return replace(plot, curves=curves)


def latency_bars(label: str, views: Sequence[RowView | None]) -> Bars:
    """Medians in milliseconds with their intervals; None for a view that is None."""
    return Bars(
        label=label,
        values=tuple(None if view is None else view.median_ns / NS_PER_MS for view in views),
        low=tuple(view.interval.low / NS_PER_MS if view and view.interval else None for view in views),
        high=tuple(view.interval.high / NS_PER_MS if view and view.interval else None for view in views),
    )


def batch_spans(series: Sequence[Series]) -> tuple[Span, ...]:
    """The lengths of each batch size; empty if all lengths have the same."""
    sizes: dict[int, set[int]] = {}
    for workload in (view.row.case.workload for member in series for view in member.measured):
        sizes.setdefault(workload.seq_len, set()).add(workload.batch_size)
    texts = {length: "/".join(map(str, sorted(sizes[length]))) for length in sorted(sizes)}
    runs = [(text, list(lengths)) for text, lengths in groupby(texts, key=texts.__getitem__)]
    return tuple(Span(lengths[0], lengths[-1], text) for text, lengths in runs) if len(runs) > 1 else ()


def _latencies(series: Series) -> tuple[Point, ...]:
    points = []
    for view in series.measured:
        ends = (view.interval.low / NS_PER_MS, view.interval.high / NS_PER_MS) if view.interval else (None, None)
        points.append(Point(view.row.case.workload.seq_len, view.median_ns / NS_PER_MS, *ends))
    return tuple(points)


def _throughputs(series: Series) -> tuple[Point, ...]:
    return tuple(
        Point(view.row.case.workload.seq_len, view.tokens_per_s, *(view.tokens_per_s_interval or (None, None)))
        for view in series.measured
    )


def _peaks(series: Series) -> tuple[Point, ...]:
    return tuple(
        Point(view.row.case.workload.seq_len, view.peak_bytes / MIB)
        for view in series.measured
        if view.peak_bytes is not None
    )
