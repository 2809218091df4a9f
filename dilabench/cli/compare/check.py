"""`dilabench check`: the gate of a CI job."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from dilabench.cli.compare.deciding import FailOn, FailOnOption, Only, Threshold, policy_for, refuse_other_machine
from dilabench.cli.options import AsJson, StrictPlugins
from dilabench.cli.terminal import note, say
from dilabench.errors import ConfigError, EnvironmentNotReady
from dilabench.plugins.manager import discover
from dilabench.record import Case, PlannedCase, RunRecord

DEFAULT_FOLDER = Path("benchmark_results")
SECOND_LOOK_SESSIONS = 3


def check(
    against: Annotated[
        str, typer.Option("--against", metavar="BASELINE", help="A baseline's name, a run's id, file or folder.")
    ],
    run: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="Judge this run instead of measuring now.")
    ] = None,
    sessions: Annotated[
        int | None, typer.Option("--sessions", metavar="N", min=1, help="Sessions to measure now (default 1).")
    ] = None,
    threshold: Threshold = None,
    only: Only = None,
    fail_on: FailOnOption = None,
    as_json: AsJson = False,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder that gets a folder for each session.")
    ] = DEFAULT_FOLDER,
    keep: Annotated[bool, typer.Option("--store/--no-store", help="Keep what is measured in the store.")] = True,
    strict_plugins: StrictPlugins = False,
) -> None:
    """Measure a baseline's cases again and fail on wrong output, slower times or larger peaks.

    Cases that look slower are measured once more in three fresh sessions, and only those decide. Times are gated from
    five baseline sessions on (`dilabench baseline save NAME RUN --add`), below that they advise; memory and correctness
    always count. Exit codes: 0 fine, 3 another machine, 4 a case fails now, 5 wrong output, 6 regression, 7 undecided
    (with --fail-on inconclusive), 8 nothing measured.
    """
    from dilabench.cli.compare import verdict_view
    from dilabench.cli.compare.remeasure import Remeasure
    from dilabench.compare.across import compare_across
    from dilabench.compare.gate import confirmed, exit_code
    from dilabench.compare.selection import selection
    from dilabench.store.lookup import Store

    if run is not None and sessions is not None:
        raise ConfigError(f"--run {run} is judged instead of {sessions} sessions measured now; leave one of them out")
    store = Store(tell=note)
    baseline = store.records(against)
    cases = _cases(baseline, only or ())
    calibration = store.calibration_of(baseline)
    policy = policy_for(baseline, threshold, calibration)

    def measure(planned: Sequence[PlannedCase], count: int) -> Sequence[RunRecord]:
        again = Remeasure(discover(strict_plugins), baseline[-1], output, store if keep else None)
        refuse_other_machine(baseline, [again.here()], EnvironmentNotReady)
        records = again.sessions(planned, count)
        refuse_other_machine(baseline, records, EnvironmentNotReady)
        return records

    if run is None:
        new = measure(cases, sessions or 1)
    else:
        new = store.records(run)
        refuse_other_machine(baseline, new, ConfigError)
    comparison = compare_across(baseline, new, policy=policy, select=selection(only or ()))
    flagged = {case.case_id: case for case in comparison.flagged}
    if flagged:
        records = _second_look(flagged.values(), cases, measure)
        second = compare_across(baseline, records, policy=policy, select=lambda case: case.case_id in flagged)
        comparison = confirmed(comparison, second if records else None)
    code = exit_code(comparison, {FailOn.SLOWER, FailOn.LARGER, *(fail_on or ())})
    if as_json:
        say(verdict_view.as_json(comparison, code, calibration))
    else:
        verdict_view.show(comparison, code, calibration)
    raise typer.Exit(code)


def _cases(baseline: Sequence[RunRecord], only: Sequence[str]) -> list[PlannedCase]:
    """What the baseline measured, each case once. Raises ConfigError when that is nothing."""
    from dilabench.compare.comparison import is_measured
    from dilabench.compare.selection import selection

    select = selection(only)
    rows = [row for record in baseline for row in record.rows if is_measured(row) and select(row.case)]
    cases = {row.case.case_id: row.planned for row in rows}
    if not cases:
        among = f" that contains {' or '.join(map(repr, only))}" if only else ""
        raise ConfigError(f"the baseline has no measured case{among}; save a run that has one")
    return list(cases.values())


def _second_look(
    flagged: Iterable[Case],
    cases: Sequence[PlannedCase],
    measure: Callable[[Sequence[PlannedCase], int], Sequence[RunRecord]],
) -> Sequence[RunRecord]:
    """Measure the whole workload groups of cases that look slower again, so that each case has the same neighbours.

    Empty when this is not the baseline's machine (a run that was brought here, say): then nothing can be confirmed.
    """
    groups = {case.group_id for case in flagged}
    say(
        f"{len(groups)} groups hold slower cases and are measured again in {SECOND_LOOK_SESSIONS} fresh sessions",
        err=True,
    )
    try:
        return measure([one for one in cases if one.case.group_id in groups], SECOND_LOOK_SESSIONS)
    except EnvironmentNotReady as error:
        say(f"not possible here: {error}", err=True)
        return ()
