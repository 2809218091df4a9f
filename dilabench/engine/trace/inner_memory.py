"""Temporary memory inside torch's operators, which no trace sees and this module states (torch).

Measured on an H200 (torch 2.11) for the CUDA kernels, read from torch's sources and measured for the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
FLOAT32_BYTES = 4


def inner_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: str) -> int:
    """Bytes of one operator beyond its arguments and results; 0 for what is not listed."""
    if (stated := _STATED.get(func)) is not None:
        return stated(args, device)
    if device == "cpu":
        if torch.Tag.pointwise in func.tags and func not in _COPIES:
            return _casts(args)
        if func is aten.sum.dim_IntList and kwargs.get("dtype") not in (None, args[0].dtype):
            return int(args[0].numel() * kwargs["dtype"].itemsize)
    return 0


_COPIES = (aten.copy_.default, aten._to_copy.default)


def _casts(args: tuple[Any, ...]) -> int:
    """On a CPU elementwise operators copy what has another dtype than the common one; CUDA casts in registers."""
    given = [x for x in args if isinstance(x, Tensor) and x.ndim]
    if len({x.dtype for x in given}) < 2 or any(x.dtype == torch.bool for x in given):
        return 0
    common = given[0].dtype
    for x in given[1:]:
        common = torch.promote_types(common, x.dtype)
    return sum(x.numel() * common.itemsize for x in given if x.dtype != common)


def _exponentials(args: tuple[Any, ...], _device: str) -> int:
    return int(args[0].nbytes)


def _accumulators(q: Tensor, *, grouped: Tensor | None = None, viewed: tuple[Tensor, ...] = ()) -> int:
    """A float32 sum for each element of q and a number per row; dk and dv per query head; copies of views."""
    nbytes = q.numel() * FLOAT32_BYTES + q.numel() // q.shape[-1] * FLOAT32_BYTES
    if grouped is not None:
        nbytes += 2 * grouped.nbytes * q.shape[-2] // grouped.shape[-2]
    return nbytes + sum(x.nbytes for x in viewed if not x.is_contiguous())


def _flash(args: tuple[Any, ...], _device: str) -> int:
    dout, q, k, _, out = args[:5]
    return _accumulators(q, grouped=k if k.shape[-2] != q.shape[-2] else None, viewed=(dout, out))


def _efficient(args: tuple[Any, ...], _device: str) -> int:
    return _accumulators(args[1])


def _cudnn(args: tuple[Any, ...], _device: str) -> int:
    q, k = (x.transpose(1, 2) for x in args[1:3])
    return _accumulators(q, grouped=k if k.shape[2] != q.shape[2] else None)


def _cpu_blocks(q: Tensor, k: Tensor) -> tuple[int, int, int]:
    """Scores of the block that a thread of torch's flash kernel on a CPU works on, its rows, and bytes of a float.

    Blocks of 256, 64 or 32 queries by 512 keys, in float32 for half precision (torch/FlashAttentionKernel.cpp). q and
    k [B, H, N, D].
    """
    length = q.shape[2]
    rows = min(length, 256 if length >= 768 else 64 if length >= 192 else 32)
    return rows * min(k.shape[2], 512), rows, max(FLOAT32_BYTES, q.element_size())


def _cpu_flash(args: tuple[Any, ...], _device: str) -> int:
    """Per thread: scores, their sums and largest, out of a block; half precision has the weights in its own, too."""
    q, k = args[:2]
    scores, rows, nbytes = _cpu_blocks(q, k)
    weights = scores * q.element_size() * (q.element_size() < FLOAT32_BYTES)
    return torch.get_num_threads() * ((scores + rows * (2 + q.shape[-1])) * nbytes + weights)


def _cpu_flash_backward(args: tuple[Any, ...], _device: str) -> int:
    """Per thread the scores and their gradients, the same in half precision; a copy of dout if it is a view."""
    dout, q, k = args[:3]
    scores, rows, nbytes = _cpu_blocks(q, k)
    halves = scores * q.element_size() * (q.element_size() < FLOAT32_BYTES)
    copied = 0 if dout.transpose(1, 2).is_contiguous() else dout.nbytes
    return torch.get_num_threads() * 2 * (scores * nbytes + halves) + rows * nbytes + copied


_STATED = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _cpu_flash,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _cpu_flash_backward,
    aten.logsumexp.default: _exponentials,
    aten._flash_attention_backward.default: _flash,
    aten._efficient_attention_backward.default: _efficient,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn,
}


def _efficient_backward(
    _dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_others: Any, **_options: Any
) -> tuple[Tensor, Tensor, Tensor, None]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None


# Operators whose own fake form is wrong: up to torch 2.13 this one mistakes an argument.
FORMS = {aten._efficient_attention_backward.default: _efficient_backward}
