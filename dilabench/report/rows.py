"""A run record as rows of text: what is shown, in which order, compared with what. Table and Markdown both print this.

A table holds the rows of one effective workload. Inside it a section holds rows that may be ranked against each other;
a speed-up exists only inside a section, against the plain method or else the section's first measured row.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dilabench.compare.view import Ranking, rank, view_of
from dilabench.record import ESTIMATOR, Case, Row, RunRecord
from dilabench.report.columns import Column, DisplayRow, chosen_columns, workload_title

ESTIMATES = f"time: the {ESTIMATOR}; speed-up: from the rounds that both rows took turns in, else from their times"
FOOTNOTES = {
    "*": "chosen by auto",
    "†": "too few independent turns for 95 %: the interval is the whole range of the samples",
    "‡": "not to be quoted, and not ranked: the note on this row says why its time cannot be true",
    "✓": "its output was verified before timing: all rows, or a sample of that many",
    "all vs": "a built-in: every row was compared with that built-in's, of which the oracle had confirmed a sample",
}


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


def footnotes(tables: Iterable[WorkloadTable], columns: Sequence[Column] = ()) -> tuple[str, ...]:
    """How the figures were estimated, and the meaning of the marks that these columns of the tables use."""
    rows = [row for table in tables for row in table.rows]
    texts = [column.text(row) for row in rows for column in columns or chosen_columns()]
    marks = (f"{mark} {meaning}" for mark, meaning in FOOTNOTES.items() if any(mark in text for text in texts))
    return (*([ESTIMATES] if any(row.view for row in rows) else []), *marks)


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
            view=view_of(row),
            speedup=ranking.speedups.get(row.case.case_id) if ranking else None,
            status=row.outcome.status,
            fastest=ranking is not None and ranking.proven and row is ranking.fastest,
        )
        for row in rows
    ]
    return Section(title=title, rows=tuple(shown), ranking=ranking)
