"""Functions of a script as implementations of one run: `dilabench.run(implementations=function)`. No torch.

A worker process imports the function by the name of its module, as it imports the target of any implementation.
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dilabench.choice.descriptors import Implementation
from dilabench.errors import ConfigError
from dilabench.plugins import ANY_PATTERN, Capabilities, hookimpl
from dilabench.plugins.catalogue import Catalogue

# Parameters of an attention function, and of a function that builds one.
ATTENTION, BUILD = ("q", "k", "v"), ("workload", "context")
_BUILT = "attention_"


class Functions:
    """The plug-in of functions `attention(q, k, v)` or `build(workload, context)`, named as these are.

    They are tried on every workload that is asked for; verification shows whether they compute it. Raises ConfigError
    for a function that a worker process cannot import.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        self._implementations = [_described(function) for function in functions]
        self.__name__ = ", ".join(dict.fromkeys(_module_of(function) for function in functions))

    @property
    def names(self) -> list[str]:
        """The names of the implementations, in the order of the functions."""
        return [implementation.name for implementation in self._implementations]

    def refuse_left_out(self, catalogue: Catalogue) -> None:
        """Raise ConfigError for a function whose name another implementation has: that one would be measured."""
        for name in self.names:
            if name not in catalogue.implementations or catalogue.implementations.origin(name) != self.__name__:
                raise ConfigError(
                    f"there is an implementation {name!r} already (`dilabench list`); rename the function"
                )

    @hookimpl
    def dilabench_register_implementations(self) -> list[Implementation]:
        """One implementation for each function."""
        return self._implementations


def __getattr__(name: str) -> Callable[..., Any]:
    """The build function of a target of this module, which has the attention function's place in hexadecimal digits."""
    if not name.startswith(_BUILT):
        raise AttributeError(name)
    module, _, attribute = bytes.fromhex(name.removeprefix(_BUILT)).decode().partition(":")
    function = getattr(importlib.import_module(module), attribute)
    return lambda workload, context: function  # noqa: ARG005 - what `build` is given


def _described(function: Callable[..., Any]) -> Implementation:
    name, target = function.__qualname__, f"{_module_of(function)}:{function.__qualname__}"
    if not name.isidentifier():
        raise ConfigError(
            f"implementation {name!r} is not defined at the top of its module, so that worker processes cannot import "
            "it; move it there, with `def`"
        )
    needed = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if len(needed) not in (len(ATTENTION), len(BUILD)):
        raise ConfigError(
            f"implementation {name!r} needs {len(needed)} arguments; write an attention function of "
            f"({', '.join(ATTENTION)}), or a function of ({', '.join(BUILD)}) that returns one"
        )
    if len(needed) == len(ATTENTION):
        target = f"{__name__}:{_BUILT}{target.encode().hex()}"
    supports = Capabilities(patterns=ANY_PATTERN, zero_keys=True, sums=True)
    return Implementation(name, f"function {name} of {_module_of(function)}", target, supports=supports)


def _module_of(function: Callable[..., Any]) -> str:
    """The name under which a worker process imports the function's module."""
    if function.__module__ != "__main__":
        return function.__module__
    file = getattr(sys.modules["__main__"], "__file__", None)
    module = Path(file).stem if file else ""
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if file is None or spec is None or spec.origin is None or not Path(spec.origin).samefile(file):
        raise ConfigError(
            f"implementation {function.__qualname__!r} is of a notebook or an interactive session, which worker "
            "processes cannot import; write it into a file, and import it from there"
        )
    return module
