"""What dilabench ships, registered through the same hooks as a third party's plug-in."""

from dataclasses import replace

from dilabench.patterns.registry import PatternKind
from dilabench.plugins import (
    ANY_PATTERN,
    Backend,
    Capabilities,
    Implementation,
    Reporter,
    Suite,
    Timer,
    WorkloadPreset,
    hookimpl,
)
from dilabench.plugins.builtin.block_sparse import OVER_BLOCKS
from dilabench.plugins.builtin.patterns import PATTERNS
from dilabench.plugins.builtin.suites import SUITES
from dilabench.plugins.builtin.timers import TIMERS
from dilabench.workload.presets import PRESETS
from dilabench.workload.spec import Workload

DILATED = frozenset({"dilated"})
HALF = frozenset({"float16", "bfloat16"})
CUDA = frozenset({"cuda"})
BOTH_MERGES = frozenset({"exact", "detached"})
DENSE = frozenset({"dense"})


FUSED_HEAD_DIMS = (16, 32, 64, 128, 256)


def _no_fused_head_dim(workload: Workload) -> str | None:
    """The reason against a head dim that Triton kernels have no tiles for."""
    known = ", ".join(map(str, FUSED_HEAD_DIMS))
    return None if workload.head_dim in FUSED_HEAD_DIMS else f"head_dim {workload.head_dim} is not one of {known}"


FUSED = Capabilities(patterns=DILATED, devices=CUDA, dtypes=HALF | {"float32"}, check=_no_fused_head_dim)
# FlexAttention has no backward on a CPU, and its eager form there makes the whole score matrix.
FLEX_ON_CUDA = Capabilities(patterns=DILATED, devices=CUDA, dtypes=HALF | {"float32"}, check=_no_fused_head_dim)


# Over ranks: dense and dilated, any number of them. With one rank they are what one device computes.
OVER_RANKS = Capabilities(patterns=DENSE | DILATED, max_world_size=None)
PACKED_OVER_RANKS = Capabilities(patterns=DENSE | DILATED, layouts=frozenset({"packed"}), max_world_size=None)
_RINGS = (
    Implementation(
        "ring",
        "K and V go from rank to rank, hop by hop",
        "dilabench.impls.ring.ring:build",
        supports=OVER_RANKS,
        aliases=("ring_v2",),
        uses_backend=True,
    ),
    Implementation(
        "ring-overlap",
        "the ring with double buffers: the next hop is under way while this one is computed",
        "dilabench.impls.ring.overlap:build",
        supports=OVER_RANKS,
        aliases=("ring_v3",),
        uses_backend=True,
    ),
    Implementation(
        "ring-allgather",
        "one fused exchange of the dilated K and V (LongNet's own distributed algorithm)",
        "dilabench.impls.ring.allgather:build",
        supports=OVER_RANKS,
        aliases=("ring_v2_collective",),
        uses_backend=True,
    ),
    Implementation(
        "fused-sharded",
        "whole segments on every rank, fused on each: nothing is sent",
        "dilabench.impls.ring.apart:build",
        supports=replace(FUSED, max_world_size=None, parts_apart=True),
        requires=("cuda>=sm80", "triton"),
        deterministic=True,
    ),
    Implementation(
        "zigzag-ring",
        "the overlapping ring on shards that balance causal work",
        "dilabench.impls.ring.zigzag:build",
        supports=OVER_RANKS,
        aliases=("zigzag",),
        uses_backend=True,
    ),
    Implementation(
        "zigzag-allgather",
        "all keys that a rank sees in one exchange, then one call per chunk of queries (as Llama 3): for few K/V heads",
        "dilabench.impls.ring.gathered:build",
        supports=Capabilities(patterns=DENSE, layouts=frozenset({"padded", "packed"}), max_world_size=None),
        aliases=("llama3",),
        uses_backend=True,
    ),
    Implementation(
        "ring-varlen",
        "the overlapping ring on packed sequences of any lengths",
        "dilabench.impls.ring.varlen:build",
        supports=PACKED_OVER_RANKS,
        aliases=("varlen",),
        uses_backend=True,
    ),
    Implementation(
        "ring-multihead",
        "projections around the ring",
        "dilabench.impls.ring.multihead:build",
        supports=OVER_RANKS,
        uses_backend=True,
        takes="embeddings",
    ),
    Implementation(
        "ulysses",
        "ranks trade tokens for heads: all-to-all around whole sequences",
        "dilabench.impls.ring.ulysses:build",
        supports=Capabilities(patterns=DENSE | DILATED, layouts=frozenset({"padded", "packed"}), max_world_size=None),
        aliases=("distributed",),
        uses_backend=True,
    ),
)


