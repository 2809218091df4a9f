"""The content of every report on a run record: tables of its rows, rows without a time, notes, the machine, the
command.

A table holds the rows of one effective workload. Inside it a section holds rows that may be ranked against each other;
a speed-up exists only inside a section, against the plain method or else the section's first measured row.
"""

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from types import MappingProxyType

from dilabench.comparison.view import Ranking, lengths_without_rows, locate_rows, rankings, view_of
from dilabench.machine import device_named
from dilabench.metadata import NOTES, note_figures, note_text
from dilabench.record import (
    ESTIMATOR,
    Case,
    Failed,
    FailureCode,
    Measured,
    Note,
    Row,
    RunRecord,
    Skipped,
)
from dilabench.report.columns import Column, DisplayRow, chosen_columns, row_name, workload_title
from dilabench.retired import ANY_KIND, removed
from dilabench.units import counted, format_bytes, format_count, format_seconds
from dilabench.workload.spec import Workload

ESTIMATES = f"time: the {ESTIMATOR}; speed-up: how many times as fast as the row with 1.00x"
FOOTNOTES = {
    "*": "chosen by auto",
    "†": "too few independent rounds for 95 %: the interval is the whole range of the samples",
    "‡": "not to be quoted, and not ranked: the note on this row says why its time cannot be true",
    "✓": "its output was verified before timing: all rows, or that many sampled rows",
    "timed": "calls: rows of the output of this many timed calls were checked, too",
    "all vs": "a built-in: every row was compared with this implementation, of which the oracle had confirmed "
    "sampled rows",
}
# The inputs of a call in words, if they are not q, k, v.
MODULES: Mapping[str, str] = MappingProxyType({"embeddings": "whole modules"})
STAGES: Mapping[str, str] = MappingProxyType(
    {
        "worker": "start of processes",
        "build": "import, compilation and first calls",
        "verify": "verification",
        "kernels": "profiler",
        "warmup": "warm-up",
        "time": "timing",
        "timed_checks": "checks of timed calls",
        "memory": "memory",
        "diagnostics": "parts of calls over ranks",
        "release": "release of memory",
        "ceilings": "measurement of the device's peaks",
        "waiting": "waiting for the device",
        "unmeasured": "rows without a time",
    }
)
UNVERIFIED: frozenset[FailureCode] = frozenset({"wrong_output", "backend_not_proven"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Rows that compute the same thing from the same inputs. `title` is None for the table's own subject.

    `ranking` is None if no row was measured, and for unranked references.
    """

    title: str | None
    rows: tuple[DisplayRow, ...]
    ranking: Ranking | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadTable:
    """The rows of one effective workload: `members` as they are in the record, `sections` as they are shown."""

    members: tuple[Row, ...]
    sections: tuple[Section, ...]

    @property
    def title(self) -> str:
        """Shape, pattern, mode and world size."""
        return workload_title(self.members[0].case)

    @property
    def rows(self) -> tuple[DisplayRow, ...]:
        """The rows of all sections."""
        return tuple(row for section in self.sections for row in section.rows)


# Cached tables of the last requested record, which the answer and the reporters share.
_last: list[tuple[RunRecord, tuple["WorkloadTable", ...]]] = []


def workload_tables(record: RunRecord) -> tuple[WorkloadTable, ...]:
    """One table per effective workload and world size, in the order of the record.

    An unranked reference (role `yardstick`) computes another function of the same shape. It is in the table of this
    shape, in a separate section and without a speed-up.
    """
    # By identity: to hash or compare a record takes longer than to make its tables.
    if not _last or _last[0][0] is not record:
        _last[:] = [(record, _tables(record))]
    return _last[0][1]


def _tables(record: RunRecord) -> tuple[WorkloadTable, ...]:
    locate_rows(record.rows)
    groups: dict[tuple[Workload, int], list[Row]] = {}
    references: list[Row] = []
    for row in record.rows:
        if row.planned.role == "yardstick":
            references.append(row)
        else:
            groups.setdefault((row.case.workload, row.case.world_size), []).append(row)
    shape_owner = {shape_of(rows[0].case): cell for cell, rows in reversed(groups.items())}
    for row in references:
        cell = shape_owner.setdefault(shape_of(row.case), (row.case.workload, row.case.world_size))
        groups.setdefault(cell, []).append(row)
    sections = [_by_title(rows) for rows in groups.values()]
    every = [rows for titled in sections for rows in titled.values()]
    ranked = iter(rankings([() if is_unranked(rows) else rows for rows in every], record.device))
    return tuple(
        WorkloadTable(
            members=tuple(rows),
            sections=tuple(_section(title, members, next(ranked), record) for title, members in titled.items()),
        )
        for rows, titled in zip(groups.values(), sections, strict=True)
    )


def without_skipped(tables: Iterable[WorkloadTable]) -> tuple[WorkloadTable, ...]:
    """The tables, sections and rows that are more than dashes: skipped rows are listed with their reasons."""
    kept = []
    for table in tables:
        sections = [
            replace(section, rows=tuple(row for row in section.rows if row.status != "skipped"))
            for section in table.sections
        ]
        if shown := tuple(section for section in sections if section.rows):
            kept.append(replace(table, sections=shown))
    return tuple(kept)


def footnotes(tables: Iterable[WorkloadTable], columns: Sequence[Column] = ()) -> tuple[str, ...]:
    """How the figures were estimated, and the meaning of the marks that these columns of the tables use."""
    tables = tuple(tables)
    rows = [row for table in tables for row in table.rows]
    texts = [column.text(row) for row in rows for column in columns or chosen_columns((), (row.row for row in rows))]
    marks = (f"{mark} {meaning}" for mark, meaning in FOOTNOTES.items() if any(mark in text for text in texts))
    bases = dict.fromkeys(
        f"speed-ups in {table.title} refer to {row_name(base)} of {base.planned.source}: no built-in has a time"
        for table in tables
        for section in table.sections
        if section.ranking and (base := section.ranking.baseline).planned.source
    )
    return (*([ESTIMATES] if any(row.view for row in rows) else []), *bases, *marks)


def shape_of(case: Case) -> tuple[Workload, int]:
    """Equal for cases that differ only in what is computed from inputs of one shape."""
    return case.workload.as_dense(), case.world_size


def _by_title(rows: Sequence[Row]) -> dict[str | None, list[Row]]:
    sections: dict[str | None, list[Row]] = {}
    for row in rows:
        sections.setdefault(_section_title(row), []).append(row)
    return sections


def is_unranked(rows: Iterable[Row]) -> bool:
    """Return True if all rows are unranked references."""
    return all(row.planned.role == "yardstick" for row in rows)


def _section_title(row: Row) -> str | None:
    if row.planned.role == "yardstick":
        return f"yardstick: {row.case.workload.pattern.label()}, another function of the same shape"
    module = MODULES.get(row.planned.takes)
    return None if module is None else f"{module}: not comparable with the rows above"


def _section(title: str | None, rows: Sequence[Row], ranking: Ranking | None, record: RunRecord) -> Section:
    shown = [
        DisplayRow(
            row=row,
            view=view_of(row),
            speedup=ranking.speedups.get(row.case.case_id) if ranking else None,
            status=row.outcome.status,
            fastest=ranking is not None and ranking.proven and row is ranking.fastest,
            ceilings=record.ceilings,
        )
        for row in rows
    ]
    return Section(title=title, rows=tuple(shown), ranking=ranking)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmeasured:
    """Rows that have no time for one reason, named with their workloads. `status` is 'skipped' or 'failed'.

    `code`: the kind of reason; `count`: its number of rows.
    """

    status: str
    code: str
    rows: str
    count: int = 0
    stage: str | None
    why: str
    checks: tuple[str, ...] = ()
    traceback: str | None = None


def headline(record: RunRecord) -> str:
    """How many rows ended how, in one sentence."""
    statuses = Counter(row.outcome.status for row in record.rows)
    wrong = sum(isinstance(row.outcome, Failed) and row.outcome.code in UNVERIFIED for row in record.rows)
    idle = sum(row.planned.skip is not None for row in record.rows)
    parts = [f"{statuses['measured']} of {counted(len(record.rows) - idle, 'row')} verified and measured"]
    if statuses["skipped"] > idle:
        parts.append(f"{statuses['skipped'] - idle} skipped")
    if idle:
        parts.append(f"{idle} more could not run")
    late = sum(isinstance(row.outcome, Failed) and row.outcome.code == "verification_timeout" for row in record.rows)
    if statuses["failed"]:
        unproven = [f"{wrong} did not pass verification"] * bool(wrong)
        unproven += [f"{late} could not be verified in time"] * bool(late)
        parts.append(f"{statuses['failed']} FAILED" + (f" ({', '.join(unproven)})" if unproven else ""))
    ended = "" if record.status == "complete" else f" The run was {record.status}; these are the results so far."
    if statuses["measured"] and (lengths := lengths_without_rows(record)):
        ended = f" No row was measured at length {', '.join(map(format_count, lengths))}.{ended}"
    return f"Suite {record.suite} on {device_text(record)}: {', '.join(parts)}.{ended}"


def device_text(record: RunRecord) -> str:
    """The device that did the work, by name."""
    environment = record.environment
    if device_named(record.device).own_memory and environment.gpus:
        names = Counter(gpu.name for gpu in environment.gpus)
        return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in names.items())
    return f"{environment.cpu.model} ({environment.cpu.threads} threads)"


def unmeasured(record: RunRecord) -> tuple[Unmeasured, ...]:
    """Failed rows first, then skipped ones; rows that share a reason are gathered."""
    found: dict[Unmeasured, dict[str, list[str]]] = {}
    for row in record.rows:
        if isinstance(row.outcome, Skipped | Failed):
            workloads = found.setdefault(_reason(row.outcome), {}).setdefault(row_name(row), [])
            workloads.append(row.case.workload.label())
    entries = [
        replace(
            reason,
            rows=", ".join(f"{name} ({_gathered(labels)})" for name, labels in names.items()),
            count=sum(map(len, names.values())),
        )
        for reason, names in found.items()
    ]
    return tuple(sorted(entries, key=lambda entry: entry.status != "failed"))


def _reason(outcome: Skipped | Failed) -> Unmeasured:
    """Why there is no time, without the rows."""
    if isinstance(outcome, Skipped):
        return Unmeasured(status="skipped", code=outcome.code, rows="", stage=None, why=outcome.why)
    broken = [check for check in outcome.verification.checks if not check.passed] if outcome.verification else []
    return Unmeasured(
        status="failed",
        code=outcome.code,
        rows="",
        stage=outcome.stage,
        why=outcome.why,
        checks=tuple(check.text for check in broken),
        traceback=outcome.traceback,
    )


def _gathered(labels: Iterable[str]) -> str:
    """Workload labels that differ only in batch and length as one: '1x1K, 1x4K H8 D64 fp32 causal'."""
    sizes: dict[str, list[str]] = {}
    for label in dict.fromkeys(labels):
        size, _, rest = label.partition(" ")
        sizes.setdefault(rest, []).append(size)
    return "; ".join(f"{', '.join(found)} {rest}" for rest, found in sizes.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteGroup:
    """The notes of one kind: its meaning, how many rows have one, and advice.

    `texts`: the lines of each note; rows whose notes differ in figures only share one, with a line for each workload.
    `brief`: one line for all of them. `severe`: the times of these rows cannot be true.
    """

    meaning: str
    count: int
    texts: tuple[tuple[str, ...], ...]
    hint: str | None
    severe: bool

    @property
    def brief(self) -> str:
        """The note itself if all rows have the same, else the number of rows and the meaning of its kind."""
        if len(self.texts) == 1:
            return self.texts[0][0]
        return f"{self.count} rows: {self.meaning}" + (f"; {self.hint}" if self.hint else "")


def note_groups(record: RunRecord) -> tuple[NoteGroup, ...]:
    """The warnings on measured rows by kind, the severe ones first, then by number."""
    kinds: dict[str, list[tuple[Row, Note]]] = {}
    for row in record.rows:
        for note in getattr(row.outcome, "notes", ()):
            kinds.setdefault(note.code, []).append((row, note))
    groups = [
        NoteGroup(
            meaning=NOTES[code].meaning if code in NOTES else notes[0][1].message,
            count=len(notes),
            texts=tuple(_note_texts(notes)),
            hint=hints.pop() if len(hints := {note.hint for _, note in notes}) == 1 else None,
            severe=code in NOTES and NOTES[code].disqualifies,
        )
        for code, notes in kinds.items()
    ]
    return tuple(sorted(groups, key=lambda group: (not group.severe, -group.count)))


def _note_texts(notes: Iterable[tuple[Row, Note]]) -> Iterator[tuple[str, ...]]:
    alike: dict[tuple[str, str | None], list[tuple[Row, Note]]] = {}
    for row, note in notes:
        alike.setdefault((note.message, note.hint), []).append((row, note))
    for (message, hint), of_rows in alike.items():
        if len(of_rows) == 1:
            ((row, note),) = of_rows
            yield (f"{row_name(row)}, {row.case.workload.label()}: {note_text(note)}",)
            continue
        workloads: dict[str, list[str]] = {}
        for row, note in of_rows:
            figures = note_figures(note)
            name = row_name(row) + (f" ({figures})" if figures else "")
            workloads.setdefault(row.case.workload.label(), []).append(name)
        head = f"{len(of_rows)} rows: {message}" + (f"; {hint}" if hint else "")
        yield head, *(f"{label}: {', '.join(names)}" for label, names in workloads.items())


def environment_rows(record: RunRecord) -> tuple[tuple[str, str], ...]:
    """The machine and the versions, as (what, value)."""
    environment, cpu = record.environment, record.environment.cpu
    memory = format_bytes(cpu.memory_bytes) if cpu.memory_bytes else None
    rows = [
        ("device", record.device),
        ("CPU", _join(cpu.model, f"{cpu.cores} cores", f"{cpu.threads} threads", memory)),
        *(("GPU", _join(gpu.name, gpu.memory_bytes and format_bytes(gpu.memory_bytes))) for gpu in environment.gpus),
        ("driver", next((gpu.driver for gpu in environment.gpus if gpu.driver), None)),
        ("system", environment.os + (", in a container" if environment.container else "")),
        ("Python", environment.python),
        ("packages", ", ".join(f"{name} {version}" for name, version in environment.packages.items())),
        ("torch settings", ", ".join(f"{name}={value}" for name, value in environment.torch.items())),
        ("plug-ins", ", ".join(" ".join(filter(None, (plugin.name, plugin.version))) for plugin in record.plugins)),
        ("git", environment.git and environment.git.sha + (" with local changes" if environment.git.dirty else "")),
        ("seed", str(record.seed)),
        ("started", record.started_at),
        ("finished", record.finished_at),
        ("time spent", time_spent(record)),
    ]
    return tuple((what, value) for what, value in rows if value)


def time_spent(record: RunRecord) -> str | None:
    """The time of the run by stage, the longest first; None if the record has none."""
    spent: Counter[str] = Counter(record.wall_ns)
    for row in record.rows:
        if isinstance(row.outcome, Measured):
            spent.update(row.outcome.wall_ns)
    if not spent:
        return None
    stages = ((STAGES.get(stage, stage), total_ns) for stage, total_ns in spent.most_common())
    texts = [f"{title} {format_seconds(total_ns * 1e-9)}" for title, total_ns in stages if total_ns]
    # Merged records have one start and one end.
    rest_s = record.duration_s - spent.total() * 1e-9
    texts += [f"everything else {format_seconds(rest_s)}"] if rest_s > 0 else []
    return ", ".join(texts) + (f" of {format_seconds(record.duration_s)}" if rest_s > 0 else "")


def reproduce_command(record: RunRecord) -> str:
    """The command line that made the record, for a shell.

    A comment follows for each name in it that was removed. If a script made the record, all of it is a comment.
    """
    words = record.argv or ("run", record.suite, "--seed", str(record.seed))
    if PurePath(words[0]).name in {"dilabench", "__main__.py"}:
        words = words[1:]
    # Records of scripts hold the arguments of the script.
    if not words or not re.fullmatch("[a-z]+", words[0]):
        arguments = " ".join(shlex.join(record.argv).split())
        return f"# no command repeats this run: a script made it, with the arguments {arguments}"
    names = dict.fromkeys(name for word in words for name in re.split("[,=]", word))
    answers = (removed(ANY_KIND, name) for name in names)
    return "\n".join([shlex.join(["dilabench", *words]), *(f"# {answer}" for answer in answers if answer)])


def _join(*parts: str | int | None) -> str:
    return ", ".join(str(part) for part in parts if part)
