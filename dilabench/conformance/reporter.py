"""Does a reporter render whatever record there is, and write what it says it writes?"""

import tempfile
from pathlib import Path

from dilabench.conformance.made_record import made_record, odd_outcomes
from dilabench.conformance.scorecard import Findings
from dilabench.errors import counted
from dilabench.machine import Machine
from dilabench.plugins.catalogue import Catalogue
from dilabench.plugins.descriptors import Reporter
from dilabench.record import RunRecord
from dilabench.report.findings import render, sections_of
from dilabench.request import run_request
from dilabench.suites.planner import expand


def check_reporter(reporter: Reporter, catalogue: Catalogue, machine: Machine, findings: Findings) -> None:
    """Records that were made up for the suite that is asked first, printed and written; twice, for the same text."""
    first = max(catalogue.suites, key=lambda one: one.priority)
    request = run_request(catalogue, suite=first.name, run={"device": machine.device})
    planned, odd = expand(catalogue, machine, request), odd_outcomes()
    records = {
        "all measured": made_record(planned, request, machine),
        "with failures": made_record(planned, request, machine, odd),
        "nothing measured": made_record(planned[: len(odd)], request, machine, odd),
        "no row": made_record((), request, machine).model_copy(update={"status": "interrupted"}),
    }
    for name, record in records.items():
        with findings.tried(name):
            findings.hold(name, *_rendered(reporter, record, catalogue))


def _rendered(reporter: Reporter, record: RunRecord, catalogue: Catalogue) -> tuple[str | None, str]:
    """What is wrong with the rendering, or None; and what it gave."""
    sections = sections_of(record, catalogue)
    # Where there is no time, a plot or a table of numbers may be nothing.
    measured = any(row.outcome.status == "measured" for row in record.rows)
    with tempfile.TemporaryDirectory() as name:
        folder, rendered = Path(name), []
        if reporter.prints:
            texts = [render(reporter, record, None, sections, catalogue) for _ in range(2)]
            if not texts[0] and measured:
                return "it prints nothing", ""
            if texts[0] != texts[1]:
                return "the same record gives another text the second time", ""
            rendered.append(counted(len((texts[0] or "").splitlines()), "line"))
        if reporter.filename:
            render(reporter, record, folder, sections, catalogue)
            path = folder / reporter.filename
            if measured and not path.exists():
                return f"it did not write {reporter.filename!r} into the folder it was given", ""
            rendered.append(counted(sum(1 for one in folder.rglob("*") if one.is_file()), "file"))
        return None, ", ".join(rendered)
