"""`dilabench leaderboard`: who is fastest, over the records of many people and machines."""

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dilabench.cli.options import AsJson, require_one_format
from dilabench.cli.terminal import note, print_table, say, say_folded, say_page
from dilabench.errors import ExitCode

if TYPE_CHECKING:
    from dilabench.report.leaderboard import Leaderboard


class Form(StrEnum):
    """How a leaderboard is shown."""

    TABLE = "table"
    HTML = "html"


COLUMNS = ("workload", "place", "implementation", "time", "behind", "memory", "run")


def leaderboard(
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="Folders, run.json files or ids of runs.")],
    form: Annotated[
        Form, typer.Option("--format", "-f", help="html has the commands that repeat each row.")
    ] = Form.TABLE,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Write leaderboard.html there (html).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """One board per device and family of workloads, from any number of records.

    Only verified rows stand on it. Rows share a place where no difference between them is proven (=, or ? after too few
    rounds); rows of different runs did not take turns, so each run has places of its own. Refused are records that were
    edited, and a run that is named twice. Exit code 8: no row was verified and measured.
    """
    from dilabench.report.leaderboard import leaderboard as boards_of
    from dilabench.store.lookup import Store
    from dilabench.store.merging import refuse_unsound, shared_records

    require_one_format(as_json, () if form is Form.TABLE else (form,))
    records, names = shared_records(Store(tell=note), runs)
    refuse_unsound(records, names)
    found = boards_of(records)
    if as_json:
        say(json.dumps(found.as_dict(), indent=1, ensure_ascii=False))
    elif form is Form.HTML:
        from dilabench.report.html import leaderboard as html

        say_page(html.to_text(found), output, html.FILENAME)
    else:
        _print(found)
    if not found.boards:
        say("no row of these runs was verified and measured", err=True)
        raise typer.Exit(ExitCode.NOTHING_MEASURED)


def _print(found: "Leaderboard") -> None:
    for board in found.boards:
        rows = [
            (contest.workload, one.place_text, one.name, one.time, f"{one.behind:.2f}x", one.memory, contest.run_id)
            for contest in board.contests
            for one in contest.entries
        ]
        print_table(f"{board.family}\n{board.device}", COLUMNS, rows, right=COLUMNS[3:6], spare=("memory",))
        say()
    for run in found.runs:
        say_folded(f"run {run.run_id}: {run.device}, dilabench {run.dilabench}, commit {run.commit}", "    ")
        say_folded(f"    {run.command}", "    ")
