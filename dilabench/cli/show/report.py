"""`dilabench report`: a run record, rendered."""

from pathlib import Path
from typing import Annotated

import typer

from dilabench.cli.github import GithubSummary, append_summary, require_github
from dilabench.cli.options import (
    AsJson,
    Columns,
    Details,
    StrictPlugins,
    column_names,
    discovered,
    names,
    require_one_format,
    tell_of,
)
from dilabench.cli.terminal import note, say
from dilabench.errors import ConfigError, ExitCode
from dilabench.plugins.catalogue import Catalogue
from dilabench.plugins.descriptors import Reporter
from dilabench.report.findings import render, sections_of
from dilabench.report.pull_request import of_run


def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, run.json or id, or 'latest'.")],
    formats: Annotated[
        list[str] | None, typer.Option("--format", "-f", metavar="FORMAT", help="Name of a reporter. Repeatable.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Write files there instead of printing.")
    ] = None,
    samples: Annotated[bool, typer.Option("--samples", help="csv, parquet: a line per sample, not per case.")] = False,
    columns: Columns = None,
    details: Details = False,
    github_summary: GithubSummary = False,
    as_json: AsJson = False,
    strict_plugins: StrictPlugins = False,
) -> None:
    """Render a run record: a table by default, html, markdown, json, csv, or what a plug-in brings."""
    from dilabench.store.lookup import Store

    if github_summary:
        require_github()
    require_one_format(as_json, names(formats))
    catalogue = discovered(strict_plugins).catalogue
    reporters = [catalogue.reporters.get(name) for name in names(formats) or ["json" if as_json else "table"]]
    if samples:
        reporters = [_of_samples(reporter, catalogue) for reporter in reporters]
    store = Store(tell=note)
    records = store.records(run)
    if len(records) > 1:
        raise ConfigError(f"{run!r} stands for {len(records)} runs; name one of them (see `dilabench baseline list`)")
    known = len(catalogue.problems)
    sections = sections_of(records[0], catalogue)
    options = {"details": details, "columns": column_names(columns)}
    if github_summary:
        append_summary(of_run(records[0], sections))
    written: list[tuple[str | None, Path | None]] = []
    for reporter in reporters:
        folder = output if output is not None or reporter.prints else _own_folder(store.path_of(run), run, reporter)
        with catalogue.left_out(catalogue.reporters.origin(reporter.name), ""):
            text = render(reporter, records[0], folder, sections, catalogue, options)
            written.append((text, folder / reporter.filename if folder and reporter.filename else None))
    for text, path in written:
        if text is not None:
            say(text, styled=True)
        if path is not None and path.exists():
            say(str(path), err=True)
        elif path is not None:
            note(f"{path.name}: nothing to draw or write of this run")
    tell_of(catalogue.problems[known:])
    if catalogue.problems[known:]:
        raise typer.Exit(ExitCode.ENVIRONMENT)


def _of_samples(reporter: Reporter, catalogue: Catalogue) -> Reporter:
    """The reporter that shows samples where this one shows cases."""
    if reporter.samples is None:
        able = ", ".join(one.name for one in catalogue.reporters if one.samples)
        raise ConfigError(
            f"--samples: reporter {reporter.name!r} has no form with a line per sample; these have: {able}"
        )
    return catalogue.reporters.get(reporter.samples)


def _own_folder(path: Path | None, run: str, reporter: Reporter) -> Path:
    """Where files go that were not given a place: into the run's folder. A run of the store has none."""
    from dilabench.store.archive import SUFFIX

    if path is None or path.name.endswith(SUFFIX):
        raise ConfigError(f"reporter {reporter.name!r} writes files and {run!r} has no folder; say where with -o")
    return path if path.is_dir() else path.parent
