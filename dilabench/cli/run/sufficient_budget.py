"""What to say when a budget was too small to measure anything: which one would do."""

import math

from dilabench.machine import Machine
from dilabench.predict.time import sufficient_budget_s
from dilabench.record import RunRecord, Skipped
from dilabench.units import format_seconds

ROUND_TO_S = 10


def sufficient_budget(record: RunRecord, machine: Machine) -> str | None:
    """A hint with a budget that should measure the cheapest of the cases that time ran out for; None without one."""
    skipped = [row for row in record.rows if isinstance(row.outcome, Skipped) and row.outcome.code == "budget"]
    if not skipped:
        return None
    cores = record.environment.cpu.cores
    least_s = min(sufficient_budget_s(row.case, machine, cores) for row in skipped)
    enough_s = ROUND_TO_S * math.ceil(least_s / ROUND_TO_S)
    return (
        f"the budget ended before the first sample; --budget {enough_s}s should suffice to measure at least one case "
        f"(predicted: {format_seconds(least_s)})"
    )
