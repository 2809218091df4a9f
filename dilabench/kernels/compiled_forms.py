"""Compiled kernels found again by what a launch is given, as Triton finds them, in a fraction of the time.

Tensors of a layout that was not met before have no launch to repeat, yet their kernel is there: numbers that change
with a length are not compiled in. Triton would bind all arguments and look at each of them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from torch import Tensor
from triton.runtime import driver

from dilabench.kernels.direct_launch import DirectLaunch

# What Triton compiles in of the address of a tensor, and of a number: whether it is a multiple.
_ALIGNED = 16
_LEAST_INT32, _MOST_INT32 = -(2**31), 2**31 - 1


class CompiledForms:
    """The compiled forms of one kernel. Arguments are by name; those that are no parameters are options."""

    def __init__(self, kernel: Any) -> None:
        self._names = tuple(kernel.arg_names)
        self._parameters = frozenset(self._names)
        constants = [one.name for one in kernel.params if one.is_constexpr]
        lengths = [one.name for one in kernel.params if one.do_not_specialize and not one.is_constexpr]
        self._constants, self._lengths = _getter(constants), _getter(lengths)
        self._others = tuple(
            (one.name, one.do_not_specialize_on_alignment)
            for one in kernel.params
            if not one.is_constexpr and not one.do_not_specialize
        )
        self._known: dict[tuple[Any, ...], tuple[DirectLaunch, Any]] = {}

    def launch(self, grid: tuple[int], arguments: dict[str, Any]) -> Any:
        """Launch the form for these arguments, which it gives, if it is known; else None."""
        if not self._known:
            # Nor is anything asked of tensors that are there for their shapes only.
            return None
        known = self._known.get(self.form(arguments))
        if known is None:
            return None
        direct, compiled = known
        direct.launch((*grid, 1, 1)[:3], [arguments[name] for name in self._names])
        return compiled

    def keep(self, arguments: dict[str, Any], compiled: Any) -> None:
        """Remember what Triton launched for these arguments."""
        if (direct := DirectLaunch.of(compiled)) is not None:
            self._known[self.form(arguments)] = direct, compiled

    def form(self, arguments: dict[str, Any]) -> tuple[Any, ...]:
        """Everything that Triton compiles for: equal where it would take the same compiled kernel."""
        lengths = self._lengths(arguments)
        # Of these only the size counts, which is that of nearly all.
        small = not lengths or _LEAST_INT32 <= min(lengths) <= max(lengths) <= _MOST_INT32
        sizes = None if small else tuple(_LEAST_INT32 <= number <= _MOST_INT32 for number in lengths)
        found = [driver.active.get_current_device(), self._constants(arguments), sizes]
        for name, anywhere in self._others:
            value = arguments[name]
            if isinstance(value, Tensor):
                found.append((value.dtype, anywhere or value.data_ptr() % _ALIGNED == 0))
            elif isinstance(value, int):
                found.append((_LEAST_INT32 <= value <= _MOST_INT32, value == 1, value % _ALIGNED == 0))
            elif value is None or isinstance(value, float):
                found.append(type(value))
            else:
                found.append((type(value), value.base.dtype, *value.block_shape, getattr(value, "layout", None)))
        found += [option for option in arguments.items() if option[0] not in self._parameters]
        return tuple(found)


def _getter(names: Sequence[str]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """The values of these names, in a tuple."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda arguments: tuple(arguments[name] for name in names)
