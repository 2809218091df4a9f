"""Commands that are imported when they are called: `--help` waits for none of them."""

import importlib
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from dilabench.cli.arguments import INSTEAD, renamed
from dilabench.cli.defaults import defaults_file, defaults_of
from dilabench.cli.guard import guarded, require_working_folder, stopped
from dilabench.cli.terminal import note
from dilabench.errors import DilabenchError, ExitCode
from dilabench.retired import removed


class Answering(TyperCommand):
    """A command that understands the names which options have elsewhere, or says what to write instead."""

    def parse_args(self, context: Any, args: list[str]) -> list[str]:
        """As any command's."""
        known = {option for parameter in self.params for option in (*parameter.opts, *parameter.secondary_opts)}
        try:
            return super().parse_args(context, renamed(args, known))
        except Exception as error:
            # Only an error about an option that there is not has its name.
            name = getattr(error, "option_name", None)
            if refusal := removed("option", f"{self.name} {name}"):
                raise stopped(f"error: {refusal}", ExitCode.BAD_REQUEST) from None
            if name in INSTEAD:
                raise stopped(
                    f"error: there is no {name}; write instead: {INSTEAD[name]}", ExitCode.BAD_REQUEST
                ) from None
            if isinstance(message := getattr(error, "message", None), str):
                # What pydantic puts before the words of a type, by which typer reads values.
                error.message = message.removeprefix("Value error, ")  # type: ignore[attr-defined]
            _tell_defaults(context)
            raise

    def invoke(self, context: Any) -> Any:
        """As any command's."""
        try:
            return super().invoke(context)
        except typer.Exit as end:
            if end.exit_code == ExitCode.BAD_REQUEST:
                _tell_defaults(context)
            raise


def _tell_defaults(context: Any) -> None:
    """Print the options that come from a file of defaults: the refused one may not be on the command line."""
    values = context.default_map or {}
    used = {}
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name)
        # By name, for typer may bring a click of its own.
        if source is not None and source.name == "DEFAULT_MAP":
            option = next(option for option in parameter.opts if option.startswith("--"))
            used[option.lstrip("-")] = values[parameter.name]
    if used:
        settings = ", ".join(f"{name} = {value!r}" for name, value in used.items())
        note(f"defaults from {str(defaults_file())!r}: {settings}")


@dataclass(frozen=True, slots=True)
class Command:
    """A command by name: where it is, and what `--help` says of it in one line of 80 columns.

    `prints`: what it prints is what it is for, not a record or the exit code, so that it fails where that cannot be
    written. The target is a function, or a Typer application of its own whose commands are guarded already.
    """

    name: str
    target: str
    summary: str
    prints: bool = True

    def loaded(self, settings: MutableMapping[str, Any]) -> Any:
        """The click command. `settings` are those of its context."""
        module, _, attribute = self.target.partition(":")
        target = getattr(importlib.import_module(module), attribute)
        if isinstance(target, typer.Typer):
            return typer.main.get_command(target)
        alone = typer.Typer(
            add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, context_settings=dict(settings)
        )
        alone.command(self.name, cls=Answering, short_help=self.summary)(guarded(target, prints=self.prints))
        return typer.main.get_command(alone)


class Commands(TyperGroup):
    """A group of such commands; subclasses say which."""

    entries: Sequence[Command] = ()

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # Suggestions for a misspelt name look here.
        self.commands = dict.fromkeys(entry.name for entry in self.entries)  # type: ignore[assignment]

    def get_command(self, context: Any, name: str) -> Any:
        """The command of that name, with the user's defaults for its options; None where there is none."""
        entry = next((entry for entry in self.entries if entry.name == name), None)
        if entry is None:
            if refusal := removed("command", name):
                raise stopped(f"error: {refusal}", ExitCode.BAD_REQUEST)
            return None
        try:
            require_working_folder()
            command = entry.loaded(self.context_settings)
            context.default_map = {name: defaults_of(name, command, self._all)}
        except DilabenchError as error:
            raise stopped(f"error: {error}", error.exit_code) from None
        return command

    def _all(self) -> dict[str, Any]:
        return {entry.name: entry.loaded(self.context_settings) for entry in self.entries}

    def format_commands(self, context: Any, formatter: Any) -> None:  # noqa: ARG002 - click's signature
        """The summaries, which need no command to be imported."""
        with formatter.section("Commands"):
            formatter.write_dl([(entry.name, entry.summary) for entry in self.entries])
