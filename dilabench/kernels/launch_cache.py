"""Launches of Triton kernels: compiled ahead side by side, and repeated for tensors of one layout.

Triton binds the arguments of a launch, looks at each for what to specialise on and looks the compiled kernel up, and
dilabench makes tables and descriptors for it: more than a small problem takes on a GPU. For tensors of equal shapes,
strides, dtypes and alignment, only the addresses differ.

Triton launches on the current device. These launches use the device of their tensors, as torch's operators do, and its
current stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from contextvars import copy_context
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from inspect import isfunction
from types import CellType, FunctionType, MappingProxyType
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver
from triton.runtime.errors import OutOfResources

from dilabench.kernels.streams import record

# Bulk copies step in units of this many bytes, and Triton specialises on addresses that are a multiple of them.
COPY_BYTES = 16

Arguments = tuple[tuple[int], dict[str, Any]]
"""Grid and keyword arguments of a launch."""

Tensors = Mapping[str, Tensor]
"""Tensors of a launch that differ from call to call: of x its arguments x_ptr, x_desc or x_tail_desc."""


class Launch(NamedTuple):
    """A kernel on its ``arguments(ragged)``, whether tiles are cut or not.

    kind: all other properties that it is compiled for, so that both forms can be compiled ahead; None if Triton
    compiles it when it runs.
    """

    kernel: Any
    arguments: Callable[[bool], Arguments]
    ragged: bool = False
    kind: tuple[Hashable, ...] | None = None

    @property
    def of(self) -> tuple[Hashable, ...]:
        """The compiled kernels, both forms. By identity: to hash a kernel, Triton would name it."""
        return id(self.kernel), *(self.kind or ())

    @property
    def is_new(self) -> bool:
        """Return True if it must still be compiled ahead."""
        return self.kind is not None and self.of not in _compiled


Beside = Callable[[], Iterable[Launch]]
"""Launches whose kernels are compiled together with others, and that are not made."""


class LaunchCache:
    """The launches of a pass without the addresses of its tensors, for tensors of one layout.

    Launches and facts of a pass have names. A launch is remembered at its second use: most layouts of data with
    changing lengths never recur. noted: collects the launches without making them, for `compile_ahead`.
    """

    def __init__(self, noted: list[Launch] | None = None) -> None:
        self._noted = noted
        self._facts: dict[str, Any] = {}
        self._known: dict[Hashable, list[_Repeated]] = {}
        # The CUDA device of all tensors (-1: none), and on which of its streams tables of what repeats are recorded.
        self._device = -1
        self._recorded: set[tuple[Hashable, int]] = set()

    @classmethod
    # Each holds the tables of a length on the device for as long as it is here: few, for lengths change.
    @lru_cache(maxsize=32)
    def of(cls, *_key: Hashable) -> LaunchCache:
        """The cache of this key: everything that the launches depend on, `layout` of each tensor included."""
        return cls()

    def once(self, name: str, find: Callable[[], Any]) -> Any:
        """The result of `find`, which depends only on the layout and is computed at the first call."""
        if name not in self._facts:
            self._facts[name] = find()
        return self._facts[name]

    def launch(
        self,
        name: Hashable,
        tensors: Sequence[Tensors],
        prepare: Callable[[], Iterable[Launch]],
        beside: Beside | None = None,
    ) -> None:
        """Make the launches that `prepare` gives, one for each of ``tensors``; it is not called for repeated ones.

        If the first of a kind must be compiled, the launches in ``beside`` are compiled with it, but not made. Their
        failures (out of memory, or a compiler error) show when they are launched.
        """
        known = self._known.get(name)
        if known:
            stream, by_triton = None, True
            if self._device >= 0:
                if torch.cuda.current_device() != self._device:
                    with torch.cuda.device(self._device):
                        self.launch(name, tensors, prepare, beside)
                    return
                # Triton would ask for both once more at every launch.
                stream = driver.active.get_current_stream(self._device)
                if (name, stream) not in self._recorded:
                    record(value for launch in known for value in launch.values)
                    self._recorded.add((name, stream))
                enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
                # A chain of hooks; a program may also have set a function, or None.
                by_triton = bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
            for launch, own in zip(known, tensors, strict=True):
                launch.again(own, stream, by_triton)
            return
        first = next(iter(tensors[0].values()))
        with torch.cuda.device_of(first):
            if self._noted is not None:
                self._noted += prepare()
                return
            launched = _launched(prepare(), beside)
            if known is None:
                self._known[name] = []
            else:
                self._device = first.get_device()
                repeated = [_repeated(*launch, own) for launch, own in zip(launched, tensors, strict=True)]
                self._known[name] = [launch for launch in repeated if launch] if all(repeated) else []


def launch_once(kernel: Any, grid: tuple[int, ...], x: Tensor, *arguments: Any, **options: Any) -> None:
    """Launch a kernel, whose first argument is x, on the device of x; for launches that are not repeated."""
    if x.is_cuda and torch.cuda.current_device() != x.get_device():
        with torch.cuda.device_of(x):
            kernel[grid](x, *arguments, **options)
    else:
        kernel[grid](x, *arguments, **options)


class _Recorded(NamedTuple):
    """The arguments of Triton's launcher, and where among them the stream and the addresses of numbered tensors are."""

    arguments: list[Any]
    stream: int
    pointers: tuple[tuple[int, int], ...]


