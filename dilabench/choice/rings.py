"""The implementations over ranks that dilabench ships. With one rank they compute what one device computes."""

from dataclasses import replace

from dilabench.choice.descriptors import Capabilities, Implementation
from dilabench.choice.implementations import (
    ADDED_QUERIES,
    BLOCKS,
    DENSE,
    DILATED,
    FUSED,
    HALF,
    better_branch_by_branch,
    no_block_tiles,
)
from dilabench.workload.spec import Workload

OVER_RANKS = Capabilities(patterns=DENSE | DILATED, max_world_size=None)
PACKED_OVER_RANKS = Capabilities(patterns=DENSE | DILATED, layouts=frozenset({"packed"}), max_world_size=None)


def _mask_over_branches(workload: Workload) -> str | None:
    """Return why ranks, which own whole blocks of the sequence, cannot compute the mask, or None."""
    from dilabench.patterns.block_sparse import BlockSparsePattern

    pattern = BlockSparsePattern.match(workload.pattern)
    if pattern is not None and pattern.branches is not None:
        return "a block mask over dilated branches has blocks of scattered rows, which no single rank owns"
    return None


def _beyond_ring_attention(workload: Workload) -> str | None:
    """Return the fields of a dilated pattern that `ring_attention` does not take, or None."""
    given = workload.pattern.model_dump(exclude_defaults=True).keys() - {"kind", "segment_lengths", "dilation_rates"}
    return f"ring_attention does not take {', '.join(sorted(given))}" if given else None


def _over_ranks_on_cuda(workload: Workload) -> str | None:
    return _mask_over_branches(workload) or no_block_tiles(workload)


# Gathered blocks have no row distances that a window could limit.
BLOCKS_OVER_RANKS = Capabilities(
    patterns=BLOCKS,
    window=False,
    max_world_size=None,
    check=_mask_over_branches,
    on_cuda=Capabilities(
        patterns=BLOCKS,
        dtypes=HALF | {"float32"},
        window=False,
        max_head_dim=256,
        max_world_size=None,
        check=_over_ranks_on_cuda,
    ),
)

FUSED_BESIDE_MESSAGES = replace(
    FUSED, layouts=frozenset({"padded"}), merge_grads=frozenset({"exact"}), max_world_size=None, zero_keys=False
)

