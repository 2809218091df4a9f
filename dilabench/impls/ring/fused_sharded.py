"""`fused-sharded`, `strided-sharded`: every rank holds whole segments and computes them alone, without messages.

As in LongNet: with segments that end where ranks do, a sequence over P ranks costs each of them 1/P of the work, the
memory and no traffic. Only the results are allocated. A branch that crosses ranks needs `ring-allgather`. Of packed
documents each rank holds whole ones (`distributed.document_assignment`), in one launch of `fused`; `strided-sharded`
computes these over any backend.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from dilabench.contracts import BuildContext
from dilabench.distributed.document_assignment import assigned_documents, runs_of, segments_of
from dilabench.distributed.sharding import Shards, Span, shards_of
from dilabench.distributed.world import World
from dilabench.impls import strided
from dilabench.impls.no_pairs import SHAPES_ONLY
from dilabench.impls.ring.schedule.function import LocalOnly, ShardedAttention
from dilabench.workload.cuts import cut_apart
from dilabench.workload.spec import Workload


def build(workload: Workload, context: BuildContext) -> ShardedAttention:
    """Rank r holds the r-th part, cut where segments end; packed: documents assigned by their work.

    Raises ValueError if a sequence that is not packed has fewer parts than there are ranks.
    """
    # Triton is not installed everywhere.
    from dilabench.impls import fused

    return build_local(workload, context, fused.build)


def build_strided(workload: Workload, context: BuildContext) -> ShardedAttention:
    """`strided-sharded`: the same over a backend."""
    return build_local(workload, context, strided.build)


def build_local(
    workload: Workload, context: BuildContext, single_device: Callable[[Workload, BuildContext], Any]
) -> ShardedAttention:
    """`build` with another single-device implementation on each rank's part."""
    world = context.world or World.single(context.device)
    if workload.layout == "packed":
        shards, own = _of_documents(workload, world)
    else:
        lengths = cut_apart(workload, world.size)
        starts = accumulate(lengths, initial=0)
        shards = Shards(tuple((Span(start, start + length),) for start, length in zip(starts, lengths, strict=False)))
        own = workload.replace(seq_len=lengths[world.rank])
    local = SHAPES_ONLY if own is None else single_device(own, context)
    return ShardedAttention(workload, shards, world, LocalOnly(local))


def _of_documents(workload: Workload, world: World) -> tuple[Shards, Workload | None]:
    """The shards, and this rank's packed workload; None without a document."""
    segments = segments_of(workload.pattern, workload.seq_len, workload.num_heads, workload.num_kv_heads)
    if segments is None:
        raise ValueError(f"{workload.label()}: its documents are no strided segments that can be cut apart")
    documents = assigned_documents(workload.sequences, segments, world.size)
    bounds = (0, *accumulate(stop - start for start, stop in documents[world.rank]))
    own = workload.replace(cu_seqlens=bounds, seq_len=bounds[-1]) if bounds[-1] else None
    return shards_of(runs_of(documents)), own
