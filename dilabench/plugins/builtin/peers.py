"""Public projects as peers of dilabench's implementations, registered like a third party's plug-in."""

from dataclasses import replace

from dilabench.choice.implementations import FLEX_ON_CUDA
from dilabench.patterns.dense import DENSE
from dilabench.patterns.dilated import DilatedPattern
from dilabench.plugins import Capabilities, Implementation, hookimpl
from dilabench.workload.equal_parts import (
    against_equal_pairs,
    against_equal_parts,
    against_usp,
    against_whole_heads,
)
from dilabench.workload.spec import DEFAULT_PATTERN, Workload

HALF = frozenset({"float16", "bfloat16"})
# Over flash-attn itself, or over torch's built-in FlashAttention 2 if that is not installed.
FLASH_ATTN_2 = ("flash2", "sdpa-flash")
STAND_IN = "over -b flash2 it calls flash-attn itself, over -b sdpa-flash torch's own FlashAttention 2"
COPIED_GRADIENTS = "over -b sdpa-flash gradients are copied into the buffers that flash-attn would write to"
CONTEXT_PARALLEL = (
    "shards are given cut, as after torch's own sharding of buffers: cutting is outside the timed call, DTensor's "
    "dispatch inside",
    "k and v are copied into [B, H, N, D] by torch, inside the timed call",
    "enables DTensor's context-parallel dispatch for the rest of the process",
)
NOT_COUNTED = "what it sends goes past our counters: its bytes are known by formula only"

_IN_ORDER = Capabilities(
    patterns=frozenset({"dense"}),
    dtypes=HALF,
    window=False,
    head_dim_multiple=8,
    max_head_dim=256,
    max_world_size=None,
    check_ranks=against_equal_parts,
)
_SELECTED_BRANCH = Capabilities(
    patterns=frozenset({"selected_blocks"}),
    devices=frozenset({"cuda"}),
    dtypes=HALF,
    causal=frozenset({True}),
    window=False,
)
_ZIGZAG = replace(_IN_ORDER, causal=frozenset({True}), check_ranks=against_equal_pairs)


def _one_sequence(workload: Workload) -> str | None:
    return None if workload.batch_size == 1 else f"takes one sequence, not a batch of {workload.batch_size}"


def _not_torchscales(workload: Workload) -> str | None:
    """Return why a workload's function is not torchscale's, or None; settings that change no row are accepted."""
    pattern = DilatedPattern.match(workload.pattern)
    if pattern is None:
        return None
    theirs = pattern.model_copy(update={"padding": "zero_key"})
    if reason := next(filter(None, map(theirs.why_not_over, workload.shapes)), None):
        return reason
    if pattern.offset != "blocked" and workload.num_heads > 1 and max(pattern.dilation_rates) > 1:
        return f"torchscale computes offset=blocked, not offset={pattern.offset} (--set offset=blocked)"
    zero_keys = (theirs.zero_keys(shape, head) for shape in workload.shapes for head in range(workload.num_heads))
    if not pattern.has_zero_keys and any(True for keys in zero_keys for _ in keys):
        return "torchscale attends to the zeros that it pads with, padding=zero_key (--set padding=zero_key)"
    if workload.scale is not None and workload.scale != workload.head_dim**-0.5:
        return f"torchscale computes scale=1/sqrt(D), not {workload.scale:g}"
    return None


TORCHSCALE = Implementation(
    "torchscale",
    "LongNet's own module, which LongViT and Prov-GigaPath run: branch by branch through flash-attn",
    "dilabench.impls.peers.torchscale:build",
    supports=Capabilities(
        window=False,
        gqa=False,
        grouped_heads=False,
        layouts=frozenset({"padded", "packed"}),
        zero_keys=True,
        merge_grads=frozenset({"detached"}),
        check=_not_torchscales,
    ),
    requires=("torchscale.component.dilated_attention", "einops"),
    uses_backend=True,
    backends=FLASH_ATTN_2,
    quirks=(
        "offset=blocked, padding=zero_key and merge_grad=detached are what it computes",
        "its own forward pass with the identity in place of its projections",
        "packed sequences one after another, for it knows none",
        STAND_IN,
    ),
    project="torchscale",
    install="git clone https://github.com/microsoft/torchscale; pip install einops; "
    "DILABENCH_PEERS=torchscale dilabench ... (the package torchscale 0.3.0 has no dilated attention)",
)


