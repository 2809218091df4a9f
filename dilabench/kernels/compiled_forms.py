"""Compiled kernels found again by what a launch is given, as Triton finds them, in a fraction of the time.

A layout of tensors that was not met before has no launch to repeat, yet the kernel is compiled: numbers that change
with a length are not. Triton binds and looks at the arguments for 250 microseconds on a slow host.
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
        self._known: dict[tuple[Any, ...], DirectLaunch] = {}
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def launch(self, grid: tuple[int], arguments: dict[str, Any]) -> Any:
        """Launch the form for these arguments, which it gives, if it is known; else None."""
        if not self._known:
            # Nor is anything asked of tensors that are there for their shapes only.
            return None
        form = self.form(arguments)
        known = self._known.get(form)
        if known is None:
            return None
        known.launch((*grid, 1, 1)[:3], [arguments[name] for name in self._names])
        return self._compiled[form]

    def keep(self, arguments: dict[str, Any], compiled: Any) -> None:
        """Remember what Triton launched for these arguments."""
        if (direct := DirectLaunch.of(compiled)) is not None:
            form = self.form(arguments)
            self._known[form], self._compiled[form] = direct, compiled

    def form(self, arguments: dict[str, Any]) -> tuple[Any, ...]:
        """Everything that Triton compiles for: equal where it would take the same compiled kernel."""
        found = [driver.active.get_current_device(), self._constants(arguments)]
        lengths = self._lengths(arguments)
        # Of these only the size counts, which is that of nearly all.
        if lengths and not _LEAST_INT32 <= min(lengths) <= max(lengths) <= _MOST_INT32:
            found.append(tuple(_LEAST_INT32 <= number <= _MOST_INT32 for number in lengths))
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
