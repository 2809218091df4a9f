"""Any suite of implementations: the rows of a record at a glance, as plots."""

from collections.abc import Sequence

from dilabench.record import Measured, RunRecord
from dilabench.report.findings import BarPlot, Bars, Plot, Section
from dilabench.suites.findings.plots_over_length import NS_PER_MS, plots_over_length
from dilabench.suites.findings.series import Series, series_of
from dilabench.workload.spec import Workload

MIB = 2**20


def analyse(record: RunRecord) -> tuple[Section, ...]:
    """One section with the plots: curves where several lengths were measured, bars where there is one."""
    series = [one for one in series_of(record) if one.measured]
    if not series:
        return ()
    plots: tuple[Plot, ...] = plots_over_length(series) or _bars(series)
    return (
        Section(
            title="At a glance",
            sentence="Medians of the measured rows, with their intervals; peaks are those of one call.",
            plots=plots,
        ),
    )


def _bars(series: Sequence[Series]) -> tuple[BarPlot, ...]:
    """Time and peak memory of every row, by workload."""
    workloads = list(dict.fromkeys(row.case.workload for one in series for row, _ in one.measured))
    latency = tuple(_latency_bars(one, workloads) for one in series)
    memory = tuple(_memory_bars(one, workloads) for one in series)
    categories = tuple(f"{workload.label()}, {workload.pattern.kind}" for workload in workloads)
    plots = [
        BarPlot(
            name="latency",
            title="Latency of one call",
            value_label="latency (ms)",
            categories=categories,
            bars=latency,
        )
    ]
    if any(value is not None for bars in memory for value in bars.values):
        plots.append(
            BarPlot(
                name="memory",
                title="Peak memory of one call",
                value_label="peak memory (MiB)",
                categories=categories,
                bars=memory,
            )
        )
    return tuple(plots)


def _latency_bars(series: Series, workloads: Sequence[Workload]) -> Bars:
    found = {row.case.workload: place for row, place in series.measured}
    places = [found.get(workload) for workload in workloads]
    return Bars(
        label=series.label,
        values=tuple(None if place is None else place.median_ns / NS_PER_MS for place in places),
        low=tuple(place.interval.low / NS_PER_MS if place and place.interval else None for place in places),
        high=tuple(place.interval.high / NS_PER_MS if place and place.interval else None for place in places),
    )


def _memory_bars(series: Series, workloads: Sequence[Workload]) -> Bars:
    peaks = {
        row.case.workload: row.outcome.memory.peak_bytes / MIB
        for row, _ in series.measured
        if isinstance(row.outcome, Measured) and row.outcome.memory
    }
    return Bars(label=series.label, values=tuple(peaks.get(workload) for workload in workloads))
