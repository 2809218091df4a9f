"""The application: its name, its version, its commands."""

from typing import Annotated

import typer

from dilabench.cli.commands import Command, Commands
from dilabench.version import __version__

COMMANDS = (
    Command("run", "dilabench.cli.run.command:run", "Measure a suite: verify, time, report.", prints=False),
    Command("plan", "dilabench.cli.run.plan:plan", "What fits into memory; nothing is run."),
    Command(
        "verify",
        "dilabench.cli.verify.command:verify",
        "Check outputs and gradients; nothing is timed.",
        prints=False,
    ),
    Command("list", "dilabench.cli.show.list:list_names", "What there is, and why something cannot be used here."),
    Command("describe", "dilabench.cli.show.describe:describe", "Everything known about one name."),
    Command("doctor", "dilabench.cli.show.doctor:doctor", "The machine, the packages, and what makes times noisy."),
    Command("report", "dilabench.cli.show.report:report", "Show a stored run again, or rank several."),
    Command("compare", "dilabench.cli.compare.command:compare", "Slower, faster or the same: runs, or rows of one."),
    Command(
        "check",
        "dilabench.cli.compare.check:check",
        "Measure again and fail on what is slower than a baseline.",
        prints=False,
    ),
    Command("history", "dilabench.cli.compare.history:history", "Stored runs, and how a case developed over them."),
    Command(
        "recheck",
        "dilabench.cli.compare.recheck:recheck",
        "Measure some rows of a record again, and compare.",
        prints=False,
    ),
    Command(
        "merge", "dilabench.cli.compare.merge:merge", "Join shards, or runs of different workloads, to one record."
    ),
    Command(
        "calibrate",
        "dilabench.cli.compare.calibrate:calibrate",
        "Find out how noisy this machine is between sessions.",
        prints=False,
    ),
    Command("tune", "dilabench.cli.run.tune:tune", "Measure what is fastest here, for `-i auto`.", prints=False),
    Command(
        "baseline",
        "dilabench.cli.compare.baseline:baseline_app",
        "Name runs to compare with; list and remove names.",
    ),
    Command(
        "plugin",
        "dilabench.cli.author.app:plugin_app",
        "Begin a plug-in; hold one to everything that is asked of it.",
    ),
)


class OurCommands(Commands):
    """The commands of dilabench."""

    entries = COMMANDS


app = typer.Typer(
    name="dilabench",
    cls=OurCommands,
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
        typer.echo(f"dilabench {__version__}")
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
