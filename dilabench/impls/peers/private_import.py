"""A project's module, imported for an adapter alone: with other modules in place of some, and without a trace."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

from dilabench.impls.peers.paths import search_peer_paths


def imported(name: str, *given: ModuleType, install: str) -> ModuleType:
    """`imported_together` of one module."""
    return imported_together((name,), *given, install=install)[0]


def imported_together(names: Sequence[str], *given: ModuleType, install: str) -> tuple[ModuleType, ...]:
    """Modules `package.module` of one package, imported again while the modules `given` are found by their names.

    The package itself is not imported: it may need packages that the modules do not. Raises ModuleNotFoundError if the
    package is missing, saying how to `install` it.
    """
    search_peer_paths()
    package = names[0].partition(".")[0]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError(f"the package {package} is not installed; {install}")
    shell = ModuleType(package)
    shell.__path__ = list(spec.submodule_search_locations)
    with _importable(package, (shell, *given)):
        return tuple(map(importlib.import_module, names))


@contextmanager
def _importable(package: str, modules: Sequence[ModuleType]) -> Iterator[None]:
    """Put modules into sys.modules inside the block; afterwards the modules of these names, and all of the package that
    was imported before, are restored.
    """
    names = {module.__name__ for module in modules}

    def of_ours(name: str) -> bool:
        return name in names or name.startswith(f"{package}.")

    kept = {name: module for name, module in sys.modules.items() if of_ours(name)}
    for name in kept:
        del sys.modules[name]
    sys.modules.update({module.__name__: module for module in modules})
    try:
        yield
    finally:
        for name in [name for name in sys.modules if of_ours(name)]:
            del sys.modules[name]
        sys.modules.update(kept)