def _no_attention(_workload: Workload) -> str:
    """The reason against every workload, from the source of dilated-attention-pytorch 0.2.0."""
    return (
        "refused: it does not compute LongNet attention. Each head has only one branch, and each output is divided "
        "by its sum over all positions, so a causal row depends on later ones"
    )


DILATED_ATTENTION_PYTORCH = Implementation(
    "dilated-attention-pytorch",
    "fkodom's DilatedAttention: known and refused, because it computes another function",
    "dilated_attention_pytorch.dilated_attention:DilatedAttention",
    supports=Capabilities(
        layouts=frozenset({"padded", "packed"}),
        merge_grads=frozenset({"exact", "detached"}),
        zero_keys=True,
        check=_no_attention,
    ),
    requires=("dilated_attention_pytorch",),
    quirks=("with n branches it does 1/n of LongNet's work, so its times are not comparable",),
    project="dilated-attention-pytorch",
    install="pip install --no-deps dilated-attention-pytorch",
)


def _context_parallel(name: str, summary: str, rotation: str, sharding: str) -> Implementation:
    return Implementation(
        name,
        f"torch's context_parallel around scaled_dot_product_attention, {summary}",
        f"dilabench.impls.peers.torch_context_parallel:build_{rotation}",
        supports=replace(_ZIGZAG, devices=frozenset({"cuda"})),
        requires=("torch>=2.10",),
        uses_backend=True,
        backends=("sdpa-cudnn", "sdpa-flash"),
        quirks=(*CONTEXT_PARALLEL, NOT_COUNTED),
        sharding=f"dilabench.distributed.shardings:{sharding}",
        project="torch",
        install="pip install 'torch>=2.10'",
    )


def _ring_flash_attn(
    name: str, function: str, build: str, supports: Capabilities, sharding: str, quirk: str
) -> Implementation:
    return Implementation(
        name,
        f"{function} of the package ring_flash_attn",
        f"dilabench.impls.peers.ring_flash_attn:{build}",
        supports=supports,
        requires=("ring_flash_attn",),
        uses_backend=True,
        backends=FLASH_ATTN_2,
        quirks=(quirk, STAND_IN, COPIED_GRADIENTS, NOT_COUNTED),
        sharding=f"dilabench.distributed.shardings:{sharding}",
        project="ring-flash-attn",
        install="pip install --no-deps ring-flash-attn",
    )


def _yunchang(name: str, summary: str, supports: Capabilities, sharding: str, *quirks: str) -> Implementation:
    return Implementation(
        name,
        f"{summary} of the package yunchang",
        f"dilabench.impls.peers.yunchang:{name.replace('yunchang-', 'build_')}",
        supports=supports,
        requires=("yunchang", "einops"),
        uses_backend=True,
        backends=(*FLASH_ATTN_2, "sdpa-cudnn", "flash4"),
        quirks=(*quirks, STAND_IN, "any other backend takes the place of flash-attn in its calls", NOT_COUNTED),
        sharding=f"dilabench.distributed.shardings:{sharding}",
        project="yunchang",
        install="pip install --no-deps yunchang; pip install einops",
    )


def _not_flashinfers(workload: Workload) -> str | None:
    (shape,) = workload.shapes
    blocks = workload.pattern.whole_blocks(shape)
    if blocks is None:
        return "FlashInfer computes one mask of whole blocks"
    if len(blocks.mask) == 1:
        uneven = workload.seq_len % blocks.block_size
        return f"seq_len {workload.seq_len} is not a multiple of block_size {blocks.block_size}" if uneven else None
    if len(blocks.mask) != workload.num_kv_heads:
        return "FlashInfer has one mask for all heads, or one for each key/value head"
    return None


