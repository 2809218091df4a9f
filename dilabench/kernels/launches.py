"""Launches that repeat: what Triton finds out at every call of a kernel, found out once for tensors of one layout.

A call binds its arguments, looks at each for what to specialise on and looks the compiled kernel up: tens of
microseconds of the host for forty arguments, more than a small problem takes on a GPU. For tensors of equal shapes,
strides, dtypes and alignment all of that comes out alike, and so do the tables of tiles that a launch reads: what
differs are the addresses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import lru_cache
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction
from triton.runtime.errors import OutOfResources

from dilabench.kernels.compiled_forms import CompiledForms
from dilabench.kernels.direct_launch import DirectLaunch

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
    forms = _forms_of(kernel)
    compiled = forms.launch(grid, arguments) if forms else None
    if compiled is None:
        compiled = kernel[grid](**arguments)
        if forms and isinstance(compiled, CompiledKernel):
            forms.keep(arguments, compiled)
    return Launched(kernel, compiled, grid, arguments)


# By the identity of kernels, here and below: to hash one, Triton would name it.
_forms: dict[int, CompiledForms] = {}


def _forms_of(kernel: Any) -> CompiledForms | None:
    """None under the interpreter."""
    if id(kernel) not in _forms and isinstance(kernel, JITFunction):
        settle_key(kernel)
        _forms[id(kernel)] = CompiledForms(kernel)
    return _forms.get(id(kernel))


class Launch(NamedTuple):
    """A launch that is to be made: a kernel on its ``arguments(ragged)``, where tiles are cut or not. kind: all else
    that it is compiled for.
    """

    kernel: Any
    arguments: Callable[[bool], Arguments]
    ragged: bool
    kind: tuple[Hashable, ...]

    @property
    def of(self) -> tuple[Hashable, ...]:
        """What is compiled for it, both forms."""
        return id(self.kernel), *self.kind


_compiled: set[tuple[Hashable, ...]] = set()
# What makes the launches that will come behind those being made.
_behind: ContextVar[Callable[[], object] | None] = ContextVar("behind", default=None)
# Where launches are noted that are not to be made.
_noted: ContextVar[list[Launch] | None] = ContextVar("noted", default=None)


def launch(launches: Iterable[Launch]) -> list[Launched]:
    """Make launches one after another, each before the next one is asked for.

    Only the first of a kind is compiled, and with it all that follow: both forms of each, side by side, so that no
    later length compiles anything.
    """
    noted = _noted.get()
    if noted is not None:
        launches = list(launches)
        noted += launches
        return [Launched(one.kernel, None, *one.arguments(one.ragged)) for one in launches]
    made, remaining = [], iter(launches)
    for one in remaining:
        following = [one]
        if one.of not in _compiled:
            following += remaining
            _compile_with_what_follows(following)
        made += [run(each.kernel, *each.arguments(each.ragged)) for each in following]
    return made


@contextmanager
def followed_by(calls: Callable[[], object]) -> Iterator[None]:
    """Whatever launches inside have to be compiled, those of ``calls`` are compiled beside them and not made.

    It is called only if there is anything to compile, and what it allocates is given back. Where it fails, for want of
    memory or of a compiler that takes them, its kernels are compiled when they are launched.
    """
    token = _behind.set(calls)
    try:
        yield
    finally:
        _behind.reset(token)


def _compile_with_what_follows(launches: Sequence[Launch]) -> None:
    calls = _behind.get()
    if calls is not None:
        # What fails of that says so when it is called; out of memory and failed passes are RuntimeErrors, too.
        with suppress(RuntimeError, triton.TritonError):
            compile_ahead([*launches, *_launches_of(calls)])
            return
    compile_ahead(launches)


def _launches_of(calls: Callable[[], object]) -> list[Launch]:
    noted: list[Launch] = []
    token = _noted.set(noted)
    try:
        calls()
    finally:
        _noted.reset(token)
    return noted


def compile_ahead(launches: Sequence[Launch]) -> None:
    """Compile both forms of those of a kind that is new, and load them, which takes milliseconds."""
    new = {one.of: one for one in launches if one.of not in _compiled}
    if not new:
        return
    forms = [(one.kernel, *one.arguments(ragged)) for one in new.values() for ragged in (False, True)]
    # In a context of its own, so that an interrupt leaves none of Triton's switches on.
    warmed = copy_context().run(_warmed, forms)
    for (kernel, _, arguments), compiled in zip(forms, warmed, strict=True):
        compiled = compiled.result() if hasattr(compiled, "result") else compiled
        if isinstance(compiled, CompiledKernel) and (known := _forms_of(kernel)):
            # Whoever runs this form is told so.
            with suppress(OutOfResources):
                known.keep(arguments, compiled)
    _compiled.update(new)


def _warmed(forms: Sequence[tuple[Any, tuple[int], dict[str, Any]]]) -> list[Any]:
    """Kernels, or futures of kernels that are done: compiled in threads where Triton can do so (seen with 3.6)."""
    with ExitStack() as stack:
        if hasattr(triton, "AsyncCompileMode"):
            threads = stack.enter_context(ThreadPoolExecutor())
            # A caller may do the same around this call: Triton raises, and threads of theirs compile.
            with suppress(RuntimeError):
                stack.enter_context(triton.AsyncCompileMode(threads, ignore_errors=True))
        for kernel, _, _ in forms:
            settle_key(kernel)
        return [kernel.warmup(grid=grid, **arguments) for kernel, grid, arguments in forms]


# What it holds on to leaves its identity to nobody else.
_settled: dict[int, Any] = {}


def settle_key(function: Any) -> None:
    """Have Triton name a function in its cache on disk as it does in every other process.

    Triton 3.6 puts the constants of a function that this one calls into the name of this one only if it named that one
    before, for the sake of another: what ran earlier decided whether a kernel was found on disk or compiled again. So
    those that are called are named first. Nothing to do under the interpreter.
    """
    if id(function) in _settled or not isinstance(function, JITFunction):
        return
    _settled[id(function)] = function
    for name in function.fn.__code__.co_names:
        settle_key(function.fn.__globals__.get(name))
    # Found once and kept.
    _ = function.cache_key


class Launches:
    """The launches of one pass for tensors of one layout, known from the second call on: most layouts of data whose
    length changes never come again, and would pay for what they do not use.
    """

    def __init__(self) -> None:
        self._made: set[Hashable] = set()
        self._known: dict[Hashable, _Repeated] = {}
        self._facts: dict[str, Any] = {}

    def once(self, name: str, find: Callable[[], Any]) -> Any:
        """What `find` gives, which depends on the layout alone: found at the first call."""
        if name not in self._facts:
            self._facts[name] = find()
        return self._facts[name]

    def make(
        self,
        names: Sequence[Hashable],
        tensors: Sequence[Mapping[str, Tensor]],
        prepare: Callable[[], Iterable[Launch]],
    ) -> None:
        """Make launches of these names, each for its tensors (as of `keep`): those that were made before where all are
        known, else those that `prepare` gives.
        """
        if all(name in self._known for name in names):
            for name, own in zip(names, tensors, strict=True):
                self.repeat(name, own)
            return
        for name, launched, own in zip(names, launch(prepare()), tensors, strict=True):
            self.keep(name, launched, own)

    def repeat(self, name: Hashable, tensors: Mapping[str, Tensor]) -> bool:
        """Make the launch of this name for other tensors; False where it is not known yet."""
        known = self._known.get(name)
        if known is None:
            return False
        known.launch(tensors)
        return True

    def keep(self, name: Hashable, launched: Launched, tensors: Mapping[str, Tensor]) -> None:
        """Remember a launch that was made before, too; `tensors` are those that are others the next time: its arguments
        x_ptr, x_desc or x_tail_desc of x."""
        if name not in self._made:
            self._made.add(name)
        elif isinstance(launched.compiled, CompiledKernel):
            self._known[name] = _Repeated(launched, tensors)


class _Repeated:
    """A launch whose tensors are exchanged. It holds on to none of them, only to what else it was given (tables)."""

    def __init__(self, launched: Launched, tensors: Mapping[str, Tensor]) -> None:
        grid = (*launched.grid, 1, 1)[:3]
        way = DirectLaunch.of(launched.compiled) or _TritonLaunch(launched.compiled, grid)
        self._run = way.run
        self._values: list[Any] = [*way.before(grid)]
        self._exchanged: list[tuple[int, str, Callable[[Tensor], Any] | None]] = []
        for place, argument in enumerate(launched.kernel.arg_names):
            value = launched.arguments[argument]
            name, _, form = argument.rpartition("_")
            name = name.removesuffix("_tail")
            described: Callable[[Tensor], Any] | None = None
            behind: Sequence[Any] = ()
            if value is not None and (form == "desc" or (form == "ptr" and name in tensors)):
                if form == "desc":
                    described, behind = way.described(place, value)
                self._exchanged.append((len(self._values), name, described))
                value = None
            self._values += (value, *behind)

    def launch(self, tensors: Mapping[str, Tensor]) -> None:
        values = self._values.copy()
        for place, name, described in self._exchanged:
            values[place] = described(tensors[name]) if described else tensors[name]
        self._run(values)


class _TritonLaunch:
    """Launches of a compiled kernel on one grid as Triton makes them. As `DirectLaunch`, for every Triton."""

    def __init__(self, compiled: Any, grid: tuple[int, ...]) -> None:
        self._runner = compiled[grid]

    def before(self, _grid: tuple[int, ...]) -> tuple[()]:
        """Nothing."""
        return ()

    def described(self, _place: int, descriptor: Any) -> tuple[Callable[[Tensor], Any], tuple[()]]:
        """The same view of another tensor, by a descriptor of Triton or Gluon, without the checks that the first
        passed.
        """
        facts, kind = vars(descriptor) | {"base": None}, type(descriptor)

        def of_tensor(base: Tensor) -> Any:
            other = object.__new__(kind)
            vars(other).update(facts, base=base)
            return other

        return of_tensor, ()

    def run(self, values: list[Any]) -> None:
        self._runner(*values)


def stride_unit(*tensors: Tensor) -> int:
    """The most elements, 16 bytes at most, that divide every step of the tensors but that of the last dimension.

    Strides are given to kernels in such units: the compiler knows what it can read at a time, and compiles nothing anew
    for others.
    """
    steps = (x.stride(axis) for x in tensors for axis in range(x.dim() - 1) if x.shape[axis] > 1)
    return math.gcd(COPY_BYTES // max(x.element_size() for x in tensors), *steps)


def layout(x: Tensor) -> tuple[Hashable, ...]:
    """What a launch depends on of a tensor, but for its address and contents."""
    return x.shape, x.stride(), x.dtype, x.device, type(x), x.data_ptr() % COPY_BYTES


# Each holds the tables of a length on the device for as long as it is here: few, for lengths change from call to call.
@lru_cache(maxsize=32)
def launches(*_key: Hashable) -> Launches:
    """The launches of a pass under this key: everything that they depend on, `layout` of each tensor included."""
    return Launches()
