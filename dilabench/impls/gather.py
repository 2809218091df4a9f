"""`gather`: branches as indexed copies, any dense backend, results merged by lse. The plain method."""

from __future__ import annotations

from functools import partial

import torch

from dilabench.contracts import BuildContext
from dilabench.impls.packed import ByBranches, Packed, build_packed, by_branches
from dilabench.impls.union.gathered_rows import GatheredRows, gathered_rows
from dilabench.impls.union.union import Union
from dilabench.workload.spec import Workload


def build(workload: Workload, context: BuildContext) -> Union | ByBranches | Packed:
    """Copies of rows live in the context's buffers, indices in its pattern cache."""
    if workload.layout == "padded":
        return padded(workload, context)
    return by_branches(workload, context) or build_packed(padded, workload, context)


def padded(workload: Workload, context: BuildContext) -> Union:
    """One or several sequences of equal length."""

    def rows(device: torch.device) -> tuple[GatheredRows, ...]:
        make = partial(gathered_rows, workload, device, context.buffers)
        return context.patterns.get(("gathered rows", workload, device), make)

    return Union.of(workload, context, rows)
