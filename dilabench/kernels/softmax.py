# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""Merging by log-sum-exp inside of Triton kernels; in PyTorch: `lse`. Gluon kernels have their own (`sm90.softmax`)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def finite(top):
    """A maximum to subtract: 0 if it is -inf, because -inf - (-inf) must not reach an exponential."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def weights_of_two(lse, other):
    """The larger of two lse, and the weights exp(lse - larger) and exp(other - larger), 0 for -inf."""
    top = tl.maximum(lse, other)
    safe = finite(top)
    return top, tl.exp(lse - safe), tl.exp(other - safe)
