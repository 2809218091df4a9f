"""What dilabench ships, registered through the same hooks as a third party's plug-in."""

from dilabench.plugins import Backend, Capabilities, Implementation, Reporter, Suite, Timer, WorkloadPreset, hookimpl
from dilabench.workloads.presets import PRESETS

DILATED = frozenset({"dilated"})
HALF = frozenset({"float16", "bfloat16"})
BOTH_MERGES = frozenset({"exact", "detached"})
FORWARD_ONLY = frozenset({"forward"})
DENSE = frozenset({"dense"})


@hookimpl
def dilabench_register_implementations() -> list[Implementation]:
    """Ours, each named after its algorithm; the names of the source documents work as aliases."""
    return [
        Implementation(
            "reference",
            "the formula in float64, blocked over queries: the oracle",
            "dilabench.impls.reference:build",
            supports=Capabilities(patterns=frozenset({"dense", "dilated"}), layouts=frozenset({"padded", "packed"}), merge_grads=BOTH_MERGES),
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
    ]


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
        ),
        Backend(
            "sdpa-flash",
            "torch's own flash attention kernel (FlashAttention 2 on CUDA, a C++ kernel on CPU)",
            "dilabench.backends.sdpa_flash:attend",
            "dilabench.backends.sdpa_flash:attend_backward",
        ),
        Backend(
            "sdpa-efficient",
            "torch's memory-efficient (cutlass) kernel",
            "dilabench.backends.sdpa_efficient:attend",
            "dilabench.backends.sdpa_efficient:attend_backward",
            requires=("cuda",),
        ),
        Backend(
            "sdpa-cudnn",
            "cuDNN's fused attention through torch",
            "dilabench.backends.sdpa_cudnn:attend",
            "dilabench.backends.sdpa_cudnn:attend_backward",
            requires=("cuda>=sm80",),
        ),
    ]


@hookimpl
def dilabench_register_workloads() -> list[WorkloadPreset]:
    """The named workloads and sets of the catalogue."""
    return list(PRESETS)


@hookimpl
def dilabench_register_suites() -> list[Suite]:
    """The questions that can be asked."""
    return [
        Suite("quick", "does it work, how fast is it roughly: 1K, 4K and 16K tokens", "dilabench.suites.quick:expand"),
        Suite("implementations", "which implementation is fastest and smallest", "dilabench.suites.implementations:expand"),
    ]


@hookimpl
def dilabench_register_reporters() -> list[Reporter]:
    """Renderings of a run record."""
    return [
        Reporter("table", "a table in the terminal", "dilabench.reporters.table:render"),
        Reporter("json", "the run record", "dilabench.reporters.json:render", filename="run.json"),
        Reporter("markdown", "a report to read and share", "dilabench.reporters.markdown:render", filename="report.md"),
    ]


@hookimpl
def dilabench_register_timers() -> list[Timer]:
    """Ways to take samples."""
    return [
        Timer("wall", "host clock around a call and a device synchronisation", "dilabench.bench.timing:Wall", proves="elapsed host time of one call, device work included"),
        Timer(
            "events",
            "CUDA events around one call",
            "dilabench.bench.timing:Events",
            proves="time between two events on the current stream",
            devices=frozenset({"cuda"}),
        ),
    ]
