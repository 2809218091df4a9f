"""The application: its name, its version, its commands."""

from typing import Annotated

import typer

import dilabench
from dilabench.cli.author.app import plugin_app
from dilabench.cli.compare.baseline import baseline_app
from dilabench.cli.compare.calibrate import calibrate
from dilabench.cli.compare.check import check
from dilabench.cli.compare.command import compare
from dilabench.cli.compare.history import history
from dilabench.cli.compare.merge import merge
from dilabench.cli.compare.recheck import recheck
from dilabench.cli.guard import guarded
from dilabench.cli.run.command import run
from dilabench.cli.run.plan import plan
from dilabench.cli.run.tune import tune
from dilabench.cli.show.describe import describe
from dilabench.cli.show.doctor import doctor
from dilabench.cli.show.list import list_names
from dilabench.cli.show.report import report
from dilabench.cli.verify.command import verify

# What they are for is the record, or the exit code.
MEASURING = frozenset({"run", "verify", "check", "calibrate", "tune", "recheck"})

app = typer.Typer(
    name="dilabench",
    help="A verified benchmark for long-context attention: dilated, ring and block-sparse.",
    epilog="Start with `dilabench run quick`. Exit codes: 0 fine, 2 bad request, 3 environment, 4 some case failed, "
    "5 wrong output, 6 regression, 7 inconclusive (if asked), 8 nothing measured, 130 interrupted "
    "(Ctrl-C, SIGTERM, SIGHUP) with results saved.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"dilabench {dilabench.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 - its callback has answered
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


# Beside each command what `--help` says of it in one line of 80 columns; its own page has the whole of it.
for _name, _command, _summary in (
    ("run", run, "Measure a suite: verify, time, report."),
    ("plan", plan, "What fits into memory; nothing is run."),
    ("verify", verify, "Check outputs and gradients; nothing is timed."),
    ("list", list_names, "What there is, and why something cannot be used here."),
    ("describe", describe, "Everything known about one name."),
    ("doctor", doctor, "The machine, the packages, and what makes times noisy."),
    ("report", report, "Show a stored run again."),
    ("compare", compare, "Slower, faster or the same: two runs, or rows of one."),
    ("check", check, "Measure again and fail on what is slower than a baseline."),
    ("history", history, "Stored runs, and how a case developed over them."),
    ("recheck", recheck, "Measure some rows of a record again, and compare."),
    ("merge", merge, "Join shards, or runs of different workloads, to one record."),
    ("calibrate", calibrate, "Find out how noisy this machine is between sessions."),
    ("tune", tune, "Measure what is fastest here, for `-i auto`."),
):
    app.command(_name, short_help=_summary)(guarded(_command, prints=_name not in MEASURING))
app.add_typer(baseline_app, name="baseline", short_help="Name runs to compare with; list and remove names.")
app.add_typer(plugin_app, name="plugin", short_help="Begin a plug-in; hold one to everything that is asked of it.")