# Each takes a few kilobytes; enough for the layers of a model.
_MOST_RECORDED = 128


class _Repeated:
    """A launch whose tensors are exchanged. It keeps none of them, only the other arguments (tables).

    exchanged: the place of a tensor among the values, its name, and the type and fields of its descriptor, if any.
    """

    def __init__(
        self,
        compiled: Any,
        grid: tuple[int, ...],
        values: list[Any],
        exchanged: list[tuple[int, str, tuple[type, dict[str, Any]] | None]],
    ) -> None:
        self.values = values
        self._exchanged = exchanged
        described = dict.fromkeys(name for _, name, descriptor in exchanged if descriptor)
        # The tensors of descriptors come first.
        self._names = [*dict.fromkeys((*described, *(name for _, name, _ in exchanged)))]
        self._described = len(described)
        self._launch_by_triton = compiled[grid]
        self._launcher, self._record = _launcher(compiled, grid)
        self._recorded: dict[tuple[int, ...], _Recorded] = {}

    def again(self, own: Tensors, stream: int | None, by_triton: bool) -> None:
        """Launch on these tensors, on this stream or, if it is None, the current one.

        Triton's Python runs only for descriptors of addresses that are new, and ``by_triton``, for Triton's hooks.
        """
        if self._launcher is None or stream is None or by_triton:
            self._launch_by_triton(*self._values_of(own), stream=stream)
            return
        addresses = [own[name].data_ptr() for name in self._names]
        described = tuple(addresses[: self._described])
        recorded = self._recorded.get(described)
        if recorded is None:
            if len(self._recorded) >= _MOST_RECORDED:
                self._recorded.clear()
            exchanged = ((place, name) for place, name, descriptor in self._exchanged if not descriptor)
            pointers = {place: _Pointer(self._names.index(name)) for place, name in exchanged}
            self._recorded[described] = recorded = self._record(self._values_of(own, pointers))
        arguments = recorded.arguments.copy()
        for place, number in recorded.pointers:
            arguments[place] = addresses[number]
        arguments[recorded.stream] = stream
        self._launcher(*arguments)

    def _values_of(self, own: Tensors, instead: Mapping[int, object] = MappingProxyType({})) -> list[Any]:
        values = self.values.copy()
        for place, operand, descriptor in self._exchanged:
            values[place] = x = own[operand]
            if descriptor:
                # The same view of another tensor, without the checks that the first one passed.
                kind, facts = descriptor
                view: Any = object.__new__(kind)
                view.__dict__ = {**facts, "base": x}
                values[place] = view
        for place, value in instead.items():
            values[place] = value
        return values


@dataclass(frozen=True, slots=True, eq=False)
class _Pointer:
    """A placeholder for the tensor of that number in a recorded launch."""

    number: int


def _launcher(compiled: Any, grid: tuple[int, ...]) -> tuple[Callable[..., object] | None, Callable[..., _Recorded]]:
    """Triton's launcher in C, and a function that gives its arguments for the values of a launch, with tensors as
    addresses, and where the arguments of type `_Pointer` are.

    Triton 3.6 walks over all arguments in Python at each launch and encodes each tensor descriptor again: 20
    microseconds for forty arguments, of which the launcher takes two. Here a copy of ``compiled.run`` does that with a
    recording function in the launcher's place. The launcher is None if this Triton calls it in another way, or
    allocates memory at each launch.
    """
    run: Any = getattr(compiled, "run", None)
    above: Any = getattr(run, "launch", None)
    launcher, cells = above, {}
    if isfunction(above):
        # The function that expands descriptors, if any: the launcher is a variable of its closure.
        cells = dict(zip(above.__code__.co_freevars, above.__closure__ or (), strict=True))
        launcher = cells["launcher"].cell_contents if "launcher" in cells else None
    if getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1):
        launcher = None

    def record(values: list[Any]) -> _Recorded:
        given: list[Any] = []
        stream, recording = object(), copy(run)
        recording.launch = lambda *arguments: given.extend(arguments)
        if cells:
            closure = cells | {"launcher": CellType(recording.launch)}
            recording.launch = FunctionType(above.__code__, above.__globals__, closure=tuple(closure.values()))
        recording(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *values)
        pointers = tuple((place, x.number) for place, x in enumerate(given) if isinstance(x, _Pointer))
        place = given.index(stream)
        return _Recorded([x.data_ptr() if isinstance(x, Tensor) else x for x in given], place, pointers)

    return launcher, record


