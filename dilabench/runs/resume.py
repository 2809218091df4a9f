"""Resuming a run: its request and header for `--resume`, and the command that measures the skipped cases."""

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from dilabench.errors import ConfigError
from dilabench.machine import Machine
from dilabench.predict.time import budget_option, case_seconds, seconds_like, sufficient_budget_s
from dilabench.record import Row, RunHeader, RunRecord, Skipped
from dilabench.request import RunRequest, resume_command
from dilabench.runs import DEFAULT_FOLDER
from dilabench.store.run_files import read_rows
from dilabench.units import counted, format_seconds
from dilabench.validation import validated


def recorded_request(run: Path, suites: Sequence[str], given: Iterable[str]) -> tuple[RunRequest, RunHeader]:
    """The run's request and its header. Given together with `--resume`: `suites`, the suite as given and its
    other names, empty if it was omitted, and `given`, the names of options.

    Raises ConfigError if its suite is another one, or an option would change its measurement.
    """
    header, _ = read_rows(run if run.is_dir() else run.parent)
    given = sorted(given)
    if suites and header.suite not in suites:
        raise ConfigError(
            f"run {str(run)!r} is of suite {header.suite!r}, not {suites[0]!r}; omit {suites[0]!r}: --resume takes the "
            "suite from the run"
        )
    if given:
        raise ConfigError(f"--resume continues the run as it was requested; omit {', '.join(given)}")
    return validated(RunRequest, header.config), header


def resumed_header(earlier: RunHeader, now: RunHeader, machine: Machine) -> RunHeader:
    """The header of a resumed run, in today's environment.

    Facts of torch that only a worker knows are kept, in case the remaining cases need no worker.
    """
    from dilabench.engine.device.environment import with_torch

    environment = with_torch(now.environment, machine, earlier.environment.torch)
    return earlier.model_copy(update={"environment": environment})


def without_time(record: RunRecord) -> tuple[Row, ...]:
    """The rows that the budget skipped."""
    return tuple(row for row in record.rows if isinstance(row.outcome, Skipped) and row.outcome.code == "budget")


def how_to_go_on(record: RunRecord, machine: Machine, folder: Path, more_follow: bool = False) -> str | None:
    """How to continue a run that the budget or Ctrl-C ended, with the command on a separate line; None if no case is
    missing.

    The budget comes from the time of the measured cases, builds and verification included, scaled by the work of longer
    missing ones. Without measured cases it comes from the predicted time, and is at least twice the one that was too
    small. `more_follow`: the suite plans more cases after these.
    """
    missing = without_time(record)
    name = _named(record, folder)
    if not missing:
        return f"To go on:\n  {resume_command(record.suite, name)}" if record.status == "interrupted" else None
    elapsed_s = record.duration_s
    took_s = case_seconds(record.rows, elapsed_s)
    if took_s and elapsed_s:
        needed_s = sum(seconds_like(row.case, record.rows, took_s) for row in missing)
        source = "by what those measured took"
    else:
        cores = record.environment.cpu.cores
        predicted_s = min(sufficient_budget_s(row.case, machine, cores) for row in missing)
        needed_s, source = max(predicted_s, 2 * elapsed_s), "predicted for the first"
    rest = "; more follow" if more_follow else ""
    had_no = (
        f"{counted(len(missing), 'case')} {'was' if len(missing) == 1 else 'were'} skipped by the budget. "
        f"To continue ({format_seconds(needed_s)} "
        f"{source}{rest}):"
    )
    return f"{had_no}\n  {resume_command(record.suite, name, budget_option(needed_s))}"


def _named(record: RunRecord, folder: Path) -> str:
    """The argument of `--resume`: the run's id and -o if its folder has the default name, else the folder."""
    if not folder.name.endswith(f"-{record.run_id}"):
        return shlex.quote(str(folder))
    return record.run_id + ("" if folder.parent == DEFAULT_FOLDER else f" -o {shlex.quote(str(folder.parent))}")
