"""`strided`: branches as zero-copy strided and diagonal views, any dense backend, results merged in place.

On a CPU, large workloads whose branches share pairs are computed as rectangles of such views.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dilabench.contracts import BuildContext, LoadedBackend
from dilabench.impls.last_rows import aligned
from dilabench.impls.union.branches import branches_of, chains
from dilabench.impls.union.strided_rows import kept_rows
from dilabench.impls.union.union import Union
from dilabench.workload.spec import UNBOUNDED, Workload, flops

if TYPE_CHECKING:
    from dilabench.impls.packed import ByBranches, InTiles, OneLaunch, Packed

# Of a forward pass in rectangles; new threads take milliseconds to start, and calls grow small.
LEAST_FLOPS = 8e9


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
    if _gains_by_rectangles(workload, context):
        from dilabench.impls.union.rectangle_union import rectangle_union

        return rectangle_union(workload, context)
    return Union.of(workload, context, rows)


def _gains_by_rectangles(workload: Workload, context: BuildContext) -> bool:
    """Return True if rectangles take less time than whole branches: for branches that share pairs, without a window.

    On two cores both took the same time for the same pairs; small workloads took up to twice as long.
    """
    if context.device.type != "cpu" or workload.window != UNBOUNDED or not _keeps_sums(workload, context.backend):
        return False
    shares_pairs = any(len(chain) > 1 for chain in chains(branches_of(workload), workload.seq_len))
    return shares_pairs and flops(workload.replace(mode="forward")) >= LEAST_FLOPS


def _keeps_sums(workload: Workload, backend: LoadedBackend | None) -> bool:
    """Whether partial results are merged before they are rounded to the dtype."""
    if workload.dtype in ("float32", "float64"):
        return True
    merging = backend.merging if backend and not workload.detaches_merge else None
    return merging is not None and getattr(torch, workload.dtype) in merging.dtypes
