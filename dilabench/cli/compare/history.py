"""`dilabench history`: stored runs, and the trend of a case with its steps."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dilabench.cli.options import OUTPUT_DIR, AsJson, Backends, real_names, require_one_format
from dilabench.cli.run.options import Implementations
from dilabench.cli.terminal import note, print_items, say, say_page
from dilabench.errors import ConfigError
from dilabench.report.columns import Column
from dilabench.units import change_text, format_latency

if TYPE_CHECKING:
    from dilabench.report.html.history import Trend
    from dilabench.stats.decisions.steps import Step
    from dilabench.store.index import CaseEntry, RunEntry


class Format(StrEnum):
    """How a history is shown."""

    TABLE = "table"
    HTML = "html"


SHOWN_RUNS = 20
ALL = "all cases"


@dataclass(frozen=True, slots=True)
class TrendLine:
    """A case in one run; `step`: the change of level from this run on, None if it did not change."""

    entry: "CaseEntry"
    step: "Step | None"

    @property
    def remark(self) -> str:
        """The step, or the reason for the missing time."""
        if self.entry.median_ns is None:
            return f"{self.entry.status}: {self.entry.why}"
        return "" if self.step is None else f"<- step: {_change(self.step)}"


RUN_COLUMNS = (
    Column(name="date", cell=lambda run: _date(run), right=False, spare=None),
    Column(name="run", cell=lambda run: run.run_id, right=False, spare=None),
    Column(name="suite", cell=lambda run: run.suite, right=False, spare=None),
    Column(name="device", cell=lambda run: run.device, right=False, spare=None),
    Column(name="status", cell=lambda run: run.status, right=False, spare=None),
    Column(name="measured", cell=lambda run: f"{run.measured}/{run.rows}", spare=None),
    Column(name="git", cell=lambda run: run.git, right=False, spare=None),
)
CASE_COLUMNS = (
    Column(name="date", cell=lambda line: _date(line.entry.run), right=False, spare=None),
    Column(name="run", cell=lambda line: line.entry.run.run_id, right=False, spare=None),
    Column(name="git", cell=lambda line: line.entry.run.git, right=False, spare=None),
    Column(name="timer", cell=lambda line: line.entry.timer, right=False, spare=1, absent=""),
    Column(name="median", cell=lambda line: line.entry.median_ns, unit="ns", spare=None, absent=""),
    Column(name="samples", cell=lambda line: line.entry.samples or None, spare=2, absent=""),
    Column(name="peak", cell=lambda line: line.entry.peak_bytes, unit="bytes", spare=None, absent=""),
    Column(name="", cell=lambda line: line.remark, right=False, spare=None),
)


def history(
    case: Annotated[
        list[str] | None,
        typer.Argument(metavar="CASE", help="Words of a case's name (strided 8K fp32) or its case id."),
    ] = None,
    implementations: Implementations = None,
    backends: Backends = None,
    reindex: Annotated[bool, typer.Option("--reindex", help="Rebuild the index from the run files.")] = False,
    limit: Annotated[
        int | None,
        typer.Option("--limit", metavar="N", min=1, help="Newest runs to show (default 20; of a case, all)."),
    ] = None,
    form: Annotated[Format, typer.Option("--format", "-f", help="html: a page with a chart per case.")] = Format.TABLE,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Write the page there instead of printing."),
        OUTPUT_DIR,
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the stored runs, or every case that the words, -i and -b fit, with its trend and the steps in it.

    Steps are looked for in the median of all samples, and never across machines or timers.
    """
    from dilabench.store.archive import Archive
    from dilabench.store.index import HistoryIndex

    require_one_format(as_json, () if form is Format.TABLE else (form,))
    archive = Archive()
    with HistoryIndex(archive, note, rebuild=reindex) as index:
        if case or implementations or backends or form is Format.HTML:
            words = [word for text in case or () for word in text.split()]
            chosen, over = real_names(implementations, backends)
            entries = [
                entry
                for entry in index.cases(words)
                if (not chosen or entry.implementation in chosen) and (not over or entry.backend in over)
            ]
            asked = " ".join((*words, *chosen, *over)) or ALL
            if form is Format.HTML:
                _page(_trends(entries, asked), asked, output)
            else:
                _show_cases(_trends(entries, asked), limit, as_json)
        else:
            _show_runs(index.runs(limit or SHOWN_RUNS), str(archive.folder), as_json)


