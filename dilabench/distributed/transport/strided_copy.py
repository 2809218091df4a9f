"""Copies between tensors with different strides, in the widest words that both allow.

torch's kernel for strided copies moves one element per thread: with two-byte elements it reaches a third of an H200's
memory rate.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

_WORDS = {16: torch.complex128, 8: torch.int64, 4: torch.int32}


def copy_strided_(target: Tensor, source: Tensor) -> None:
    """Overwrite `target` with `source`, of the same shape and dtype, with any strides.

    Bit-exact: the words are only moved. Words wider than the elements are used where strides, the last dimension and
    the addresses of both are multiples of them.
    """
    width = gcd(_unit(target), _unit(source))
    if width > target.element_size() and (word := _WORDS.get(width)) is not None:
        target, source = target.view(word), source.view(word)
    target.copy_(source)


def _unit(x: Tensor) -> int:
    """The bytes, at most 16, of which all rows of x are multiples, at addresses that are multiples of them."""
    if not x.ndim or x.stride(-1) != 1:
        return 1
    elements = gcd(x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    return gcd(elements * x.element_size(), x.data_ptr(), 16)
