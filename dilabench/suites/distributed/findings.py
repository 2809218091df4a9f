"""Suite `distributed`: which implementation overtakes which, and how each scales with the number of ranks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dilabench.comparison.view import measured_view, peak_of
from dilabench.plugins.catalogue import Catalogue
from dilabench.record import Row, RunRecord
from dilabench.report.columns import ABSENT
from dilabench.report.findings import Curve, CurvePlot, Point, Section
from dilabench.suites.findings.crossings import crossover_section
from dilabench.suites.findings.parallel_efficiency import Comparison, comparisons
from dilabench.suites.findings.series import VARIES_ALONG_A_RANGE, series_of
from dilabench.suites.ring import findings as parallel
from dilabench.suites.ring.findings import namer, section, workload_text
from dilabench.units import MIB, format_bytes, format_latency, format_rate, format_ratio, speedup

STRONG_MEANING = "Strong scaling: the same workload on more ranks. Speed-up over one device, and that per rank."
WEAK_MEANING = (
    "Weak scaling: the same number of tokens on each rank. If attention crosses ranks, longer sequences need more "
    "work per token, so the efficiency is useful FLOP/s per rank over the FLOP/s of one device."
)
MEMORY_MEANING = "Peak memory of the rank that needs most, in one call."


def analyse(record: RunRecord, catalogue: Catalogue) -> tuple[Section, ...]:
    """The findings of suite `ring`, crossovers, strong and weak scaling, memory; empty without rows over ranks."""
    compared = comparisons(record)
    if not compared:
        return ()
    name = namer(compared)
    return (
        *parallel.analyse(record, catalogue),
        *_crossovers(record),
        *_scaling("Strong scaling", STRONG_MEANING, _strong(compared, name), _speedup_text, _speedup_plot),
        *_scaling("Weak scaling", WEAK_MEANING, _weak(compared, name), _rate_text, _rate_plot),
        *_scaling("Memory over ranks", MEMORY_MEANING, _strong(compared, name), _peak_text, _peak_plot),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scaling:
    """One implementation over ranks, and its single-device row."""

    workload: str
    implementation: str
    single: Row
    by_ranks: Mapping[int, Row]


def _crossovers(record: RunRecord) -> Iterator[Section]:
    """The crossovers of the implementations on each number of ranks."""
    for ranks in sorted({row.case.world_size for row in record.rows} - {1}):
        rows = tuple(row for row in record.rows if row.case.world_size == ranks)
        crossings = crossover_section(series_of(record.model_copy(update={"rows": rows})), record.device)
        if crossings is not None:
            yield replace(crossings, title=f"{crossings.title} on {ranks} ranks")


def _strong(compared: Sequence[Comparison], name: Callable[[Row], str]) -> list[_Scaling]:
    """The same workload on one device and on ranks."""
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for comparison in compared:
        groups.setdefault((workload_text(comparison.row), name(comparison.row)), []).append(comparison)
    return [
        _Scaling(
            workload=workload,
            implementation=implementation,
            single=members[0].single_row,
            by_ranks={comparison.row.case.world_size: comparison.row for comparison in members},
        )
        for (workload, implementation), members in groups.items()
    ]


def _weak(compared: Sequence[Comparison], name: Callable[[Row], str]) -> list[_Scaling]:
    """Workloads that differ only in length, with the tokens per rank of a single-device row."""
    singles = {
        (_shape(comparison.single_row), comparison.single_row.case.workload.seq_len): comparison.single_row
        for comparison in compared
    }
    groups: dict[tuple[str, int, str], dict[int, Row]] = {}
    for comparison in compared:
        length, rest = divmod(comparison.row.case.workload.seq_len, comparison.row.case.world_size)
        if not rest and (_shape(comparison.row), length) in singles:
            key = _shape(comparison.row), length, name(comparison.row)
            groups.setdefault(key, {})[comparison.row.case.world_size] = comparison.row
    return [
        _Scaling(
            workload=f"{workload_text(singles[shape, length])} per rank",
            implementation=implementation,
            single=singles[shape, length],
            by_ranks=rows,
        )
        for (shape, length, implementation), rows in groups.items()
    ]


def _shape(row: Row) -> str:
    """A key that is equal for rows that differ only in length."""
    takes = row.planned.takes
    return row.case.workload.model_dump_json(exclude=VARIES_ALONG_A_RANGE) + takes


Text = Callable[[Row, Row], str]


def _scaling(
    title: str,
    sentence: str,
    scalings: Sequence[_Scaling],
    text: Text,
    plot: Callable[[str, Sequence[_Scaling]], CurvePlot],
) -> Iterator[Section]:
    """A line per workload and implementation, a column per number of ranks, a plot per workload."""
    if not scalings:
        return
    counts = sorted({ranks for scaling in scalings for ranks in scaling.by_ranks})
    columns = ("workload", "implementation", "1 device", *(f"{ranks} ranks" for ranks in counts))
    rows = (
        (
            scaling.workload,
            scaling.implementation,
            text(scaling.single, scaling.single),
            *(text(scaling.by_ranks[n], scaling.single) if n in scaling.by_ranks else ABSENT for n in counts),
        )
        for scaling in scalings
    )
    by_workload: dict[str, list[_Scaling]] = {}
    for scaling in scalings:
        by_workload.setdefault(scaling.workload, []).append(scaling)
    name = title.lower().replace(" ", "-")
    plots = (
        replace(plot(workload, several), name=f"{name}-{index}")
        for index, (workload, several) in enumerate(by_workload.items(), 1)
    )
    drawn = tuple(plot for plot in plots if max(len(curve.points) for curve in plot.curves) > 1)
    yield replace(section(title, sentence, columns, rows), plots=drawn)


def _speedup_text(row: Row, single: Row) -> str:
    time = format_latency(measured_view(row).median_ns)
    if row is single:
        return time
    gain = speedup(measured_view(single).median_ns, measured_view(row).median_ns)
    return f"{time} ({format_ratio(gain)}, {gain / row.case.world_size:.0%})"


def _speedup_plot(workload: str, several: Sequence[_Scaling]) -> CurvePlot:
    most = max(ranks for scaling in several for ranks in scaling.by_ranks)
    ideal = Curve(label="ideal: P times one device", points=(Point(1, 1), Point(most, most)))
    curves = _curves(
        several, lambda row, single: speedup(measured_view(single).median_ns, measured_view(row).median_ns)
    )
    return _plot(f"Strong scaling: {workload}", "speed-up over one device", (*curves, ideal))


def _rate(row: Row) -> float:
    """Useful TFLOP/s per rank."""
    return measured_view(row).tflops_per_s / row.case.world_size


def _rate_text(row: Row, single: Row) -> str:
    view = measured_view(row)
    texts = format_latency(view.median_ns), f"{format_rate(view.tokens_per_s)} tok/s"
    share = "" if row is single else f" ({_rate(row) / _rate(single):.0%})"
    return f"{', '.join(texts)}{share}"


def _rate_plot(workload: str, several: Sequence[_Scaling]) -> CurvePlot:
    curves = _curves(several, lambda row, _: _rate(row))
    return _plot(f"Weak scaling: {workload}", "useful TFLOP/s per rank", curves)


def _peak_text(row: Row, _single: Row) -> str:
    peak = peak_of(row)
    return ABSENT if peak is None else format_bytes(peak)


def _peak_plot(workload: str, several: Sequence[_Scaling]) -> CurvePlot:
    curves = _curves(several, lambda row, _: (peak_of(row) or 0) / MIB)
    return _plot(f"Memory: {workload}", "peak memory per rank (MiB)", curves)


def _curves(several: Sequence[_Scaling], value: Callable[[Row, Row], float]) -> tuple[Curve, ...]:
    """A value over ranks per implementation, beginning at the single device; unmeasured points are omitted."""
    curves = []
    for scaling in several:
        values = [
            (ranks, value(row, scaling.single))
            for ranks, row in [(1, scaling.single), *sorted(scaling.by_ranks.items())]
        ]
        points = tuple(Point(ranks, y) for ranks, y in values if y)
        curves.append(Curve(label=scaling.implementation, points=points))
    return tuple(curves)


def _plot(title: str, y_label: str, curves: tuple[Curve, ...]) -> CurvePlot:
    return CurvePlot(name="", title=title, y_label=y_label, curves=curves, x_label="ranks")
