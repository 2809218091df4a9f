"""The base of computations that are attention functions as well."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from dilabench.impls.one_operator import as_one_operator, eager, new_number, outside_compilers, register


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class AttentionComputation(ABC):
    """A `one_operator.Computation`, found by operators under its number, that autograd can differentiate.

    `keeps_more`: `forward` also gives a list of tensors, which `backward` takes last.
    """

    number: int = field(default_factory=new_number, init=False, repr=False, compare=False)

    keeps_more: ClassVar[bool] = False

    def __post_init__(self) -> None:
        register(self.number, self)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out [B, N, H, D] of q [B, N, H, D] and k, v [B, N, K, D], or packed [T, ·, D]; differentiable."""
        return self.with_lse(q, k, v)[0]

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out, and lse [B, H, N], packed [H, T] (natural log; float32, float64 for float64), without a gradient."""
        if q.ndim == 3:
            out, lse = self.with_lse(q[None], k[None], v[None])
            return out.squeeze(0), lse.squeeze(0)
        # An operator would not pass on the tensors that `forward` keeps.
        if (torch.compiler.is_compiling() or torch._C._is_tracing()) and not self.keeps_more:
            return as_one_operator(self.number, q, k, v)
        return outside_compilers(eager, self, q, k, v)

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        """out [B, N, H, D] in q's dtype and lse [B, H, N], outside autograd; packed sequences are one item.

        A row that sees no key has out 0 and lse -inf.
        """

    @abstractmethod
    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv in the dtypes of q, k, v, from an out and lse that may belong to a larger softmax."""
