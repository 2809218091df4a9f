"""Leaderboards: from any number of records, one board per device and family of workloads.

Only rows that passed verification and whose time may be quoted are on it, and whose implementation there still is.
Places are given by the rule that `compare`
decides with: rows share one if no difference is proven. That needs interleaved rows, so each run is ranked separately,
even if two runs measured the same workload.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dilabench.comparison.view import is_quotable, measured_view, rank
from dilabench.machine import device_named
from dilabench.plugins.manager import discover
from dilabench.record import Row, RunRecord
from dilabench.report.columns import ABSENT, COLUMNS, Column, row_name
from dilabench.report.content import MODULES, environment_rows, reproduce_command, workload_tables
from dilabench.report.html.commands import quoted, row_command
from dilabench.report.html.page import page
from dilabench.version import __version__
from dilabench.workload.spec import UNBOUNDED, Workload

HTML_NAME = "leaderboard.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One row. `place`: 1 is the fastest; `tied`: others share it. `unproven`: too few rounds to separate them.

    `behind`: its time / time of the fastest. `command`: measures it again, alone; None if only a suite's own search
    knows how the row came to be.
    """

    place: int
    tied: bool
    unproven: bool
    name: str
    median_ns: float
    time: str
    behind: float
    memory: str
    verified: str
    command: str | None

    @property
    def place_text(self) -> str:
        """'1', '1 =' if others share it, '1 ?' if no difference could be proven."""
        return f"{self.place} {'?' if self.unproven else '='}" if self.tied else str(self.place)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """The rows of one workload that were interleaved in one run."""

    workload: str
    run_id: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """The contests of one family on one device by shape: the newest run of each workload, and `older` ones."""

    device: str
    family: str
    contests: tuple[Contest, ...]
    older: tuple[Contest, ...] = ()

    @property
    def lines(self) -> Iterator[BoardLine]:
        """A line per entry of the newest runs, in order."""
        return _board_lines(self.contests)

    @property
    def older_lines(self) -> Iterator[BoardLine]:
        """A line per entry of older runs of the same workloads, in order."""
        return _board_lines(self.older)


@dataclass(frozen=True, slots=True)
class BoardLine:
    """An entry with the contest that it is in."""

    contest: Contest
    entry: Entry

    @property
    def opposed(self) -> bool:
        """Return True if other rows were interleaved with it."""
        return len(self.contest.entries) > 1


def _board_lines(contests: Sequence[Contest]) -> Iterator[BoardLine]:
    return (BoardLine(contest, entry) for contest in contests for entry in contest.entries)


