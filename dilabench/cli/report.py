"""`dilabench report`: a run record, rendered."""

from pathlib import Path
from typing import Annotated

import typer

from dilabench.cli.options import StrictPlugins, names
from dilabench.plugins.manager import discover
from dilabench.sections import render, sections_of
from dilabench.store.run_files import read_record


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder or its run.json.")],
    formats: Annotated[
        list[str] | None, typer.Option("--format", "-f", metavar="FORMAT", help="Name of a reporter. Repeatable.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Write files there instead of printing.")
    ] = None,
    strict_plugins: StrictPlugins = False,
) -> None:
    """Render a run record: a table by default, markdown, json, or what a plug-in brings."""
    catalogue = discover(strict_plugins).catalogue
    reporters = [catalogue.reporters.get(name) for name in names(formats) or ["table"]]
    record = read_record(run)
    sections = sections_of(record, catalogue)
    for reporter in reporters:
        folder = output if output is not None or reporter.prints else run if run.is_dir() else run.parent
        text = render(reporter, record, folder, sections)
        if text is not None:
            typer.echo(text)
        if folder is not None and reporter.filename:
            typer.echo(str(folder / reporter.filename), err=True)
