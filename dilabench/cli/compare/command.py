"""`dilabench compare`: two records, or the rows of one."""

from collections.abc import Callable
from enum import StrEnum
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Annotated

import typer

from dilabench.cli.compare.deciding import OTHERWISE, FailOn, FailOnOption, Only, Threshold, check_again, longer_run
from dilabench.cli.github import GithubSummary, append_summary, require_github
from dilabench.cli.options import OUTPUT_DIR, AsJson, Backends, Details, RelativeTo, real_names, require_one_format
from dilabench.cli.run.options import Implementations
from dilabench.cli.terminal import note, say
from dilabench.errors import ConfigError, gravest


class Format(StrEnum):
    """How a comparison is shown."""

    TABLE = "table"
    JSON = "json"
    MARKDOWN = "markdown"
    HTML = "html"


class By(StrEnum):
    """The field that may differ between two compared rows of one record."""

    IMPLEMENTATION = "implementation"
    BACKEND = "backend"
    OPTIMIZATIONS = "optimizations"


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="BASE NEW... | RUN...", help="Files, folders, ids (`dilabench history`), 'latest' or baselines."
        ),
    ],
    by: Annotated[By | None, typer.Option("--by", help="Compare rows inside RUN, which are interleaved.")] = None,
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
    details: Details = False,
    form: Annotated[
        Format,
        typer.Option("--format", "-f", help="markdown: for a pull request; html: a page."),
    ] = Format.TABLE,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Write the page there instead of printing."),
        OUTPUT_DIR,
    ] = None,
    github_summary: GithubSummary = False,
    as_json: AsJson = False,
) -> None:
    """Compare records, or with --by the rows of one (or of several runs of it, each adding a session).

    More than two are compared each with each, as a matrix.

    Exit codes: 0 fine, 4 a case that was measured fails now, 5 wrong output or a time that cannot be true, 6 slower or
    larger than BASE, 7 undecided (with --fail-on undecided), 8 nothing to compare. The first of several runs is BASE.
    """
    from dilabench.cli.compare import verdict_view
    from dilabench.comparison.across import refuse_other_machine
    from dilabench.comparison.comparison import selection
    from dilabench.comparison.gate import exit_code
    from dilabench.comparison.matrix import compare_all, run_names
    from dilabench.comparison.within import compare_within
    from dilabench.store.calibrations import policy_for
    from dilabench.store.lookup import Store

    if github_summary:
        require_github()
    store = Store(tell=note)
    runs = store.runs_of(runs)
    require_one_format(as_json, () if form is Format.TABLE else (form,))
    if as_json:
        form = Format.JSON
    if by is None and len(runs) < 2:
        raise ConfigError(
            "one run is given; name two or more, BASE first ('latest', or ids of `dilabench history`), or compare the "
            "rows of one by --by"
        )
    if by is not None and form is Format.HTML:
        raise ConfigError(
            "-f html compares runs; the rows of one, which --by compares, are in `dilabench report -f html`"
        )
    if output is not None and form is not Format.HTML:
        raise ConfigError(f"-o {output} is where -f html writes its page; add -f html, or redirect what is printed")
    if by is None and base is not None:
        raise ConfigError(f"--base {base} says which rows to compare with and needs --by")
    if by is not None and relative_to is not None:
        raise ConfigError(f"--relative-to {relative_to} is for two records; rows of one record are interleaved anyway")
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
            raise ConfigError("--across-machines gives no verdicts, so it takes two runs and no option but --json")
        raise typer.Exit(verdict_view.show_machines(records[0], records[1], as_json=form is Format.JSON))
    for record in records[1:] if by else ():
        refuse_other_machine(records[:1], [record], ConfigError)
    calibration = store.calibration_of(records)
    policy = policy_for(records, threshold, calibration)
    select = selection(only or (), *real_names(implementations, backends))
    wanted = set(fail_on or ())
    if by is None:
        for base_side, new_side in combinations(sides, 2):
            refuse_other_machine(base_side, new_side, ConfigError)
        wanted |= {FailOn.SLOWER, FailOn.LARGER}
        matrix = compare_all(run_names(runs, sides), sides, policy=policy, select=select, reference=relative_to)
        way_out = [check_again(runs[0], *(f"--only={text}" for text in only or ()))]
        if len(runs) > 2 or form is Format.HTML:
            codes = [exit_code(comparison, wanted) for comparison in matrix.with_first]
            show = partial(verdict_view.show_matrix, matrix, codes, calibration, way_out, details=details)
            if form is Format.HTML:
                show = partial(verdict_view.write_matrix_page, matrix, codes, [side[-1] for side in sides], output)
            as_data = partial(verdict_view.matrix_as_json, matrix, codes, calibration)
            _print(form, github_summary, show, as_data, partial(verdict_view.matrix_as_markdown, matrix, codes))
            raise typer.Exit(gravest(codes))
        (comparison,) = matrix.with_first
    else:
        comparison = compare_within(records, policy=policy, by=by.value, base=base, select=select)
        way_out = longer_run(records[-1], comparison.pairs) or [OTHERWISE]
    code = exit_code(comparison, wanted)
    show = partial(verdict_view.show, comparison, code, calibration, way_out, details=details)
    as_data = partial(verdict_view.as_json, comparison, code, calibration, way_out)
    _print(form, github_summary, show, as_data, partial(verdict_view.as_markdown, comparison, code, way_out))
    raise typer.Exit(code)


def _print(
    form: Format,
    github_summary: bool,
    show: Callable[[], None],
    as_data: Callable[[], str],
    as_markdown: Callable[[], str],
) -> None:
    """Print in the requested format; `show` handles formats other than data and Markdown."""
    if github_summary:
        append_summary(as_markdown())
    if form is Format.JSON:
        say(as_data())
    elif form is Format.MARKDOWN:
        say(as_markdown(), styled=True)
    else:
        show()
