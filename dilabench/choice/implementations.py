"""The implementations for one device that dilabench ships, each named after its algorithm.

The names of the source documents work as aliases. Rules import the patterns that they read when they are called.
"""

from dataclasses import replace
from itertools import pairwise
from math import lcm

from dilabench.choice.descriptors import ANY_PATTERN, Capabilities, Implementation
from dilabench.machine import WORDS
from dilabench.patterns.dilated import DilatedPattern
from dilabench.workload.spec import UNBOUNDED, Workload

DENSE = frozenset({"dense"})
DILATED = frozenset({"dilated"})
BLOCK_SPARSE = frozenset({"block_sparse"})
# Masks of whole blocks, and masks that also have bounds of columns.
SELECTED = frozenset({"topk_blocks"})
PER_TOKEN = frozenset({"selected_blocks"})
SUMS = frozenset({"native_sparse", "blockwise_native_sparse"})
COLUMNS = frozenset({"window_sink", "column_bounds"})
BLOCKS = BLOCK_SPARSE | SELECTED
SPARSE = BLOCKS | COLUMNS
HALF = frozenset({"float16", "bfloat16"})
CUDA = frozenset({"cuda"})
CPU = frozenset({"cpu"})
BOTH_MERGES = frozenset({"exact", "detached"})
BOTH_LAYOUTS = frozenset({"padded", "packed"})
LONGEST_COUNTED = 2**17
# 8 KiB for each token and 128 keys: half a GiB for a head.
LONGEST_BY_TOKEN = 2**13


def _too_long_to_count(workload: Workload) -> str | None:
    """Return why lengths are refused whose blocks take minutes to count on the host, or None."""
    if workload.seq_len > LONGEST_COUNTED:
        return f"the blocks of {workload.seq_len} positions are too many to count; it takes at most {LONGEST_COUNTED}"
    if workload.pattern.differs_by_token and workload.seq_len > LONGEST_BY_TOKEN:
        return (
            f"the keys of {workload.seq_len} tokens, each with its own, are too many to keep as blocks; it takes at "
            f"most {LONGEST_BY_TOKEN}"
        )
    return None


def _no_fused_head_dim(workload: Workload) -> str | None:
    """Return why a head dim is refused whose rows bulk copies cannot address, or None."""
    row_bytes = workload.head_dim * (4 if workload.dtype == "float32" else 2)
    return (
        f"rows of {row_bytes} bytes (head_dim {workload.head_dim}) are not a multiple of 16" if row_bytes % 16 else None
    )


# Limits of the fused kernels' tile lists (`kernels.fused.residue_plan`): of a rate, of the least common multiple of all
# rates, and of rows of one residue in a segment. Grouped heads share the space of one list between two.
LARGEST_RATE, LARGEST_MULTIPLE, MOST_ROWS, MOST_GROUPED_ROWS = 1024, 4096, 262_144, 185_344


