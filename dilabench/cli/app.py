"""The application: its commands, each imported when it is called, and how they end: by a message and an exit code."""

import contextlib
import functools
import importlib
import inspect
import json
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ParamSpec

import typer
from typer.core import TyperCommand, TyperGroup

from dilabench.cli.defaults import defaults_file, defaults_of
from dilabench.cli.github import VARIABLE, append_summary
from dilabench.cli.options import OldNames
from dilabench.cli.terminal import note, output_lost, say, say_folded
from dilabench.errors import (
    ConfigError,
    DilabenchError,
    EnvironmentNotReady,
    ExitCode,
    heed,
    interrupt_behind,
    interruption,
    said,
    shortened,
)
from dilabench.retired import removed
from dilabench.units import printable
from dilabench.version import __version__

P = ParamSpec("P")

DEBUG_VARIABLE = "DILABENCH_DEBUG"
# A value that is named in a message may have any length.
MOST_LETTERS = 8000

# Options of other tools that dilabench lacks, with their replacement.
INSTEAD = {
    "--segment-lengths": "--set segment_lengths=2048,4096",
    "--dilation-rates": "--set dilation_rates=1,2",
    "--causal": "--set causal=true",
    "--no-causal": "--set causal=false",
    "--window-size": "--set window=512,0",
    "--backward": "--mode backward, or --mode both",
    "--forward-only": "--mode forward",
    "--profile": "--timing profiler",
    "--test-flash": "-b flash2",
    "--test-sdpa": "-b sdpa-flash",
    "--test-xformers": "-b xformers",
    "--test-ring": "dilabench run ring --nproc 2",
    "--quick": "dilabench run quick",
    "--list-implementations": "dilabench list implementations",
    "--list-backends": "dilabench list backends",
    "--save-results": "no option: every run writes run.json, report.md and report.html",
    "--save": "no option: every run writes run.json, report.md and report.html",
    "--plot": "no option: every run writes its plots",
    "--csv": "dilabench report latest -f csv",
    "--master-port": "torchrun ... -m dilabench run ring",
}


