"""The exit code of a run, from its rows."""

import numpy as np
import pytest

from dilabench.cli.compare.verdict_view import final_lines
from dilabench.comparison.across import compare_across
from dilabench.comparison.gate import exit_code as compared_exit_code
from dilabench.errors import ExitCode
from dilabench.metadata import ABOVE_PEAK_FLOPS, WAY
from dilabench.record import (
    Case,
    Check,
    CpuInfo,
    Environment,
    Failed,
    Measured,
    PlannedCase,
    Row,
    RunRecord,
    Skipped,
    Slot,
    Timing,
    Verification,
)
from dilabench.report.content import headline
from dilabench.runs import execution
from dilabench.runs.execute import verdict
from dilabench.runs.execution import exit_code
from dilabench.stats.decisions.decide import Policy
from dilabench.workload.spec import Workload
from tests.conftest import interrupting_once

WORKLOAD = Workload(
    pattern={"kind": "dense"}, batch_size=1, seq_len=96, num_heads=6, num_kv_heads=3, head_dim=24, dtype="float16"
)
TIMING = Timing(timer="wall", proves="p", slots=(Slot(samples_ns=(1000, 1010, 1020)),))
MEASURED = Measured(verification=Verification(checks=(Check(name="out", passed=True),)), timings=(TIMING,))
SKIPPED = Skipped(code="unsupported", why="needs cuda, have cpu")
CRASHED = Failed(stage="time", code="out_of_memory", why="out of memory")
HUNG = Failed(stage="verify", code="timeout", why="no answer within 10 s")
WRONG = Failed(
    stage="verify", code="wrong_output", why="out", verification=Verification(checks=(Check(name="out", passed=False),))
)


def record(*outcomes, status="complete", labels=(), lengths=(), yardsticks=()):
    rows = tuple(
        Row(
            planned=PlannedCase(
                case=Case(implementation=f"number-{index}", workload=WORKLOAD.replace(seq_len=length)),
                labels=dict(labels),
                role="yardstick" if index in yardsticks else "method",
            ),
            outcome=outcome,
        )
        for index, (outcome, length) in enumerate(zip(outcomes, lengths or [96] * len(outcomes), strict=True))
    )
    environment = Environment(os="Linux", python="3.11", cpu=CpuInfo(model="a CPU", cores=2, threads=2))
    return RunRecord(
        tool_version="0",
        run_id="r",
        suite="quick",
        started_at="2026-01-01T00:00:00+00:00",
        environment=environment,
        status=status,
        rows=rows,
    )


@pytest.mark.parametrize(
    ("outcomes", "status", "code"),
    [
        ((MEASURED, SKIPPED), "complete", ExitCode.OK),
        ((MEASURED, CRASHED), "complete", ExitCode.CASE_FAILED),
        ((MEASURED, HUNG), "complete", ExitCode.CASE_FAILED),
        ((MEASURED, CRASHED, WRONG), "complete", ExitCode.WRONG_OUTPUT),
        ((SKIPPED,), "complete", ExitCode.NOTHING_MEASURED),
        ((), "complete", ExitCode.NOTHING_MEASURED),
        ((MEASURED, WRONG), "interrupted", ExitCode.INTERRUPTED),
    ],
)
def test_exit_code(outcomes, status, code):
    assert exit_code(record(*outcomes, status=status)) is code


LATE = Skipped(code="budget", why="budget of 5 s used up before its turn")


@pytest.mark.parametrize(
    ("outcomes", "lengths", "code", "word"),
    [
        ((MEASURED, LATE), (96, 96), ExitCode.OK, "ok, 1 row had no time"),
        ((MEASURED, LATE), (96, 192), ExitCode.INCOMPLETE, "INCOMPLETE, no row at length 192"),
        ((MEASURED, SKIPPED, LATE), (96, 192, 1024), ExitCode.INCOMPLETE, "INCOMPLETE, no row at length 192, 1K"),
        ((MEASURED, LATE, CRASHED), (96, 192, 96), ExitCode.CASE_FAILED, "SOME CASE FAILED"),
        ((LATE, LATE), (96, 192), ExitCode.NOTHING_MEASURED, "NOTHING MEASURED"),
    ],
)
def test_a_length_without_a_row_is_incomplete(outcomes, lengths, code, word):
    found = record(*outcomes, lengths=lengths)
    assert exit_code(found) is code
    assert verdict(found, code).startswith(f"verdict: {word} (")
    allowed = exit_code(found, allow_incomplete=True)
    assert allowed is (ExitCode.OK if code is ExitCode.INCOMPLETE else code)
    assert ("No row was measured at length" in headline(found)) is bool(
        code is ExitCode.INCOMPLETE or (code is ExitCode.CASE_FAILED)
    )


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ((MEASURED, LATE), ExitCode.INCOMPLETE),
        ((MEASURED, SKIPPED, LATE), ExitCode.INCOMPLETE),
        ((MEASURED, MEASURED, LATE), ExitCode.OK),
        # Nothing here could have had a time.
        ((MEASURED, SKIPPED), ExitCode.OK),
        ((MEASURED,), ExitCode.OK),
    ],
)
def test_a_yardstick_alone_is_no_answer_where_the_budget_ended(outcomes, code):
    assert exit_code(record(*outcomes, yardsticks=(0,))) is code


