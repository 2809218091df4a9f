"""A call passes few functions of ours, a first one few files: the way from q, k and v to the kernel can be read.

Run as a program it makes the first call of a pattern and prints the files.
"""

import os
import subprocess
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
from dilabench.attention import attention, block_sparse_attention, dilated_attention
from dilabench.kernels.cpu import flash
from dilabench.patterns import ColumnBoundsPattern, SelectedBlocksPattern, WindowSinkPattern

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


Call = Callable[[Tensor, Tensor, Tensor], Tensor]
HEADS, TOKENS, BLOCK = 8, 1024, 128
INDICES = torch.arange(TOKENS)[:, None, None].expand(TOKENS, HEADS, 2) // BLOCK
BLOCKS = torch.arange(TOKENS // BLOCK)[:, None]
# A call of every pattern, and the functions that it passes, with its backward pass too.
CALLS: dict[str, Call] = {
    "dense": lambda q, k, v: attention(q, k, v, causal=True),
    "dilated": lambda q, k, v: dilated_attention(q, k, v, **BRANCHES),
    "window_sink": lambda q, k, v: attention(q, k, v, pattern=WINDOW, causal=True),
    "column_bounds": lambda q, k, v: attention(q, k, v, pattern=DOCUMENTS, causal=True),
    "block_sparse": lambda q, k, v: block_sparse_attention(q, k, v, block_size=BLOCK, density=0.5),
    "topk_blocks": lambda q, k, v: block_sparse_attention(q, k, v, block_size=BLOCK, indices=BLOCKS, causal=True),
    "selected_blocks": lambda q, k, v: attention(q, k, v, pattern=SELECTED, indices=INDICES, causal=True),
}
WINDOW = WindowSinkPattern(sinks=4, window_size=BLOCK)
DOCUMENTS = ColumnBoundsPattern(document_lengths=(300, 700))
SELECTED = SelectedBlocksPattern(block_size=BLOCK)


def operands(device: str, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(1, TOKENS, HEADS, 64, device=device, dtype=dtype) for _ in range(3)]


@pytest.mark.skipif(not flash.serves(torch.float32), reason="needs a C++ compiler, none works here")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_repeated_call_on_a_cpu(call: Call) -> None:
    tensors = operands("cpu", torch.float32)
    found = functions_of(lambda: call(*tensors))
    assert len(found) <= 14, found
    leaves, dout = [x.requires_grad_() for x in tensors], torch.ones_like(tensors[0])
    found = functions_of(lambda: torch.autograd.grad(call(*leaves), leaves, dout))
    assert len(found) <= 28, found


QUICK = ("dense", "dilated")
# Branches of a dilated pattern are cut into views by four files of their own; blocks and indices may be a file's.
MOST_FILES = dict.fromkeys(CALLS, 24) | dict.fromkeys(("block_sparse", "topk_blocks", "selected_blocks"), 25)
MOST_FILES["dilated"] = 28


@pytest.mark.skipif(not flash.serves(torch.float32), reason="needs a C++ compiler, none works here")
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CALLS]
)
def test_a_first_call_on_a_cpu(name: str) -> None:
    found = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, check=True).stdout.split()
    assert 0 < len(found) <= MOST_FILES[name], found


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["sdpa-cudnn", "sdpa-flash"])
def test_torch_alone_differentiates_a_dense_call_on_a_gpu(backend: str) -> None:
    leaves = [x.requires_grad_() for x in operands("cuda", torch.bfloat16)]
    dout = torch.ones_like(leaves[0])
    forward = functions_of(lambda: attention(*leaves, causal=True, backend=backend))
    both = functions_of(lambda: torch.autograd.grad(attention(*leaves, causal=True, backend=backend), leaves, dout))
    assert both == forward
    assert len(both) <= 14, both


@pytest.mark.gpu
@pytest.mark.parametrize("call", [CALLS["dense"], CALLS["dilated"]], ids=["dense", "dilated"])
def test_a_repeated_call_on_a_gpu(call: Call) -> None:
    tensors = operands("cuda", torch.bfloat16)
    found = functions_of(lambda: call(*tensors))
    assert len(found) <= 14, found


if __name__ == "__main__":
    tensors, passed = operands("cpu", torch.float32), set()
    with watched(passed):
        CALLS[sys.argv[1]](*tensors)
    print(*sorted({code.co_filename.removeprefix(HOME) for code in passed}))  # noqa: T201 - the test reads it