BOARD_COLUMNS = (
    Column(name="workload", cell=lambda line: line.contest.workload, right=False, spare=None),
    Column(name="place", cell=lambda line: line.entry.place_text if line.opposed else "alone", right=False, spare=None),
    Column(name="implementation", cell=lambda line: line.entry.name, right=False, spare=None),
    Column(name="time", cell=lambda line: line.entry.median_ns, unit="ns", spare=None),
    Column(name="behind", cell=lambda line: line.entry.behind if line.opposed else None, unit="times", spare=None),
    Column(name="memory", cell=lambda line: line.entry.memory, spare=2),
    Column(name="verified", cell=lambda line: line.entry.verified, right=False, spare=1),
    Column(name="run", cell=lambda line: line.contest.run_id, right=False, spare=None),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The source of entries: commit, machine and versions, and the command that made the whole record."""

    run_id: str
    started_at: str
    dilabench: str
    commit: str
    device: str
    environment: tuple[tuple[str, str], ...]
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaderboard:
    """Every board, and the runs behind them."""

    boards: tuple[Board, ...]
    runs: tuple[Run, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def leaderboard(records: Sequence[RunRecord]) -> Leaderboard:
    """The boards of all records, that of the newest run first; runs without a row on a board are not named."""
    found: dict[tuple[str, str], list[tuple[tuple[Any, ...], Contest]]] = {}
    named: dict[str, RunRecord] = {}
    known = discover().catalogue.implementations.names
    for record in sorted(records, key=lambda record_: record_.started_at, reverse=True):
        for rows in _ranked_together(record, known):
            named[record.run_id] = record
            case = rows[0].case
            shape = case.workload.mode, case.world_size, case.workload.dtype, case.workload.seq_len, case.group_id
            contest = Contest(
                workload=_shape_text(rows[0]), run_id=record.run_id, entries=tuple(_entries(rows, record))
            )
            board = device_name(record), family_text(case.workload)
            found.setdefault(board, []).append(((*shape, contest.workload), contest))
    boards = []
    for (device, family), listed in found.items():
        # Sorting is stable, so the newest run of a shape comes first.
        ordered = sorted(listed, key=lambda entry: entry[0])
        newest = dict(reversed(ordered))
        older = tuple(contest for shape, contest in ordered if contest is not newest[shape])
        contests = tuple(contest for shape, contest in ordered if contest is newest[shape])
        boards.append(Board(device=device, family=family, contests=contests, older=older))
    return Leaderboard(boards=tuple(boards), runs=tuple(map(_run, named.values())))


def to_html(found: Leaderboard) -> str:
    """leaderboard.html: a board per device and family, with the commands that repeat every row. It needs no network."""
    return page(
        "leaderboard.html.j2",
        boards=found.boards,
        columns=BOARD_COLUMNS,
        runs=found.runs,
        run_of={run.run_id: run for run in found.runs},
        version=__version__,
    )


def device_name(record: RunRecord) -> str:
    """The kind of GPU, regardless of their number, or of CPU."""
    environment = record.environment
    if device_named(record.device).own_memory and environment.gpus:
        return ", ".join(dict.fromkeys(gpu.name for gpu in environment.gpus))
    return f"{environment.cpu.model} ({environment.cpu.threads} threads)"


def family_text(workload: Workload) -> str:
    """The computation regardless of its shape: 'dilated w 2K,4K r 1,2, causal'."""
    parts = [workload.pattern.label(), "causal" if workload.causal else "not causal"]
    if workload.window != UNBOUNDED:
        parts.append(f"window {workload.window[0]},{workload.window[1]}")
    if workload.scale is not None:
        parts.append(f"scale {workload.scale:g}")
    return ", ".join(parts)


def _shape_text(row: Row) -> str:
    """The fields outside the family: shape, dtype, mode, devices, and the inputs of a call unless they are q, k, v."""
    case, module = row.case, MODULES.get(row.planned.takes)
    world = f" · {case.world_size} devices" if case.world_size > 1 else ""
    return f"{case.workload.label()} · {case.workload.mode}{world}" + ("" if module is None else f" · {module}")


def _ranked_together(record: RunRecord, known: Container[str]) -> Iterator[list[Row]]:
    """Rows that compute one function of the same inputs, so without unranked references.

    `known`: the implementations that there are; a plug-in's need not be installed here.
    """
    for table in workload_tables(record):
        for section in table.sections:
            quotable = [line.row for line in section.rows if is_quotable(line.row)]
            rows = [row for row in quotable if row.planned.source or row.case.implementation in known]
            if rows and rows[0].planned.role != "yardstick":
                yield rows


def _entries(rows: Sequence[Row], record: RunRecord) -> Iterator[Entry]:
    left, place, fastest = list(rows), 1, 0.0
    first = rank(left, record.device)
    assert first is not None
    fastest = first.speedups[first.fastest.case.case_id]
    while left:
        ranking = rank(left, record.device)
        assert ranking is not None
        sharing = (ranking.fastest, *ranking.unproven)
        for row in sharing:
            view, command = measured_view(row), row_command(row, record)
            yield Entry(
                place=place,
                tied=len(sharing) > 1,
                unproven=ranking.too_few_rounds,
                name=row_name(row),
                median_ns=view.median_ns,
                time=COLUMNS["median"].value_text(view),
                behind=fastest / first.speedups[row.case.case_id],
                memory=COLUMNS["peak mem."].value_text(view),
                verified=view.verified,
                command=command and f"dilabench {quoted((*command[0], *command[1]))}",
            )
        place += len(sharing)
        ended = {row.case.case_id for row in sharing}
        left = [row for row in left if row.case.case_id not in ended]


def _run(record: RunRecord) -> Run:
    git = record.environment.git
    return Run(
        run_id=record.run_id,
        started_at=record.started_at,
        dilabench=record.tool_version,
        commit=ABSENT if git is None else git.sha + (" with local changes" if git.dirty else ""),
        device=device_name(record),
        environment=environment_rows(record),
        command=reproduce_command(record),
    )
