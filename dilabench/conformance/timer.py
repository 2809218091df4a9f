"""Does a timer take samples of a real case, and tell a short call from a long one?"""

from dilabench.choice.requirements import wrong_device
from dilabench.conformance.scorecard import Findings
from dilabench.engine.device.environment import snapshot
from dilabench.engine.runner import run
from dilabench.errors import counted
from dilabench.machine import Machine
from dilabench.metadata import note_text
from dilabench.patterns.dense import DENSE
from dilabench.plugins.catalogue import Catalogue
from dilabench.plugins.descriptors import Timer
from dilabench.record import Measured, Row, RunHeader, RunRecord
from dilabench.request import run_request
from dilabench.stats.samples.location import locate
from dilabench.suites.planner import Planner
from dilabench.units import format_seconds

SHAPE = {"pattern": DENSE.kind, "batch_size": 1, "num_heads": 4, "head_dim": 64}
# Work that differs by more than a thousand times: whatever a timer measures, it shows that.
LENGTHS = (64, 2048)
SAMPLES = 5


class _Nowhere:
    """A sink that keeps nothing; the record has the rows."""

    def start(self, header: RunHeader) -> None: ...
    def row(self, row: Row) -> None: ...
    def finish(self, record: RunRecord) -> None: ...


def check_timer(timer: Timer, catalogue: Catalogue, machine: Machine, findings: Findings) -> None:
    """A dense case at two lengths, measured as `dilabench run --timing NAME` does."""
    if lacking := wrong_device(timer.devices, machine):
        findings.add("samples", "skipped", "; ".join(lacking))
        return
    # No budget: on a busy machine the suite's own may be over before a timer that starts processes is done.
    settings = {"timing": timer.name, "timing_runs": SAMPLES, "device": machine.device, "budget_s": None}
    suite = max(catalogue.suites, key=lambda one: one.priority)
    request = run_request(catalogue, suite=suite.name, run=settings)
    planner = Planner(catalogue, machine, request)
    plain = next(one for one in catalogue.implementations if one.uses_backend and one.supports.only_dense)
    asked = planner.workload_requests([{**SHAPE, "seq_len": length} for length in LENGTHS])
    planned = planner.compare(asked, [plain])
    header = RunHeader(
        tool_version="0", run_id="conformance", suite=suite.name, started_at="", environment=snapshot(machine)
    )
    rows = run(planned, request, catalogue, machine, header, _Nowhere()).rows
    medians = []
    for length, row in zip(LENGTHS, rows, strict=True):
        outcome, name = row.outcome, f"samples at {length} tokens"
        if not isinstance(outcome, Measured):
            findings.add(name, "failed", outcome.why)
            continue
        timing = outcome.timings[0]
        samples = timing.samples_ns
        medians.append(locate(samples).median_ns)
        other = f"the samples are by {timing.timer!r}: {'; '.join(map(note_text, outcome.notes))}"
        summary = f"{counted(len(samples), 'sample')}, median {format_seconds(medians[-1] * 1e-9)}"
        findings.hold(name, None if timing.timer == timer.name else other, summary)
    if len(medians) == len(LENGTHS):
        findings.hold("longer work takes longer", None if medians[0] < medians[1] else "it does not")
