"""`dilabench report`: a run record, rendered; the rows of several records, ranked per device and family."""

import gc
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dilabench.cli.github import GithubSummary, append_summary, require_github
from dilabench.cli.options import (
    OUTPUT_DIR,
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
from dilabench.cli.terminal import file_meant, note, print_items, say, say_folded, say_page, say_text
from dilabench.errors import ConfigError, ExitCode
from dilabench.plugins.catalogue import Catalogue
from dilabench.plugins.descriptors import Reporter
from dilabench.record import RunRecord
from dilabench.report.findings import Section, render, sections_of
from dilabench.report.pull_request import of_run
from dilabench.units import counted

if TYPE_CHECKING:
    from dilabench.store.lookup import Store

BOARD_FORMATS = ("table", "html", "json")
INDENT = "    "


def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN", help="A run's folder, run.json or id (`dilabench history`), or 'latest'; or several."
        ),
    ],
    formats: Annotated[
        list[str] | None, typer.Option("--format", "-f", metavar="FORMAT", help="Name of a reporter. Repeatable.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="DIR", help="Write files there, or one file by this name, instead of printing."
        ),
        OUTPUT_DIR,
    ] = None,
    samples: Annotated[bool, typer.Option("--samples", help="csv, parquet: a line per sample, not per case.")] = False,
    columns: Columns = None,
    details: Details = False,
    github_summary: GithubSummary = False,
    as_json: AsJson = False,
    strict_plugins: StrictPlugins = False,
) -> None:
    """Render a run record: a table by default, html, markdown, json, csv, or a plug-in's format.

    Several runs are ranked together, as table, html or json: one board per device and family of workloads. It lists
    verified rows only. Rows share a place if no difference between them is proven (=, or ? after too few rounds). Rows
    of different runs were not interleaved, so each run is ranked separately. Edited records and a run that is named
    twice are refused. Exit code 8: no row was verified and measured.
    """
    from dilabench.store.lookup import Store
    from dilabench.store.run_files import is_edited

    if github_summary:
        require_github()
    require_one_format(as_json, names(formats))
    catalogue = discovered(strict_plugins).catalogue
    reporters = [catalogue.reporters.get(name) for name in names(formats) or ["json" if as_json else "table"]]
    store = Store(tell=note)
    runs = store.runs_of(runs)
    run, *others = runs
    records = store.records(run)
    # They stay until the end and may be millions of objects, so the garbage collector must not scan them.
    gc.freeze()
    if others or len(records) > 1:
        only_one = {"--samples": samples, "--columns": columns, "--github-summary": github_summary}
        if unheard := [option for option, value in only_one.items() if value]:
            raise ConfigError(f"{', '.join(unheard)}: for the report of one run; name one run, or leave it out")
        _report_several(store, runs, [reporter.name for reporter in reporters], output)
        return
    if samples:
        reporters = [_of_samples(reporter, catalogue) for reporter in reporters]
    (record,) = records
    path = store.path_of(run)
    if path is not None and is_edited(path, record):
        note(f"{run} was edited after its run: it is not the text whose digest it carries; see `dilabench history`")
    known = len(catalogue.problems)
    plots = github_summary or any(reporter.shows_sections and reporter.shows_plots for reporter in reporters)
    shown = github_summary or any(reporter.shows_sections for reporter in reporters)
    sections = sections_of(record, catalogue, plots=plots) if shown else ()
    options = {"details": details, "columns": column_names(columns)}
    if github_summary:
        append_summary(of_run(record, sections))
    written: list[tuple[str | Iterator[str] | None, Path | None]] = []
    for reporter in reporters:
        meant = file_meant(output, reporter.filename) if output and reporter.filename else None
        if meant is not None and meant == output:
            _write_file(reporter, record, meant, sections, catalogue, options)
            continue
        folder = output if output is not None or reporter.prints else _own_folder(store.path_of(run), run, reporter)
        with catalogue.left_out(catalogue.reporters.origin(reporter.name), ""):
            text = render(reporter, record, folder, sections, catalogue, options)
            written.append((text, folder / reporter.filename if folder and reporter.filename else None))
    for text, path in written:
        if text is not None:
            say_text(text)
        if path is not None and path.exists():
            say(str(path), err=True)
        elif path is not None:
            note(f"{path.name}: nothing to draw or write of this run")
    tell_of(catalogue.problems[known:])
    if catalogue.problems[known:]:
        raise typer.Exit(ExitCode.ENVIRONMENT)


