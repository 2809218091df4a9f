"""From a run record to the file that `-i auto` chooses by."""

from itertools import groupby
from pathlib import Path

from dilabench.choice.measured import TunedCell, remember
from dilabench.choice.ways import way_name
from dilabench.comparison.view import measured_view
from dilabench.machine import Machine
from dilabench.record import Measured, RunRecord
from dilabench.store.run_files import read_record


def add_to_file(path: Path, run_folder: Path, machine: Machine) -> int:
    """Put the fastest measured row of each workload of a run into the file; returns how many workloads that were.

    Cells of other workloads stay. Raises ConfigError when the file or the record cannot be read.
    """
    cells = fastest(read_record(run_folder))
    if not cells:
        return 0
    remember(path, machine, cells, run_folder.name)
    return len(cells)


def fastest(record: RunRecord) -> list[TunedCell]:
    """The fastest measured row of each workload, by the median of its first timing."""
    measured = [row for row in record.rows if isinstance(row.outcome, Measured)]
    cells = []
    for _, group in groupby(sorted(measured, key=lambda row: row.case.group_id), key=lambda row: row.case.group_id):
        ranked = sorted(group, key=lambda row: measured_view(row).median_ns)
        best, second = ranked[0], ranked[1] if len(ranked) > 1 else None
        cells.append(
            TunedCell(
                workload=best.case.workload,
                implementation=best.case.implementation,
                backend=best.case.backend,
                median_ns=round(measured_view(best).median_ns),
                runner_up=way_name(second.case) if second else None,
                runner_up_ns=round(measured_view(second).median_ns) if second else None,
            )
        )
    return cells
