"""Defaults of options from `dilabench.toml`, or `[tool.dilabench]` of a pyproject.toml.

A key is an option's name without its dashes. Top-level keys apply to every command with this option; the keys of a
table apply to the command with its name:

    device = "cpu"
    [run]
    budget = "60s"
    implementations = ["gather", "strided"]

The first such file counts, from the working folder upwards. Options on the command line take precedence.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dilabench.atomic_file import read_file
from dilabench.errors import ConfigError, unknown_name
from dilabench.retired import removed

OWN_FILE = "dilabench.toml"
PROJECT_FILE = "pyproject.toml"
TOOL = "dilabench"


def defaults_of(name: str, command: Any, commands: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """The defaults of a command by the names of its parameters; for a group, by the names of its commands.

    Raises ConfigError for a key that is no option of the command, or, at the top, of none of `commands`.
    """
    found = _file(Path.cwd())
    if found is None:
        return {}
    path, settings = found
    try:
        return _of_command(name, command, settings, commands)
    except ConfigError as error:
        raise ConfigError(f"defaults in {str(path)!r}: {error}") from None


def defaults_file() -> Path | None:
    """The file of defaults that applies here, if there is one. Raises ConfigError if it cannot be read."""
    found = _file(Path.cwd())
    return None if found is None else found[0]


def _of_command(
    name: str, command: Any, settings: Mapping[str, Any], commands: Callable[[], Mapping[str, Any]]
) -> dict[str, Any]:
    everywhere = {key: value for key, value in settings.items() if not isinstance(value, dict)}
    options = _options(command)
    unknown = everywhere.keys() - options.keys()
    tables = {key for key, value in settings.items() if isinstance(value, dict)} - {name}
    if unknown or tables:
        # Rarely: each command has to be imported for that.
        known = commands()
        for key in sorted(tables - known.keys()):
            raise removed("command", key) or unknown_name("command", key, known, command="dilabench --help")
        for key in sorted(everywhere.keys() & known.keys()):
            # An option may have the name of another command.
            if isinstance(several := everywhere[key], list) and any(isinstance(item, dict) for item in several):
                raise ConfigError(f"{key} {several!r:.80} is no table; write the command's options below [{key}]")
        all_options = {option for command in known.values() for option in _options(command)}
        for key in sorted(unknown - all_options):
            raise unknown_name("option", key, all_options, command="dilabench --help")
    table = settings.get(name)
    own = table if isinstance(table, dict) else {}
    for key in own:
        if key not in options:
            spelt = f"{name} --{key.replace('_', '-')}"
            raise removed("option", spelt) or unknown_name(
                f"option of {name}", key, options, command=f"dilabench {name} --help"
            )
    values = {**{key: everywhere[key] for key in everywhere.keys() & options.keys()}, **own}
    return {options[key]: value for key, value in values.items()}


def _options(command: Any) -> dict[str, str]:
    """Names of a command's options, with dashes or underscores between words, and the parameters that they set."""
    spelt = {
        option.lstrip("-"): parameter.name
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("--") and not parameter.is_eager
    }
    return spelt | {option.replace("-", "_"): parameter for option, parameter in spelt.items()}


def _file(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The nearest file with defaults, and its content. Raises ConfigError if it cannot be read."""
    for path in (above / name for above in (folder, *folder.parents) for name in (OWN_FILE, PROJECT_FILE)):
        if not path.is_file():
            continue
        settings: Any = _tables(path)
        for table in ("tool", TOOL) if path.name == PROJECT_FILE else ():
            # A file of other tools: only dilabench's tables are read.
            settings = settings.get(table) if isinstance(settings, dict) else None
        if isinstance(settings, dict):
            return path, settings
        if settings is not None:
            raise ConfigError(f"defaults in {str(path)!r}: tool.{TOOL} {settings!r:.80} is no table")
    return None


def _tables(path: Path) -> dict[str, Any]:
    # It loads pydantic, and most commands have no file of defaults.
    from dilabench.validation import parsed_toml

    try:
        return parsed_toml(read_file(path).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"defaults in {str(path)!r} cannot be read: {error}") from None
