"""The functions of torch, Python and dilabench that times rely on, saved before any plug-in is imported.

A plug-in could detect that it is being checked, and compute only then, by replacing a method of Tensor, a mode that
sees every operator, or the clock. `restored` names the replaced functions and puts the originals back. This module is
imported before any plug-in.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, overrides
from torch.utils import _python_dispatch

_TENSOR_BASE = torch._C.TensorBase
_METHODS = dict(vars(Tensor))
_FUNCTIONS: tuple[tuple[ModuleType, str, tuple[str, ...]], ...] = (
    (time, "time", ("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time", "time_ns")),
    (torch.autograd, "torch.autograd", ("grad", "backward")),
    (torch.cuda, "torch.cuda", ("synchronize", "Event", "Stream", "_sleep", "current_stream")),
    (
        torch,
        "torch",
        (
            *("equal", "isfinite", "isnan", "where", "stack", "cat", "tensor", "arange", "zeros", "zeros_like", "full"),
            "finfo",
            *("full_like", "ones_like", "empty", "empty_like", "empty_strided", "randn", "randint", "maximum"),
        ),
    ),
)
_KNOWN = tuple(
    (owner, f"{text}.{name}", name, getattr(owner, name)) for owner, text, names in _FUNCTIONS for name in names
)


class Known(NamedTuple):
    """A Python function of dilabench as it was: its place, its code, and the defaults of its arguments."""

    owner: Any
    name: str
    function: FunctionType
    code: CodeType
    defaults: tuple[Any, ...] | None
    named_defaults: dict[str, Any]


def functions_of(*owners: Any) -> tuple[Known, ...]:
    """The functions that are defined in these classes and modules, as they are now."""
    return tuple(
        Known(owner, name, function, function.__code__, function.__defaults__, dict(function.__kwdefaults__ or {}))
        for owner in owners
        for name, function in vars(owner).items()
        if isinstance(function, FunctionType) and function.__module__ == getattr(owner, "__module__", owner.__name__)
    )


_SIGNALS = [name for name in ("SIGALRM", "SIGVTALRM", "SIGPROF", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)]
# Functions that Python calls between the lines of any code, and handlers of signals, as `watched` found them.
_HOOKS: dict[str, Any] = {}


# Functions of dilabench, as the calling process knew them before any plug-in.
_OWN: list[Known] = []


@contextmanager
def watched(functions: Sequence[Known] = ()) -> Iterator[None]:
    """In it, compare these functions too, and profile and trace functions, callbacks of collections and signal handlers
    with the present ones: the calling process may have its own, a debugger's for example.
    """
    _HOOKS.update({name: get() for name, get, _ in _hooks()})
    _OWN[:] = functions
    try:
        yield
    finally:
        _HOOKS.clear()
        _OWN.clear()


def _hooks() -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], object]]]:
    yield "sys.setprofile was used", sys.getprofile, sys.setprofile
    yield "sys.settrace was used", sys.gettrace, sys.settrace
    yield "gc.callbacks was changed", lambda: list(gc.callbacks), partial(gc.callbacks.__setitem__, slice(None))
    if threading.current_thread() is threading.main_thread():
        for name in _SIGNALS:
            number = getattr(signal, name)
            yield (
                f"the handler of {name} was replaced",
                partial(signal.getsignal, number),
                partial(signal.signal, number),
            )


def restored() -> list[str]:
    """Restore the replaced functions, and return their names."""
    return [*_methods_restored(), *_functions_restored(), *_own_restored(), *_modes_left(), *_hooks_left()]


def _methods_restored() -> Iterator[str]:
    now = vars(Tensor)
    changed = [name for name, was in _METHODS.items() if now.get(name, _METHODS) is not was]
    hiding = [name for name in now.keys() - _METHODS.keys() if getattr(_TENSOR_BASE, name, now[name]) is not now[name]]
    for name in changed:
        setattr(Tensor, name, _METHODS[name])
    for name in hiding:
        delattr(Tensor, name)
    yield from (f"Tensor.{name} was replaced" for name in sorted([*changed, *hiding]))


def _functions_restored() -> Iterator[str]:
    for owner, text, name, was in _KNOWN:
        if getattr(owner, name, None) is not was:
            setattr(owner, name, was)
            yield f"{text} was replaced"


def _own_restored() -> Iterator[str]:
    for known in _OWN:
        function: Any = known.function
        text = function.__qualname__
        if vars(known.owner).get(known.name) is not function:
            setattr(known.owner, known.name, function)
            yield f"{text} was replaced"
        if function.__code__ is not known.code:
            function.__code__ = known.code
            yield f"the code of {text} was replaced"
        if function.__defaults__ is not known.defaults or (function.__kwdefaults__ or {}) != known.named_defaults:
            function.__defaults__, function.__kwdefaults__ = known.defaults, dict(known.named_defaults) or None
            yield f"the defaults of {text} were replaced"


def _hooks_left() -> Iterator[str]:
    for what, get, put in _hooks():
        if what in _HOOKS and _differ(get(), _HOOKS[what]):
            put(_HOOKS[what])
            yield what


def _differ(now: Any, then: Any) -> bool:
    """Whether they are other objects, or lists of others; their own equality does not count."""
    if isinstance(now, list) and isinstance(then, list):
        return [*map(id, now)] != [*map(id, then)]
    return now is not then


def _modes_left() -> Iterator[str]:
    """Modes for operators and for functions that were entered and never left."""
    stacks: tuple[tuple[str, Any, Any], ...] = (
        ("TorchDispatchMode", torch._C._len_torch_dispatch_stack, _python_dispatch._pop_mode),
        ("TorchFunctionMode", torch._C._len_torch_function_stack, overrides._pop_mode),
    )
    for kind, length, pop in stacks:
        while length():
            yield f"a {kind} ({type(pop()).__name__}) was entered and not left"
