"""Latency, tokens per second and peak memory over length, as plots of any record with more than one length."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from dilabench.report.figures import is_certain
from dilabench.report.findings import Curve, CurvePlot, Point, Span
from dilabench.suites.findings.series import Series

NS_PER_MS = 1e6
MIB = 2**20


def plots_over_length(series: Sequence[Series]) -> tuple[CurvePlot, ...]:
    """The three plots; a plot without a curve of at least two points is left out."""
    batches = batch_spans(series)
    intervals = [view.interval for one in series for view in one.measured if view.interval]
    ranges = any(not is_certain(one) for one in intervals)
    plots = (
        CurvePlot(
            name="latency",
            title="Latency of one call",
            y_label="latency (ms)",
            curves=tuple(Curve(label=one.label, points=_latencies(one)) for one in series),
            spans=batches,
            ranges=ranges,
        ),
        CurvePlot(
            name="throughput",
            title="Throughput",
            y_label="throughput (tokens/s)",
            curves=tuple(Curve(label=one.label, points=_throughputs(one)) for one in series),
            spans=batches,
            ranges=ranges,
        ),
        CurvePlot(
            name="memory",
            title="Peak memory of one call",
            y_label="peak memory (MiB)",
            curves=tuple(Curve(label=one.label, points=_peaks(one)) for one in series),
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


def batch_spans(series: Sequence[Series]) -> tuple[Span, ...]:
    """The lengths of each batch size; none where all were measured with one."""
    sizes: dict[int, set[int]] = {}
    for workload in (view.row.case.workload for one in series for view in one.measured):
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
