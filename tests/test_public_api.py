"""The compatibility promise (docs/reference/compatibility.md): what is public keeps its name and its arguments.

`python tests/test_public_api.py` adds what is new to the snapshot. What has gone or changed it leaves for a person:
deprecate first, and edit the snapshot when the time of the deprecation is over.
"""

import ast
import dataclasses
import importlib
import inspect
import json
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from dilabench.cli.app import COMMANDS

ROOT = Path(__file__).parents[1]
SNAPSHOT = ROOT / "tests" / "golden" / "public_api.json"
PAGE = ROOT / "docs" / "reference" / "compatibility.md"
# Modules of which everything in __all__, or else everything that they define, is public.
MODULES = (
    "dilabench.attention",
    "dilabench.compat.torchscale",
    "dilabench.compat.transformers",
    "dilabench.contracts",
    "dilabench.distributed.model",
    "dilabench.engine.timers",
    "dilabench.errors",
    "dilabench.impls.visible_keys",
    "dilabench.patterns",
    "dilabench.patterns.pattern",
    "dilabench.plugins",
    "dilabench.plugins.hookspecs",
    "dilabench.pytest_plugin",
    "dilabench.record",
    "dilabench.report.findings",
    "dilabench.request",
    "dilabench.suites.planner",
    "dilabench.testing",
    "dilabench.workload.spec",
)


def public_api() -> dict[str, Any]:
    """Every public name with its arguments, fields, members; exit codes and options of the commands."""
    import dilabench

    found = {f"dilabench.{name}": described(getattr(dilabench, name)) for name in dilabench.__all__}
    for name in MODULES:
        module = importlib.import_module(name)
        for attribute in getattr(module, "__all__", None) or defined(module):
            found[f"{name}.{attribute}"] = described(getattr(module, attribute))
    for one in COMMANDS:
        command = one.loaded({})
        for name, part in (getattr(command, "commands", None) or {"": command}).items():
            found[f"dilabench {one.name} {name}".strip()] = sorted(parameter.name for parameter in part.params)
    return found


def defined(module: Any) -> list[str]:
    """Public classes and functions that a module defines, or exports by `import name as name`; no constants."""
    imports = [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.ImportFrom)]
    exported = {alias.name for node in imports for alias in node.names if alias.asname == alias.name}
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and callable(value)
        and (getattr(value, "__module__", "") == module.__name__ or (name in exported and inspect.isclass(value)))
    ]


def described(value: Any) -> Any:
    """What somebody's code relies on: members, fields and methods of a class, arguments of a function."""
    if not inspect.isclass(value):
        return arguments(value) if inspect.isfunction(value) else type(value).__name__
    if issubclass(value, Enum):
        return {name: member.value for name, member in value.__members__.items()}
    if issubclass(value, BaseModel):
        fields = {name: "required" if one.is_required() else "optional" for name, one in value.model_fields.items()}
    elif dataclasses.is_dataclass(value):
        missing = dataclasses.MISSING
        fields = {
            one.name: "required" if one.default is missing and one.default_factory is missing else "optional"
            for one in dataclasses.fields(value)
        }
    else:
        fields = {}
    own = {name: inspect.unwrap(getattr(one, "__func__", one)) for name, one in vars(value).items()}
    methods = {name: arguments(one) for name, one in own.items() if name[0] != "_" and inspect.isfunction(one)}
    kinds = property, cached_property
    properties = {name: "property" for name, one in own.items() if name[0] != "_" and isinstance(one, kinds)}
    return fields | methods | properties


def arguments(function: Any) -> list[str]:
    """Names of the parameters in order; '=' where they may be left out, '*' before those that need their names."""
    found = []
    for one in inspect.signature(function).parameters.values():
        sign = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**", one.KEYWORD_ONLY: "* "}.get(one.kind, "")
        found.append(f"{sign}{one.name}" + ("=" if one.default is not one.empty else ""))
    return found


def broken(old: Any, new: Any, at: str) -> list[str]:
    """Where the new description lacks something of the old one, or has it otherwise."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [found for name in old for found in broken(old[name], new.get(name), f"{at}.{name}")] + [
            f"{at}.{name} is required and was not there" for name in new.keys() - old.keys() if new[name] == "required"
        ]
    if isinstance(old, list) and isinstance(new, list):
        added = [one for one in new if one not in old and not one.endswith("=") and one[0] != "*"]
        gone = [one for one in old if one not in new and f"{one}=" not in new]
        moved = [one for one in new if one in old] != [one for one in old if one in new]
        if " " in at:
            return [f"{at} has lost {', '.join(gone)}"] if gone else []
        return [f"{at}({', '.join(old)}) is now ({', '.join(new)})"] if gone or added or moved else []
    return [] if old == new or (old, new) == ("required", "optional") else [f"{at} was {old}, is {new}"]


def known() -> dict[str, Any]:
    """The snapshot."""
    return json.loads(SNAPSHOT.read_text())


def test_what_is_public_is_still_there() -> None:
    now = public_api()
    lost = [problem for name, one in known().items() for problem in broken(one, now.get(name), name)]
    assert lost == [], "deprecate it first (docs/reference/compatibility.md)"


def test_what_is_new_is_in_the_snapshot() -> None:
    assert public_api() == known(), "run python tests/test_public_api.py and commit the snapshot"


def test_the_page_names_every_public_module() -> None:
    text = PAGE.read_text()
    assert [name for name in ("dilabench", *MODULES) if f"`{name}`" not in text] == []


def test_a_loss_is_found_and_an_addition_is_none() -> None:
    def old(a: int, b: int = 0) -> None: ...
    def longer(a: int, b: int = 0, *, c: int = 0) -> None: ...
    def renamed(a: int, c: int = 0) -> None: ...

    assert broken(described(old), described(longer), "f") == []
    assert broken(described(old), described(renamed), "f") == ["f(a, b=) is now (a, c=)"]
    assert broken({"a": "required"}, {"a": "optional", "b": "optional"}, "C") == []
    assert broken({"a": "optional"}, {"b": "required"}, "C") == [
        "C.a was optional, is None",
        "C.b is required and was not there",
    ]


if __name__ == "__main__":
    snapshot, present = (known() if SNAPSHOT.exists() else {}), public_api()
    problems = [problem for name, one in snapshot.items() for problem in broken(one, present.get(name), name)]
    if problems:
        raise SystemExit("\n".join(problems))
    SNAPSHOT.write_text(json.dumps(present, indent=1, sort_keys=True) + "\n")
