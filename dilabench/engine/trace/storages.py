"""Follows every storage that a function makes, on tensors without data: how many bytes are alive at the same time
(torch).

Tensors of the workload are torch's fake tensors: shapes, dtypes and strides, but no numbers. Tables of positions are
integers that code reads, so they are computed: on the host as plain tensors, on the device together with a fake one. A
CUDA device need not be there. To torch its tensors are `meta`, which every build of torch has and can differentiate; to
the code that asks a tensor for its device they are on cuda:0.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dilabench.engine.trace.inner_memory import FORMS, inner_bytes

aten = torch.ops.aten
META, CUDA, CPU = torch.device("meta"), torch.device("cuda", 0), torch.device("cpu")
# Integers beyond this many are not computed; code that reads them cannot be traced at that length.
MOST_COMPUTED = 2**20
MAKES_DATA_SHAPE = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)

# Operators that torch computes the shapes of without Python, and that take no shape from numbers.
QUICK = {
    getattr(getattr(aten, name), overload)
    for name, overload in (
        *((view, "default") for view in ("permute", "unsqueeze", "view", "expand", "as_strided", "_unsafe_view", "t")),
        *(("slice", "Tensor"), ("select", "int"), ("transpose", "int"), ("copy_", "default"), ("bmm", "default")),
        *((name, "Tensor") for name in ("add", "sub", "mul", "add_", "sub_", "mul_", "lerp_")),
        *((name, "default") for name in ("exp", "exp_", "sigmoid", "logaddexp", "zero_")),
    )
}

_fake_device: Callable[[Tensor], torch.device] = vars(FakeTensor)["device"].fget


class TooLongError(Exception):
    """A trace takes too long, or too much memory itself; a shorter length takes less."""


class Storages(TorchDispatchMode):
    """Counts the bytes of storages on one kind of device; enter it by `following`.

    live: bytes now. peak: the most so far, with what operators allocate inside. operations: how many have run.
    """

    def __init__(self, device: torch.device, most_operations: int | None = None) -> None:
        super().__init__()
        self.live = self.peak = self.operations = 0
        self._most_operations = most_operations
        self._where = META if device.type == "cuda" else CPU
        self._held: dict[int, int] = {}
        self._depth = 0
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._fake.allow_meta = True

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak = self.live

    def device_of(self, x: FakeTensor) -> torch.device:
        """The device that a fake tensor reports."""
        found = _true_device(x)
        return CUDA if found.type == "meta" and not self._depth else found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operator on numbers if they are known, else on shapes."""
        if func is torch.ops.prim.device.default:
            return _true_device(args[0])
        self.operations += 1
        if self._most_operations is not None and self.operations > self._most_operations:
            raise TooLongError
        self._depth += 1
        try:
            return self._run(func, args, dict(kwargs or {}))
        finally:
            self._depth -= 1

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in (aten.detach.default, aten.alias.default) and not isinstance(args[0], FakeTensor):
            return func(*args, **kwargs)
        if "device" in kwargs:
            if func is aten._to_copy.default and _stays(args[0], kwargs):
                func, kwargs = aten.alias.default, {}
            else:
                kwargs["device"] = _translated(kwargs["device"])
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func is aten.index.Tensor:
            args = (args[0], [_positions(i) for i in args[1]])
        elif func in (aten.index_put.default, aten.index_put_.default):
            args = (args[0], [_positions(i) for i in args[1]], *args[2:])
        if func in QUICK and all(isinstance(x, FakeTensor) and not hasattr(x, "numbers") for x in given):
            out = self._quickly(func, args, kwargs, given)
            if out is not None:
                return out
        numbers = self._numbers(func, args, kwargs, given)
        if numbers is not None and not any(isinstance(x, FakeTensor) for x in given) and kwargs.get("device") != META:
            out = numbers
        elif numbers is not None and any(tag in func.tags for tag in MAKES_DATA_SHAPE):
            out = tree_map(self._on_device, numbers)
        else:
            with self._fake:
                out = FORMS.get(func, func)(*args, **kwargs)
            _remember(out, numbers)
            if numbers is None and func._schema.is_mutable:
                _forget(func, args)
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self._hold(x)
        self.peak = max(self.peak, self.live + inner_bytes(func, args, kwargs, self._where.type))
        return out

    def _quickly(self, func: Any, args: Any, kwargs: dict[str, Any], given: list[Tensor]) -> Tensor | None:
        """The operator by torch's own form for `meta`: loops over blocks have tens of thousands of these few."""
        device = _true_device(given[0])
        if any(_true_device(x) != device for x in given[1:]):
            return None
        with in_kernel_invocation_manager(self._fake):
            found = func(*args, **kwargs)
        if isinstance(found, FakeTensor):
            out = found
        else:
            out = FakeTensor(self._fake, found, device)
            if not func.is_view:
                self._hold(out)
        self.peak = max(self.peak, self.live + inner_bytes(func, args, kwargs, self._where.type))
        return out

    def _numbers(self, func: Any, args: Any, kwargs: dict[str, Any], given: list[Tensor]) -> Any:
        """The operator's result with numbers; None if there are none, or too many to compute."""
        if given:
            known = all(not isinstance(x, FakeTensor) or hasattr(x, "numbers") for x in given)
            if not known or _most_numbers(func, given) > 4 * MOST_COMPUTED:
                return None
        else:
            with self._fake:
                shape = func(*args, **kwargs)
            if not isinstance(shape, Tensor) or shape.is_floating_point() or shape.numel() > MOST_COMPUTED:
                return None
        real_args, real_kwargs = tree_map(lambda x: getattr(x, "numbers", x), (args, kwargs))
        if "device" in real_kwargs:
            real_kwargs["device"] = CPU
        return func(*real_args, **real_kwargs)

    def _on_device(self, numbers: Any) -> Any:
        """The numbers on the device of an argument; plain numbers stay."""
        if not isinstance(numbers, Tensor):
            return numbers
        with self._fake:
            found = torch.empty(numbers.shape, dtype=numbers.dtype, device=META)
        _remember(found, numbers)
        return found

    def _hold(self, x: Tensor) -> None:
        if _true_device(x).type != self._where.type:
            return
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._held:
            return
        self._held[key] = nbytes = storage.nbytes()
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.live -= self._held.pop(key, 0)


