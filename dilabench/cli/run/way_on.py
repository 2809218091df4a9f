"""What to say when a budget ended before the cases did: how to go on, and which budget would do."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from dilabench.cli.options import DEFAULT_FOLDER
from dilabench.errors import counted
from dilabench.machine import Machine
from dilabench.predict.time import budget_option, case_seconds, elapsed_seconds, seconds_like, sufficient_budget_s
from dilabench.record import Row, RunRecord, Skipped
from dilabench.units import format_seconds


def without_time(record: RunRecord) -> tuple[Row, ...]:
    """The rows that the budget left no time for."""
    return tuple(row for row in record.rows if isinstance(row.outcome, Skipped) and row.outcome.code == "budget")


def way_on(record: RunRecord, machine: Machine, folder: Path, more_follow: bool = False) -> str | None:
    """How to get the rest of a run that the budget or Ctrl-C ended, the command on a line of its own to copy; None
    where nothing is missing.

    The budget comes from what the measured cases took, builds and verification included, and grows with the work of the
    longer ones that are missing; without any, it comes from the predicted time, and is at least twice what was not
    enough. `more_follow`: the suite asks for more when it has these.
    """
    missing = without_time(record)
    resume = f"  dilabench run {record.suite} --resume {_named(record, folder)}"
    if not missing:
        return f"To go on:\n{resume}" if record.status == "interrupted" else None
    elapsed_s = elapsed_seconds(record)
    took_s = case_seconds(record.rows, elapsed_s)
    if took_s and elapsed_s:
        needed_s = sum(seconds_like(row.case, record.rows, took_s) for row in missing)
        source = "by what those measured took"
    else:
        cores = record.environment.cpu.cores
        predicted_s = min(sufficient_budget_s(row.case, machine, cores) for row in missing)
        needed_s, source = max(predicted_s, 2 * elapsed_s), "predicted for the first"
    rest = "; more follow" if more_follow else ""
    had_no = f"{counted(len(missing), 'case')} had no time. To go on ({format_seconds(needed_s)} {source}{rest}):"
    return f"{had_no}\n{resume} {budget_option(needed_s)}"


def _named(record: RunRecord, folder: Path) -> str:
    """The run as `--resume` finds it: short, by its id and -o, where its folder is named as runs name them."""
    if not folder.name.endswith(f"-{record.run_id}"):
        return shlex.quote(str(folder))
    return record.run_id + ("" if folder.parent == DEFAULT_FOLDER else f" -o {shlex.quote(str(folder.parent))}")


def together(folders: Sequence[str]) -> str:
    """What can be done with several sessions of one request."""
    runs = " ".join(folders)
    return (
        f"{len(folders)} sessions. What they say together: `dilabench compare {runs} --by implementation`; "
        f"as a baseline for `check`: `dilabench baseline save NAME {runs}`"
    )
