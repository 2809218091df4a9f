"""`dilabench compare`: two records, or the rows of one."""

from enum import StrEnum
from typing import Annotated

import typer

from dilabench.cli.compare.deciding import FailOn, FailOnOption, Only, Threshold, policy_for, refuse_other_machine
from dilabench.cli.options import AsJson, RelativeTo
from dilabench.cli.terminal import note, say
from dilabench.errors import ConfigError


class By(StrEnum):
    """What may differ between two compared rows of one record."""

    IMPLEMENTATION = "implementation"
    BACKEND = "backend"
    OPTIMIZATIONS = "optimizations"


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="BASE NEW | RUN...", help="Files, folders, run ids, 'latest', or names of baselines."),
    ],
    by: Annotated[By | None, typer.Option("--by", help="Compare rows inside RUN, which took turns.")] = None,
    base: Annotated[str | None, typer.Option("--base", metavar="NAME", help="With --by: what to compare with.")] = None,
    threshold: Threshold = None,
    only: Only = None,
    relative_to: RelativeTo = None,
    fail_on: FailOnOption = None,
    as_json: AsJson = False,
) -> None:
    """Compare two records, or with --by the rows of one (or of several runs of it, each adding a session).

    Exit codes: 0 fine, 4 a case that was measured fails now, 5 wrong output, 6 slower or larger than BASE, 7 undecided
    (with --fail-on inconclusive), 8 nothing to compare.
    """
    from dilabench.cli.compare import verdict_view
    from dilabench.compare.across import compare_across
    from dilabench.compare.gate import exit_code
    from dilabench.compare.selection import selection
    from dilabench.compare.within import compare_within
    from dilabench.store.lookup import Store

    if by is None and len(runs) != 2:
        raise ConfigError(f"{len(runs)} runs are given; name two, BASE and NEW, or compare the rows of one by --by")
    if by is None and base is not None:
        raise ConfigError(f"--base {base} says which rows to compare with and needs --by")
    if by is not None and relative_to is not None:
        raise ConfigError(f"--relative-to {relative_to} is for two records; rows of one took turns anyway")
    store = Store(tell=note)
    sides = [store.records(run) for run in runs]
    records = [record for side in sides for record in side]
    for record in records[1:] if by else ():
        refuse_other_machine(records[:1], [record], ConfigError)
    calibration = store.calibration_of(records)
    policy, select = policy_for(records, threshold, calibration), selection(only or ())
    wanted = set(fail_on or ())
    if by is None:
        baseline, candidate = sides
        refuse_other_machine(baseline, candidate, ConfigError)
        comparison = compare_across(baseline, candidate, policy=policy, select=select, reference=relative_to)
        wanted |= {FailOn.SLOWER, FailOn.LARGER}
    else:
        comparison = compare_within(records, policy=policy, by=by.value, base=base, select=select)
    code = exit_code(comparison, wanted)
    if as_json:
        say(verdict_view.as_json(comparison, code, calibration))
    else:
        verdict_view.show(comparison, code, calibration)
    raise typer.Exit(code)
