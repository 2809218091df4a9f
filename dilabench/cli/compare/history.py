"""`dilabench history`: stored runs, and the trend of a case with its steps."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from dilabench.cli.options import AsJson
from dilabench.cli.terminal import note, print_table, say
from dilabench.errors import ConfigError
from dilabench.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from dilabench.store.index import CaseEntry, RunEntry

SHOWN_RUNS = 20
RUN_COLUMNS = ("date", "run", "suite", "device", "status", "measured", "git")
CASE_COLUMNS = ("date", "run", "git", "timer", "p25", "median", "samples", "peak", "")


def history(
    case: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CASE]...", help="Words of a case's name (strided 8K fp32) or its case id."),
    ] = None,
    reindex: Annotated[bool, typer.Option("--reindex", help="Make the index anew from the run files.")] = False,
    limit: Annotated[
        int | None,
        typer.Option("--limit", metavar="N", min=1, help="Newest runs to show (default 20; of a case, all)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the stored runs, or every case that the words fit with its trend and the steps in it.

    Steps are looked for in the lower quartile, which is steadier between runs than the median, and never across
    machines or timers.
    """
    from dilabench.store.archive import Archive
    from dilabench.store.index import HistoryIndex

    archive = Archive()
    with HistoryIndex(archive, note, rebuild=reindex) as index:
        if case:
            words = [word for text in case for word in text.split()]
            _show_cases(list(index.cases(words)), " ".join(words), limit, as_json)
        else:
            _show_runs(index.runs(limit or SHOWN_RUNS), str(archive.folder), as_json)


def _show_runs(runs: "Sequence[RunEntry]", folder: str, as_json: bool) -> None:
    if as_json:
        say(json.dumps([asdict(run) for run in runs], indent=2))
    elif not runs:
        say(f"no runs in {folder}; `dilabench run SUITE` keeps its record there")
    else:
        rows = [
            (_date(run), run.run_id, run.suite, run.device, run.status, f"{run.measured}/{run.rows}", run.git)
            for run in runs
        ]
        print_table(None, RUN_COLUMNS, rows, right=("measured",))


def _show_cases(cases: "Sequence[CaseEntry]", asked: str, limit: int | None, as_json: bool) -> None:
    if not cases:
        raise ConfigError(f"no stored case has {asked!r} in its name; `dilabench history` lists the runs")
    groups: dict[tuple[str, str], list[CaseEntry]] = {}
    for entry in cases:
        groups.setdefault((entry.case_id, entry.run.machine), []).append(entry)
    if as_json:
        document = [
            {"cells": [asdict(entry) for entry in _newest(group, limit)], "steps": _steps(group)}
            for group in groups.values()
        ]
        say(json.dumps(document, indent=2, ensure_ascii=False))
        return
    for group in groups.values():
        _show_trend(group, limit)


def _newest(group: "Sequence[CaseEntry]", limit: int | None) -> "Sequence[CaseEntry]":
    return group if limit is None else group[-limit:]


def _show_trend(group: "Sequence[CaseEntry]", limit: int | None) -> None:
    first, steps = group[0], _steps(group)
    backend = f" over {first.backend}" if first.backend else ""
    title = f"{first.implementation}{backend}, {first.title} [case {first.case_id}, machine {first.run.machine}]"
    rows = [_row(entry, steps.get(entry.run.file)) for entry in _newest(group, limit)]
    print_table(title, CASE_COLUMNS, rows, right=CASE_COLUMNS[4:8], spare=("timer", "samples"))
    say()


def _row(entry: "CaseEntry", step: float | None) -> Sequence[str]:
    start = (_date(entry.run), entry.run.run_id, entry.run.git, entry.timer or "")
    if entry.p25_ns is None or entry.median_ns is None:
        return (*start, "", "", "", "", f"{entry.status}: {entry.why}")
    change = ""
    if step is not None:
        change = f"<- step: {abs(step - 1):.1%} {'slower' if step > 1 else 'faster'}"
    times = (format_seconds(entry.p25_ns * 1e-9), format_seconds(entry.median_ns * 1e-9))
    peak = format_bytes(entry.peak_bytes) if entry.peak_bytes is not None else ""
    return (*start, *times, str(entry.samples), peak, change)


def _steps(group: "Sequence[CaseEntry]") -> dict[str, float]:
    """File of the run at which the level changed -> level after / level before."""
    from dilabench.stats.decisions.steps import steps

    found: dict[str, float] = {}
    by_timer: dict[str | None, list[tuple[str, float]]] = {}
    for entry in group:
        if entry.p25_ns is not None:
            by_timer.setdefault(entry.timer, []).append((entry.run.file, entry.p25_ns))
    for measured in by_timer.values():
        found |= {measured[step.index][0]: step.ratio for step in steps([p25_ns for _, p25_ns in measured])}
    return found


def _date(run: "RunEntry") -> str:
    return run.started_at[:16].replace("T", " ") or "undated"