FLASHINFER = Implementation(
    "flashinfer",
    "FlashInfer's block-sparse attention, for inference",
    "dilabench.impls.peers.flashinfer:build",
    supports=Capabilities(
        patterns=frozenset({"block_sparse", "topk_blocks"}),
        devices=frozenset({"cuda"}),
        dtypes=HALF,
        modes=frozenset({"forward"}),
        causal=frozenset({False}),
        window=False,
        head_dim_multiple=64,
        max_head_dim=256,
        check=lambda workload: _one_sequence(workload) or _not_flashinfers(workload),
    ),
    requires=("flashinfer", "cuda>=sm80"),
    compiles=True,
    quirks=(
        "masks of single heads go to VariableBlockSparseAttentionWrapper, which wants heads first: copies are timed",
        "that wrapper gathers key by key (pages of one key) at every block size",
        "on Hopper a tile of its kernel, 128 queries for head_dim 128 and 192 for 64, holds rows of one block only",
        "its causal mask counts positions among the blocks that a row sees, so causal workloads are not asked of it",
    ),
    project="FlashInfer",
    install="pip install flashinfer-python",
)


# The sizes of its generated kernels.
CAKE_BLOCK_SIZE = 64
CAKE_MAX_BLOCKS = 64


def _not_cakes(workload: Workload) -> str | None:
    if why := _not_flashinfers(workload):
        return why
    (shape,) = workload.shapes
    blocks = workload.pattern.whole_blocks(shape)
    assert blocks is not None
    if blocks.block_size != CAKE_BLOCK_SIZE:
        return f"this kernel of FlashInfer's has blocks of {CAKE_BLOCK_SIZE}, not of {blocks.block_size}"
    if workload.seq_len % CAKE_BLOCK_SIZE:
        return f"seq_len {workload.seq_len} is not a multiple of block_size {CAKE_BLOCK_SIZE}"
    per_row = blocks.mask.sum(-1)
    if per_row.min() < 1 or per_row.max() > CAKE_MAX_BLOCKS:
        return (
            f"it takes 1 to {CAKE_MAX_BLOCKS} blocks for each block of queries, here {per_row.min()} to {per_row.max()}"
        )
    return None


FLASHINFER_VSA = Implementation(
    "flashinfer-vsa",
    "FlashInfer's Hopper kernel for 64-row blocks, for inference",
    "dilabench.impls.peers.flashinfer_vsa:build",
    supports=Capabilities(
        patterns=frozenset({"block_sparse", "topk_blocks"}),
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"bfloat16"}),
        modes=frozenset({"forward"}),
        causal=frozenset({False}),
        window=False,
        gqa=False,
        head_dim_multiple=128,
        max_head_dim=128,
        check=lambda workload: _one_sequence(workload) or _not_cakes(workload),
    ),
    requires=("flashinfer>=0.7.1", "cuda>=sm90"),
    compiles=True,
    quirks=(
        "the backend `cake` of VariableBlockSparseAttentionWrapper, for sm_90 only, which its `auto` never picks",
        "it wants heads first: copies are timed; its plan, made in Python, is not",
    ),
    project="FlashInfer",
    install="pip install flashinfer-python",
)


def _not_flas(workload: Workload) -> str | None:
    from dilabench.patterns.selected_blocks import SelectedBlocksPattern

    pattern = SelectedBlocksPattern.of(workload)
    group = workload.num_heads // workload.num_kv_heads
    if group < FLA_LEAST_GROUP or group & (group - 1):
        return f"parallel_nsa has {FLA_LEAST_GROUP}, 32, 64 ... query heads for each key/value head, not {group}"
    if pattern.top_k & (pattern.top_k - 1):
        return f"parallel_nsa selects a power of two of blocks, not top_k {pattern.top_k}"
    if pattern.block_size < FLA_LEAST_BLOCK or pattern.block_size & (pattern.block_size - 1):
        return f"parallel_nsa has blocks of {FLA_LEAST_BLOCK}, 32, 64 ... tokens, not of {pattern.block_size}"
    return "a file of indices may name a block twice, which parallel_nsa counts twice" if pattern.indices_file else None


# Each is a side of a tile in its kernels.
FLA_LEAST_GROUP = FLA_LEAST_BLOCK = 16

FLA_NSA = Implementation(
    "fla-nsa",
    "the selected branch of NSA in flash-linear-attention",
    "dilabench.impls.peers.fla_nsa:build",
    supports=replace(_SELECTED_BRANCH, max_head_dim=256, check=_not_flas),
    requires=("fla.ops.nsa", "einops", "cuda>=sm80"),
    compiles=True,
    quirks=(
        "pools keys and values for the branch that is not asked for, inside the timed call",
        "its autotuning is before the first timed call",
    ),
    project="flash-linear-attention",
    install="pip install --no-deps fla-core; pip install einops",
)