def guarded(command: Callable[P, None], *, prints: bool = True) -> Callable[P, None]:
    """Wrap a command: errors meant for the user become one message on stderr, others a short text on where to report.

    `prints`: its purpose is its output, so that it fails if that cannot be written. DILABENCH_DEBUG=1 shows tracebacks.
    With --json standard output has the message as an object, with --github-summary the page of the job has it.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        code = ExitCode.OK
        stopped = functools.partial(
            stop,
            as_json=bool(kwargs.get("as_json")) or "json" in (kwargs.get("form"), *_words(kwargs.get("formats"))),
            github_summary=bool(kwargs.get("github_summary")),
        )
        try:
            command(*args, **kwargs)
        except typer.Exit as end:
            code = ExitCode(end.exit_code)
        # The outermost boundary: any exception here that is no message for the user is a bug of dilabench.
        except (Exception, KeyboardInterrupt) as error:
            if interrupt := interrupt_behind(error):
                heed(interrupt)
                raise stopped(interruption(interrupt), ExitCode.INTERRUPTED) from None
            if os.environ.get(DEBUG_VARIABLE):
                raise
            if isinstance(error, DilabenchError):
                raise stopped(f"error: {error}", error.exit_code) from None
            if not os.path.exists(__file__):
                # Modules are imported when they are needed.
                text = f"error: dilabench was removed or replaced while it ran ({said(error)}); start the command again"
                raise stopped(text, ExitCode.ENVIRONMENT) from None
            text = (
                f"internal error: {said(error)}\n"
                f"This is a bug in dilabench. Run again with {DEBUG_VARIABLE}=1 for the traceback and report it, "
                "with the output of `dilabench doctor`, in the project's issue tracker."
            )
            raise stopped(text, ExitCode.INTERNAL) from None
        if prints and code is ExitCode.OK and (lost := output_lost()):
            raise stopped(f"error: standard output cannot be written: {lost.strerror}", ExitCode.ENVIRONMENT)
        if code is not ExitCode.OK:
            raise typer.Exit(code)

    return run


def require_working_folder() -> None:
    """Raise EnvironmentNotReady if the working folder is gone, or files in it cannot be named."""
    folder = os.environ.get("PWD", ".")
    try:
        folder = os.getcwd()
        # The system limits a whole path. The part in the folder is as long as the names of a run's files.
        with contextlib.suppress(FileNotFoundError):
            os.stat(folder + f"{os.sep}x" * 128)
    except OSError as error:
        where = shortened(repr(folder), 200)
        raise EnvironmentNotReady(f"working folder {where} cannot be used: {error.strerror}; go to another") from None


def _words(texts: Any) -> list[str]:
    return [word for text in texts or () for word in str(text).split(",")]


def stop(message: str, code: ExitCode, *, as_json: bool = False, github_summary: bool = False) -> typer.Exit:
    """Print on stderr why a command ends, with `as_json` as an object on stdout, too, and return the exit code."""
    message = shortened(message, MOST_LETTERS)
    try:
        say_folded(message, "  ", err=True)
    except ConfigError:
        # The width in the environment is invalid, as the message says.
        say(message, err=True)
    show_elsewhere(message.removeprefix("error: "), code, as_json=as_json, github_summary=github_summary)
    return typer.Exit(code)


def show_elsewhere(text: str, code: ExitCode, *, as_json: bool, github_summary: bool) -> None:
    """Show why a command ends where its result would be: as a JSON object on stdout, and on the page of the job.

    The object has the exit code and its name, the text, and the way out, which messages have after their last ';'.
    """
    if as_json:
        _, mark, way_out = text.rpartition("; ")
        error = {"code": code.value, "name": code.name.lower(), "text": text, "way_out": way_out if mark else None}
        say(json.dumps({"error": error}, indent=1))
    # Outside of GitHub Actions the error is that there is no such page.
    if github_summary and os.environ.get(VARIABLE):
        # Reports are loaded only if they are shown.
        from dilabench.report.markdown import fenced

        with contextlib.suppress(EnvironmentNotReady):
            append_summary("\n".join([f"### dilabench: exit code {code.value}", "", *fenced(f"error: {text}")]))


def asked_forms(arguments: Sequence[str]) -> dict[str, bool]:
    """Whether --json and --github-summary are among the options, as `stop` takes it."""
    options = list(arguments)[: arguments.index("--") if "--" in arguments else None]
    return {"as_json": "--json" in options, "github_summary": "--github-summary" in options}


def show_usage_elsewhere(error: Any, command: str, forms: Mapping[str, bool]) -> None:
    """The same of an error of the command line itself, for which --help is the way out."""
    show_elsewhere(f"{error.format_message()}; see `{command} --help`", ExitCode.BAD_REQUEST, **forms)


class Refusing(TyperCommand):
    """A command whose refusals of a value begin with the value."""

    def parse_args(self, context: Any, args: list[str]) -> list[str]:
        """As any command's."""
        # Reading the arguments empties their list.
        forms = asked_forms(args)
        try:
            return super().parse_args(context, args)
        except Exception as error:
            if isinstance(message := getattr(error, "message", None), str):
                # The prefix of pydantic for the names of a type, by which typer reads values.
                # The value may be one of a stranger's dilabench.toml.
                error.message = printable(message.removeprefix("Value error, "))  # type: ignore[attr-defined]
                parameter = getattr(error, "param", None)
                if not message and getattr(parameter, "param_type_name", None) == "argument":
                    # A missing one, whose error has no text: the help says what to give.
                    error.message = getattr(parameter, "help", None) or ""  # type: ignore[attr-defined]
                if text := self.instead_of(error):
                    raise stop(f"error: {text}", ExitCode.BAD_REQUEST, **forms) from None
                show_usage_elsewhere(error, context.command_path, forms)
            raise

    def instead_of(self, error: Exception) -> str | None:  # noqa: ARG002 - for subclasses
        """Return what to write instead of an option that there is not; None if nothing is known."""
        return None


