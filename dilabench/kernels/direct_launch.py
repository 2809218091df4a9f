"""Launches by the function in C that Triton makes for a kernel, without the Python above it.

Where a kernel takes tensor descriptors, Triton 3.6 walks over all its arguments in Python at every launch and looks up
what it knows of each descriptor: ten microseconds of the host for forty arguments, of which that function takes two.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor
from triton import knobs
from triton.runtime import driver

# What the function takes before the arguments of a kernel, by Triton's own mark of it: the grid, the stream, the
# kernel, two switches, two scratch buffers, the shape of a program, facts for hooks, and the hooks before and after.
_TAKES = "iiiKKppOOOOOO"
_STREAM, _FACTS, _ENTER, _EXIT = 3, 10, 11, 12


class DirectLaunch:
    """Launches of a compiled kernel."""

    def __init__(self, compiled: Any) -> None:
        launcher = compiled.run
        self._triton: Any = inspect.getmodule(type(launcher))
        self._compiled = compiled
        switches = launcher.launch_cooperative_grid, launcher.launch_pdl
        self._fixed = (0, compiled.function, *switches, None, None, compiled.packed_metadata, None, None, None)
        # Above the function there is nothing where a kernel takes no descriptors.
        above = inspect.getclosurevars(launcher.launch).nonlocals if inspect.isfunction(launcher.launch) else {}
        self._launch = above.get("launcher", launcher.launch)
        places = sorted(above.get("tensordesc_indices", ()))
        self._encodings = dict(zip(places, above.get("tensordesc_meta", ()), strict=True))

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, compiled: Any) -> DirectLaunch | None:
        """None where Triton launches in a way that this module does not know: another version, another maker of GPUs,
        or memory that each launch allocates.
        """
        launcher = compiled.run
        known = getattr(inspect.getmodule(type(launcher)), "_BASE_ARGS_FORMAT", None) == _TAKES
        if not known or launcher.global_scratch_size or launcher.profile_scratch_size:
            return None
        return cls(compiled)

    def before(self, grid: tuple[int, ...]) -> tuple[Any, ...]:
        """What the function takes before the kernel's arguments."""
        return *grid, *self._fixed

    def launch(self, grid: tuple[int, ...], arguments: Sequence[Any]) -> None:
        """Launch on arguments as Triton takes them."""
        values = [*self.before(grid)]
        for place, argument in enumerate(arguments):
            if place in self._encodings:
                values += self._triton.make_tensordesc_arg(argument, self._encodings[place])
            else:
                values.append(argument)
        self.run(values)

    def described(self, place: int, descriptor: Any) -> tuple[Callable[[Tensor], Any] | None, Sequence[Any]]:
        """What the function takes for a tensor in place of that of this descriptor, the kernel's argument of this
        place (None: the tensor), and what it takes behind that.
        """
        encoding = self._encodings[place]
        _, *behind = self._triton.make_tensordesc_arg(descriptor, encoding)
        if encoding is None:
            return None, behind
        assert not encoding["fp4_padded"]
        encode, element = driver.active.utils.fill_tma_descriptor, encoding["elem_type"]
        of_elements = encoding["swizzle"], encoding["elem_size"], self._triton.TMA_DTYPE_DEVICE_TO_HOST[element]
        padding = int(descriptor.padding == "nan")
        fixed = (*of_elements, encoding["block_size"], descriptor.shape, descriptor.strides, padding)
        return lambda x: encode(x.data_ptr(), *fixed), behind

    def run(self, values: list[Any]) -> None:
        """Launch on the current stream. values: `before`, then the kernel's arguments."""
        active, hooks = driver.active, knobs.runtime
        values[_STREAM] = stream = active.get_current_stream(active.get_current_device())
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            values[_FACTS] = self._compiled.launch_metadata(tuple(values[:_STREAM]), stream)
            values[_ENTER], values[_EXIT] = hooks.launch_enter_hook, hooks.launch_exit_hook
        self._launch(*values)
