"""`strided`: branches as zero-copy strided and diagonal views, any dense backend, results merged in place.

On a CPU, large workloads whose branches share pairs are computed as rectangles of such views.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dilabench.contracts import BuildContext
from dilabench.impls.last_rows import aligned
from dilabench.impls.union.rectangle_union import in_rectangles
from dilabench.impls.union.strided_rows import kept_rows
from dilabench.impls.union.union import Union
from dilabench.workload.spec import Workload

if TYPE_CHECKING:
    from dilabench.impls.packed import ByBranches, InTiles, OneLaunch, Packed


def build(workload: Workload, context: BuildContext) -> Union | OneLaunch | InTiles | ByBranches | Packed:
    """Tensors that are contiguous in [B, N, H, D], or slices of a packed projection, are read in place."""
    if workload.layout == "padded":
        return padded(workload, context)
    from dilabench.impls.packed import build_packed, by_branches, in_one_launch, in_tiles

    together = in_one_launch(workload, context) or by_branches(workload, context) or in_tiles(workload, context)
    return together or build_packed(padded, workload, context)


def padded(workload: Workload, context: BuildContext) -> Union:
    """The computation for sequences of one length, or of queries that are the last rows of their keys."""
    rows = kept_rows(workload, context.patterns)
    if workload.query_len is not None:
        return Union.of(workload, context, rows, backend=aligned(context.require_backend()))
    return in_rectangles(workload, context) or Union.of(workload, context, rows)
