"""`natten`: dilated neighbourhood attention by NATTEN's own kernels, in one dimension. Read in version 0.21.6."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.patterns.neighborhood import NeighborhoodPattern
from dilabench.workload.spec import Workload


def build(workload: Workload, context: BuildContext) -> Neighborhoods:  # noqa: ARG001 (the kernel is NATTEN's choice)
    """Raises ModuleNotFoundError where NATTEN is missing."""
    return Neighborhoods(workload)


class Neighborhoods:
    """out [B, N, H, D] of q [B, N, H, D] and k, v [B, N, K, D]."""

    def __init__(self, workload: Workload) -> None:
        from natten import na1d

        pattern = NeighborhoodPattern.of(workload)
        self._function = na1d
        self._options: dict[str, Any] = {
            "kernel_size": pattern.kernel_size,
            "dilation": pattern.dilation,
            "is_causal": workload.causal,
            "scale": workload.softmax_scale,
        }

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Differentiable."""
        out: Tensor = self._function(q, k, v, **self._options)
        return out

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out, and lse [B, H, N]."""
        out, lse = self._function(q, k, v, **self._options, return_lse=True)
        return out, lse.transpose(1, 2)