def _not_lucidrains(workload: Workload) -> str | None:
    from dilabench.patterns.selected_blocks import SelectedBlocksPattern

    pattern, name = SelectedBlocksPattern.of(workload), "native_sparse_attend"
    group = workload.num_heads // workload.num_kv_heads
    if group & (group - 1):
        return f"{name} has a power of two of query heads for each key/value head, not {group}"
    if pattern.block_size == 1:
        return f"{name} has blocks of 16 or more tokens, not single ones"
    if workload.scale is not None and workload.scale != workload.head_dim**-0.5:
        return f"{name} computes scale=1/sqrt(D), not {workload.scale:g}"
    return f"{name} always sees the token's own block, a file of indices not" if pattern.indices_file else None


NSA_PYTORCH = Implementation(
    "native-sparse-attention-pytorch",
    "the selected branch of lucidrains' Native Sparse Attention",
    "dilabench.impls.peers.nsa_pytorch:build",
    supports=replace(_SELECTED_BRANCH, max_head_dim=128, check=_not_lucidrains),
    requires=("native_sparse_attention_pytorch", "einops", "einx", "jaxtyping", "cuda>=sm80"),
    compiles=True,
    quirks=("computes in float16 whatever the dtype of q: bfloat16 is converted inside the timed call",),
    project="native-sparse-attention-pytorch",
    install="pip install --no-deps native-sparse-attention-pytorch; pip install einops einx jaxtyping",
)


FLEX_DOCUMENTS = Implementation(
    "flex-documents",
    "torch's FlexAttention with document ids: mask and score of packed sequences as one writes them by hand",
    "dilabench.impls.flex.documents:build",
    supports=replace(FLEX_ON_CUDA, patterns=frozenset({DENSE.kind, DEFAULT_PATTERN}), layouts=frozenset({"packed"})),
    requires=("cuda>=sm80", "triton"),
    compiles=True,
    quirks=("the list of visible blocks is made from the pattern, outside the timed call",),
    project="torch",
    install="pip install 'torch>=2.10'",
)


@hookimpl
def dilabench_register_implementations() -> list[Implementation]:
    """LongNet's module; packed documents; over ranks torch's context parallelism, rings and meshes of others; sparse
    patterns.
    """
    return [
        TORCHSCALE,
        FLEX_DOCUMENTS,
        DILATED_ATTENTION_PYTORCH,
        _context_parallel(
            "torch-context-parallel", "K and V gathered (its default)", "allgather", "WHOLE_ZIGZAG_GATHER"
        ),
        _context_parallel(
            "torch-context-parallel-alltoall", "K and V from rank to rank", "alltoall", "WHOLE_ZIGZAG_RING"
        ),
        _ring_flash_attn(
            "ring-flash-attn-zigzag",
            "zigzag_ring_flash_attn_func",
            "build_zigzag",
            _ZIGZAG,
            "WHOLE_ZIGZAG_RING",
            "gives a wrong dq in float32: it adds to the buffer that it reads",
        ),
        _ring_flash_attn(
            "ring-flash-attn-ring",
            "ring_flash_attn_func",
            "build_ring",
            replace(_IN_ORDER, dtypes=frozenset({"bfloat16"})),
            "WHOLE_RING",
            "gives dq in bfloat16 for every dtype of q",
        ),
        _yunchang(
            "yunchang-ulysses",
            "UlyssesAttention",
            replace(_IN_ORDER, check_ranks=against_whole_heads),
            "HEADS_FOR_TOKENS",
        ),
        _yunchang(
            "yunchang-usp",
            "LongContextAttention (USP: Ulysses within pairs, a zigzag ring between them)",
            replace(_ZIGZAG, check_ranks=against_usp),
            "HEADS_IN_RING",
            "on 2 ranks, and on an odd number, it is its zigzag ring alone",
        ),
        FLASHINFER,
        FLASHINFER_VSA,
        FLA_NSA,
        NSA_PYTORCH,
    ]