def _repeated(
    launch: Launch, grid: tuple[int], arguments: dict[str, Any], compiled: Any, own: Tensors
) -> _Repeated | None:
    """None under the interpreter, where memory is traced, and where the launch reads copies of its tensors."""
    if not isinstance(compiled, CompiledKernel):
        return None
    values: list[Any] = []
    exchanged: list[tuple[int, str, tuple[type, dict[str, Any]] | None]] = []
    for place, argument in enumerate(launch.kernel.arg_names):
        value = arguments[argument]
        name, _, form = argument.rpartition("_")
        name = name.removesuffix("_tail")
        if value is not None and (form == "desc" or (form == "ptr" and name in own)):
            read = value.base if form == "desc" else value
            if read.data_ptr() != own[name].data_ptr():
                return None
            exchanged.append((place, name, (type(value), vars(value) | {"base": None}) if form == "desc" else None))
            value = None
        values.append(value)
    return _Repeated(compiled, (*grid, 1, 1)[:3], values, exchanged)


_Launched = tuple[Launch, tuple[int], dict[str, Any], Any]


def _launched(launches: Iterable[Launch], beside: Beside | None) -> list[_Launched]:
    """Make launches one after another, each before the next one is prepared. If a launch is new, it and all following
    ones are compiled, both forms of each, so that no later length compiles.
    """
    made: list[_Launched] = []
    remaining = iter(launches)
    for launch in remaining:
        following = [launch]
        if launch.is_new:
            following += remaining
            _compile(following, beside)
        for each in following:
            settle_key(each.kernel)
            grid, arguments = each.arguments(each.ragged)
            compiled = each.kernel[grid](**arguments)
            if isinstance(compiled, CompiledKernel):
                # Tables among them are kept for others, and may have been made on another stream.
                record(arguments.values())
            made.append((each, grid, arguments, compiled))
    return made


def _compile(launches: Sequence[Launch], beside: Beside | None) -> None:
    if beside is not None:
        # Failures show when the kernel is called; out of memory and failed passes are RuntimeErrors, too.
        with suppress(RuntimeError, triton.TritonError):
            compile_ahead([*launches, *beside()])
            return
    compile_ahead(launches)


_compiled: set[tuple[Hashable, ...]] = set()


def compile_ahead(launches: Iterable[Launch]) -> None:
    """Compile both forms of the launches of a new kind, side by side, and load them, which takes milliseconds."""
    new = {launch.of: launch for launch in launches if launch.is_new}
    if not new:
        return
    # In a separate context, so that an interrupt leaves none of Triton's switches on.
    for compiled in copy_context().run(_warmed, [*new.values()]):
        compiled = compiled.result() if hasattr(compiled, "result") else compiled
        if isinstance(compiled, CompiledKernel):
            # The launch of this form reports it.
            with suppress(OutOfResources):
                compiled[1, 1, 1]
    _compiled.update(new)


def _warmed(launches: Sequence[Launch]) -> list[Any]:
    """Kernels, or futures of kernels that are done: compiled in threads where Triton can do so (seen with 3.6)."""
    with ExitStack() as stack:
        if hasattr(triton, "AsyncCompileMode"):
            threads = stack.enter_context(ThreadPoolExecutor())
            # A caller may do the same around this call: Triton raises, and threads of theirs compile. One that cannot
            # ignore errors (3.5) compiles one kernel after another.
            with suppress(RuntimeError, TypeError):
                stack.enter_context(triton.AsyncCompileMode(threads, ignore_errors=True))
        warmed = []
        for launch in launches:
            settle_key(launch.kernel)
            for ragged in (False, True):
                grid, arguments = launch.arguments(ragged)
                warmed.append(launch.kernel.warmup(grid=grid, **arguments))
        return warmed


# A held object keeps its id unique.
_settled: dict[int, Any] = {}


def settle_key(function: Any) -> None:
    """Have Triton name a function in its cache on disk as it does in every other process.

    Triton 3.6 puts the constants of a function that this one calls into the name of this one only if it named that one
    before, for another kernel. So earlier kernels decided whether one was found on disk or compiled again. Here called
    functions are named first. Without effect under the interpreter.
    """
    if id(function) in _settled or not isinstance(function, JITFunction):
        return
    _settled[id(function)] = function
    for name in function.fn.__code__.co_names:
        settle_key(function.fn.__globals__.get(name))
    # Found once and kept.
    _ = function.cache_key


def stride_unit(*tensors: Tensor) -> int:
    """The most elements, 16 bytes at most, that divide every stride of the tensors except the last dimension's.

    Strides are given to kernels in such units: the compiler knows how much it can read at a time, and needs no other
    kernel for other strides.
    """
    steps = (x.stride(axis) for x in tensors for axis in range(x.dim() - 1) if x.shape[axis] > 1)
    return math.gcd(COPY_BYTES // max(x.element_size() for x in tensors), *steps)


def layout(x: Tensor) -> tuple[Hashable, ...]:
    """The properties of a tensor that a launch depends on, without its address and contents.

    Raises ValueError for one whose memory does not hold its values.
    """
    if x.is_neg() or x._is_zerotensor():
        raise ValueError(
            f"the memory of a tensor {list(x.shape)} on {x.device} does not hold its values (a zero tensor or a "
            "negative view); give a copy, x.resolve_neg().clone()"
        )
    return x.shape, x.stride(), x.dtype, x.device, type(x), x.data_ptr() % COPY_BYTES
