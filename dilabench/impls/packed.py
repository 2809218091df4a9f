"""Packed sequences, each by the computation for its own length: segments and zero keys begin anew in every one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.impls.one_operator import Computation, differentiable, new_number, register
from dilabench.workload.spec import Workload


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Packed:
    """Sequences (start, stop) that follow each other along one axis, and what computes those of each length."""

    sequences: tuple[tuple[int, int], ...]
    computations: Mapping[int, Computation]
    number: int = field(default_factory=new_number, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        register(self.number, self)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out [T, H, D] of q [T, H, D] and k, v [T, K, D]; differentiable."""
        return self.with_lse(q, k, v)[0]

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out, and lse [H, T] (natural log), which carries no gradient."""
        out, lse = differentiable(self, self.number, q[None], k[None], v[None])
        return out[0], lse[0]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out [1, T, H, D] and lse [1, H, T], outside autograd."""
        outs, lses = [], []
        for start, stop in self.sequences:
            out, lse = self.computations[stop - start].forward(*(x[:, start:stop] for x in (q, k, v)))[:2]
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs, 1), torch.cat(lses, 2)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv [1, T, ·, D] from the results of `forward`."""
        gradients = []
        for start, stop in self.sequences:
            parts = [x[:, start:stop] for x in (dout, q, k, v, out)]
            parts.append(lse[:, :, start:stop].contiguous())
            gradients.append(self.computations[stop - start].backward(*parts))
        dq, dk, dv = (torch.cat(several, 1) for several in zip(*gradients, strict=True))
        return dq, dk, dv


def build_packed(
    padded: Callable[[Workload, BuildContext], Computation], workload: Workload, context: BuildContext
) -> Packed:
    """What `padded` builds for a sequence of each length that occurs in a packed workload."""
    computations = {}
    for length in {stop - start for start, stop in workload.sequences}:
        alone = workload.replace(layout="padded", cu_seqlens=None, seq_len=length)
        computations[length] = padded(alone, context)
    return Packed(workload.sequences, computations)
