"""What verification puts in place of a module's attention core."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dilabench.engine.verify.oracle.reference import differentiable_rows
from dilabench.workload.spec import Workload


class ReplacedCore(nn.Module):
    """What verification puts in place of a module's attention core: always of this class, whatever it `answers`.

    A forward that could tell the cores apart could be projections around one of them only.
    """

    def __init__(self, answers: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self._answers = answers

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, N, H, D] or packed [T, H, D] -> out of the same shape."""
        return self._answers(q, k, v)


class SampledRows:
    """The formula on some rows, zeros elsewhere. Keeps q, k, v, out and lse of its calls in `seen`, the latest last.

    If `instead` is set, it is returned.
    """

    def __init__(self, workload: Workload, rows: Tensor, dtype: torch.dtype) -> None:
        self.workload, self.rows, self.compute_dtype = workload, rows, dtype
        self.seen: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = []
        self.instead: Tensor | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, N, H, D] or packed [T, H, D] -> out of the same shape."""
        if self.instead is not None:
            return self.instead
        q_heads, k_heads, v_heads = (self.batched(x) for x in (q, k, v))
        out, lse = differentiable_rows(q_heads, k_heads, v_heads, self.workload, self.rows, self.compute_dtype)
        out = out[0] if q.ndim == 3 else out
        self.seen.append((q, k, v, out, lse.detach()))
        return out

    @staticmethod
    def batched(x: Tensor) -> Tensor:
        """With the batch axis that packed heads lack."""
        return x[None] if x.ndim == 3 else x


class CoreCallsError(Exception):
    """A copy of the module did not call its core once."""


class Constant:
    """A constant for any inputs; `calls` holds the inputs."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, ...]] = []

    def __call__(self, *heads: Tensor) -> Tensor:
        """Random numbers of q's shape, the same in every call."""
        self.calls.append(tuple(x.detach() for x in heads))
        query = heads[0]
        generator = torch.Generator(query.device).manual_seed(0)
        return torch.randn(query.shape, generator=generator, device=query.device, dtype=query.dtype)
