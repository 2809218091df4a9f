"""What needs no torch: a suite with a finding, and a reporter."""

from pathlib import Path

from dilabench.record import Measured, PlannedCase, RunRecord
from dilabench.report.findings import Section
from dilabench.request import RunRequest
from dilabench.suites.planner import Planner


def expand(request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    requests = planner.workload_requests([{"pattern": "stripes", "seq_len": 192, "num_heads": 2}])
    return planner.compare(requests, planner.implementations(["stripes-plain", "dense"]))


def analyse(record: RunRecord) -> tuple[Section, ...]:
    measured = sum(isinstance(row.outcome, Measured) for row in record.rows)
    return (Section(title="Their finding", sentence=f"{measured} rows were measured."),)


def render(record: RunRecord, folder: Path | None) -> str:
    return "\n".join(f"THEIRS {row.case.implementation} {row.case.backend} {row.outcome.status}" for row in record.rows)
