"""Converts tensors into a form that a kernel supports: padding, repeating heads, copying and splitting batches.

A kernel module implements forward and backward for a plain case and declares that case; `adapted` returns the two
functions of the backend contract.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from dilabench.backends.band import Band
from dilabench.contracts import Attend, AttendBackward, PackedKernel
from dilabench.workload.spec import UNBOUNDED, Window


class Sequences(NamedTuple):
    """Packed sequences as in `contracts.AttendPacked`; the bounds of the keys are always given."""

    cu_seqlens: Tensor
    longest: int
    cu_seqlens_k: Tensor
    longest_k: int


class Call(NamedTuple):
    """The arguments of a kernel besides its tensors. `sequences`: of tokens [T, H, D]; None for a batch [B, M, H, D].
    `place`: the tensor for out, or dq, of a kernel that places results; None for a new tensor. `softcap`: 0 for none.
    """

    band: Band
    scale: float
    sequences: Sequences | None = None
    place: Tensor | None = None
    softcap: float = 0.0

    def varlen(self) -> dict[str, Tensor | int]:
        """The sequences as arguments of FlashAttention's functions; empty for a batch."""
        names = ("cu_seqlens_q", "max_seqlen_q", "cu_seqlens_k", "max_seqlen_k")
        return dict(zip(names, self.sequences, strict=True)) if self.sequences else {}


KernelForward = Callable[[Tensor, Tensor, Tensor, Call], tuple[Tensor, Tensor]]
"""(q, k, v, call) -> out [B, M, H, D], lse [B, H, M]."""