def test_a_search_goes_on_until_a_length_has_no_row():
    found = record(MEASURED, SKIPPED, lengths=(96, 192), labels=WAY.entry("as it is"))
    assert exit_code(found) is ExitCode.OK


IMPOSSIBLE = MEASURED.model_copy(update={"notes": (ABOVE_PEAK_FLOPS.note("9e15 FLOP/s is more than it can do"),)})


@pytest.mark.parametrize(
    ("outcomes", "word"),
    [
        ((MEASURED, IMPOSSIBLE), "A TIME CANNOT BE TRUE"),
        ((MEASURED, WRONG), "WRONG OUTPUT"),
        ((IMPOSSIBLE, WRONG), "WRONG OUTPUT"),
        ((IMPOSSIBLE, CRASHED), "A TIME CANNOT BE TRUE"),
    ],
    ids=["time", "output", "both", "time, and a crash"],
)
def test_exit_code_5_says_whether_an_output_or_a_time_is_wrong(outcomes, word):
    found = record(*outcomes)
    assert exit_code(found) is ExitCode.WRONG_OUTPUT
    assert verdict(found, exit_code(found)).startswith(f"verdict: {word} (")


@pytest.mark.parametrize(
    ("new", "word"), [(IMPOSSIBLE, "A TIME CANNOT BE TRUE"), (WRONG, "WRONG OUTPUT")], ids=["time", "output"]
)
def test_compare_says_whether_an_output_or_a_time_is_wrong(new, word):
    old = record(MEASURED, MEASURED)
    comparison = compare_across([old], [record(MEASURED, new)], policy=Policy())
    code = compared_exit_code(comparison)
    assert code is ExitCode.WRONG_OUTPUT
    assert final_lines(comparison, code).splitlines()[-1].startswith(f"verdict: {word} (")
    (lacking,) = comparison.uncompared
    assert lacking.regressed


def test_the_verdict_counts_the_rows():
    found = record(MEASURED, MEASURED, SKIPPED, WRONG)
    assert verdict(found, exit_code(found)) == "verdict: WRONG OUTPUT (2 measured, 1 skipped, 1 failed; exit code 5)"


@pytest.mark.parametrize("is_started", [False, True])
@pytest.mark.parametrize("form", [(), ("--json",), ("--mask-file", "mask.npy", "--set", "pattern=block_sparse")])
def test_an_interrupted_run_says_what_is_saved(cli, monkeypatch, tmp_path, form, is_started):
    np.save(tmp_path / "mask.npy", np.ones((2, 2), dtype=bool))

    def interrupted(planned, _request, _catalogue, _machine, header, folder, **_options):
        found = RunRecord(**header.model_dump(), rows=(), status="interrupted", finished_at=header.started_at)
        if is_started:
            folder.start(header)
            folder.finish(found)
        return found

    monkeypatch.setattr(execution, "run_cases", interrupted)
    chosen = ("-i", "block-sparse") if "--mask-file" in form else ("-i", "gather")
    result = cli("run", "implementations", *chosen, "--seq-length", "200", "--device", "cpu", *form)
    assert result.exit_code == 130, result.output
    said = result.stdout + result.stderr
    folders = list(tmp_path.glob("benchmark_results/*implementations*"))
    assert bool(folders) is is_started
    assert ("results so far are saved" in said) is is_started
    assert ("nothing is saved" in said) is not is_started
    assert ("--resume" in said) is is_started
    if is_started:
        run_id = folders[0].name.rpartition("-")[2]
        assert cli("run", "implementations", "--resume", run_id).exit_code == 130


@pytest.mark.parametrize("place", ["Execution.keep", "Reports.written", "Reports.printed", "Execution.recorded"])
def test_an_interrupt_after_the_rows_are_saved_ends_with_the_verdict(cli, monkeypatch, tmp_path, place):
    def done(planned, _request, _catalogue, _machine, header, folder, **_options):
        rows = tuple(Row(planned=case, outcome=case.skip or MEASURED) for case in planned)
        found = RunRecord(**header.model_dump(), rows=rows, status="complete", finished_at=header.started_at)
        folder.start(header)
        folder.finish(found)
        return found

    kind, name = place.split(".")
    owner = getattr(execution, kind)
    monkeypatch.setattr(execution, "run_cases", done)
    monkeypatch.setattr(owner, name, interrupting_once(getattr(owner, name)))
    result = cli("run", "quick", "-i", "gather", "--device", "cpu")
    assert result.exit_code == ExitCode.INTERRUPTED, result.output
    assert "verdict: INTERRUPTED, results so far are saved (" in result.stdout
    (folder,) = tmp_path.glob("benchmark_results/*quick*")
    assert f"`dilabench report {folder.relative_to(tmp_path)}`" in result.stderr
    assert cli("report", str(folder)).exit_code == 0
