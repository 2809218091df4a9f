"""Calls of the function under examination: poisoned memory, the timed mode, a side stream, a watch over its inputs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dilabench.engine.call.inputs import DIGEST_STEP
from dilabench.engine.call.intact import restored
from dilabench.engine.call.returned import not_plain
from dilabench.engine.call.torch_settings import as_text, settings_kept
from dilabench.engine.device.device import device_of
from dilabench.engine.verify.compare import agreement
from dilabench.record import Check, CheckName

INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Number of values checked together: masks and widened copies of all values could take more memory than the call.
PIECE = 2**24
# Allocations of Python code that leave memory uninitialised, as (owner, attribute).
_ALLOCATORS: tuple[tuple[Any, str], ...] = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch, "empty_permuted"),
    (Tensor, "new_empty"),
    (Tensor, "new_empty_strided"),
)
CACHED_BLOCKS = 4
# About 20 ms at 1.5 GHz: long enough that work on another stream would run before the inputs arrive.
SPIN_CYCLES = 30_000_000
# The most buffers in rotation that are looked for, and the time for it.
MAX_CALLS, MAX_SECONDS = 32, 5.0


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a call. gradients: of inputs, then of parameters; empty in mode forward, None if unused."""

    out: Tensor
    gradients: tuple[Tensor | None, ...] = ()


class Call:
    """Calls a function as it will be timed: in mode forward without autograd graph, else forward and backward."""

    def __init__(self, function: Callable[..., Tensor], parameters: Sequence[Tensor] = ()) -> None:
        self._function = function
        self._parameters = tuple(parameters)
        self.changed: list[str] = []
        self.settings: dict[str, str] = {}
        self.replaced: dict[str, None] = {}

    def __call__(self, inputs: Sequence[Tensor], dout: Tensor | None = None) -> Result:
        """Call with the inputs (one tensor for all three), and return also the gradients for `dout` if given."""
        before = [digest(tensor) for tensor in inputs]
        leaves = [tensor.detach().requires_grad_(dout is not None) for tensor in inputs]
        arguments = leaves if len(leaves) == 3 else leaves * 3
        with poisoned(inputs), torch.set_grad_enabled(dout is not None), settings_kept(self.settings):
            out = self._function(*arguments)
            gradients: tuple[Tensor | None, ...] = ()
            if dout is not None and isinstance(out, Tensor) and out.requires_grad and out.shape == dout.shape:
                gradients = torch.autograd.grad(
                    out, [*leaves, *self._parameters], dout.to(out.dtype), allow_unused=True
                )
        self.replaced.update(dict.fromkeys(restored()))
        names = ("q", "k", "v") if len(inputs) == 3 else ("the input",)
        for name, tensor, old in zip(names, inputs, before, strict=True):
            if not torch.equal(digest(tensor), old) and name not in self.changed:
                self.changed.append(name)
        return Result(out.detach() if type(out) is Tensor else out, gradients)

    def unwatched(self, inputs: Sequence[Tensor]) -> Tensor:
        """Call without autograd, without poisoned memory and without waiting for the device."""
        with torch.no_grad(), settings_kept(self.settings):
            return self._function(*(inputs if len(inputs) == 3 else list(inputs) * 3))

    def unchanged(self) -> Iterator[Check]:
        """The checks that no call changed its inputs, torch's settings, or what results are looked at with."""
        detail = f"the function changed {' and '.join(self.changed)} in place" if self.changed else None
        yield Check(name=CheckName.INPUTS, passed=not self.changed, detail=detail)
        if self.settings:
            detail = f"a call changed settings of all of torch: {as_text(self.settings)}; they were put back"
            yield Check(name=CheckName.SETTINGS, passed=False, detail=detail)
        if self.replaced:
            yield Check(name=CheckName.INTACT, passed=False, detail=f"after a call {' and '.join(self.replaced)}")


class OnHost:
    """A function of a device that the oracle cannot compute on, called with tensors of the host; its results, and what
    it writes into its inputs, come back there. Differentiable. Raises ValueError for results on another device.
    """

    def __init__(self, function: Callable[..., Any], device: torch.device) -> None:
        self._function = function
        self._device = device
        if hasattr(function, "with_lse"):
            self.with_lse = OnHost(function.with_lse, device)

    def __call__(self, *inputs: Tensor) -> Any:
        given = [tensor.to(self._device) for tensor in inputs]
        found = self._function(*given)
        for tensor, sent in zip(inputs, given, strict=True):
            seen = sent.detach().to(tensor.device)
            if not torch.equal(seen, tensor.detach()):
                tensor.detach().copy_(seen)
        return tuple(map(self._back, found)) if isinstance(found, tuple) else self._back(found)

    def _back(self, result: Any) -> Any:
        if not isinstance(result, Tensor):
            return result
        if result.device.type != self._device.type:
            raise ValueError(f"a result is on {result.device}, not on {self._device}")
        return result.cpu()