class Answering(Refusing):
    """A command that accepts the names of options in other tools, or names the replacement."""

    def parse_args(self, context: Any, args: list[str]) -> list[str]:
        """As any command's."""
        try:
            return super().parse_args(context, self.renamed(args))
        except typer.Exit:
            raise
        except Exception:
            _tell_defaults(context)
            raise

    def instead_of(self, error: Exception) -> str | None:
        """As of any refusing command."""
        # Only an error about an option that there is not has its name.
        name = getattr(error, "option_name", None)
        if refusal := removed("option", f"{self.name} {name}"):
            return str(refusal)
        return f"there is no {name}; write instead: {INSTEAD[name]}" if name in INSTEAD else None

    def renamed(self, words: Sequence[str]) -> list[str]:
        """Return the arguments with old names of options replaced by their present names."""
        spelt = {name for option in self.params for name in option.opts}
        first = {option.name: option.opts[0] for option in self.params}
        parameters = inspect.signature(self.callback).parameters if self.callback else {}
        # An option of that name takes precedence over an old name of another.
        old = {
            name: first[parameter]
            for parameter in parameters.keys() & first.keys()
            for names in getattr(parameters[parameter].annotation, "__metadata__", ())
            if isinstance(names, OldNames)
            for name in names
            if name not in spelt
        }
        end = words.index("--") if "--" in words else len(words)
        parts = [word.partition("=") for word in words[:end]]
        return [*(old.get(name, name) + equals + value for name, equals, value in parts), *words[end:]]

    def format_options(self, context: Any, formatter: Any) -> None:
        """As any command's; options of a panel get a section of its name."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(context):
            if (record := parameter.get_help_record(context)) is not None:
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)

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
        # By name, because typer may bundle another version of click.
        if source is not None and source.name == "DEFAULT_MAP":
            option = next(option for option in parameter.opts if option.startswith("--"))
            used[option.lstrip("-")] = values[parameter.name]
    if used:
        settings = ", ".join(f"{name} = {value!r}" for name, value in used.items())
        note(f"defaults from {str(defaults_file())!r}: {settings}")


def _load(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True, slots=True)
class Command:
    """A command by name: where it is, and what `--help` says of it in one line of 80 columns.

    `prints`: the command exists for its output, so it fails if that cannot be written. The target is a function, or a
    Typer application whose commands are already guarded. `signature` is a function of the arguments that returns the
    target's signature with further options.
    """

    name: str
    target: str
    summary: str
    prints: bool = True
    signature: str | None = None

    def loaded(self, settings: MutableMapping[str, Any], arguments: Sequence[str] = ()) -> Any:
        """The click command; `settings` go to its context."""
        target = _load(self.target)
        if isinstance(target, typer.Typer):
            for info in target.registered_commands:
                info.cls = Refusing
            return typer.main.get_command(target)
        alone = typer.Typer(
            add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, context_settings=dict(settings)
        )
        command: Any = guarded(target, prints=self.prints)
        if self.signature is not None:
            command.__signature__ = _load(self.signature)(arguments)
        alone.command(self.name, cls=Answering, short_help=self.summary)(command)
        return typer.main.get_command(alone)


COMMANDS = (
    Command(
        "run",
        "dilabench.cli.run.command:run",
        "Measure a suite: verify, time, report.",
        prints=False,
        signature="dilabench.cli.run.command:signature",
    ),
    Command("plan", "dilabench.cli.run.plan:plan", "Predict what fits into memory, without running it."),
    Command(
        "verify",
        "dilabench.cli.verify.command:verify",
        "Check outputs and gradients, without timing.",
        prints=False,
    ),
    Command(
        "list",
        "dilabench.cli.show.list:list_names",
        "List implementations, backends and others, and why one cannot be used here.",
    ),
    Command("describe", "dilabench.cli.show.describe:describe", "Everything known about one name."),
    Command("doctor", "dilabench.cli.show.doctor:doctor", "The machine, the packages, and what makes times noisy."),
    Command("report", "dilabench.cli.show.report:report", "Show a stored run again, or rank several."),
    Command("compare", "dilabench.cli.compare.command:compare", "Slower, faster or the same: runs, or rows of one."),
    Command(
        "check",
        "dilabench.cli.compare.check:check",
        "Measure again, and fail if a case is slower than a baseline.",
        prints=False,
    ),
    Command("history", "dilabench.cli.compare.history:history", "Stored runs, and how a case developed over them."),
    Command("merge", "dilabench.cli.compare.merge:merge", "Join the shards of a run to one record."),
    Command(
        "calibrate",
        "dilabench.cli.compare.calibrate:calibrate",
        "Find out how noisy this machine is between sessions.",
        prints=False,
    ),
    Command("tune", "dilabench.cli.run.tune:tune", "Measure which is fastest here, for `-i auto`.", prints=False),
    Command(
        "baseline",
        "dilabench.cli.compare.baseline:baseline_app",
        "Name runs to compare with; list and remove names.",
    ),
    Command(
        "plugin",
        "dilabench.cli.author.app:plugin_app",
        "Write a plug-in; run every conformance check on one.",
    ),
)


class Commands(TyperGroup):
    """The commands of dilabench."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # Suggestions for a misspelt name look here.
        self._arguments: list[str] = []
        self.commands = dict.fromkeys(entry.name for entry in COMMANDS)  # type: ignore[assignment]

    def resolve_command(self, context: Any, args: list[str]) -> Any:
        """As any group's."""
        self._arguments = args[1:]
        try:
            return super().resolve_command(context, args)
        except Exception as error:
            if isinstance(getattr(error, "message", None), str):
                show_usage_elsewhere(error, context.command_path, asked_forms(self._arguments))
            raise

    def get_command(self, context: Any, name: str) -> Any:
        """Return the named command with the user's defaults for its options; None if unknown."""
        entry = next((entry for entry in COMMANDS if entry.name == name), None)
        if entry is None:
            if refusal := removed("command", name):
                raise stop(f"error: {refusal}", ExitCode.BAD_REQUEST, **asked_forms(self._arguments))
            return None
        try:
            require_working_folder()
            command = entry.loaded(self.context_settings, self._arguments)
            defaults = defaults_of(
                name, command, lambda: {entry.name: entry.loaded(self.context_settings) for entry in COMMANDS}
            )
            # A run is resumed as it was requested, without today's defaults.
            goes_on = any(word.partition("=")[0] == "--resume" for word in self._arguments)
            context.default_map = {} if goes_on else {name: defaults}
        except DilabenchError as error:
            raise stop(f"error: {error}", error.exit_code, **asked_forms(self._arguments)) from None
        return command

    def format_commands(self, context: Any, formatter: Any) -> None:  # noqa: ARG002 - click's signature
        """The summaries, which need no command to be imported."""
        with formatter.section("Commands"):
            formatter.write_dl([(entry.name, entry.summary) for entry in COMMANDS])


app = typer.Typer(
    name="dilabench",
    cls=Commands,
    help="A verified benchmark for long-context attention: dilated, ring and block-sparse.",
    epilog="Start with `dilabench run quick`. Exit codes: 0 fine, 2 bad request, 3 environment, 4 some case failed, "
    "5 wrong output or a time that cannot be true, 6 regression, 7 undecided (if asked), 8 nothing measured, "
    "9 incomplete (a length without a row), 130 interrupted (Ctrl-C, SIGTERM, SIGHUP) with results saved.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def list_configs(asked: bool) -> None:
    """Print the values of --config and exit, if requested."""
    if asked:
        from dilabench.cli.show.list import Kind, list_names

        list_names(Kind.WORKLOADS)
        raise typer.Exit


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"dilabench {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 - its callback has answered
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
