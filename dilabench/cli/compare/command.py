"""`dilabench compare`: two records, or the rows of one."""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dilabench.cli.compare.deciding import FailOn, FailOnOption, Only, Threshold, policy_for, refuse_other_machine
from dilabench.cli.github import GithubSummary, append_summary
from dilabench.cli.options import AsJson, Backends, RelativeTo
from dilabench.cli.plugins import real_names
from dilabench.cli.run.options import Implementations
from dilabench.cli.terminal import note, say
from dilabench.errors import ConfigError, ExitCode, gravest

if TYPE_CHECKING:
    from dilabench.compare.comparison import Comparison
    from dilabench.record import RunRecord


class Format(StrEnum):
    """How a comparison is shown."""

    TABLE = "table"
    JSON = "json"
    MARKDOWN = "markdown"
    HTML = "html"


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
    implementations: Implementations = None,
    backends: Backends = None,
    across_machines: Annotated[
        bool, typer.Option("--across-machines", help="Two runs of two machines, CPU and GPU say: ratios, no verdict.")
    ] = False,
    threshold: Threshold = None,
    only: Only = None,
    relative_to: RelativeTo = None,
    fail_on: FailOnOption = None,
    form: Annotated[
        Format,
        typer.Option("--format", "-f", help="markdown: for a pull request; html: a page, also of more than two runs."),
    ] = Format.TABLE,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Write the page there instead of printing.")
    ] = None,
    github_summary: GithubSummary = False,
    as_json: AsJson = False,
) -> None:
    """Compare two records, or with --by the rows of one (or of several runs of it, each adding a session).

    With -f html, any number of runs, each compared with the first.

    Exit codes: 0 fine, 4 a case that was measured fails now, 5 wrong output, 6 slower or larger than BASE, 7 undecided
    (with --fail-on inconclusive), 8 nothing to compare.
    """
    from dilabench.cli.compare import verdict_view
    from dilabench.compare.across import compare_across
    from dilabench.compare.gate import exit_code
    from dilabench.compare.selection import selection
    from dilabench.compare.within import compare_within
    from dilabench.store.lookup import Store

    if by is None and len(runs) != 2 and (form is not Format.HTML or len(runs) < 2):
        ways = "compare the rows of one by --by, or more than two with -f html"
        raise ConfigError(f"{len(runs)} runs are given; name two, BASE and NEW, or {ways}")
    if by is not None and form is Format.HTML:
        raise ConfigError(
            "-f html compares runs; the rows of one, which --by compares, are in `dilabench report -f html`"
        )
    if output is not None and form is not Format.HTML:
        raise ConfigError(f"-o {output} is where -f html writes its page; add -f html, or redirect what is printed")
    if by is None and base is not None:
        raise ConfigError(f"--base {base} says which rows to compare with and needs --by")
    if by is not None and relative_to is not None:
        raise ConfigError(f"--relative-to {relative_to} is for two records; rows of one took turns anyway")
    store = Store(tell=note)
    sides = [store.records(run) for run in runs]
    records = [record for side in sides for record in side]
    if across_machines:
        given = {
            "--by": by,
            "--relative-to": relative_to,
            "--threshold": threshold,
            "--only": only,
            "--fail-on": fail_on,
        }
        if len(records) != 2 or any(given.values()):
            raise ConfigError(
                "--across-machines takes two runs and, because it judges nothing, no other option but --json"
            )
        from dilabench.cli.compare.machines import show_machines

        raise typer.Exit(show_machines(records[0], records[1], as_json or form is Format.JSON))
    for record in records[1:] if by else ():
        refuse_other_machine(records[:1], [record], ConfigError)
    calibration = store.calibration_of(records)
    policy = policy_for(records, threshold, calibration)
    select = selection(only or (), *real_names(implementations, backends))
    wanted = set(fail_on or ())
    if by is None:
        baseline, *candidates = sides
        for candidate in candidates:
            refuse_other_machine(baseline, candidate, ConfigError)
        comparisons = [
            compare_across(baseline, candidate, policy=policy, select=select, reference=relative_to)
            for candidate in candidates
        ]
        comparison = comparisons[0]
        wanted |= {FailOn.SLOWER, FailOn.LARGER}
        if form is Format.HTML:
            raise typer.Exit(_page(sides, comparisons, wanted, output))
    else:
        comparison = compare_within(records, policy=policy, by=by.value, base=base, select=select)
    code = exit_code(comparison, wanted)
    if github_summary:
        append_summary(verdict_view.as_markdown(comparison, code))
    if form is Format.MARKDOWN and not as_json:
        say(verdict_view.as_markdown(comparison, code), styled=True)
    elif as_json or form is Format.JSON:
        say(verdict_view.as_json(comparison, code, calibration))
    else:
        verdict_view.show(comparison, code, calibration)
    raise typer.Exit(code)


def _page(
    sides: "Sequence[Sequence[RunRecord]]",
    comparisons: "Sequence[Comparison]",
    wanted: set[FailOn],
    output: Path | None,
) -> ExitCode:
    """Show the page of one baseline and its candidates; the exit code is that of the gravest comparison."""
    from dilabench.atomic_file import write_text
    from dilabench.cli.compare.verdict_view import final_line
    from dilabench.compare.gate import exit_code
    from dilabench.report.html import comparison

    codes = [exit_code(one, wanted) for one in comparisons]
    lines = [final_line(one, code) for one, code in zip(comparisons, codes, strict=True)]
    named = [f"{side[-1].run_id}: {line}" for side, line in zip(sides[1:], lines, strict=True)]
    records = [side[-1] for side in sides]
    text = comparison.to_text(records[0], records[1:], comparisons, "; ".join(named))
    if output is None:
        say(text)
    else:
        write_text(output / comparison.FILENAME, text)
        say(str(output / comparison.FILENAME), err=True)
        for line in named:
            say(line)
    return gravest(codes)
