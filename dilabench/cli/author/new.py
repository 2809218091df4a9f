"""`dilabench plugin new`: a small package that adds one component, installs, and passes its test unchanged."""

import importlib.util
import keyword
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from dilabench.atomic_file import write_text
from dilabench.cli.terminal import say
from dilabench.errors import ConfigError, EnvironmentNotReady
from dilabench.plugins.manager import REGISTRIES, RESERVED, discover
from dilabench.version import __version__

TEMPLATES = Path(__file__).with_name("templates")
COMMON = "common"
SUFFIX = ".j2"
_NAME = re.compile(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*")


class Kind(StrEnum):
    """The kinds of things that a plug-in can add."""

    IMPLEMENTATION = "implementation"
    BACKEND = "backend"
    PATTERN = "pattern"
    SUITE = "suite"
    REPORTER = "reporter"
    TIMER = "timer"
    WORKLOAD = "workload"


KindOption = Annotated[Kind, typer.Option("--kind", "-k", help="The kind of thing that the package adds.")]


def new(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the thing, its package and its folder: my-attention.")
    ],
    kind: KindOption = Kind.IMPLEMENTATION,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="The folder that gets a folder for the package.")
    ] = Path(),
) -> None:
    """Write a package that adds one thing to dilabench: entry point, descriptor, code, test, README.

    It installs with pip and passes its test as it is. Existing files are never overwritten.
    """
    package = _package_name(name, kind)
    folder = output / name
    files = dict(_files(name, package, kind))
    try:
        output.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except FileExistsError as error:
        way_out = "choose another name, or another place with -o"
        raise ConfigError(f"{str(error.filename)!r} exists, and files are never overwritten; {way_out}") from None
    except OSError as error:
        raise EnvironmentNotReady(
            f"{str(folder)!r} cannot be made: {error.strerror}; choose another place with -o"
        ) from None
    for path, text in files.items():
        write_text(folder / path, text)
        say(str(folder / path))
    # Without a separator pip would look for a package with this name.
    place = folder if folder.is_absolute() else f".{os.sep}{folder}"
    say(f'\nnext: pip install -e "{place}[test]" && pytest {place}')


def _package_name(name: str, kind: Kind) -> str:
    """The import name. Raises ConfigError for a name that cannot be one, or that is taken."""
    package = name.replace("-", "_")
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot name a package: small letters, digits, and '-' or '_' between them; "
            "write for example my-attention"
        )
    if keyword.iskeyword(package) or keyword.issoftkeyword(package) or package in sys.stdlib_module_names:
        raise ConfigError(f"{name!r} is a word or a module of Python's own; choose another name")
    # A folder without code has a spec, too, but no origin.
    if (spec := importlib.util.find_spec(package)) is not None and spec.origin is not None:
        raise ConfigError(f"module {package!r} is there already and would be hidden; choose another name")
    catalogue = discover().catalogue
    (registry,) = (getattr(catalogue, registry) for registry in REGISTRIES if getattr(catalogue, registry).kind == kind)
    if name in registry:
        raise ConfigError(
            f"{kind} {name!r} is already registered by plug-in {registry.origin(name)!r}; choose another name"
        )
    if name in RESERVED:
        raise ConfigError(f"{name!r} means several names on the command line; choose another name")
    return package


def _files(name: str, package: str, kind: Kind) -> Iterator[tuple[Path, str]]:
    """Path inside the new folder and text of each file."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # The files are Python, TOML and Markdown.
    environment = Environment(loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, keep_trailing_newline=True)
    of_kind: dict[str, Any] = tomllib.loads((TEMPLATES / "kinds.toml").read_text(encoding="utf-8"))[kind]
    facts = {
        **of_kind,
        "use": of_kind["use"].format(name=name),
        "name": name,
        "package": package,
        "class": package.title().replace("_", ""),
        "kind": kind.value,
        "version": __version__,
    }
    for part in (COMMON, kind.value):
        for template in sorted((TEMPLATES / part).rglob(f"*{SUFFIX}")):
            inside = template.relative_to(TEMPLATES / part).with_suffix("")
            place = Path(*(word.replace("package", package) for word in inside.parts))
            yield place, environment.get_template(str(template.relative_to(TEMPLATES))).render(facts)
