"""A run on the terminal: what is about to be measured, how far it is, its reports, its verdict."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dilabench.cli.github import append_summary
from dilabench.cli.options import tell_of
from dilabench.cli.run.progress_bar import progress_shown
from dilabench.cli.terminal import interruption, note, say, say_folded, say_text
from dilabench.comparison.view import lengths_without_rows
from dilabench.errors import ExitCode, heed
from dilabench.metadata import note_text
from dilabench.plugins.descriptors import Reporter
from dilabench.predict.time import expected_time, slow_dtypes
from dilabench.record import RunRecord
from dilabench.report.pull_request import of_run
from dilabench.runs.execution import Execution, Reports, exit_code
from dilabench.runs.machine_state import notes_at_start, read
from dilabench.runs.resume import how_to_go_on, without_time
from dilabench.units import counted, format_count

TABLE = "table"
VERDICTS = {
    ExitCode.OK: "ok",
    ExitCode.ENVIRONMENT: "A PLUG-IN OR A REPORT FAILED",
    ExitCode.CASE_FAILED: "SOME CASE FAILED",
    ExitCode.WRONG_OUTPUT: "WRONG OUTPUT",
    ExitCode.NOTHING_MEASURED: "NOTHING MEASURED",
    ExitCode.INCOMPLETE: "INCOMPLETE",
    ExitCode.INTERRUPTED: "INTERRUPTED",
}


def show_run(
    execution: Execution,
    formats: Sequence[Reporter] = (),
    *,
    keep: bool = True,
    options: Mapping[str, Any] | None = None,
    github_summary: bool = False,
    allow_incomplete: bool = False,
) -> ExitCode:
    """Measure, report, and print the verdict; on stderr if stdout carries another format than the table.

    `keep`: also in the store. `options`: of reporters, by name. `allow_incomplete`: as for `exit_code`. The exit code
    follows from the record on disk after every reporter has ended.
    """
    refusal, interrupted = None, False
    err = [reporter.name for reporter in formats] != [TABLE]
    plan, folder = execution.plan, execution.folder.path
    known = len(plan.found.problems)
    try:
        say(_opening(execution), err=err)
        if slow := slow_dtypes([case.case for case in plan.planned if case.skip is None], plan.machine):
            note(f"{slow}; --dtype float32 is faster there")
        for note_ in notes_at_start(read(plan.machine)):
            note(f"{note_text(note_)} (`dilabench doctor` says more)")
        record = execution.measure(progress_shown(plan.request.budget_s))
        if folder.exists():
            if keep:
                execution.keep(record, lambda text: say(text, err=err))
            reports = Reports.of(record, plan.catalogue, options or {})
            paths, refusal = reports.written(formats, folder)
            for text in reports.printed(formats):
                say_text(text)
            if github_summary:
                append_summary(of_run(record, reports.sections))
            say("\n" + "\n".join(map(str, paths)), err=err)
            if refusal:
                say_folded(f"error: {refusal}", "  ", err=True)
            record = execution.recorded() or record
    except KeyboardInterrupt as error:
        # While the record was written, or later.
        if (saved_record := execution.recorded()) is None:
            raise
        heed(error)
        record, interrupted = saved_record, True
        note(f"{interruption(error)}; `dilabench report {shlex.quote(str(folder))}` makes the reports")
    finally:
        execution.folder.discard_if_empty()
    broken = plan.found.problems[known:]
    tell_of(broken)
    code = exit_code(record, interrupted=interrupted, broken=bool(broken or refusal), allow_incomplete=allow_incomplete)
    more_follow = plan.catalogue.suites.get(plan.request.suite).follow_up is not None
    saved = execution.folder.can_be_resumed
    if saved and (hint := how_to_go_on(record, plan.machine, folder, more_follow)):
        say(hint, err=err)
    say(verdict(record, code, saved=saved), err=err)
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
    counts = Counter(row.outcome.status for row in record.rows)
    word = VERDICTS[code]
    missing = len(without_time(record))
    if code in (ExitCode.OK, ExitCode.INCOMPLETE) and (lengths := lengths_without_rows(record)):
        word = f"{word}, no row at length {', '.join(map(format_count, lengths))}"
    elif code is ExitCode.OK and missing:
        word = f"{word}, {counted(missing, 'row')} had no time"
    if code is ExitCode.INTERRUPTED:
        word = f"{word}, results so far are saved" if saved else f"{word} before there was a result, nothing is saved"
    ended = ", ".join(f"{counts[status]} {status}" for status in ("measured", "skipped", "failed"))
    return f"verdict: {word} ({ended}; exit code {code.value})"


def together(folders: Sequence[str]) -> str:
    """The commands that read several sessions of one request."""
    runs = " ".join(folders)
    return (
        f"{len(folders)} sessions. To evaluate them together: `dilabench compare {runs} --by implementation`; "
        f"as a baseline for `check`: `dilabench baseline save NAME {runs}`"
    )