RINGS = (
    Implementation(
        "ring",
        "K and V go from rank to rank, step by step",
        "dilabench.impls.ring.rings:build",
        supports=OVER_RANKS,
        aliases=("ring_v2",),
        uses_backend=True,
        calls_ahead=True,
        priority=20,
        sharding="dilabench.distributed.shardings:RING",
    ),
    Implementation(
        "ring-overlap",
        "the ring with double buffers: the next step is under way while this one is computed",
        "dilabench.impls.ring.rings:build_overlap",
        supports=OVER_RANKS,
        aliases=("ring_v3",),
        uses_backend=True,
        calls_ahead=True,
        priority=30,
        sharding="dilabench.distributed.shardings:RING_OVERLAP",
    ),
    Implementation(
        "ring-allgather",
        "one fused exchange of the dilated K and V (LongNet's own distributed algorithm)",
        "dilabench.impls.ring.allgather:build",
        supports=replace(OVER_RANKS, zero_keys=True),
        aliases=("ring_v2_collective",),
        uses_backend=True,
        calls_ahead=True,
        priority=60,
        sharding="dilabench.distributed.shardings:RING_ALLGATHER",
        preferred_for=Capabilities(max_world_size=None, zero_keys=True),
    ),
    Implementation(
        "fused-allgather",
        "the same exchange, with branches whose segments lie on a rank in one launch of fused",
        "dilabench.impls.ring.allgather:build_fused",
        supports=FUSED_BESIDE_MESSAGES,
        requires=("cuda>=sm80", "triton>=3.6"),
        uses_backend=True,
        calls_ahead=True,
        quirks=(ADDED_QUERIES,),
        priority=65,
        sharding="dilabench.distributed.shardings:RING_ALLGATHER",
        preferred_for=replace(FUSED_BESIDE_MESSAGES, check=better_branch_by_branch),
    ),
    Implementation(
        "fused-sharded",
        "whole segments on every rank, fused on each: no messages",
        "dilabench.impls.ring.fused_sharded:build",
        supports=replace(FUSED_BESIDE_MESSAGES, parts_apart=True),
        requires=("cuda>=sm80", "triton>=3.6"),
        quirks=(ADDED_QUERIES,),
        priority=70,
    ),
    Implementation(
        "zigzag-ring",
        "the overlapping ring on shards that balance causal work",
        "dilabench.impls.ring.rings:build_zigzag",
        supports=OVER_RANKS,
        aliases=("zigzag",),
        uses_backend=True,
        calls_ahead=True,
        priority=50,
        sharding="dilabench.distributed.shardings:ZIGZAG_RING",
    ),
    Implementation(
        "zigzag-allgather",
        "all keys that a rank sees in one exchange, then one call per chunk of queries (as Llama 3): for few K/V heads",
        "dilabench.impls.ring.gathered:build",
        supports=Capabilities(patterns=DENSE, layouts=frozenset({"padded", "packed"}), max_world_size=None),
        aliases=("llama3",),
        uses_backend=True,
        calls_ahead=True,
        priority=40,
        sharding="dilabench.distributed.shardings:ZIGZAG_ALLGATHER",
        preferred_for=Capabilities(patterns=DENSE, max_world_size=None),
    ),
    Implementation(
        "balanced-allgather",
        "chunks of packed documents assigned to ranks by their work; keys go once to the ranks that see them",
        "dilabench.impls.ring.gathered:build_balanced",
        supports=Capabilities(patterns=DENSE, layouts=frozenset({"padded", "packed"}), max_world_size=None),
        uses_backend=True,
        calls_ahead=True,
        priority=45,
        sharding="dilabench.distributed.shardings:BALANCED_ALLGATHER",
        preferred_for=Capabilities(patterns=DENSE, layouts=frozenset({"packed"}), max_world_size=None),
    ),
    Implementation(
        "ring-varlen",
        "the overlapping ring on packed sequences of any lengths",
        "dilabench.impls.ring.rings:build_varlen",
        supports=PACKED_OVER_RANKS,
        aliases=("varlen",),
        uses_backend=True,
        calls_ahead=True,
        priority=20,
        sharding="dilabench.distributed.shardings:RING_VARLEN",
    ),
    Implementation(
        "library-over-ranks",
        "what `dilabench.attention.ring_attention` chooses by default, with the transport of its group",
        "dilabench.attention.as_implementation:build_over_ranks",
        supports=replace(OVER_RANKS, layouts=frozenset({"padded", "packed"}), check=_beyond_ring_attention),
        chooses=True,
    ),
    Implementation(
        "ring-multihead",
        "projections around the ring",
        "dilabench.impls.ring.multihead:build",
        supports=OVER_RANKS,
        uses_backend=True,
        calls_ahead=True,
        takes="embeddings",
    ),
    Implementation(
        "ulysses",
        "ranks trade tokens for heads: all-to-all around whole sequences",
        "dilabench.impls.ring.ulysses:build",
        supports=Capabilities(patterns=DENSE | DILATED, layouts=frozenset({"padded", "packed"}), max_world_size=None),
        aliases=("distributed",),
        uses_backend=True,
        priority=10,
        sharding="dilabench.distributed.shardings:ULYSSES",
    ),
    Implementation(
        "block-sparse-ring",
        "block-sparse over ranks: only the blocks that a local query sees are sent, with the heads that see them",
        "dilabench.impls.ring.block_sparse:build",
        supports=BLOCKS_OVER_RANKS,
        requires=("triton>=3.6|cpu",),
        priority=10,
        sharding="dilabench.distributed.shardings:BLOCKS",
    ),
    Implementation(
        "block-sparse-ring-multihead",
        "projections around block-sparse-ring",
        "dilabench.impls.ring.multihead:build_block_sparse",
        supports=BLOCKS_OVER_RANKS,
        requires=("triton>=3.6|cpu",),
        aliases=("block-sparse-multihead",),
        takes="embeddings",
        sharding="dilabench.distributed.shardings:BLOCKS",
    ),
)
