"""Does a suite plan cases, the same each time, and read whatever record they come to?"""

from dilabench.conformance.made_record import made_record, odd_outcomes
from dilabench.conformance.scorecard import Findings
from dilabench.errors import counted
from dilabench.machine import Machine
from dilabench.plugins.catalogue import Catalogue
from dilabench.plugins.descriptors import Suite
from dilabench.record import RunRecord
from dilabench.report.findings import sections_of
from dilabench.request import run_request
from dilabench.suites.planner import Planner, expand, more_cases_of


def check_suite(suite: Suite, catalogue: Catalogue, machine: Machine, findings: Findings) -> None:
    """Its plan on this machine, its follow-up and its analysis of records that were made up; nothing is measured."""
    request = run_request(catalogue, suite=suite.name, run={"device": machine.device})
    planned = expand(catalogue, machine, request)
    runs = sum(one.skip is None for one in planned)
    summary = f"{counted(len(planned), 'case')}, of which {runs} run here"
    findings.hold("plan", None if planned else "it plans no case for a request without options", summary)
    again = expand(catalogue, machine, request)
    same = [one.case.case_id for one in planned] == [one.case.case_id for one in again]
    findings.hold("determinism", None if same else "the same request comes to other cases the second time")
    odd = odd_outcomes()
    records = {
        "measured": made_record(planned, request, machine),
        "with failures": made_record(planned, request, machine, odd[: len(planned)]),
        "nothing measured": made_record(planned[: len(odd)], request, machine, odd[: len(planned)]),
    }
    for name, record in records.items():
        with findings.tried(f"analysis, {name}"):
            _check_analysis(name, record, catalogue, findings)
    if suite.follow_up is not None:
        with findings.tried("follow-up"):
            more = more_cases_of(suite, Planner(catalogue, machine, request), records["measured"].rows)
            findings.hold("follow-up", None, f"asks for {counted(len(more), 'more case')}")


def _check_analysis(name: str, record: RunRecord, catalogue: Catalogue, findings: Findings) -> None:
    """A failing analysis is kept among the catalogue's problems instead of being raised."""
    known = len(catalogue.problems)
    sections = sections_of(record, catalogue)
    problems = "; ".join(problem.why for problem in catalogue.problems[known:])
    del catalogue.problems[known:]
    if not problems and sections != sections_of(record, catalogue):
        problems = "the same record has other sections the second time"
    findings.hold(f"analysis, {name}", problems or None, counted(len(sections), "section"))