KernelBackward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Call], tuple[Tensor, Tensor, Tensor]]
"""(dout, q, k, v, out, lse, call) -> dq, dk, dv. lse comes contiguous."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """The plain case of a kernel.

    head_dim_multiple: other head dims are padded with zeros, which changes neither scores nor out (the scale is given).
    value_dim: it takes values of another width than keys; otherwise the narrower ones are padded.
    softcap: it caps scores.
    grouped_heads: it reads fewer K/V heads than query heads; otherwise they are repeated, and dk, dv summed in float32.
    max_batch: rows of the batch per launch; a CUDA grid's second and third axes end at 65535.
    alignment_bytes: required multiple of addresses and outer strides; a tensor that violates it is copied.
    forward_span, backward_span: elements from the first to the last of a tensor, gaps included, that one launch can
    address (32-bit arithmetic inside); a batch that spans more needs several launches.
    aligns_ends: under a causal mask or a window over fewer queries than keys the last query sees the last key.
    places_results: it writes out and dq into given tensors.
    """

    head_dim_multiple: int = 1
    value_dim: bool = False
    softcap: bool = False
    grouped_heads: bool = True
    max_batch: int | None = None
    alignment_bytes: int = 1
    forward_span: int | None = None
    backward_span: int | None = None
    aligns_ends: bool = False
    places_results: bool = False


# The spans that every kernel supports; a kernel verified beyond them declares more.
CUDA_KERNEL = Plain(
    head_dim_multiple=8,
    max_batch=65535,
    alignment_bytes=16,
    forward_span=2**31 - 1,
    backward_span=2**31 - 1,
)


def adapted(
    forward: KernelForward, backward: KernelBackward, plain: Plain, derivative: bool = False
) -> tuple[Attend, AttendBackward]:
    """`attend` and `attend_backward` of the contract over a kernel's plain case.

    derivative: `forward` is operators of torch, whose derivative is what `backward` calls. Then `attend.differentiable`
    is attention that torch differentiates without Python, or None for tensors that are not plain.
    Both raise ValueError for a mask over different numbers of queries and keys, since kernels disagree on which corner
    of the matrix such a mask starts from (except over fewer queries with `aligns_ends`), and if a single batch item
    spans more than a launch can address.
    """

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        window: Window = UNBOUNDED,
        scale: float,
        softcap: float = 0.0,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        call, is_plain, _ = _call(plain, causal, window, scale, softcap, q.shape, k.shape, v.shape[-1], q.itemsize)
        if is_plain and out is None and _are_plain(plain, plain.forward_span, q, k, v):
            return forward(q, k, v, call)
        if q.numel() == 0 or k.shape[1] == 0:
            nothing, lse = _nothing_seen(q, v)
            return _put(nothing, out), lse
        batch = _batch(plain, plain.forward_span, q, k, v)
        if _placeable(out, batch, plain, q):
            call = call._replace(place=out)
        result, lse = _split(partial(_run, forward, plain, call), batch, q, k, v)
        return _put(result, out), lse

    def attend_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        window: Window = UNBOUNDED,
        scale: float,
        softcap: float = 0.0,
        dq: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        call, _, is_plain = _call(plain, causal, window, scale, softcap, q.shape, k.shape, v.shape[-1], q.itemsize)
        if is_plain and dq is None and _are_plain(plain, plain.backward_span, q, k, v, dout, out):
            return backward(dout, q, k, v, out, lse.contiguous(), call)
        if q.numel() == 0 or k.shape[1] == 0:
            return _put(torch.zeros_like(q), dq), torch.zeros_like(k), torch.zeros_like(v)
        batch = _batch(plain, plain.backward_span, dout, q, k, v, out)
        if _placeable(dq, batch, plain, v):
            call = call._replace(place=dq)
        result, dk, dv = _split(partial(_run_backward, backward, plain, call), batch, dout, q, k, v, out, lse)
        return _put(result, dq), dk, dv

    def differentiable(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: Window = UNBOUNDED, scale: float, softcap: float = 0.0
    ) -> tuple[Tensor, Tensor] | None:
        call, *are_plain = _call(plain, causal, window, scale, softcap, q.shape, k.shape, v.shape[-1], q.itemsize)
        if not (all(are_plain) and q.is_contiguous() and _are_plain(plain, plain.backward_span, q, k, v)):
            return None
        out, lse = forward(q, k, v, call)
        # Kernels take gradients of out's layout, which the derivatives of two views give them.
        return (out.view(-1).view(q.shape), lse) if out.requires_grad and out.is_contiguous() else None

    if derivative:
        attend.differentiable = differentiable  # type: ignore[attr-defined]
    return attend, attend_backward


def adapted_packed(forward: KernelForward, backward: KernelBackward, plain: Plain) -> PackedKernel:
    """The same for packed sequences.

    It raises ValueError if a tensor spans more than a launch can address, and for a mask over different numbers of
    queries and keys if the kernel does not align ends.
    """

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens: Tensor,
        longest: int,
        cu_seqlens_k: Tensor | None = None,
        longest_k: int | None = None,
        causal: bool,
        window: Window = UNBOUNDED,
        scale: float,
        softcap: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        _batch(plain, plain.forward_span, *(x[None] for x in (q, k, v)))
        sequences = _sequences(cu_seqlens, longest, cu_seqlens_k, longest_k)
        call = Call(_packed_band(causal, window, sequences, plain), scale, sequences, None, _checked(plain, softcap))
        return _run(forward, plain, call, q, k, v)

    def attend_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        cu_seqlens: Tensor,
        longest: int,
        cu_seqlens_k: Tensor | None = None,
        longest_k: int | None = None,
        causal: bool,
        window: Window = UNBOUNDED,
        scale: float,
        softcap: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        _batch(plain, plain.backward_span, *(x[None] for x in (dout, q, k, v, out)))
        sequences = _sequences(cu_seqlens, longest, cu_seqlens_k, longest_k)
        call = Call(_packed_band(causal, window, sequences, plain), scale, sequences, None, _checked(plain, softcap))
        return _run_backward(backward, plain, call, dout, q, k, v, out, lse)

    return PackedKernel(attend, attend_backward, aligns_ends=plain.aligns_ends)


def _run(forward: KernelForward, plain: Plain, call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse of tensors in any form, on their device: not all packages set it."""
    width = _width(plain, q, v)
    q_in, k_in, v_in = (_readable(x, plain, width) for x in (q, k, v))
    with torch.cuda.device_of(q):
        out, lse = forward(q_in, _repeated(k_in, q, plain), _repeated(v_in, q, plain), call)
    return _cut(out, v), lse


