"""The plug-ins of a command: which were found, and which were left out."""

from collections.abc import Iterable

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
