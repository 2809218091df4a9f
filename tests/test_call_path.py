"""A repeated call passes few functions of ours, so that the way from q, k and v to the kernel can be read."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import dilabench
from dilabench.attention import dilated_attention
from dilabench.kernels.cpu import flash

HOME = os.path.dirname(dilabench.__file__) + os.sep
# Code of functions, and of no module or class body.
OPTIMIZED = 1
BRANCHES = {"segment_lengths": (256, 512, 1024), "dilation_rates": (1, 2, 4)}


@contextmanager
def watched(seen: set[CodeType]) -> Iterator[None]:
    """Collect what runs of our files, also in threads that begin meanwhile."""

    def watch(frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_flags & OPTIMIZED and code.co_filename.startswith(HOME):
            seen.add(code)

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def functions_of(call: Callable[[], object]) -> list[str]:
    """The functions, lambdas and comprehensions of ours that a call goes through from its fourth time on."""
    for _ in range(3):
        call()
    seen: set[CodeType] = set()
    with watched(seen):
        call()
    return sorted(f"{code.co_filename.removeprefix(HOME)}:{code.co_qualname}" for code in seen)


def calls(device: str, dtype: torch.dtype) -> tuple[Callable[[], Tensor], Callable[[], object]]:
    """A call without gradients, and one with its backward pass."""
    q, k, v = (torch.randn(1, 1024, 8, 64, device=device, dtype=dtype) for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    dout = torch.ones_like(q)
    return (
        lambda: dilated_attention(q, k, v, **BRANCHES),
        lambda: torch.autograd.grad(dilated_attention(*leaves, **BRANCHES), leaves, dout),
    )


@pytest.mark.skipif(not flash.serves(torch.float32), reason="needs a C++ compiler, none works here")
def test_a_repeated_call_on_a_cpu() -> None:
    forward, both = calls("cpu", torch.float32)
    found = functions_of(forward)
    assert len(found) <= 20, found
    found = functions_of(both)
    assert len(found) <= 56, found


@pytest.mark.gpu
def test_a_repeated_call_on_a_gpu() -> None:
    found = functions_of(calls("cuda", torch.bfloat16)[0])
    assert len(found) <= 8, found