def _run_backward(
    backward: KernelBackward,
    plain: Plain,
    call: Call,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of tensors in any form, on their device."""
    width = _width(plain, q, v)
    dout_in, q_in, k_in, v_in, out_in = (_readable(x, plain, width) for x in (dout, q, k, v, out))
    k_in, v_in = _repeated(k_in, q, plain), _repeated(v_in, q, plain)
    with torch.cuda.device_of(q):
        dq, dk, dv = backward(dout_in, q_in, k_in, v_in, out_in, lse.contiguous(), call)
    return _cut(dq, q), _summed(_cut(dk, k), k), _summed(_cut(dv, v), v)


def _sequences(cu_seqlens: Tensor, longest: int, cu_seqlens_k: Tensor | None, longest_k: int | None) -> Sequences:
    """The sequences of queries and keys; raises ValueError if only one of the keys' two arguments is given."""
    if (cu_seqlens_k is None) != (longest_k is None):
        raise ValueError("cu_seqlens_k and longest_k go together: give both if keys have separate sequences")
    if cu_seqlens_k is None or longest_k is None:
        return Sequences(cu_seqlens, longest, cu_seqlens, longest)
    return Sequences(cu_seqlens, longest, cu_seqlens_k, longest_k)


def _packed_band(causal: bool, window: Window, sequences: Sequences, plain: Plain) -> Band:
    """The band of the longest sequences, which holds for all: bounds that it drops hide nothing in shorter ones."""
    band = Band.of(causal, window, sequences.longest, sequences.longest_k)
    if sequences.cu_seqlens_k is not sequences.cu_seqlens and not (band.full or plain.aligns_ends):
        raise ValueError(
            f"causal={causal} window={window} over keys with separate sequences: this kernel does not align the last "
            "query with the last key; use a backend whose packed kernel aligns ends"
        )
    return band


def _width(plain: Plain, q: Tensor, v: Tensor) -> int:
    """Channels that keys and values have at least in a kernel that takes one width."""
    return 0 if plain.value_dim else max(q.shape[-1], v.shape[-1])


@lru_cache(maxsize=256)
def _call(
    plain: Plain,
    causal: bool,
    window: Window,
    scale: float,
    softcap: float,
    query: torch.Size,
    key: torch.Size,
    value_dim: int,
    itemsize: int,
) -> tuple[Call, bool, bool]:
    """The call of these shapes, made once, and whether contiguous tensors of them are plain forward and backward.

    Raises ValueError for a mask that the kernel does not align, and for a softcap that it does not compute.
    """
    (batch, queries, heads, dim), (_, keys, kv_heads, _) = query, key
    band = Band.of(causal, window, queries, keys)
    aligned = plain.aligns_ends and queries < keys
    if queries and keys and queries != keys and not (band.full or aligned):
        raise ValueError(
            f"causal={causal} window={window} with {queries} queries and {keys} keys: under a mask their numbers must "
            "be equal; use the backend math, which aligns the last query with the last key"
        )
    numbers = query.numel(), key.numel()
    is_plain = (
        all(numbers)
        and batch <= (plain.max_batch or batch)
        and (plain.grouped_heads or heads == kv_heads)
        and not dim % plain.head_dim_multiple
        and not dim * itemsize % plain.alignment_bytes
        # Rare, and copied only if it must be.
        and value_dim == dim
    )
    forward, backward = (
        is_plain and (span is None or max(numbers) <= span) for span in (plain.forward_span, plain.backward_span)
    )
    return Call(band, scale, softcap=_checked(plain, softcap)), forward, backward


def _checked(plain: Plain, softcap: float) -> float:
    if softcap and not plain.softcap:
        raise ValueError(f"softcap {softcap} is not computed by this kernel; use another backend, such as math")
    return softcap


def _are_plain(plain: Plain, span: int | None, *tensors: Tensor) -> bool:
    """Return True if a kernel takes tensors of plain shapes as they are, in one launch, on the current device."""
    multiple = plain.alignment_bytes
    for x in tensors:
        if multiple > 1 and x.data_ptr() % multiple:
            return False
        if not x.is_contiguous():
            itemsize, (*steps, last) = x.element_size(), x.stride()
            if last != 1 and x.shape[-1] > 1:
                return False
            if span is not None and x.untyped_storage().nbytes() > span * itemsize:
                return False
            for step, size in zip(steps, x.shape, strict=False):
                if size > 1 and step * itemsize % multiple:
                    return False
    x = tensors[0]
    return not x.is_cuda or x.get_device() == torch.cuda.current_device()


def _placeable(place: Tensor | None, batch: int, plain: Plain, other: Tensor) -> bool:
    """Return True if one launch can write its result there. other: q for out, and v for dq."""
    return (
        place is not None
        and plain.places_results
        and place.shape[-1] == other.shape[-1]
        and place.shape[0] <= batch
        and place.shape[-1] % plain.head_dim_multiple == 0
        and _aligned(place, plain.alignment_bytes)
    )


def _put(result: Tensor, place: Tensor | None) -> Tensor:
    """Return `result`, copied into `place` if there is one."""
    if place is None or result is place:
        return result
    return place.copy_(result)


def _nothing_seen(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out 0 and lse -inf, if there is no query or no visible key."""
    B, M, H, _ = q.shape
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_zeros((B, M, H, v.shape[-1])), q.new_full((B, H, M), float("-inf"), dtype=lse_dtype)


def _readable(x: Tensor, plain: Plain, width: int) -> Tensor:
    """Return x if the kernel can read it, else a contiguous copy, padded to `width` and to the required head dim."""
    missing = max(width, x.shape[-1]) - x.shape[-1]
    missing += -(x.shape[-1] + missing) % plain.head_dim_multiple
    if missing:
        return torch.nn.functional.pad(x, (0, missing))
    return x if _aligned(x, plain.alignment_bytes) else x.clone(memory_format=torch.contiguous_format)


def _aligned(x: Tensor, alignment_bytes: int) -> bool:
    if x.is_contiguous() and x.shape[-1] * x.element_size() % alignment_bytes == 0:
        # All other strides are multiples of the last dimension.
        return x.data_ptr() % alignment_bytes == 0
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        return False
    steps = (stride * x.element_size() for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1)
    return x.data_ptr() % alignment_bytes == 0 and all(step % alignment_bytes == 0 for step in steps)


def _cut(x: Tensor, like: Tensor) -> Tensor:
    """Remove the padding of the head dim."""
    return x if x.shape[-1] == like.shape[-1] else x[..., : like.shape[-1]].contiguous()


def _repeated(x: Tensor, q: Tensor, plain: Plain) -> Tensor:
    """K or V heads repeated to the number of query heads; a single head is expanded without a copy."""
    group = q.shape[-2] // x.shape[-2]
    if plain.grouped_heads or group == 1:
        return x
    return x.unsqueeze(-2).expand(*x.shape[:-1], group, x.shape[-1]).flatten(-3, -2)


def _summed(gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient of repeated heads, summed over each group."""
    if gradient.shape[-2] == like.shape[-2]:
        return gradient
    sum_dtype = torch.float64 if gradient.dtype == torch.float64 else torch.float32
    return gradient.unflatten(-2, (like.shape[-2], -1)).sum(-2, dtype=sum_dtype).to(gradient.dtype)


def _batch(plain: Plain, span: int | None, *tensors: Tensor) -> int:
    """Rows of the batch in one launch: all of them, or as many as the kernel takes."""
    batch = tensors[0].shape[0]
    if plain.max_batch is not None:
        batch = min(batch, plain.max_batch)
    if span is None:
        return batch
    for x in tensors:
        if x.untyped_storage().nbytes() <= span * x.element_size():
            # No view of it spans more.
            continue
        item = _span(x[:1])
        if item > span:
            raise ValueError(
                f"a tensor {list(x.shape)} spans {item} elements for each batch item, but this kernel can address "
                f"{span} only; give it fewer rows or heads at a time"
            )
        batch = min(batch, 1 + (span - item) // max(1, x.stride(0)))
    return batch


def _span(x: Tensor) -> int:
    """Elements from the first to the last, gaps included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _split(call: Callable[..., tuple[Tensor, ...]], batch: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Call once, or once per `batch` rows of the batch, and join the results."""
    rows = tensors[0].shape[0]
    if rows <= batch:
        return call(*tensors)
    wholes: tuple[Tensor, ...] = ()
    for start in range(0, rows, batch):
        wholes = _placed(wholes, call(*(x[start : start + batch] for x in tensors)), start, rows)
    return wholes


def _placed(wholes: tuple[Tensor, ...], parts: tuple[Tensor, ...], start: int, rows: int) -> tuple[Tensor, ...]:
    """Write the parts into the whole tensors of `rows` rows, which are allocated with the first parts.

    The parts can be freed afterwards: together they would take as much memory as the result.
    """
    wholes = wholes or tuple(x.new_empty((rows, *x.shape[1:])) for x in parts)
    for whole, part in zip(wholes, parts, strict=True):
        whole[start : start + part.shape[0]] = part
    return wholes
