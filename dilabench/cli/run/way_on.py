"""What to say when a budget ended before the cases did: how to go on, and which budget would do."""

import math
from datetime import datetime
from pathlib import Path

from dilabench.machine import Machine
from dilabench.predict.time import sufficient_budget_s
from dilabench.record import Measured, Row, RunRecord, Skipped
from dilabench.units import format_seconds

ROUND_TO_S = 10


def without_time(record: RunRecord) -> tuple[Row, ...]:
    """The rows that the budget left no time for."""
    return tuple(row for row in record.rows if isinstance(row.outcome, Skipped) and row.outcome.code == "budget")


def way_on(record: RunRecord, machine: Machine, folder: Path) -> str | None:
    """How to get the rest of a run that the budget or Ctrl-C ended; None where nothing is missing.

    The budget comes from what the measured cases took, builds and verification included; without any, from the
    predicted time, and it is never less than twice what was not enough.
    """
    missing = without_time(record)
    resume = f"`dilabench run {record.suite} --resume {folder}`"
    if not missing:
        return f"go on with {resume}" if record.status == "interrupted" else None
    measured = sum(isinstance(row.outcome, Measured) for row in record.rows)
    elapsed_s = _elapsed_s(record)
    if measured and elapsed_s:
        needed_s, source = len(missing) * elapsed_s / measured, "as long as those measured took"
    else:
        cores = record.environment.cpu.cores
        predicted_s = min(sufficient_budget_s(row.case, machine, cores) for row in missing)
        needed_s, source = max(predicted_s, 2 * elapsed_s), "for the first of them, predicted"
    budget = f"--budget {ROUND_TO_S * math.ceil(needed_s / ROUND_TO_S)}s"
    return f"{len(missing)} cases had no time: go on with {resume} {budget} ({format_seconds(needed_s)} {source})"


def _elapsed_s(record: RunRecord) -> float:
    if record.finished_at is None:
        return 0.0
    return (datetime.fromisoformat(record.finished_at) - datetime.fromisoformat(record.started_at)).total_seconds()
