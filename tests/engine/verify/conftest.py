"""A right implementation that shares no code with the oracle's evaluation, and the workloads it is tried on."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dilabench.impls.visible_keys import multiplicity
from dilabench.record import Verification
from dilabench.workload.spec import Workload

BRANCHES = {"kind": "dilated", "segment_lengths": (16, 48, 256), "dilation_rates": (1, 3, 6)}
BASE = {"pattern": BRANCHES, "batch_size": 2, "seq_len": 61, "num_heads": 5, "num_kv_heads": 5, "head_dim": 24}

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def failing(verification: Verification) -> set[str]:
    """The names of the checks that failed."""
    return {check.name for check in verification.checks if not check.passed}


class DenseMask:
    """Softmax over the whole N x N score matrix in the inputs' dtype, masked and weighted by C."""

    def __init__(self, workload: Workload, counts: Tensor | None = None) -> None:
        rows = torch.arange(workload.seq_len)
        self.workload = workload
        self.counts = torch.stack([multiplicity(workload, head, rows) for head in range(workload.num_heads)])
        if counts is not None:
            self.counts = counts

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packed = q.ndim == 3
        if packed:
            q, k, v = q[None], k[None], v[None]
        k, v = (x.repeat_interleave(self.workload.group_size, dim=2) for x in (k, v))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * self.workload.softmax_scale
        scores = scores.to(torch.promote_types(q.dtype, torch.float32))
        empty = (self.counts.sum(-1) == 0)[..., None]
        weights = (
            (scores + torch.where(empty, 1, self.counts).to(scores.dtype).log()).softmax(-1).masked_fill(empty, 0.0)
        )
        out = torch.einsum("bhij,bjhd->bihd", weights.to(q.dtype), v)
        return out[0] if packed else out


@pytest.fixture
def make_workload() -> Callable[..., Workload]:
    """A small odd workload with some fields changed."""

    def make(**changes: Any) -> Workload:
        return Workload.model_validate({**BASE, **changes})

    return make


@pytest.fixture
def right() -> type[DenseMask]:
    """The class of the right implementation; `right(workload)` is a function, `counts=` replaces its C."""
    return DenseMask
