"""The plug-ins of a command: which were found, and which were left out."""

from collections.abc import Iterable, Sequence

from dilabench.cli.options import names
from dilabench.cli.terminal import note
from dilabench.plugins.boundary import Problem
from dilabench.plugins.manager import Found, discover


def discovered(strict: bool = False) -> Found:
    """The plug-ins; says on stderr which were left out. With `strict`, raises PluginError for the first of them."""
    found = discover(strict)
    tell_of(found.problems)
    return found


def tell_of(problems: Iterable[Problem]) -> None:
    """Say on stderr which plug-ins, or parts of them, were left out, and why."""
    for problem in problems:
        note(f"left out, plug-in {problem.plugin!r}: {problem.why}")


def real_names(
    implementations: Sequence[str] | None, backends: Sequence[str] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What records call the implementations and backends that -i and -b name, aliases resolved.

    A name that is not known here may be that of a plug-in which made the record, and stays.
    """
    wanted = names(implementations), names(backends)
    if not any(wanted):
        return (), ()
    catalogue = discover().catalogue
    known, kernels = catalogue.implementations, catalogue.backends
    return (
        tuple(known.get(one).name if one in known else one for one in wanted[0]),
        tuple(kernels.get(one).name if one in kernels else one for one in wanted[1]),
    )
