"""What dilabench ships for the block-sparse pattern, on one device and over ranks."""

from dilabench.plugins.descriptors import Capabilities, Implementation
from dilabench.workload.spec import BlockSparsePattern, Workload

BLOCK_SPARSE = frozenset({"block_sparse"})
HALF = frozenset({"float16", "bfloat16"})
CUDA = frozenset({"cuda"})
BOTH_MERGES = frozenset({"exact", "detached"})


def _no_block_tiles(workload: Workload) -> str | None:
    """The reason against a block size that the kernels cannot cut into tiles."""
    pattern = workload.pattern
    if isinstance(pattern, BlockSparsePattern) and pattern.block_size % 16:
        return f"block_size {pattern.block_size} is not a multiple of 16"
    return None


def _mask_over_branches(workload: Workload) -> str | None:
    """The reason of ranks, which hold whole blocks of the sequence."""
    pattern = workload.pattern
    if isinstance(pattern, BlockSparsePattern) and pattern.branches is not None:
        return "a block mask over dilated branches has blocks whose rows lie apart, on no rank as a whole"
    return None


def _over_ranks_on_cuda(workload: Workload) -> str | None:
    return _mask_over_branches(workload) or _no_block_tiles(workload)


def _only_whole_128_blocks(workload: Workload) -> str | None:
    """The reason of libraries that take one block mask over the whole sequence, in blocks of their own tiles."""
    pattern = workload.pattern
    if isinstance(pattern, BlockSparsePattern):
        if pattern.branches is not None:
            return "a block mask over dilated branches is not supported"
        if pattern.block_size % 128:
            return f"block_size {pattern.block_size} is not a multiple of 128"
    return None


def _only_flash4_blocks(workload: Workload) -> str | None:
    """The reason of FlashAttention 4, whose blocks are its tiles."""
    pattern = workload.pattern
    if isinstance(pattern, BlockSparsePattern) and pattern.block_size > 128:
        return f"block_size {pattern.block_size} is not 128"
    return _only_whole_128_blocks(workload)


# Gathered blocks have no distance in rows that a window could be held to.
BLOCKS_OVER_RANKS = Capabilities(
    patterns=BLOCK_SPARSE,
    window=False,
    max_world_size=None,
    check=_mask_over_branches,
    on_cuda=Capabilities(
        patterns=BLOCK_SPARSE,
        dtypes=HALF | {"float32"},
        window=False,
        max_head_dim=256,
        max_world_size=None,
        check=_over_ranks_on_cuda,
    ),
)

OVER_BLOCKS = (
    Implementation(
        "block-sparse",
        "only the visible blocks: Triton kernels on CUDA, one flash call per block of queries on CPU",
        "dilabench.impls.block_sparse.block_sparse:build",
        supports=Capabilities(
            patterns=BLOCK_SPARSE,
            merge_grads=BOTH_MERGES,
            on_cuda=Capabilities(
                patterns=BLOCK_SPARSE,
                dtypes=HALF | {"float32"},
                merge_grads=BOTH_MERGES,
                max_head_dim=256,
                check=_no_block_tiles,
            ),
        ),
        requires=("triton|cpu",),
    ),
    Implementation(
        "block-sparse-flex",
        "FlexAttention over a BlockMask of the same blocks",
        "dilabench.impls.block_sparse.flex:build",
        supports=Capabilities(
            patterns=BLOCK_SPARSE,
            devices=CUDA,
            dtypes=HALF | {"float32"},
            head_dim_multiple=16,
            max_head_dim=256,
            check=_only_whole_128_blocks,
        ),
        requires=("cuda>=sm80", "triton"),
        compiles=True,
    ),
    Implementation(
        "block-sparse-flash4",
        "FlashAttention 4 over lists of the same blocks",
        "dilabench.impls.block_sparse.flash4:build",
        supports=Capabilities(
            patterns=BLOCK_SPARSE,
            devices=CUDA,
            dtypes=HALF,
            window=False,
            gqa=False,
            head_dim_multiple=8,
            max_head_dim=128,
            check=_only_flash4_blocks,
        ),
        requires=("cuda>=sm90", "flash-attn-4"),
        compiles=True,
    ),
    Implementation(
        "block-sparse-ring",
        "block-sparse over ranks: only blocks that some local query sees travel, while the own part is computed",
        "dilabench.impls.ring.block_sparse:build",
        supports=BLOCKS_OVER_RANKS,
        requires=("triton|cpu",),
    ),
    Implementation(
        "block-sparse-ring-multihead",
        "projections around block-sparse-ring",
        "dilabench.impls.ring.block_sparse_multihead:build",
        supports=BLOCKS_OVER_RANKS,
        requires=("triton|cpu",),
        aliases=("block-sparse-multihead",),
        takes="embeddings",
    ),
)
