"""Less memory for more work (torch): queries in chunks that see no key outside, inputs on the host, recomputation.

The backward pass of chunks runs each one forward again, so only the inputs are kept between the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from dilabench.contracts import AttentionFn, Build, BuildContext
from dilabench.workload.cuts import cut_into
from dilabench.workload.spec import Workload


@dataclass(frozen=True, slots=True)
class ChunkedQueries:
    """An AttentionFn of q [B, N, H, D] and k, v [B, N, K, D] on any device, computed on `device` chunk by chunk.

    `lengths` are the chunks; `functions` holds what was built for each length that occurs.
    """

    lengths: tuple[int, ...]
    functions: dict[int, AttentionFn]
    device: torch.device

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out [B, N, H, D] on the device of q; differentiable."""
        out: Tensor = _Chunks.apply(self, q, k, v)
        return out

    def chunks(self) -> Iterator[tuple[slice, AttentionFn]]:
        """Positions of each chunk, and its function."""
        start = 0
        for length in self.lengths:
            yield slice(start, start + length), self.functions[length]
            start += length

    def taken(self, at: slice, *tensors: Tensor) -> list[Tensor]:
        """The chunk of each tensor on the computing device, detached."""
        return [tensor.detach()[:, at].to(self.device) for tensor in tensors]


def build_in_chunks(build: Build, workload: Workload, context: BuildContext, tokens: int) -> ChunkedQueries:
    """Build `workload` in chunks of this many tokens. Raises ValueError when a chunk would end inside a segment."""
    lengths = cut_into(workload, tokens)
    functions = {length: build(workload.replace(seq_len=length), context) for length in set(lengths)}
    return ChunkedQueries(lengths, functions, context.device)


class _Chunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chunked: ChunkedQueries, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.chunked = chunked
        ctx.save_for_backward(q, k, v)
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        for at, function in chunked.chunks():
            out[:, at] = function(*chunked.taken(at, q, k, v))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        chunked: ChunkedQueries = ctx.chunked
        inputs = ctx.saved_tensors
        gradients = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs]
        for at, function in chunked.chunks():
            leaves = [tensor.requires_grad_() for tensor in chunked.taken(at, *inputs)]
            with torch.enable_grad():
                out = function(*leaves)
            parts = torch.autograd.grad([out], leaves, chunked.taken(at, dout))
            for gradient, part in zip(gradients, parts, strict=True):
                gradient[:, at] = part
        return None, *gradients


def checkpointed(function: AttentionFn) -> AttentionFn:
    """The function keeping only its inputs for the backward pass, which calls it again."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = checkpoint(function, q, k, v, use_reentrant=False, preserve_rng_state=False)
        return out

    return call
