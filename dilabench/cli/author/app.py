"""`dilabench plugin`: write a plug-in, and run every conformance check on its components."""

import typer

from dilabench.cli.app import guarded
from dilabench.cli.author.check import check
from dilabench.cli.author.new import new

plugin_app = typer.Typer(
    help="Write a plug-in, and run every conformance check on its components.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)
for _name, _command in (("new", new), ("check", check)):
    plugin_app.command(_name)(guarded(_command, prints=_name == "new"))