class _OnMeta(TorchFunctionMode):
    """Replaces the device `cuda` by `meta` before torch looks for it. Inactive in a backward pass."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and (device := kwargs.pop("device", None)) is not None:
            return func(*args, **kwargs).to(_translated(device))
        return func(*map(_translated, args), **{name: _translated(x) for name, x in kwargs.items()})


def _translated(x: Any) -> Any:
    if isinstance(x, torch.device):
        return META if x.type == "cuda" else x
    return META if isinstance(x, str) and x.partition(":")[0] == "cuda" else x


def _stays(x: Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether `x.to(device)` is x itself: in a backward pass torch compares `cuda` with its own `meta`."""
    there = kwargs["device"] is not None and kwargs["device"].type == "cuda" and _true_device(x) == META
    return there and kwargs.get("dtype") in (None, x.dtype)


@contextmanager
def following(storages: Storages) -> Iterator[None]:
    """Everything inside runs on tensors without data and is followed."""
    device, is_cuda = property(storages.device_of), property(lambda x: storages.device_of(x).type == "cuda")
    with (
        mock.patch.object(FakeTensor, "device", device),
        mock.patch.object(FakeTensor, "is_cuda", is_cuda),
        storages,
        _OnMeta(),
    ):
        yield


def _true_device(x: Tensor) -> torch.device:
    """The device that torch knows: `meta` instead of `cuda`."""
    return _fake_device(x) if isinstance(x, FakeTensor) else x.device


def _most_numbers(func: Any, given: list[Tensor]) -> int:
    """The number of integers that an operator reads, or writes if it spreads a few over a table."""
    made = torch.broadcast_shapes(*(x.shape for x in given)).numel() if torch.Tag.pointwise in func.tags else 0
    return max(made, sum(x.numel() for x in given))


def _positions(index: Tensor | None) -> Tensor | None:
    """A mask whose numbers are known, as the positions of its true entries: their number is the result's shape."""
    numbers = getattr(index, "numbers", None if isinstance(index, FakeTensor) else index)
    if numbers is None or numbers.dtype != torch.bool or numbers.ndim != 1:
        return index
    return numbers.nonzero()[:, 0]


def _remember(out: Any, numbers: Any) -> None:
    if numbers is None:
        return
    for x, found in zip(tree_leaves(out), tree_leaves(numbers), strict=True):
        if isinstance(x, FakeTensor) and not found.is_floating_point():
            vars(x)["numbers"] = found


def _forget(func: Any, args: tuple[Any, ...]) -> None:
    """Numbers that an operator has overwritten with unknown ones."""
    for argument, x in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write and hasattr(x, "numbers"):
            del x.numbers