def no_residue_plan(workload: Workload) -> str | None:
    """Return why the fused kernels have no tile lists for the branches, or None."""
    longest, multiple, rows = max(stop - start for start, stop in workload.sequences), 1, 0
    pattern = DilatedPattern.of(workload)
    taken = set(pattern.branch_of_head(workload.num_heads) or range(len(pattern.branches)))
    for at in sorted(taken):
        segment, rate = pattern.branches[at]
        if rate > LARGEST_RATE:
            return f"dilation rate {rate} is above {LARGEST_RATE}"
        multiple, rows = lcm(multiple, rate), max(rows, -(-min(segment, longest) // rate))
    if multiple > LARGEST_MULTIPLE:
        return f"the lcm of the dilation rates is {multiple}, above {LARGEST_MULTIPLE}"
    most = MOST_GROUPED_ROWS if len(taken) > 1 and pattern.has_grouped_heads else MOST_ROWS
    return f"a branch has {rows} rows of one residue in a segment, above {most}" if rows > most else None


def _not_for_fused(workload: Workload) -> str | None:
    return _no_fused_head_dim(workload) or no_residue_plan(workload)


def _too_wide_in_float32(workload: Workload) -> str | None:
    """Return why `fused` is not tried for float32 heads that spill registers, or None.

    On an H200, with backward, D192 takes 32.8 ms, branch by branch over memory-efficient attention 13.9; D256 61.2 and
    22.6. Each of a dozen kernels compiles for 6 to 14 s (docs/results/choice.md).
    """
    wide = workload.dtype == "float32" and workload.head_dim > 128
    return f"a head dim of {workload.head_dim} in float32 does not fit into registers" if wide else None


def better_branch_by_branch(workload: Workload) -> str | None:
    """Return why a dense kernel, branch by branch, is known to be faster than `fused`, or None.

    The kernels of `fused` compute a pair once that several branches share. If no pairs are shared, the rate of its
    kernel decides: for head dims of 65 to 128 0.8 to 0.9 of cuDNN's, for 192, which is padded to 256, 0.7 of
    FlashAttention 2's (docs/notes/choice.md). Under a window few pairs remain, and `fused` is faster than dense
    kernels with windows (672 against 1,835 microseconds, docs/results/choice.md).
    """
    pattern = DilatedPattern.of(workload)
    if 128 < workload.head_dim < 256:
        return f"a head dim of {workload.head_dim} is padded to 256"
    if not 64 < workload.head_dim <= 128 or workload.window != UNBOUNDED:
        return None
    if pattern.is_detached:
        return f"branches of a head dim of {workload.head_dim} share no pairs where merge weights are detached"
    nested = sorted({min(w, workload.seq_len) for w, _ in pattern.branches})
    if any(longer % shorter for shorter, longer in pairwise(nested) if longer < workload.seq_len):
        return f"branches of a head dim of {workload.head_dim} share no pairs, for their segments do not nest"
    return None


FUSED = Capabilities(
    patterns=DILATED,
    devices=CUDA,
    dtypes=HALF | {"float32"},
    layouts=BOTH_LAYOUTS,
    merge_grads=BOTH_MERGES,
    zero_keys=True,
    softcap=True,
    max_head_dim=256,
    check=_not_for_fused,
)
# FlexAttention has no backward on a CPU, and its eager form there makes the whole score matrix.
FLEX_ON_CUDA = Capabilities(
    patterns=ANY_PATTERN | DILATED | SPARSE,
    devices=CUDA,
    dtypes=HALF | {"float32"},
    layouts=BOTH_LAYOUTS,
    value_dim=True,
    softcap=True,
    head_dim_multiple=16,
    max_head_dim=256,
    check=_too_long_to_count,
)


SELECTED_ON_CUDA = Capabilities(patterns=PER_TOKEN, dtypes=HALF | {"float32"}, layouts=BOTH_LAYOUTS, max_head_dim=256)


def no_block_tiles(workload: Workload) -> str | None:
    """Return why the kernels cannot cut a block size into tiles, or None."""
    size = workload.pattern.block_length
    return f"block_size {size} is not a multiple of 16" if size is not None and size % 16 else None


def _no_selector(workload: Workload) -> str | None:
    """Return why the blocks cannot be selected in the call (no queries read, or too few numbers of each), or None."""
    from dilabench.patterns.selectors import STAND_IN_DIM

    pattern = workload.pattern
    if pattern.selects and not pattern.reads_queries:
        return f"the selector of {pattern.label()} reads no queries that a call could select from"
    if workload.head_dim < STAND_IN_DIM:
        return f"head_dim {workload.head_dim} is below {STAND_IN_DIM}, the numbers that a selector reads"
    return None


def _no_selector_or_tiles(workload: Workload) -> str | None:
    return _no_selector(workload) or no_block_tiles(workload)


# Rows that the kernels of `split-keys` are for: queries, and the heads that share a head of keys. More rows are left to
# flash kernels, which end at a width of 256: for 512 rows of MLA over 32K keys, an H200 takes 0.27 ms here, 1.2 with
# torch's products and 2.9 with memory-efficient attention.
FEW_ROWS, FEW_WIDE_ROWS = 128, 512
# The widest keys and values, those of MLA in absorbed form: sums of wider values do not fit into registers.
WIDEST_KEYS, WIDEST_VALUES = 576, 512


def _no_split(workload: Workload) -> str | None:
    """Return why there are too many rows, or values too wide for a tile, or None."""
    rows, width = workload.rows * workload.group_size, workload.value_width
    most = FEW_ROWS if max(workload.head_dim, width) <= 256 else FEW_WIDE_ROWS
    if rows > most:
        return f"{rows} rows of queries read the same keys, more than {most}"
    return f"value_dim {width} is above {WIDEST_VALUES}" if width > WIDEST_VALUES else None


# A property of `kernels.fused.sm90.backward`.
ADDED_QUERIES = (
    "on a Hopper GPU at head dims of 33 to 128, programs add to dq in no fixed order, so its last bits may differ "
    "between calls; torch.use_deterministic_algorithms(True) selects a slower, reproducible kernel"
)

IMPLEMENTATIONS = (
    Implementation(
        "dense",
        "full attention through one backend: what a user has without dilation",
        "dilabench.impls.dense:build",
        supports=Capabilities(
            patterns=DENSE, devices=WORDS, layouts=BOTH_LAYOUTS, last_rows=True, value_dim=True, softcap=True
        ),
        aliases=("standard",),
        uses_backend=True,
        priority=10,
    ),
    Implementation(
        "split-keys",
        "few queries over many keys: heads that share keys in one tile, keys split between programs, one merge",
        "dilabench.impls.split_keys:build",
        supports=Capabilities(
            patterns=DENSE | DILATED,
            devices=CUDA,
            dtypes=HALF | {"float32"},
            modes=frozenset({"forward"}),
            merge_grads=BOTH_MERGES,
            last_rows=True,
            square=False,
            value_dim=True,
            max_head_dim=WIDEST_KEYS,
            check=_no_split,
        ),
        requires=("cuda>=sm80", "triton>=3.6"),
        deterministic=True,
        priority=15,
    ),
    Implementation(
        "gather",
        "per branch: index rows, dense backend, merge by lse (the plain method)",
        "dilabench.impls.gather:build",
        supports=Capabilities(patterns=DILATED, layouts=BOTH_LAYOUTS, merge_grads=BOTH_MERGES, zero_keys=True),
        aliases=("dilated",),
        uses_backend=True,
        role="plain",
    ),
    Implementation(
        "strided",
        "per branch: zero-copy strided views, dense backend, fused merge",
        "dilabench.impls.strided:build",
        supports=Capabilities(
            patterns=DILATED,
            devices=WORDS,
            layouts=BOTH_LAYOUTS,
            merge_grads=BOTH_MERGES,
            zero_keys=True,
            last_rows=True,
        ),
        aliases=("improved",),
        uses_backend=True,
        priority=10,
    ),
    Implementation(
        "fused",
        "one Triton kernel over all branches, each distinct pair once",
        "dilabench.impls.fused:build",
        supports=FUSED,
        requires=("cuda>=sm80", "triton>=3.6"),
        priority=20,
        preferred_for=replace(FUSED, check=better_branch_by_branch),
        tried_for=replace(FUSED, check=_too_wide_in_float32),
        quirks=(ADDED_QUERIES,),
    ),
    Implementation(
        "library",
        "what `dilabench.attention.dilated_attention` chooses by default; on a GPU it measures candidates at the "
        "first call",
        "dilabench.attention.as_implementation:build",
        supports=Capabilities(
            patterns=DILATED, layouts=BOTH_LAYOUTS, merge_grads=BOTH_MERGES, zero_keys=True, last_rows=True
        ),
        chooses=True,
    ),
    Implementation(
        "flex",
        "torch's FlexAttention over any pattern: its counts as block mask, and as score where keys count twice",
        "dilabench.impls.flex.flex:build",
        supports=FLEX_ON_CUDA,
        requires=("cuda>=sm80", "triton"),
        compiles=True,
    ),
    Implementation(
        "gather-multihead",
        "projections around gather",
        "dilabench.impls.multihead:build_gather",
        supports=Capabilities(patterns=DILATED, zero_keys=True),
        aliases=("multihead",),
        uses_backend=True,
        takes="embeddings",
        role="plain",
    ),
    Implementation(
        "strided-multihead",
        "projections around strided",
        "dilabench.impls.multihead:build_strided",
        supports=Capabilities(patterns=DILATED, zero_keys=True),
        aliases=("improved-multihead",),
        uses_backend=True,
        takes="embeddings",
    ),
    Implementation(
        "block-sparse",
        "only the visible blocks: Triton kernels on CUDA, our own in C++ on CPU, or torch's for each block of queries",
        "dilabench.impls.block_sparse.block_sparse:build",
        supports=Capabilities(
            patterns=SPARSE,
            layouts=BOTH_LAYOUTS,
            merge_grads=BOTH_MERGES,
            last_rows=True,
            on_cuda=Capabilities(
                patterns=SPARSE,
                layouts=BOTH_LAYOUTS,
                dtypes=HALF | {"float32"},
                merge_grads=BOTH_MERGES,
                max_head_dim=256,
                check=no_block_tiles,
            ),
        ),
        requires=("triton>=3.6|cpu",),
        priority=10,
        quirks=(ADDED_QUERIES,),
    ),
    Implementation(
        "block-sparse-planned",
        "block-sparse that makes the lists of selected blocks, or of bounds of columns, in every call, on the device",
        "dilabench.impls.block_sparse.selected:build_planned",
        supports=Capabilities(
            patterns=SELECTED | COLUMNS,
            on_cuda=Capabilities(
                patterns=SELECTED | COLUMNS, dtypes=HALF | {"float32"}, max_head_dim=256, check=no_block_tiles
            ),
        ),
        requires=("triton>=3.6|cpu",),
        every_call=("plan", "attend"),
        steps_of="block-sparse",
    ),
    Implementation(
        "block-sparse-selected",
        "block-sparse that selects the blocks and makes their lists in every call: end to end",
        "dilabench.impls.block_sparse.selected:build_selected",
        supports=Capabilities(
            patterns=SELECTED,
            check=_no_selector,
            on_cuda=Capabilities(
                patterns=SELECTED, dtypes=HALF | {"float32"}, max_head_dim=256, check=_no_selector_or_tiles
            ),
        ),
        requires=("triton>=3.6|cpu",),
        every_call=("select", "plan", "attend"),
        steps_of="block-sparse",
    ),
    Implementation(
        "selected-gather",
        "blocks selected per token: keys and values copied by index, some rows at a time (the plain method)",
        "dilabench.impls.selected.gather:build",
        supports=Capabilities(patterns=PER_TOKEN, layouts=BOTH_LAYOUTS),
        role="plain",
    ),
    Implementation(
        "selected-blocks",
        "blocks selected per token: Triton kernels on CUDA, our own in C++ over lists of each token's keys on a CPU",
        "dilabench.impls.selected.selected_blocks:build",
        supports=Capabilities(patterns=PER_TOKEN, layouts=BOTH_LAYOUTS, on_cuda=SELECTED_ON_CUDA),
        requires=("triton>=3.6|cpu",),
        deterministic=True,
        priority=10,
    ),
    Implementation(
        "selected-blocks-planned",
        "selected-blocks that makes the lists in every call",
        "dilabench.impls.selected.selected_blocks:build_planned",
        supports=Capabilities(patterns=PER_TOKEN, layouts=BOTH_LAYOUTS, on_cuda=SELECTED_ON_CUDA),
        requires=("triton>=3.6|cpu",),
        deterministic=True,
        every_call=("plan", "attend"),
        steps_of="selected-blocks",
    ),
    Implementation(
        "selected-blocks-selected",
        "selected-blocks that selects the blocks and makes their lists in every call: end to end",
        "dilabench.impls.selected.selected_blocks:build_selected",
        supports=Capabilities(
            patterns=PER_TOKEN,
            layouts=BOTH_LAYOUTS,
            check=_no_selector,
            on_cuda=replace(SELECTED_ON_CUDA, check=_no_selector),
        ),
        requires=("triton>=3.6|cpu",),
        deterministic=True,
        every_call=("select", "plan", "attend"),
        steps_of="selected-blocks",
    ),
    Implementation(
        "native-sparse",
        "means, selected blocks and a window, each by kernels with its own softmax, summed with gates (NSA)",
        "dilabench.impls.native_sparse:build",
        supports=Capabilities(
            patterns=SUMS,
            on_cuda=Capabilities(patterns=SUMS, dtypes=HALF | {"float32"}, max_head_dim=256, check=no_block_tiles),
        ),
        requires=("triton>=3.6|cpu",),
        priority=10,
    ),
)