def digest(tensor: Tensor) -> Tensor:
    """A checksum per row that depends on positions, so exchanged rows or values and a row of zeros show.

    The bits of a row are words, each multiplied by its own odd number and summed modulo 2^64.
    """
    tensor = tensor.detach()
    wide = tensor.shape[-1] * tensor.element_size() % 8 == 0 and tensor.stride(-1) == 1
    aligned = wide and all(stride * tensor.element_size() % 8 == 0 for stride in tensor.stride()[:-1])
    aligned = aligned and tensor.storage_offset() * tensor.element_size() % 8 == 0
    bits = tensor.view(torch.int64 if aligned and tensor.ndim else INTEGER[tensor.element_size()])
    factors = torch.arange(1, bits.shape[-1] + 1, device=bits.device).mul_(DIGEST_STEP).bitwise_or_(1)
    if bits.dim() < 2:
        return (bits * factors).sum(-1)
    # A product has the width of a word of 8 bytes for any values.
    pieces = bits.flatten(0, -2).split(max(1, PIECE // bits.shape[-1]))
    return torch.cat([(piece * factors).sum(-1) for piece in pieces]).view(bits.shape[:-1])


def form_checks(out: object, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Check]:
    """shape, dtype, device and finite, in this order; after the first failure the others are not informative."""
    if (why := not_plain(out)) is not None:
        return [Check(name=CheckName.SHAPE, passed=False, detail=why)]
    assert isinstance(out, Tensor)
    found = (
        (CheckName.SHAPE, list(out.shape), list(shape)),
        (CheckName.DTYPE, out.dtype, dtype),
        (CheckName.DEVICE, out.device, device if device.index is not None or device.type == "cpu" else out.device),
    )
    checks = []
    for name, actual, wanted in found:
        right = actual == wanted
        checks.append(
            Check(name=name, passed=right, detail=None if right else f"out has {name} {actual}, not {wanted}")
        )
        if not right:
            return checks
    bad = _not_finite(out)
    detail = f"{bad} of {out.numel()} values of out are NaN or infinite" if bad else None
    return [*checks, Check(name=CheckName.FINITE, passed=not bad, detail=detail)]


def _not_finite(out: Tensor) -> int:
    """How many values are NaN or infinite."""
    if out.ndim < 2 or not out.numel():
        return int((~torch.isfinite(out)).sum())
    rows = max(1, PIECE // out[:, :1].numel())
    return sum(int((~torch.isfinite(piece)).sum()) for piece in out.split(rows, 1))


@contextmanager
def poisoned(like: Sequence[Tensor] = ()) -> Iterator[None]:
    """Fill what torch.empty and its relatives give with NaN while inside.

    Kernels that allocate in C++ are reached on CUDA only: there, blocks of the sizes of the tensors in `like` are
    filled with NaN and given back to the caching allocator, which hands them out next.
    """
    _poison_cached_blocks(like)
    originals = [(owner, name, getattr(owner, name)) for owner, name in _ALLOCATORS]
    try:
        for owner, name, original in originals:
            setattr(owner, name, _filled(original))
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _filled(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def allocate_and_fill(*args: Any, **kwargs: Any) -> Tensor:
        tensor = allocate(*args, **kwargs)
        if tensor.is_floating_point() or tensor.is_complex():
            with torch.no_grad():
                tensor.fill_(torch.nan)
        return tensor

    return allocate_and_fill


def _poison_cached_blocks(like: Sequence[Tensor]) -> None:
    blocks = []
    for tensor in like:
        free = device_of(tensor.device).free_bytes()
        if free is not None:
            count = min(CACHED_BLOCKS, free // (4 * max(1, tensor.nbytes)))
            blocks += [torch.full_like(tensor, torch.nan) for _ in range(count)]
    del blocks


def stream_check(call: Call, inputs: Sequence[Tensor], first: Tensor, tolerance: float) -> Check:
    """Call on a fresh side stream whose inputs arrive only after queued work.

    Work that the function puts on another stream reads the NaN written there before.
    """
    late = [torch.full_like(tensor, torch.nan) for tensor in inputs]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SPIN_CYCLES)
        for target, source in zip(late, inputs, strict=True):
            target.copy_(source)
        out = call.unwatched(late)
        result = out.clone()
    torch.cuda.synchronize()
    return agreement(CheckName.STREAM, first, result, tolerance, "a call on a side stream with work queued")


def buffer_reuse_check(call: Call, inputs: Sequence[Tensor], out: Tensor, before: Tensor) -> Check:
    """Check that `out` keeps its values, also after more calls than there may be buffers in rotation.

    `before`: digest of `out` when it was returned. If only the caller holds the storage, no later call can reach it.
    Otherwise calls are made until one writes into it, or returns memory that an earlier result still has.
    """
    reused = not torch.equal(digest(out), before) or (
        _held_elsewhere(out) and _is_reused(lambda: call.unwatched(inputs), out, before)
    )
    detail = "a later call wrote into the result of an earlier one: out must be a fresh tensor" if reused else None
    return Check(name=CheckName.RESULT_KEPT, passed=not reused, detail=detail)


def _held_elsewhere(out: Tensor) -> bool:
    """Return True if the storage has other owners, garbage not counted, or if torch cannot count them."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        return True

    def owners(tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        return int(count(storage._cdata))

    usual = owners(torch.zeros(1, device=out.device))
    if owners(out) <= usual:
        return False
    gc.collect()
    return owners(out) > usual


def _is_reused(again: Callable[[], Tensor], out: Tensor, before: Tensor) -> bool:
    started = time.monotonic()
    results = [out]
    for _ in range(MAX_CALLS):
        results.append(again())
        known = {result.untyped_storage().data_ptr() for result in results if result.numel()}
        if len(known) < len(results) or not torch.equal(digest(out), before):
            return out.numel() > 0
        if time.monotonic() - started > MAX_SECONDS:
            break
    return False
