"""`fused-documents`, `strided-documents`: dilated attention of packed documents, whole ones on every rank, without
messages (`distributed.document_assignment`). A rank computes its documents as one device does.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from dilabench.contracts import BuildContext
from dilabench.distributed.document_assignment import assigned_documents, runs_of, segments_of
from dilabench.distributed.sharding import shards_of
from dilabench.distributed.world import World
from dilabench.impls import strided
from dilabench.impls.no_pairs import SHAPES_ONLY
from dilabench.impls.ring.schedule.function import LocalOnly, ShardedAttention
from dilabench.workload.spec import Workload


def build_fused(workload: Workload, context: BuildContext) -> ShardedAttention:
    """All documents of a rank in one launch of `fused`. Raises ValueError for a pattern without segments or cuts."""
    # Triton is not installed everywhere.
    from dilabench.impls import fused

    return _built(workload, context, fused.build)


def build_strided(workload: Workload, context: BuildContext) -> ShardedAttention:
    """By `strided` over the backend, also on a CPU. Raises ValueError like `build_fused`."""
    return _built(workload, context, strided.build)


def _built(
    workload: Workload, context: BuildContext, single_device: Callable[[Workload, BuildContext], Any]
) -> ShardedAttention:
    world = context.world or World.single(context.device)
    segments = segments_of(workload.pattern, workload.seq_len, workload.num_heads, workload.num_kv_heads)
    if segments is None:
        raise ValueError(f"{workload.label()}: the pattern is no union of strided segments, or its parts have no cut")
    documents = assigned_documents(workload.sequences, segments, world.size)
    bounds = (0, *accumulate(stop - start for start, stop in documents[world.rank]))
    own = workload.replace(cu_seqlens=bounds, seq_len=bounds[-1]) if bounds[-1] else None
    local = SHAPES_ONLY if own is None else single_device(own, context)
    return ShardedAttention(workload, shards_of(runs_of(documents)), world, LocalOnly(local))
