"""Forward and backward of every kernel, on lengths that tiles do not divide: what `test_memcheck_gpu` runs.

Takes a head dim, a dtype and, for some entries alone, their names.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

# Each tensor in memory of its own, so that what lies beside it belongs to nobody.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
os.environ["DILABENCH_FIRST_USE"] = "0"

import torch
from gated_sums import gated_sum
from torch import Tensor

from dilabench.attention import attention, block_sparse_attention, dilated_attention

N, H = 509, 4
BOUNDS = (0, 3, 3, 250, N)
BRANCHES: dict[str, Any] = {"segment_lengths": (100, 512), "dilation_rates": (1, 3)}
WHOLE: dict[str, Any] = {"segment_lengths": (128, 512), "dilation_rates": (1, 2)}


def selected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    indices = torch.arange(-(-N // 64), device=q.device)[:, None]
    return block_sparse_attention(q, k, v, block_size=64, indices=torch.cat((indices, indices * 0), 1), causal=True)


ENTRIES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "dilated": lambda q, k, v: dilated_attention(q, k, v, causal=True, **BRANCHES),
    "whole rows": lambda q, k, v: dilated_attention(q, k, v, **WHOLE),
    "detached": lambda q, k, v: dilated_attention(q, k, v, merge_grad="detached", padding="zero_key", **BRANCHES),
    "window": lambda q, k, v: dilated_attention(q, k, v, causal=True, window=(50, 0), **BRANCHES),
    "sink": lambda q, k, v: dilated_attention(q, k, v, sink=q.new_ones(H), **BRANCHES),
    "packed": lambda q, k, v: dilated_attention(q[0], k[0], v[0], cu_seqlens=BOUNDS, **BRANCHES)[None],
    "packed dense": lambda q, k, v: attention(q[0], k[0], v[0], cu_seqlens=BOUNDS, causal=True)[None],
    "blocks": lambda q, k, v: block_sparse_attention(q, k, v, block_size=64, density=0.5, causal=True),
    "blocks of 128": lambda q, k, v: block_sparse_attention(q, k, v, block_size=128, density=0.5),
    "selected": selected,
    "sum": gated_sum,
}


def run(name: str, dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, N, heads, dim) for heads in (H, H // 2, H // 2)]
    q, k, v = (torch.randn(shape, generator=generator).to("cuda", dtype).requires_grad_() for shape in shapes)
    # The third call repeats launches.
    for _ in range(3):
        out = ENTRIES[name](q, k, v)
        gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    torch.cuda.synchronize()
    assert all(x.isfinite().all() for x in (out, *gradients)), name


if __name__ == "__main__":
    for name in sys.argv[3:] or ENTRIES:
        run(name, int(sys.argv[1]), getattr(torch, sys.argv[2]))
        sys.stdout.write(f"{name} D{sys.argv[1]} {sys.argv[2]}\n")
        sys.stdout.flush()
