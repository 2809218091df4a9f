"""Launches that repeat: what Triton finds out at every call of a kernel, found out once for tensors of one layout.

A call binds its arguments, looks at each for what to specialise on and looks the compiled kernel up: tens of
microseconds of the host for forty arguments, more than a small problem takes on a GPU. For tensors of equal shapes,
strides, dtypes and alignment all of that comes out alike, and so do the tables of tiles that a launch reads: what
differs are the addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor
from triton.compiler import CompiledKernel

# Bulk copies step in units of so many bytes, and Triton specialises on addresses that are a multiple of them.
COPY_BYTES = 16

Arguments = tuple[tuple[int], dict[str, Any]]
"""Grid and keyword arguments of a launch."""


class Launched(NamedTuple):
    """A launch that was made. compiled: what ran; None under the interpreter, and where memory is traced."""

    kernel: Any
    compiled: Any
    grid: tuple[int]
    arguments: dict[str, Any]


def run(kernel: Any, grid: tuple[int], arguments: dict[str, Any]) -> Launched:
    """Launch a kernel by its keyword arguments."""
    return Launched(kernel, kernel[grid](**arguments), grid, arguments)


_compiled: set[tuple[Any, ...]] = set()


def launch(kernel: Any, arguments: Callable[[bool], Arguments], ragged: bool, *kind: Any) -> Launched:
    """Run a kernel on its ``arguments(ragged)``, where tiles are cut or not.

    At the first call of a ``kind`` (all else that it is compiled for) both forms are compiled, so that no later length
    compiles anything.
    """
    if (kernel, *kind) not in _compiled:
        _compiled.add((kernel, *kind))
        grid, other = arguments(not ragged)
        kernel.warmup(grid=grid, **other)
    return run(kernel, *arguments(ragged))


class Launches:
    """The launches of one pass for tensors of one layout. Empty until the first call has made them."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Repeated] = {}
        self._facts: dict[str, Any] = {}

    def once(self, name: str, find: Callable[[], Any]) -> Any:
        """What `find` gives, which depends on the layout alone: found at the first call."""
        if name not in self._facts:
            self._facts[name] = find()
        return self._facts[name]

    def repeat(self, name: Hashable, tensors: Mapping[str, Tensor]) -> bool:
        """Make the launch of this name for other tensors; False where it is not known yet."""
        known = self._known.get(name)
        if known is None:
            return False
        known.launch(tensors)
        return True

    def keep(self, name: Hashable, launched: Launched, tensors: Mapping[str, Tensor]) -> None:
        """Remember a launch; `tensors` are those that are others the next time: its arguments x_ptr, x_desc
        or x_tail_desc of x."""
        if isinstance(launched.compiled, CompiledKernel):
            self._known[name] = _Repeated(launched, tensors)


class _Repeated:
    """A launch whose tensors are exchanged. It holds on to none of them, only to what else it was given (tables)."""

    def __init__(self, launched: Launched, tensors: Mapping[str, Tensor]) -> None:
        self._run = launched.compiled[(*launched.grid, 1, 1)[:3]]
        self._values = [launched.arguments[name] for name in launched.kernel.arg_names]
        self._tensors: list[tuple[int, str]] = []
        self._descriptors: list[tuple[int, str, Any]] = []
        for place, argument in enumerate(launched.kernel.arg_names):
            name, _, form = argument.rpartition("_")
            name = name.removesuffix("_tail")
            if name not in tensors or self._values[place] is None:
                continue
            if form == "ptr":
                self._tensors.append((place, name))
                self._values[place] = None
            elif form == "desc":
                self._descriptors.append((place, name, _with_base(self._values[place], None)))
                self._values[place] = None

    def launch(self, tensors: Mapping[str, Tensor]) -> None:
        values = self._values.copy()
        for place, name in self._tensors:
            values[place] = tensors[name]
        for place, name, descriptor in self._descriptors:
            values[place] = _with_base(descriptor, tensors[name])
        self._run(*values)


def _with_base(descriptor: Any, base: Tensor | None) -> Any:
    """The same view of another tensor, by a descriptor of Triton or Gluon, without the checks that the first passed."""
    other = object.__new__(type(descriptor))
    vars(other).update(vars(descriptor), base=base)
    return other


def layout(x: Tensor) -> tuple[Hashable, ...]:
    """What a launch depends on of a tensor, but for its address and contents."""
    return x.shape, x.stride(), x.dtype, x.device, type(x), x.data_ptr() % COPY_BYTES


# Each holds the tables of a length on the device for as long as it is here: few, for lengths change from call to call.
@lru_cache(maxsize=32)
def launches(*_key: Hashable) -> Launches:
    """The launches of a pass under this key: everything that they depend on, `layout` of each tensor included."""
    return Launches()
