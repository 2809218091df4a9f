"""`dilabench check`: the gate of a CI job."""

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dilabench.cli.compare.deciding import (
    OTHERWISE,
    FailOn,
    FailOnOption,
    Only,
    Threshold,
    check_again,
    longer_run,
)
from dilabench.cli.github import GithubSummary, append_summary, require_github
from dilabench.cli.options import (
    OUTPUT_DIR,
    AsJson,
    Backends,
    Details,
    RelativeTo,
    StrictPlugins,
    names,
    real_names,
    require_one_format,
)
from dilabench.cli.run.options import Implementations
from dilabench.cli.terminal import note, say
from dilabench.errors import ConfigError, ExitCode
from dilabench.record import RunRecord
from dilabench.runs import DEFAULT_FOLDER
from dilabench.units import counted, parse_duration

if TYPE_CHECKING:
    from dilabench.store.lookup import Store

DEFAULT_BUDGET = "5m"
# Most sessions of a baseline with --update: enough for a gate, and recent enough to follow the machine.
MOST_SESSIONS = 10
# The name of a baseline that is made of a run and further sessions.
NEW_BASELINE = "more"


class Format(StrEnum):
    """How the verdict is shown."""

    TABLE = "table"
    JSON = "json"
    MARKDOWN = "markdown"


def check(
    against: Annotated[
        str, typer.Option("--against", metavar="BASELINE", help="A baseline's name, a run's id, file or folder.")
    ],
    run: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="Judge this run instead of measuring now.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="TIME", help=f"Time to decide in (default {DEFAULT_BUDGET}).")
    ] = None,
    sessions: Annotated[
        int | None, typer.Option("--sessions", metavar="N", min=1, help="Measure and judge exactly N sessions.")
    ] = None,
    threshold: Threshold = None,
    only: Only = None,
    implementations: Implementations = None,
    backends: Backends = None,
    relative_to: RelativeTo = None,
    fail_on: FailOnOption = None,
    details: Details = False,
    form: Annotated[Format, typer.Option("--format", "-f", help="markdown: for a pull request.")] = Format.TABLE,
    github_summary: GithubSummary = False,
    as_json: AsJson = False,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="DIR", help="Folder that gets a folder for each session."),
        OUTPUT_DIR,
    ] = DEFAULT_FOLDER,
    update: Annotated[
        bool,
        typer.Option(
            "--update",
            help=f"Add sessions that pass to the baseline (the newest {MOST_SESSIONS} stay); if none has that name, "
            "create it from --run, or from the latest run.",
        ),
    ] = False,
    keep: Annotated[bool, typer.Option("--store/--no-store", help="Keep the new record in the store.")] = True,
    strict_plugins: StrictPlugins = False,
) -> None:
    """Measure a baseline's cases again and fail on wrong output, slower times or larger peaks.

    Sessions are added until every case is slower, faster, or no change above 10 % or the threshold is seen, or until
    the budget ends. A case that looks slower or faster is measured again in fresh sessions, and only these decide. One
    stored session is enough; more of them (`baseline save --add`) find smaller changes. Exit codes: 0 fine, 3 another
    machine, 4 a case fails now, 5 wrong output or a time that cannot be true, 6 regression, 7 undecided (with
    --fail-on undecided), 8 nothing measured.
    """
    from dilabench.cli.compare import verdict_view
    from dilabench.cli.run.progress_bar import progress_shown
    from dilabench.comparison.comparison import selection
    from dilabench.comparison.gate import exit_code
    from dilabench.runs.against_baseline import Check
    from dilabench.store.calibrations import policy_for
    from dilabench.store.lookup import Store

    if github_summary:
        require_github()
    require_one_format(as_json, () if form is Format.TABLE else (form,))
    options = {"--run": run, "--budget": budget, "--sessions": sessions}
    given = [f"{option} {value}" for option, value in options.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} each say what is judged; give one of them")
    store, select = Store(tell=note), selection(only or (), *real_names(implementations, backends))
    if update and not keep:
        raise ConfigError("--update keeps sessions in the baseline, --no-store keeps none; leave one out")
    if update and against not in store.baselines.all():
        _save(store, against, store.records(run or "latest"))
        raise typer.Exit
    baseline = store.records(against)
    calibration = store.calibration_of(baseline)
    gate = Check(
        baseline=baseline,
        select=select,
        reference=relative_to,
        policy=policy_for(baseline, threshold, calibration),
        budget_s=parse_duration(budget or DEFAULT_BUDGET),
        output=output,
        store=store if keep else None,
        strict_plugins=strict_plugins,
        tell=note,
        progress=progress_shown,
    )
    if not gate.cases:
        asked = ", ".join(map(repr, (*(only or ()), *names(implementations, backends))))
        fitting = f" that fits {asked}" if asked else ""
        raise ConfigError(f"the baseline has no measured case{fitting}; save a run that has one")
    comparison = gate.of_sessions(sessions) if run is None else gate.of_run(store.records(run))
    code = exit_code(comparison, {FailOn.SLOWER, FailOn.LARGER, *(fail_on or ())})
    enough = gate.budget.sufficient(comparison)
    way_out = [check_again(against, *enough.split())] if enough else []
    if not way_out:
        save = _save_command(store, against, baseline)
        way_out = longer_run(baseline[-1], comparison.pairs, save) or [OTHERWISE]
    if github_summary:
        append_summary(verdict_view.as_markdown(comparison, code, way_out))
    if as_json or form is Format.JSON:
        say(verdict_view.as_json(comparison, code, calibration, way_out))
    elif form is Format.MARKDOWN:
        say(verdict_view.as_markdown(comparison, code, way_out), styled=True)
    else:
        verdict_view.show(comparison, code, calibration, way_out, details=details)
    if update and code is ExitCode.OK:
        _save(store, against, [*baseline, *gate.complete])
    raise typer.Exit(code)


def _save_command(store: "Store", against: str, records: Sequence[RunRecord]) -> str:
    """The command that adds the runs in `more-sessions` to a baseline, or makes one of them and the run `against`."""
    known, save = store.baselines.all(), ("dilabench", "baseline", "save")
    if against in known:
        return f"{shlex.join([*save, against])} more-sessions/* --add"
    run = records[-1].run_id if against == "latest" else against
    return f"{shlex.join([*save, NEW_BASELINE, run])} more-sessions/*" + (" --replace" if NEW_BASELINE in known else "")


def _save(store: "Store", name: str, records: Sequence[RunRecord]) -> None:
    """Replace the runs of a baseline by the newest of these sessions."""
    files = list(dict.fromkeys(store.archive.add(record) for record in records))[-MOST_SESSIONS:]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    store.baselines.save(name, files, now, replace=True)
    note(f"baseline {name} holds {counted(len(files), 'session')}, the newest {files[-1]}")
