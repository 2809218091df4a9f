"""`block-sparse-ring-multihead`: projections around `block-sparse-ring`, on shards of embeddings."""

from __future__ import annotations

from dilabench.contracts import BuildContext
from dilabench.impls.multihead import ProjectedAttention
from dilabench.impls.ring import block_sparse
from dilabench.impls.ring.multihead import ShardedProjection, projected
from dilabench.workload.spec import Workload


def build(workload: Workload, context: BuildContext) -> ShardedProjection | ProjectedAttention:
    """As `ring-multihead`, with the shards and refusals of `block-sparse-ring`."""
    return projected(workload, context, block_sparse.build(workload, context))
