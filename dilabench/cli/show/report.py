"""`dilabench report`: a run record, rendered."""

from pathlib import Path
from typing import Annotated

import typer

from dilabench.cli.options import AsJson, Columns, Details, StrictPlugins, column_names, names
from dilabench.cli.plugins import discovered, tell_of
from dilabench.cli.terminal import note, say
from dilabench.errors import ConfigError, ExitCode
from dilabench.plugins.descriptors import Reporter
from dilabench.report.findings import render, sections_of


def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, run.json or id, or 'latest'.")],
    formats: Annotated[
        list[str] | None, typer.Option("--format", "-f", metavar="FORMAT", help="Name of a reporter. Repeatable.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Write files there instead of printing.")
    ] = None,
    columns: Columns = None,
    details: Details = False,
    as_json: AsJson = False,
    strict_plugins: StrictPlugins = False,
) -> None:
    """Render a run record: a table by default, markdown, json, or what a plug-in brings."""
    from dilabench.store.lookup import Store

    catalogue = discovered(strict_plugins).catalogue
    reporters = [catalogue.reporters.get(name) for name in names(formats) or ["json" if as_json else "table"]]
    store = Store(tell=note)
    records = store.records(run)
    if len(records) > 1:
        raise ConfigError(f"{run!r} stands for {len(records)} runs; name one of them (see `dilabench baseline list`)")
    known = len(catalogue.problems)
    sections = sections_of(records[0], catalogue)
    options = {"details": details, "columns": column_names(columns)}
    written: list[tuple[str | None, Path | None]] = []
    for reporter in reporters:
        folder = output if output is not None or reporter.prints else _own_folder(store.path_of(run), run, reporter)
        with catalogue.left_out(catalogue.reporters.origin(reporter.name), ""):
            text = render(reporter, records[0], folder, sections, catalogue, options)
            written.append((text, folder / reporter.filename if folder and reporter.filename else None))
    for text, path in written:
        if text is not None:
            say(text, styled=True)
        if path is not None:
            say(str(path), err=True)
    tell_of(catalogue.problems[known:])
    if catalogue.problems[known:]:
        raise typer.Exit(ExitCode.ENVIRONMENT)


def _own_folder(path: Path | None, run: str, reporter: Reporter) -> Path:
    """Where files go that were not given a place: into the run's folder. A run of the store has none."""
    from dilabench.store.archive import SUFFIX

    if path is None or path.name.endswith(SUFFIX):
        raise ConfigError(f"reporter {reporter.name!r} writes files and {run!r} has no folder; say where with -o")
    return path if path.is_dir() else path.parent
