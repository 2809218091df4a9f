"""Suites `quick` (does it work, and how fast is it roughly?) and `implementations` (what is fastest and smallest?).

The rows of their records, and of any suite of implementations, at a glance: as plots.
"""

from collections.abc import Sequence

from dilabench.comparison.view import RowView, view_of
from dilabench.plugins.descriptors import Implementation
from dilabench.record import PlannedCase, RunRecord
from dilabench.report.columns import row_name, workload_title
from dilabench.report.findings import BarPlot, Bars, Plot, Section
from dilabench.request import RunRequest
from dilabench.suites.findings.series import latency_bars, plots_over_length, series_of
from dilabench.suites.planner import Planner
from dilabench.units import MIB
from dilabench.workload.spec import DEFAULT_PATTERN

QUICK_LENGTHS = (1024, 4096, 16384)


def quick(_request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """Implementations over a dense kernel, which run everywhere, and those that `auto` takes here, at each length.

    Full attention is an unranked reference. One sequence of two heads: under a minute on two CPU cores.
    """
    shape = {"batch_size": 1, "num_heads": 2, "head_dim": 64}
    workloads = planner.workload_requests([{**shape, "seq_len": length} for length in QUICK_LENGTHS])

    def is_shown(implementation: Implementation) -> bool:
        dilated = implementation.supports.computes(DEFAULT_PATTERN)
        here = planner.machine.facts.word in implementation.supports.devices and dilated
        over_kernel = implementation.uses_backend and (dilated or implementation.supports.only_dense)
        return implementation.supports.max_world_size == 1 and (over_kernel or (implementation.priority > 0 and here))

    default = planner.where(is_shown)
    return planner.compare(workloads, planner.implementations(default))


def implementations(_request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """Every implementation except the oracle, which is slow and included only if named."""
    default = planner.where(lambda _: True)
    return planner.compare(planner.workload_requests([{}]), planner.implementations(default))


def analyse(record: RunRecord) -> tuple[Section, ...]:
    """One section with the plots: curves if several lengths were measured, else bars."""
    series = [member for member in series_of(record) if member.measured]
    if not series:
        return ()
    plots: tuple[Plot, ...] = plots_over_length(series) or bars_of(record)
    return (
        Section(
            title="At a glance",
            sentence="Medians of the measured rows with intervals, and the peak memory of one call.",
            plots=plots,
        ),
    )


def bars_of(record: RunRecord) -> tuple[BarPlot, ...]:
    """Time and peak memory of every row: a group of bars per workload, a bar per implementation."""
    groups: dict[str, dict[str, RowView]] = {}
    for row in record.rows:
        if view := view_of(row):
            groups.setdefault(workload_title(row.case), {})[row_name(row)] = view
    titles = [title.split(" · ") for title in groups]
    shared = [part for part in titles[0] if all(part in title for title in titles)] if len(titles) > 1 else []
    categories = tuple("\n".join(part for part in title if part not in shared) for title in titles)
    names = list(dict.fromkeys(name for rows in groups.values() for name in rows))
    places = [(name, [rows.get(name) for rows in groups.values()]) for name in names]
    latency = tuple(latency_bars(name, at) for name, at in places)
    memory = tuple(_memory_bars(name, at) for name, at in places)
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


def _memory_bars(name: str, at: Sequence[RowView | None]) -> Bars:
    return Bars(
        label=name,
        values=tuple(None if view is None or view.peak_bytes is None else view.peak_bytes / MIB for view in at),
    )
