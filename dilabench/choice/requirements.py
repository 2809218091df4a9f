"""What a descriptor requires of a machine, and what of it is missing. Nothing is imported to find out."""

import contextlib
import functools
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.machinery import ModuleSpec

from packaging.version import InvalidVersion, Version

from dilabench.errors import PluginError
from dilabench.kernels.cpu.compiled import why_unavailable
from dilabench.machine import CPU, CUDA, CXX_COMPILERS, Machine, cxx_compiler

FindModule = Callable[[str], ModuleSpec | None]
_REQUIREMENT = re.compile(r"^(?P<name>[A-Za-z0-9_.+-]+?)\s*(?:>=\s*(?P<version>[A-Za-z0-9.]+))?$")
# The forms that a version may have where it is none.
_VERSIONS = {"cuda": r"(sm\d{2,3})?", "gpus": r"\d{0,4}", "c++": ""}
NOT_PACKAGES = frozenset({*_VERSIONS, "cpu"})


def unmet(
    requires: Iterable[str], machine: Machine, find_module: FindModule = importlib.util.find_spec
) -> tuple[str, ...]:
    """Requirements that this machine does not meet, each with what is there instead.

    Forms: 'cuda', 'cuda>=sm80', 'cpu', 'gpus>=2', 'c++' (a compiler; on a CPU dilabench's own C++ is built and loaded),
    'module' or 'module>=1.2' (an importable module and the version of its distribution), 'some-distribution>=1.2' (a
    name with a dash is an installed distribution, for modules that several distributions share), and alternatives as in
    'cuda>=sm80|cpu'. `find_module` is called for modules: a submodule is found by importing its package, whose code may
    raise anything.
    """
    return tuple(
        reason for requirement in requires if (reason := _unmet_alternatives(requirement, machine, find_module))
    )


def wrong_device(devices: frozenset[str], machine: Machine) -> tuple[str, ...]:
    """Why what runs on such kinds of device has none here; empty when it has."""
    if machine.facts.among(devices):
        return ()
    why = f" ({machine.no_cuda})" if machine.no_cuda and CUDA.name in devices else ""
    return (f"runs on {', '.join(sorted(devices))}, have {machine.device}{why}",)


def is_readable(requirement: str) -> bool:
    """Return True if a requirement is in one of the forms of `unmet`."""
    return None not in map(_name_and_version, requirement.split("|"))


def _name_and_version(alternative: str) -> tuple[str, str | None] | None:
    """Split 'module>=1.2' into the name and the version; None if it is in none of the forms of `unmet`."""
    match = _REQUIREMENT.match(alternative)
    if match is None:
        return None
    name, version = match["name"], match["version"]
    form = _VERSIONS.get(name)
    readable = version is None or _version(version) is not None if form is None else re.fullmatch(form, version or "")
    return (name, version) if readable else None


def _unmet_alternatives(requirement: str, machine: Machine, find_module: FindModule) -> str | None:
    reasons = [_unmet(alternative, machine, find_module) for alternative in requirement.split("|")]
    return None if None in reasons else " or ".join(str(reason) for reason in reasons)


def _unmet(requirement: str, machine: Machine, find_module: FindModule) -> str | None:
    asked = _name_and_version(requirement)
    if asked is None:
        return f"requirement {requirement!r} cannot be read; write 'cuda>=sm80' or 'module>=1.2'"
    name, version = asked
    if name == "cuda":
        return _unmet_cuda(version, machine)
    if name == "cpu":
        return None if machine.device == "cpu" else f"needs cpu, have {machine.device}"
    if name == "gpus":
        needed = int(version or 1)
        return None if len(machine.gpus) >= needed else f"needs {needed} GPUs, have {len(machine.gpus)}"
    if name == "c++":
        return _unmet_compiler(machine)
    return _unmet_distribution(name, version) if "-" in name else _unmet_module(name, version, find_module)


def _unmet_cuda(version: str | None, machine: Machine) -> str | None:
    if machine.device != "cuda":
        return f"needs cuda, have {machine.device}" + (f" ({machine.no_cuda})" if machine.no_cuda else "")
    if version:
        needed = int(version.removeprefix("sm"))
        if machine.compute_capability < needed:
            return f"needs cuda sm{needed} or newer, have sm{machine.compute_capability}"
    return None


def _unmet_compiler(machine: Machine) -> str | None:
    if cxx_compiler() is None:
        return f"needs a C++ compiler, none of {', '.join(CXX_COMPILERS)} works here"
    # Only what runs on the CPU is worth seconds of compilation.
    return why_unavailable() if machine.device == CPU.name else None


def _unmet_distribution(name: str, version: str | None) -> str | None:
    try:
        installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return f"distribution {name} is not installed"
    if version is not None and is_older(installed, version):
        return f"needs {name} {version} or newer, have {installed}"
    return None


def _unmet_module(name: str, version: str | None, find_module: FindModule) -> str | None:
    try:
        spec = find_module(name)
    # Its package's code may raise anything.
    except Exception as error:  # noqa: BLE001
        cause = error.__cause__ if isinstance(error, PluginError) else error
        if isinstance(cause, ModuleNotFoundError) and cause.name and name.startswith(f"{cause.name}."):
            return f"module {cause.name} is not installed"
        why = error.why if isinstance(error, PluginError) and not isinstance(cause, ImportError) else cause
        return f"module {name} is broken: {why}"
    if spec is None:
        return f"module {name} is not installed"
    if version is None:
        return None
    installed = installed_version(name.partition(".")[0])
    if installed is None:
        return f"module {name} has no version, {version} or newer is needed"
    if is_older(installed, version):
        return f"needs {name} {version} or newer, have {installed}"
    return None


def installed_version(name: str) -> str | None:
    """The version of the distribution that a module comes from, nearly always one of the same name, or of the
    distribution of this name; None if neither is installed.
    """
    for distribution in _distributions_of(name):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return None


def _distributions_of(module: str) -> Iterator[str]:
    yield module
    yield from _distributions_by_module().get(module, ())


@functools.cache
def _distributions_by_module() -> Mapping[str, list[str]]:
    # Reads what every installed distribution lists: a tenth of a second.
    return importlib.metadata.packages_distributions()


def is_older(installed: str, needed: str) -> bool:
    """Return True if a version is below another by PEP 440: 2.10rc1 is below 2.10, 2.10+cu128 is not.

    An installed version that PEP 440 does not know counts as older.
    """
    have, least = _version(installed), _version(needed)
    return have is None or least is None or have < least


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None
