"""A record without a measurement, for what reads records: cases that were planned, with made-up samples."""

import random
from collections.abc import Sequence

from dilabench.engine.device.environment import snapshot
from dilabench.machine import Machine
from dilabench.record import (
    Check,
    Failed,
    Measured,
    Memory,
    Outcome,
    PlannedCase,
    Row,
    RunRecord,
    Skipped,
    Slot,
    Timing,
    Verification,
)
from dilabench.request import RunRequest

ROUNDS, SAMPLES = 8, 3


def made_record(
    planned: Sequence[PlannedCase], request: RunRequest, machine: Machine, others: Sequence[Outcome] = ()
) -> RunRecord:
    """Rows of the planned cases, measured where nothing speaks against them; the first ones end as `others` say.

    Its samples were drawn, not measured: such a record is for trying code on, and never shown or kept.
    """
    outcomes = [*others, *(one.skip or _measured(one) for one in planned[len(others) :])]
    return RunRecord(
        tool_version="0",
        run_id="conformance",
        suite=request.suite,
        config=request.model_dump(mode="json"),
        device=machine.device,
        started_at="2000-01-01T00:00:00+00:00",
        environment=snapshot(machine),
        rows=tuple(Row(planned=one, outcome=outcome) for one, outcome in zip(planned, outcomes, strict=False)),
    )


def odd_outcomes() -> tuple[Outcome, ...]:
    """Ways in which a row ends without a time, with texts that are hard to lay out."""
    long = "a reason " * 60
    wrong = Verification(checks=(Check(name="out", passed=False, error=0.5, tolerance=1e-6),), diagnosis="no window")
    return (
        Failed(stage="verify", code="wrong_output", why="out: error 0.5", verification=wrong),
        Failed(stage="time", code="crash", why=f"{long}<b>|`\u2026 \u0434\u043b\u0438\u043d\u0430"),
        Skipped(code="unsupported", why=long),
    )


def _measured(planned: PlannedCase) -> Measured:
    noise = random.Random(planned.case.case_id)
    median = 1e6 * planned.case.workload.tokens**0.5
    slots = tuple(
        Slot(round=index, samples_ns=tuple(round(median * noise.lognormvariate(0, 0.02)) for _ in range(SAMPLES)))
        for index in range(ROUNDS)
    )
    return Measured(
        verification=Verification(checks=(Check(name="out", passed=True),)),
        timings=(Timing(timer="made-up", proves="nothing", slots=slots),),
        memory=Memory(peak_bytes=2**20, isolated=True, source="allocator"),
    )