def _write_file(
    reporter: Reporter,
    record: RunRecord,
    path: Path,
    sections: Sequence[Section],
    catalogue: Catalogue,
    options: Mapping[str, Any],
) -> None:
    """Write what the reporter writes under the name that -o gives it. Raises ConfigError if that is no single file."""
    assert reporter.filename is not None
    if not path.parent.is_dir():
        raise ConfigError(f"-o {path}: {path.parent} is no folder; create it, or name another place")
    with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        with catalogue.left_out(catalogue.reporters.origin(reporter.name), ""):
            render(reporter, record, Path(folder), sections, catalogue, options)
        files = list(Path(folder).iterdir())
        if len(files) > 1:
            names_of = ", ".join(sorted(file.name for file in files))
            raise ConfigError(f"-o {path} names one file, and -f {reporter.name} writes {names_of}; name a folder")
        if not files:
            note(f"{path.name}: nothing to draw or write of this run")
            return
        files[0].replace(path)
    say(str(path), err=True)


def _report_several(store: "Store", runs: Sequence[str], formats: Sequence[str], output: Path | None) -> None:
    from dilabench.report.leaderboard import BOARD_COLUMNS, HTML_NAME, leaderboard, to_html
    from dilabench.store.merging import refuse_unsound, shared_records

    for form in formats:
        if form not in BOARD_FORMATS:
            raise ConfigError(f"-f {form} renders one run; several are shown as {', '.join(BOARD_FORMATS)}")
    records, called = shared_records(store, runs)
    refuse_unsound(records, called)
    ranked = leaderboard(records)
    for form in formats:
        if form == "json":
            say(json.dumps(ranked.as_dict(), indent=1, ensure_ascii=False))
        elif form == "html":
            say_page(to_html(ranked), output, HTML_NAME)
        else:
            for board in ranked.boards:
                print_items(f"{board.family}\n{board.device}", BOARD_COLUMNS, board.lines)
                if board.older:
                    say(
                        f"{counted(len(board.older), 'older result')} of these workloads: -f html and -f json have them"
                    )
                say()
            for run in ranked.runs:
                say_folded(f"run {run.run_id}: {run.device}, dilabench {run.dilabench}, commit {run.commit}", INDENT)
                say_folded(f"{INDENT}{run.command}", INDENT)
    if not ranked.boards:
        say("no row of these runs was verified and measured", err=True)
        raise typer.Exit(ExitCode.NOTHING_MEASURED)


def _of_samples(reporter: Reporter, catalogue: Catalogue) -> Reporter:
    """The reporter that shows samples where this one shows cases."""
    if reporter.samples is None:
        able = ", ".join(known.name for known in catalogue.reporters if known.samples)
        raise ConfigError(
            f"--samples: reporter {reporter.name!r} has no form with a line per sample; these have: {able}"
        )
    return catalogue.reporters.get(reporter.samples)


def _own_folder(path: Path | None, run: str, reporter: Reporter) -> Path:
    """The default output folder: the run's folder, which a run of the store does not have."""
    from dilabench.store.archive import SUFFIX

    if path is None or path.name.endswith(SUFFIX):
        raise ConfigError(f"reporter {reporter.name!r} writes files and {run!r} has no folder; say where with -o")
    return path if path.is_dir() else path.parent