@hookimpl
def dilabench_register_patterns() -> list[PatternKind]:
    """Dense, dilated, block-sparse."""
    return list(PATTERNS)


@hookimpl
def dilabench_register_implementations() -> list[Implementation]:
    """Ours, each named after its algorithm; the names of the source documents work as aliases."""
    return [
        Implementation(
            "reference",
            "the formula in float64, blocked over queries: the oracle",
            "dilabench.impls.reference:build",
            supports=Capabilities(
                patterns=ANY_PATTERN,
                layouts=frozenset({"padded", "packed"}),
                merge_grads=BOTH_MERGES,
            ),
            deterministic=True,
        ),
        Implementation(
            "dense",
            "full attention through one backend: what a user has without dilation",
            "dilabench.impls.dense:build",
            supports=Capabilities(patterns=DENSE),
            aliases=("standard",),
            uses_backend=True,
        ),
        Implementation(
            "gather",
            "per branch: index rows, dense backend, merge by lse (the plain method)",
            "dilabench.impls.gather:build",
            supports=Capabilities(patterns=DILATED, merge_grads=BOTH_MERGES),
            aliases=("dilated",),
            uses_backend=True,
        ),
        Implementation(
            "strided",
            "per branch: zero-copy strided views, dense backend, fused merge",
            "dilabench.impls.strided:build",
            supports=Capabilities(patterns=DILATED),
            aliases=("improved",),
            uses_backend=True,
        ),
        Implementation(
            "fused",
            "one Triton kernel over all branches, each distinct pair once",
            "dilabench.impls.fused:build",
            supports=FUSED,
            requires=("cuda>=sm80", "triton"),
            deterministic=True,
        ),
        Implementation(
            "flex",
            "FlexAttention with the pattern as mask and log C as score: what plain masking costs",
            "dilabench.impls.flex.flex:build",
            supports=FLEX_ON_CUDA,
            requires=("cuda>=sm80", "triton"),
            compiles=True,
        ),
        Implementation(
            "flex-permuted",
            "the same with tokens ordered by residue class, so that blocks are full or empty",
            "dilabench.impls.flex.flex:build_permuted",
            supports=FLEX_ON_CUDA,
            requires=("cuda>=sm80", "triton"),
            compiles=True,
        ),
        Implementation(
            "gather-multihead",
            "projections around gather",
            "dilabench.impls.multihead:build_gather",
            supports=Capabilities(patterns=DILATED),
            aliases=("multihead",),
            uses_backend=True,
            takes="embeddings",
        ),
        Implementation(
            "strided-multihead",
            "projections around strided",
            "dilabench.impls.multihead:build_strided",
            supports=Capabilities(patterns=DILATED),
            aliases=("improved-multihead",),
            uses_backend=True,
            takes="embeddings",
        ),
        *OVER_BLOCKS,
        *_RINGS,
    ]


def _window_looks_ahead(workload: Workload) -> str | None:
    """The reason of kernels whose windows are causal only."""
    ahead = workload.window[1] > 0 or (workload.window[1] < 0 <= workload.window[0] and not workload.causal)
    return f"window {workload.window} looks ahead; the kernel has only causal windows" if ahead else None


# FlashAttention on CUDA: half precision, head dim padded to a multiple of 8 inside.
FLASH_ON_CUDA = Capabilities(patterns=DENSE, devices=CUDA, dtypes=HALF, max_head_dim=256)


