"""Uninitialised memory that is full of NaN, so that a value nobody wrote cannot pass for a zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

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
        if tensor.device.type == "cuda":
            free = torch.cuda.mem_get_info(tensor.device)[0]
            count = min(CACHED_BLOCKS, free // (4 * max(1, tensor.nbytes)))
            blocks += [torch.full_like(tensor, torch.nan) for _ in range(count)]
    del blocks
