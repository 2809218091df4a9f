"""Gluon's Hopper language in torch: what kernels written in it do, program after program, on a CPU.

Triton's interpreter knows no Gluon. `in_its_place` puts these functions where kernels import Gluon from, so that their
own code runs: partitions as threads that wait for each other at barriers, bulk copies, and products that read shared
memory until they are waited for. Numbers are exact (float64): what differs from the definition is a mistake, not
rounding. It is an error to read or write beyond a tensor, to use a product before it is waited for, to change
shared memory under a product or a copy that still reads it, to write before the launch has ended that a program began
beside, and to wait for what nobody will do.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor
from triton import experimental

# Nothing in a test takes as long.
PATIENCE_S = 20.0
EXACT = torch.float64


class _Type:
    """What `x.type` is: in kernels it has a layout, in torch it is called."""

    layout = None

    def __init__(self, x: Tensor) -> None:
        self._x = x

    def __call__(self, *arguments: Any) -> Any:
        return torch._C.TensorBase.type(self._x, *arguments)


class Pointer:
    """Addresses of elements of a contiguous tensor."""

    def __init__(self, base: Tensor, at: Any = 0) -> None:
        self.flat, self.at = base.view(-1), at
        self.dtype = SimpleNamespace(element_ty=EXACT if base.is_floating_point() else torch.int64)

    def __add__(self, further: Any) -> Pointer:
        return Pointer(self.flat, self.at + further)

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        at, seen = torch.broadcast_tensors(torch.as_tensor(self.at), torch.as_tensor(True if mask is None else mask))
        there = at[seen]
        assert there.numel() == 0 or (there.min() >= 0 and there.max() < self.flat.numel()), "beyond a tensor"
        return at, seen


def load(pointer: Pointer, mask: Any = None, other: float = 0.0) -> Tensor:
    at, seen = pointer.places(mask)
    found = pointer.flat[torch.where(seen, at, 0)].to(pointer.dtype.element_ty)
    return torch.where(seen, found, torch.as_tensor(other, dtype=found.dtype))


def store(pointer: Pointer, value: Tensor, mask: Any = None) -> None:
    assert _own.waited or not _program.beside, "written before the launch before has ended"
    at, seen = pointer.places(mask)
    pointer.flat[at[seen]] = value.broadcast_to(at.shape)[seen].to(pointer.flat.dtype)


class Descriptor:
    """A tensor that boxes are copied from and added to, as the copy engine would have it."""

    def __init__(self, base: Tensor, shape: Sequence[int], strides: Sequence[int], block_shape: list[int], layout: Any):
        size = base.element_size()
        assert base.data_ptr() % 16 == 0, "addresses are multiples of 16 bytes"
        assert strides[-1] == 1, "elements of a row follow each other"
        assert all(stride * size % 16 == 0 for stride in strides[:-1]), "strides are multiples of 16 bytes"
        assert all(0 < side <= 256 for side in block_shape), "no side of a box is longer than 256"
        self.base, self.shape, self.strides, self.block_shape = base, shape, strides, block_shape
        self.layout, self.dtype, self.handle = layout, EXACT, self

    def window(self, at: Sequence[Any]) -> tuple[Tensor, tuple[slice, ...]]:
        """The elements of a box that there are, and where in the box they stand."""
        whole = torch.as_strided(self.base, list(self.shape), list(self.strides))
        starts = [int(start) for start in at]
        assert all(start >= 0 for start in starts)
        there = whole[tuple(slice(a, a + side) for a, side in zip(starts, self.block_shape, strict=True))]
        return there, tuple(slice(0, side) for side in there.shape)

    @property
    def nbytes(self) -> int:
        """Of a box."""
        return int(torch.Size(self.block_shape).numel()) * self.base.element_size()


class Shared:
    """Shared memory, or a view of some."""

    def __init__(self, data: Tensor) -> None:
        self.data, self.dtype, self.handle = data, data.dtype, self

    def index(self, at: Any) -> Shared:
        return Shared(self.data[int(at)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, start, length))

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.data.permute(*order))

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.data.view(*shape))

    def load(self, _layout: Any) -> Tensor:
        return self.data.clone()

    def store(self, value: Tensor) -> None:
        assert value.shape == self.data.shape
        self.data.copy_(value)


def _allocate(dtype: torch.dtype, shape: Any, _layout: Any) -> Shared:
    shape = getattr(shape, "value", shape)
    # What nobody wrote must not be read.
    return Shared(torch.full(list(shape), torch.nan if dtype.is_floating_point else 0, dtype=dtype))


class Barrier:
    """Arrivals and bytes that are waited for; `phases` that are over."""

    def __init__(self, count: int) -> None:
        self.count = self.missing = count
        self.awaited_bytes = self.phases = 0

    def change(self, arrivals: int = 0, expected: int = 0, copied: int = 0) -> None:
        with _turn:
            self.missing -= arrivals
            self.awaited_bytes += expected - copied
            assert self.missing >= 0, "more arrivals than a barrier counts"
            if self.missing == 0 and self.awaited_bytes == 0:
                self.phases, self.missing = self.phases + 1, self.count
            _turn.notify_all()

    def wait(self, parity: int) -> None:
        with _turn:
            over = _turn.wait_for(lambda: _failed or self.phases % 2 != parity % 2, PATIENCE_S)
        assert not _failed, "another partition failed"
        assert over, "waited for what nobody does"


class _Own(threading.local):
    """What a partition began: products that run, and shared memory that is on its way with what it held; and whether
    it waited for the launch before.
    """

    def __init__(self) -> None:
        self.waited = False
        self.products: list[Product] = []
        self.leaving: list[tuple[Shared, Tensor]] = []


_turn = threading.Condition()
_failed: list[BaseException] = []
_barriers: dict[int, Barrier] = {}
_own = _Own()


def _of(bar: Shared) -> Barrier:
    return _barriers[bar.data.data_ptr()]


def _init(bar: Shared, count: int) -> None:
    _barriers[bar.data.data_ptr()] = Barrier(count)


def _copy_in(descriptor: Descriptor, at: Sequence[Any], bar: Shared, to: Shared, pred: Any = True) -> None:
    if not pred:
        return
    there, places = descriptor.window(at)
    box = torch.zeros(descriptor.block_shape, dtype=EXACT)
    box[places] = there.to(EXACT)
    to.store(box)
    _of(bar).change(copied=descriptor.nbytes)


class _Builder:
    """What `add_shared_to_global` of the backward pass asks of Triton."""

    @staticmethod
    def create_async_tma_reduce(_kind: Any, descriptor: Descriptor, at: Sequence[Any], source: Shared) -> None:
        with _turn:
            there, places = descriptor.window(at)
            there += source.data[places].to(there.dtype)
        _own.leaving.append((source, source.data.clone()))


def _store_wait(pending: int) -> None:
    while len(_own.leaving) > pending:
        source, sent = _own.leaving.pop(0)
        # What nobody wrote stays what it is.
        unchanged = torch.allclose(source.data, sent, rtol=0.0, atol=0.0, equal_nan=True)
        assert unchanged, "shared memory was written before it had been copied"


def in_half_range(weights: Tensor) -> Tensor:
    """Weights as float16 holds them, but for its rounding: infinite where they are too large."""
    return weights.masked_fill(weights > torch.finfo(torch.float16).max, torch.inf)


class Product:
    """A product that runs: its operands are read at its beginning and at its end."""

    def __init__(self, a: Any, b: Shared, total: Any, use_acc: bool) -> None:
        self.operands, self.use_acc, self.done = (a, b, total), use_acc, False
        self.value = self.multiplied()

    def multiplied(self) -> Tensor:
        a, b, total = self.operands
        found = (a.data if isinstance(a, Shared) else in_half_range(a)) @ b.data
        if self.use_acc:
            found = found + (total.value if isinstance(total, Product) else total)
        return found

    def end(self) -> None:
        again = self.multiplied()
        assert torch.equal(again, self.value) or again.isnan().any(), "shared memory was written under a product"
        self.done = True


def _multiply(a: Any, b: Shared, total: Any, use_acc: bool = True, is_async: bool = False) -> Any:
    product = Product(a, b, total, use_acc)
    if not is_async:
        return product.value
    _own.products.append(product)
    return product


def _multiply_wait(pending: int, deps: Sequence[Product]) -> Any:
    while len(_own.products) > pending:
        _own.products.pop(0).end()
    assert all(product.done for product in deps), "a product is used before it is waited for"
    values = [product.value for product in deps]
    return values[0] if len(values) == 1 else tuple(values)


def _specialize(partitions: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], *_resources: Any) -> None:
    _failed.clear()

    def run(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            function(*arguments)
            assert not _own.products, "a product is not waited for"
        except BaseException as error:  # noqa: BLE001 - raised where the threads are waited for
            with _turn:
                _failed.append(error)
                _turn.notify_all()

    threads = [threading.Thread(target=run, args=partition) for partition in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if _failed:
        raise _failed[0]


class Kernel:
    """A function of Gluon: called by another, or launched on a grid."""

    launched: ClassVar[dict[str, int]] = defaultdict(int)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        parameters = inspect.signature(function).parameters.values()
        self.arg_names = [one.name for one in parameters]
        self.constants = {one.name for one in parameters if "constexpr" in str(one.annotation)}

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        def run(**arguments: Any) -> None:
            Kernel.launched[self.function.__module__] += 1
            given = {name: self._argument(name, value) for name, value in arguments.items() if name in self.arg_names}
            assert set(given) == set(self.arg_names), set(self.arg_names) ^ set(given)
            _program.beside = arguments.get("launch_pdl", False)
            for program in range(grid[0]):
                _program.at, _program.count = program, grid[0]
                _own.waited = False
                _barriers.clear()
                self.function(**given)

        return run

    def warmup(self, grid: Sequence[int], **arguments: Any) -> None:
        """Nothing is compiled; what is given must be all."""
        assert set(self.arg_names) <= set(arguments), set(self.arg_names) - set(arguments)

    def _argument(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return Pointer(value)
        return torch.as_tensor(value) if isinstance(value, int) and name not in self.constants else value


_program = SimpleNamespace(at=0, count=1, beside=False)


def _wait_for_launch_before() -> None:
    _own.waited = True


def _jit(function: Callable[..., Any] | None = None, **_options: Any) -> Any:
    return Kernel if function is None else Kernel(function)


def _both(choose: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    return lambda a, b: choose(torch.as_tensor(a), torch.as_tensor(b))


def _where(condition: Any, a: Any, b: Any) -> Tensor:
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    return torch.where(torch.as_tensor(condition), a, b.to(a.dtype) if b.ndim == 0 else b)


def _constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """What is computed while a kernel is compiled: a number as such, anything else as `value`."""

    def compute(*given: Any) -> Any:
        found = function(*given)
        return found if isinstance(found, int) else SimpleNamespace(value=found)

    return compute


def _layout(*_arguments: Any, **_options: Any) -> None:
    return None


@contextmanager
def in_its_place() -> Iterator[None]:
    """Let kernels that are imported meanwhile find this in Gluon's place. Tensors keep the `type` that kernels ask."""
    language = {
        "constexpr": lambda value: value,
        **dict.fromkeys(("float32", "float16", "bfloat16"), EXACT),
        **dict.fromkeys(("int32", "int64"), torch.int64),
        **dict.fromkeys(
            ("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "BlockedLayout", "SwizzledSharedLayout"),
            _layout,
        ),
        "NVMMASharedLayout": SimpleNamespace(get_default_for=_layout),
        "program_id": lambda _axis: torch.as_tensor(_program.at),
        "num_programs": lambda _axis: _program.count,
        "load": load,
        "store": store,
        "where": _where,
        "minimum": _both(torch.minimum),
        "maximum": _both(torch.maximum),
        "max": lambda x, axis: x.amax(axis),
        "sum": lambda x, axis: x.sum(axis),
        "exp": torch.exp,
        "exp2": torch.exp2,
        "log": torch.log,
        "log2": torch.log2,
        "full": lambda shape, value, dtype, _layout: torch.full(shape, value, dtype=dtype),
        "arange": lambda start, end, layout: torch.arange(start, end),
        "convert_layout": lambda x, _layout: x,
        "static_range": range,
        "thread_barrier": lambda: None,
        "allocate_shared_memory": _allocate,
        "warp_specialize": _specialize,
    }
    barrier = {
        "MBarrierLayout": _layout,
        "init": _init,
        "expect": lambda bar, size, pred=True: pred and _of(bar).change(arrivals=1, expected=size),
        "arrive": lambda bar, count: _of(bar).change(arrivals=count),
        "wait": lambda bar, phase: _of(bar).wait(int(phase)),
    }
    hopper = {
        "fence_async_shared": lambda: None,
        "mbarrier": SimpleNamespace(**barrier),
        "tma": SimpleNamespace(async_copy_global_to_shared=_copy_in, store_wait=_store_wait),
        "warpgroup_mma": _multiply,
        "warpgroup_mma_wait": _multiply_wait,
    }
    semantic = SimpleNamespace(_convert_to_ir_values=lambda at, require_i64: at, builder=_Builder)
    gluon = {"jit": _jit, "constexpr_function": _constant}
    home = "triton.experimental.gluon"
    modules = {
        home: gluon | {"language": SimpleNamespace(**language)},
        f"{home}.language.extra": {"libdevice": SimpleNamespace(fast_log2f=torch.log2)},
        f"{home}.language._core": {"builtin": lambda f: lambda *given: f(*given, _semantic=semantic)},
        f"{home}.language.nvidia.hopper": hopper,
        f"{home}.nvidia.hopper": {"TensorDescriptor": Descriptor},
        # Launches follow each other here.
        "triton.language.extra.cuda": {
            "gdc_launch_dependents": lambda: None,
            "gdc_wait": _wait_for_launch_before,
        },
    }
    made = {name: ModuleType(name) for name in modules}
    for name, contents in modules.items():
        vars(made[name]).update(contents)
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    Tensor.type = property(_Type)
    with mock.patch.object(experimental, "gluon", made[home], create=True):
        yield
    for name, module in before.items():
        if module is None:
            del sys.modules[name]
        else:
            sys.modules[name] = module
