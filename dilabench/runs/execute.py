"""One run from its plan to its exit code, for the command line, for Python and for `tune`: measure, report, judge."""

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from dilabench.comparison.comparison import is_wrong
from dilabench.comparison.view import lengths_without_rows
from dilabench.engine.progress import Progress
from dilabench.errors import IMPOSSIBLE_TIME, ExitCode, heed, interruption
from dilabench.metadata import note_text
from dilabench.plugins.descriptors import Reporter
from dilabench.predict.time import expected_time, slow_dtypes
from dilabench.record import RunRecord
from dilabench.report.findings import Section
from dilabench.runs.execution import Execution, Reports, exit_code
from dilabench.runs.machine_state import notes_at_start, read
from dilabench.runs.resume import how_to_go_on, without_time
from dilabench.units import counted, format_count

VERDICTS = {
    ExitCode.OK: "ok",
    ExitCode.ENVIRONMENT: "A PLUG-IN OR A REPORT FAILED",
    ExitCode.CASE_FAILED: "SOME CASE FAILED",
    ExitCode.WRONG_OUTPUT: "WRONG OUTPUT",
    ExitCode.NOTHING_MEASURED: "NOTHING MEASURED",
    ExitCode.INCOMPLETE: "INCOMPLETE",
    ExitCode.INTERRUPTED: "INTERRUPTED",
}


@dataclass(frozen=True, slots=True)
class Output:
    """Where the words of a run go. `tell`: a line about the run. `warn`: a note or an error. `show`: a report, whole or
    in parts. `progress`: while cases are measured.
    """

    tell: Callable[[str], None]
    warn: Callable[[str], None]
    show: Callable[[str | Iterator[str]], None]
    progress: AbstractContextManager[Progress]


def execute(
    execution: Execution,
    output: Output,
    formats: Sequence[Reporter] = (),
    *,
    keep: bool = True,
    options: Mapping[str, Any] | None = None,
    summarise: Callable[[RunRecord, Sequence[Section]], None] | None = None,
    allow_incomplete: bool = False,
) -> ExitCode:
    """Measure, report, and give the verdict.

    `keep`: also in the store. `options`: of reporters, by name. `summarise`: called with the record and its sections,
    after the reports. `allow_incomplete`: as for `exit_code`. The exit code follows from the record on disk after every
    reporter has ended. KeyboardInterrupt passes through if there is no record.
    """
    refusal, interrupted = None, False
    plan, folder = execution.plan, execution.folder.path
    known = len(plan.found.problems)
    try:
        output.tell(_opening(execution))
        if slow := slow_dtypes([case.case for case in plan.planned if case.skip is None], plan.machine):
            output.warn(f"note: {slow}; --dtype float32 is faster there")
        for note in notes_at_start(read(plan.machine)):
            output.warn(f"note: {note_text(note)} (`dilabench doctor` says more)")
        record = execution.measure(output.progress)
        if folder.exists():
            if keep:
                execution.keep(record, output.tell)
            reports = Reports.of(record, plan.catalogue, options or {})
            paths, refusal = reports.written(formats, folder)
            for text in reports.printed(formats):
                output.show(text)
            if summarise is not None:
                summarise(record, reports.sections)
            output.tell("\n" + "\n".join(map(str, paths)))
            if refusal:
                output.warn(f"error: {refusal}")
            record = execution.recorded() or record
    except KeyboardInterrupt as error:
        # While the record was written, or later.
        if (saved_record := execution.recorded()) is None:
            raise
        heed(error)
        record, interrupted = saved_record, True
        output.warn(f"note: {interruption(error)}; `dilabench report {shlex.quote(str(folder))}` makes the reports")
    finally:
        execution.folder.discard_if_empty()
    broken = plan.found.problems[known:]
    for problem in broken:
        output.warn(f"note: {problem.text}")
    code = exit_code(record, interrupted=interrupted, broken=bool(broken or refusal), allow_incomplete=allow_incomplete)
    more_follow = plan.catalogue.suites.get(plan.request.suite).follow_up is not None
    saved = execution.folder.can_be_resumed
    if saved and (hint := how_to_go_on(record, plan.machine, folder, more_follow)):
        output.tell(hint)
    output.tell(verdict(record, code, saved=saved))
    return code


def _opening(execution: Execution) -> str:
    plan = execution.plan
    runs = [case.case for case in plan.planned if case.skip is None]
    kept = f", {len(execution.completed)} of them kept from before" if execution.completed else ""
    cpu = execution.header.environment.cpu
    gpus = plan.machine.used_gpus
    where = gpus[0].name if gpus else cpu.model
    done = {row.case.case_id for row in execution.completed}
    waiting = [case for case in runs if case.case_id not in done]
    time = expected_time(waiting, plan.machine, cpu.cores, plan.request.budget_s)
    cases = f"{counted(len(runs), 'case')}{kept}"
    opening = f"dilabench {plan.request.suite} on {plan.machine.device} ({where}): {cases}; {time}"
    return "\n".join(filter(None, (opening, plan.machine.facts.warning)))


def verdict(record: RunRecord, code: ExitCode, *, saved: bool = True) -> str:
    """The line that a CI log ends with. `saved`: a file of the run is there."""
    counts = Counter("could not run" if row.planned.skip else row.outcome.status for row in record.rows)
    word = VERDICTS[code]
    if code is ExitCode.WRONG_OUTPUT and not any(map(is_wrong, record.rows)):
        word = IMPOSSIBLE_TIME
    missing = len(without_time(record))
    if code in (ExitCode.OK, ExitCode.INCOMPLETE) and (lengths := lengths_without_rows(record)):
        word = f"{word}, no row at length {', '.join(map(format_count, lengths))}"
    elif code is ExitCode.OK and missing:
        word = f"{word}, {counted(missing, 'row')} had no time"
    if code is ExitCode.INTERRUPTED:
        word = f"{word}, results so far are saved" if saved else f"{word} before there was a result, nothing is saved"
    ended = ", ".join(f"{counts[status]} {status}" for status in ("measured", "skipped", "failed"))
    ended += f", {counts['could not run']} could not run" if counts["could not run"] else ""
    return f"verdict: {word} ({ended}; exit code {code.value})"
