"""A run record as rows of text: what is shown, in which order, compared with what. Table and Markdown both print this.

A table holds the rows of one effective workload. Inside it a section holds rows that may be ranked against each other;
a speed-up exists only inside a section, against the plain method or else the section's first measured row.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dilabench.compare.pairing import location_of
from dilabench.compare.ranking import Ranking, is_quotable, rank
from dilabench.errors import unknown_name
from dilabench.record import Case, Failed, Measured, Row, RunRecord, Timing
from dilabench.report import figures
from dilabench.stats.samples.derive import tflops_per_second, tokens_per_second
from dilabench.stats.samples.location import Location
from dilabench.units import format_bytes, format_count
from dilabench.workload.work import flops

COLUMNS = (
    "implementation",
    "backend",
    "timer",
    "median",
    "95 % CI",
    "tok/s",
    "TFLOP/s",
    "peak mem.",
    "speed-up",
    "verified",
)
# Shown only where they are asked for.
MORE_COLUMNS = ("mean", "std")
ALL_COLUMNS = COLUMNS + MORE_COLUMNS
NAMING_COLUMNS = ("implementation", "backend")
TEXT_COLUMNS = ("implementation", "backend", "timer", "verified")
DOUBTFUL = "‡"
FOOTNOTES = {
    "*": "chosen by auto",
    "†": "too few independent turns for 95 %: the interval is the whole range of the samples",
    "‡": "not to be quoted, and not ranked: the note on this row says why its time cannot be true",
    "✓": "its output was verified before timing: all rows, or a sample of that many",
    "all vs": "a built-in: every row was compared with that built-in's, of which the oracle had confirmed a sample",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DisplayRow:
    """One line of a table: a text per column; `status` is the outcome's, `fastest` marks the best of a section."""

    row: Row
    cells: tuple[str, ...]
    status: str
    fastest: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Rows that compute the same thing from the same inputs. `title` is None for the table's own subject.

    `ranking` is None where no row was measured and among yardsticks, which are never ranked.
    """

    title: str | None
    rows: tuple[DisplayRow, ...]
    ranking: Ranking | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadTable:
    """The rows of one effective workload: `members` as they are in the record, `sections` as they are shown."""

    title: str
    members: tuple[Row, ...]
    sections: tuple[Section, ...]

    @property
    def rows(self) -> tuple[DisplayRow, ...]:
        """The rows of all sections."""
        return tuple(row for section in self.sections for row in section.rows)


# The tables of the record that was asked for last: the answer and the reporters look at the same one.
_last: list[tuple[RunRecord, tuple["WorkloadTable", ...]]] = []


def workload_tables(record: RunRecord) -> tuple[WorkloadTable, ...]:
    """One table per effective workload and world size, in the order of the record.

    A yardstick (a row with that role) computes another function of the same shape; it stands in the
    table of that shape, in a section of its own and without a speed-up.
    """
    # By identity: to hash or compare a record takes longer than to make its tables.
    if not _last or _last[0][0] is not record:
        _last[:] = [(record, _tables(record))]
    return _last[0][1]


def _tables(record: RunRecord) -> tuple[WorkloadTable, ...]:
    groups: dict[str, list[Row]] = {}
    yardsticks: list[Row] = []
    for row in record.rows:
        if row.planned.role == "yardstick":
            yardsticks.append(row)
        else:
            groups.setdefault(row.case.group_id, []).append(row)
    shape_owner = {shape_id(rows[0].case): cell for cell, rows in reversed(groups.items())}
    for row in yardsticks:
        cell = shape_owner.setdefault(shape_id(row.case), row.case.group_id)
        groups.setdefault(cell, []).append(row)
    return tuple(_table(rows, record.device) for rows in groups.values())


def chosen_columns(wanted: Sequence[str]) -> tuple[str, ...]:
    """The columns to show: the usual ones, or the `wanted` after those that name a row. Raises ConfigError."""
    for name in wanted:
        if name not in ALL_COLUMNS:
            raise unknown_name("column", name, ALL_COLUMNS)
    return tuple(dict.fromkeys((*NAMING_COLUMNS, *wanted))) if wanted else COLUMNS


def footnotes(tables: Iterable[WorkloadTable], names: Collection[str] = COLUMNS) -> tuple[str, ...]:
    """The meaning of the marks that these columns of the tables use."""
    texts = [
        cell
        for table in tables
        for row in table.rows
        for name, cell in zip(ALL_COLUMNS, row.cells, strict=True)
        if name in names
    ]
    return tuple(f"{mark} {meaning}" for mark, meaning in FOOTNOTES.items() if any(mark in text for text in texts))


def workload_title(case: Case) -> str:
    """What a table is about: shape, pattern, mode and world size."""
    workload = case.workload
    world = f" · {case.world_size} devices" if case.world_size > 1 else ""
    return f"{workload.label()} · {workload.pattern.label()} · {workload.mode}{world}"


def implementation_text(case: Case) -> str:
    """The implementation with the optimizations that are not the default ones: 'strided +pool 1G'."""
    words = {
        "pattern_cache_entries": "cache",
        "buffer_pool_bytes": "pool",
        "cuda_graph": "cuda-graph",
        "compile": "compile",
        "gradient_checkpointing": "checkpointing",
        "query_chunk": "chunk",
        "offload_inputs": "offload",
        "stream_tokens": "streamed",
        "sharding_inside": "sharding",
        "tiles": "tiles",
    }
    changed = case.optimizations.model_dump(exclude_defaults=True)
    texts = [
        words[name] if value is True else f"{words[name]} {value if isinstance(value, str) else format_count(value)}"
        for name, value in changed.items()
    ]
    return " +".join([case.implementation, *texts])


def case_name(case: Case) -> str:
    """Implementation and backend as one name: 'gather over sdpa-flash'."""
    return implementation_text(case) + (f" over {case.backend}" if case.backend else "")


def row_name(row: Row) -> str:
    """The name of its case."""
    return case_name(row.case)


def backend_text(row: Row) -> str:
    """The effective backend; a star marks a choice of `auto`."""
    if row.case.backend is None:
        return row.planned.requested_backend or figures.ABSENT
    return row.case.backend + ("*" if row.planned.requested_backend == "auto" else "")


def first_timing(row: Row) -> Timing | None:
    """The timing that is shown: the first one with samples; None when the row was not measured."""
    if not isinstance(row.outcome, Measured):
        return None
    return next((timing for timing in row.outcome.timings if timing.has_samples), None)


def location(row: Row) -> Location | None:
    """Median and interval of the timing that is shown; None when the row was not measured."""
    timing = first_timing(row)
    return None if timing is None else location_of(timing)


def shape_id(case: Case) -> str:
    """Equal for cases that differ only in what is computed from inputs of one shape."""
    return case.model_copy(update={"workload": case.workload.as_dense()}).group_id


def _table(rows: Sequence[Row], device: str) -> WorkloadTable:
    case = rows[0].case
    sections: dict[str | None, list[Row]] = {}
    for row in rows:
        sections.setdefault(_section_title(row), []).append(row)
    return WorkloadTable(
        title=workload_title(case),
        members=tuple(rows),
        sections=tuple(_section(title, members, device) for title, members in sections.items()),
    )


def _section_title(row: Row) -> str | None:
    if row.planned.role == "yardstick":
        return f"yardstick: {row.case.workload.pattern.label()}, another function of the same shape"
    takes = row.planned.takes
    return None if takes == "heads" else f"takes {takes}: not comparable with the rows above"


def _section(title: str | None, rows: Sequence[Row], device: str) -> Section:
    ranking = None if rows[0].planned.role == "yardstick" else rank(rows, device)
    shown = [
        DisplayRow(
            row=row,
            cells=_cells(row, ranking),
            status=row.outcome.status,
            fastest=ranking is not None and ranking.proven and row is ranking.fastest,
        )
        for row in rows
    ]
    return Section(title=title, rows=tuple(shown), ranking=ranking)


def _cells(row: Row, ranking: Ranking | None) -> tuple[str, ...]:
    names = (implementation_text(row.case), backend_text(row))
    timing, found = first_timing(row), location(row)
    if timing is None or found is None:
        ending = "FAILED" if isinstance(row.outcome, Failed) else row.outcome.status
        cells = (*names, figures.ABSENT, ending)
        return cells + (figures.ABSENT,) * (len(ALL_COLUMNS) - len(cells))
    assert isinstance(row.outcome, Measured)
    workload, memory, samples = row.case.workload, row.outcome.memory, np.asarray(timing.samples_ns, np.float64)
    speedup = ranking.speedups.get(row.case.case_id) if ranking else None
    return (
        *names,
        timing.timer,
        figures.latency(found.median_ns) + ("" if is_quotable(row) else DOUBTFUL),
        figures.latency_interval(found.median_ns, found.interval),
        figures.decimal(tokens_per_second(workload.tokens, found.median_ns)),
        figures.significant(tflops_per_second(flops(workload), found.median_ns), 3),
        format_bytes(memory.peak_bytes) if memory else figures.ABSENT,
        figures.ABSENT if speedup is None else figures.ratio(speedup),
        verified_text(row.outcome),
        figures.latency(float(samples.mean())),
        figures.latency(float(samples.std())),
    )


def verified_text(outcome: Measured) -> str:
    """How far a row was checked: every output row, those compared with a built-in, or the number sampled."""
    if not outcome.verification.passed:
        return "no"
    verification = outcome.verification
    if verification.sampled_rows is None:
        return "✓ all"
    return f"✓ all vs {verification.against}" if verification.against else f"✓ {verification.sampled_rows}"
