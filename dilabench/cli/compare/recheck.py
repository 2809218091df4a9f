"""`dilabench recheck`: do some rows of a record come out the same here and now?"""

import random
import secrets
from pathlib import Path
from typing import Annotated

import typer

from dilabench.cli.compare.deciding import FailOn, Threshold
from dilabench.cli.options import OUTPUT_DIR, AsJson, StrictPlugins
from dilabench.cli.terminal import note, say
from dilabench.errors import ConfigError, EnvironmentNotReady
from dilabench.plugins.manager import discover
from dilabench.runs import DEFAULT_FOLDER
from dilabench.units import counted


def recheck(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's folder, run.json or id (`dilabench history`), or 'latest'.")
    ],
    rows: Annotated[int, typer.Option("--rows", metavar="N", min=1, help="How many measured rows, at random.")] = 3,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="Draw these rows again (default: other ones each time).")
    ] = None,
    threshold: Threshold = None,
    as_json: AsJson = False,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="DIR", help="Folder that gets a folder for what is measured."),
        OUTPUT_DIR,
    ] = DEFAULT_FOLDER,
    strict_plugins: StrictPlugins = False,
) -> None:
    """Verify and measure a few rows of somebody's record again, on the same inputs, and compare.

    Rows that were interleaved with them are measured again, too. The machine must be of the same kind as the record's.
    One session cannot distinguish small changes from noise: use `check --against` for them. Exit codes: 0 fine, 3
    another machine, 4 a row fails now, 5 wrong output, 6 slower or larger than recorded, 8 nothing measured.
    """
    from dilabench.cli.compare import verdict_view
    from dilabench.cli.run.progress_bar import progress_shown
    from dilabench.comparison.across import compare_across, policy_for, refuse_other_machine
    from dilabench.comparison.comparison import is_measured
    from dilabench.comparison.gate import exit_code
    from dilabench.runs.remeasure import Remeasure
    from dilabench.store.lookup import Store

    store = Store(tell=note)
    recorded = store.records(run)
    if len(recorded) > 1:
        raise ConfigError(f"{run!r} stands for {len(recorded)} runs; name one of them (see `dilabench baseline list`)")
    measured = [row.planned for row in recorded[0].rows if is_measured(row)]
    if not measured:
        raise ConfigError(f"run {run!r} has no measured row to measure again")
    seed = secrets.randbelow(10**6) if seed is None else seed
    chosen = random.Random(seed).sample(measured, min(rows, len(measured)))
    groups = {case.case.group_id for case in chosen}
    # They were interleaved with the other rows of their workloads, which share caches and clocks with them.
    planned = [case for case in measured if case.case.group_id in groups]
    beside = f" (with {counted(len(planned) - len(chosen), 'row')} interleaved with them)" if planned != chosen else ""
    note(f"{len(chosen)} of {counted(len(measured), 'measured row')}, drawn with --seed {seed}{beside}")
    again = Remeasure(discover(strict_plugins), recorded[0], output, None, progress_shown)
    refuse_other_machine(recorded, [again.here()], EnvironmentNotReady)
    records = again.sessions(planned, 1)
    ids = {case.case.case_id for case in chosen}
    calibration = store.calibration_of(recorded)
    policy = policy_for(recorded, threshold, verdict_view.sigma_of(calibration))
    comparison = compare_across(recorded, records, policy=policy, select=lambda case: case.case_id in ids)
    code = exit_code(comparison, {FailOn.SLOWER, FailOn.LARGER})
    if as_json:
        say(verdict_view.as_json(comparison, code, calibration))
    else:
        verdict_view.show(comparison, code, calibration)
    raise typer.Exit(code)