def _show_runs(runs: "Sequence[RunEntry]", folder: str, as_json: bool) -> None:
    if as_json:
        say(json.dumps([asdict(run) for run in runs], indent=2))
    elif not runs:
        say(f"no runs in {folder}; `dilabench run quick` makes one")
    else:
        print_items(None, RUN_COLUMNS, runs)


def _trends(cases: "Sequence[CaseEntry]", asked: str) -> "Sequence[Sequence[CaseEntry]]":
    """The entries of each case on each machine, oldest first."""
    if not cases and asked == ALL:
        raise ConfigError("no run with a measured case is stored here; `dilabench run quick` makes one")
    if not cases:
        raise ConfigError(f"no stored case has {asked!r} in its name; `dilabench history` lists the runs")
    groups: dict[tuple[str, str], list[CaseEntry]] = {}
    for entry in cases:
        groups.setdefault((entry.case_id, entry.run.machine), []).append(entry)
    return list(groups.values())


def _show_cases(groups: "Sequence[Sequence[CaseEntry]]", limit: int | None, as_json: bool) -> None:
    newest = slice(None if limit is None else -limit, None)
    if as_json:
        document = [
            {
                "cells": [asdict(entry) for entry in group[newest]],
                "steps": {file: asdict(step) for file, step in _steps(group).items()},
            }
            for group in groups
        ]
        say(json.dumps(document, indent=2, ensure_ascii=False))
        return
    machines = Counter(group[0].case_id for group in groups)
    for group in groups:
        first, steps = group[0], _steps(group)
        machine = f", machine {first.run.machine}" if machines[first.case_id] > 1 else ""
        title = f"{_title(first)} [case {first.case_id}{machine}]"
        print_items(title, CASE_COLUMNS, [TrendLine(entry, steps.get(entry.run.file)) for entry in group[newest]])
        say()


def _page(groups: "Sequence[Sequence[CaseEntry]]", asked: str, output: Path | None) -> None:
    from dilabench.report.html import history as html

    text = html.to_text([_trend(group, number) for number, group in enumerate(groups)], asked)
    say_page(text, output, html.FILENAME)


def _trend(group: "Sequence[CaseEntry]", number: int) -> "Trend":
    """The chart counts runs; a new level begins at each step, and with each timer."""
    from dilabench.report.findings import Curve, CurvePlot, Point
    from dilabench.report.html.history import Trend

    steps = _steps(group)
    levels: dict[str, list[Point]] = {}
    level, shifts = "", []
    for index, entry in enumerate(group, 1):
        if entry.median_ns is None:
            continue
        if entry.run.file in steps or not level:
            level = f"from {_date(entry.run)} (run {entry.run.run_id})"
        if entry.run.file in steps:
            shifts.append(
                f"{_change(steps[entry.run.file])} from {_date(entry.run)} on (run {entry.run.run_id}, {entry.run.git})"
            )
        levels.setdefault(f"{entry.timer}, {level}", []).append(Point(x=index, y=entry.median_ns / 1e6))
    return Trend(
        title=_title(group[0]),
        where=f"case {group[0].case_id}, machine {group[0].run.machine}",
        columns=CASE_COLUMNS,
        lines=[TrendLine(entry, steps.get(entry.run.file)) for entry in group],
        steps=shifts,
        plot=CurvePlot(
            name=f"case{number}",
            title=_title(group[0]),
            x_label="run, oldest first",
            y_label="median (ms)",
            curves=tuple(Curve(label=name, points=tuple(points)) for name, points in levels.items()),
        ),
    )


def _steps(group: "Sequence[CaseEntry]") -> "dict[str, Step]":
    """The step of each run at which the level changed, by the run's file."""
    from dilabench.stats.decisions.steps import steps

    found: dict[str, Step] = {}
    by_timer: dict[str | None, list[tuple[str, float]]] = {}
    for entry in group:
        if entry.median_ns is not None:
            by_timer.setdefault(entry.timer, []).append((entry.run.file, entry.median_ns))
    for measured in by_timer.values():
        found |= {measured[step.index][0]: step for step in steps([median_ns for _, median_ns in measured])}
    return found


def _date(run: "RunEntry") -> str:
    return run.started_at[:16].replace("T", " ") or "undated"


def _title(entry: "CaseEntry") -> str:
    backend = f" over {entry.backend}" if entry.backend else ""
    return f"{entry.implementation}{backend}, {entry.title}"


def _change(step: "Step") -> str:
    return f"{format_latency(step.before_ns)} to {format_latency(step.after_ns)} ({change_text(step.ratio)})"
