"""The map of winners: one line per kind of workload, one column per length."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dilabench.comparison.view import measured_view
from dilabench.record import Measured
from dilabench.report.answer import winner_text
from dilabench.report.columns import row_name
from dilabench.report.content import Section, WorkloadTable
from dilabench.units import format_count, format_latency


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """The result at one length: the fastest, or why there is none.

    `state`: 'won' if one is proven to be fastest, 'tied' if none is; 'single' if there was one row; 'skipped' or
    'failed' without a measured row. `word`: as the answer names it. `reasons`: of the rows without a time.
    """

    state: str
    word: str
    time: str = ""
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WinnerMap:
    """`lines` hold a name and a field per length, None if nothing was requested."""

    lengths: tuple[str, ...]
    lines: tuple[tuple[str, tuple[Field | None, ...]], ...]


def winner_map(tables: Sequence[WorkloadTable]) -> WinnerMap:
    """The map of all ranked rows, without unranked references."""
    found: dict[str, dict[int, Field]] = {}
    shared = Counter((family(table), _length(table)) for table in tables)
    for table in tables:
        for section in table.sections:
            if section.rows[0].row.planned.role == "yardstick":
                continue
            name = family(table)
            if shared[name, _length(table)] > 1:
                name = f"batch {section.rows[0].row.case.workload.batch_size}, {name}"
            if section.title is not None:
                name += f" ({section.title.partition(':')[0]})"
            found.setdefault(name, {})[_length(table)] = _field(section)
    lengths = sorted({length for fields in found.values() for length in fields})
    return WinnerMap(
        lengths=tuple(map(format_count, lengths)),
        lines=tuple((name, tuple(map(fields.get, lengths))) for name, fields in found.items()),
    )


def family(table: WorkloadTable) -> str:
    """The title of a table without batch size and length."""
    return table.title.partition(" ")[2]


def _length(table: WorkloadTable) -> int:
    return table.rows[0].row.case.workload.seq_len


def _field(section: Section) -> Field:
    reasons = tuple(
        f"{row_name(line.row)} {line.status}: {line.row.outcome.why}"
        for line in section.rows
        if not isinstance(line.row.outcome, Measured)
    )
    ranking = section.ranking
    if ranking is None:
        states = {line.status for line in section.rows}
        # A row that was measured and may not be quoted is no winner either.
        state = "failed" if "failed" in states else "skipped" if "skipped" in states else "not to be quoted"
        return Field(state=state, word=state, reasons=reasons)
    winner = measured_view(ranking.fastest)
    state = "single" if len(ranking.speedups) == 1 else "won" if ranking.proven else "tied"
    return Field(state=state, word=winner_text(ranking), time=format_latency(winner.median_ns), reasons=reasons)