@hookimpl
def dilabench_register_backends() -> list[Backend]:
    """Dense kernels. Each module has `attend` and `attend_backward`."""
    return [
        Backend(
            "math",
            "plain PyTorch on any device, blocked over queries",
            "dilabench.backends.math:attend",
            "dilabench.backends.math:attend_backward",
            aliases=("standard",),
            aligns_ends=True,
            places_results=True,
        ),
        Backend(
            "sdpa-flash",
            "torch's own flash attention kernel (FlashAttention 2 on CUDA, a C++ kernel on CPU)",
            "dilabench.backends.sdpa.flash:attend",
            "dilabench.backends.sdpa.flash:attend_backward",
            supports=Capabilities(patterns=DENSE, on_cuda=FLASH_ON_CUDA),
            requires=("cuda>=sm80|cpu",),
            kernels=(r"pytorch_flash::", r"_scaled_dot_product_flash_attention_for_cpu"),
        ),
        Backend(
            "sdpa-efficient",
            "torch's memory-efficient (cutlass) kernel",
            "dilabench.backends.sdpa.efficient:attend",
            "dilabench.backends.sdpa.efficient:attend_backward",
            supports=Capabilities(patterns=DENSE, devices=CUDA, dtypes=HALF | {"float32"}, check=_window_looks_ahead),
            requires=("cuda>=sm70",),
            kernels=(r"fmha_cutlass[FB]",),
        ),
        Backend(
            "sdpa-cudnn",
            "cuDNN's fused attention through torch",
            "dilabench.backends.sdpa.cudnn:attend",
            "dilabench.backends.sdpa.cudnn:attend_backward",
            supports=Capabilities(patterns=DENSE, devices=CUDA, dtypes=HALF, window=False, max_head_dim=128),
            requires=("cuda>=sm80",),
            kernels=(r"cudnn.*(sdpa|flash)",),
        ),
        Backend(
            "flash2",
            "the flash-attn package (FlashAttention 2)",
            "dilabench.backends.flash2:attend",
            "dilabench.backends.flash2:attend_backward",
            supports=FLASH_ON_CUDA,
            requires=("cuda>=sm80", "flash-attn>=2.7"),
            kernels=(r"flash_(fwd|bwd)_",),
        ),
        Backend(
            "flash3",
            "FlashAttention 3 (module flash_attn_interface) on Hopper",
            "dilabench.backends.flash3:attend",
            "dilabench.backends.flash3:attend_backward",
            supports=FLASH_ON_CUDA,
            requires=("cuda>=sm90", "flash_attn_interface"),
            kernels=(r"FlashAttn(Fwd|Bwd)Sm",),
        ),
        Backend(
            "flash4",
            "FlashAttention 4 (flash_attn.cute, CuTe DSL) on Hopper and newer",
            "dilabench.backends.flash4:attend",
            "dilabench.backends.flash4:attend_backward",
            supports=FLASH_ON_CUDA,
            requires=("cuda>=sm90", "flash-attn-4"),
            kernels=(r"flash_attn.?cute",),
            compiles=True,
            aligns_ends=True,
            places_results=True,
        ),
        Backend(
            "xformers",
            "xformers' memory-efficient attention; the library chooses its kernel",
            "dilabench.backends.xformers:attend",
            "dilabench.backends.xformers:attend_backward",
            supports=FLASH_ON_CUDA,
            requires=("cuda>=sm80", "xformers"),
            kernels=(r"flash_(fwd|bwd)|fmha_cutlass",),
        ),
        Backend(
            "flex",
            "torch's FlexAttention, compiled; backward recomputes the forward",
            "dilabench.backends.flex:attend",
            "dilabench.backends.flex:attend_backward",
            supports=Capabilities(patterns=DENSE, devices=CUDA, dtypes=HALF | {"float32"}, max_head_dim=256),
            requires=("cuda>=sm80", "triton"),
            kernels=(r"flex_attention",),
            compiles=True,
        ),
    ]


@hookimpl
def dilabench_register_workloads() -> list[WorkloadPreset]:
    """The named workloads and sets of the catalogue."""
    return list(PRESETS)


@hookimpl
def dilabench_register_suites() -> list[Suite]:
    """The questions that can be asked."""
    return list(SUITES)


@hookimpl
def dilabench_register_reporters() -> list[Reporter]:
    """Renderings of a run record."""
    return [
        Reporter("table", "a table in the terminal", "dilabench.report.table:render", shows_sections=True),
        Reporter("json", "the run record", "dilabench.report.json:render", filename="run.json"),
        Reporter(
            "markdown",
            "a report to read and share",
            "dilabench.report.markdown:render",
            filename="report.md",
            shows_sections=True,
        ),
        Reporter(
            "plots",
            "curves and bars as PNG and SVG",
            "dilabench.report.plots.plots:render",
            filename="plots",
            shows_sections=True,
            prints=False,
        ),
    ]


@hookimpl
def dilabench_register_timers() -> list[Timer]:
    """Ways to take samples. CUDA rows use `cold` (and `graph` where launches dominate), CPU rows `wall`."""
    return list(TIMERS)
