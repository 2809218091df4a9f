"""The options of `dilabench run` that few other commands have."""

from pathlib import Path
from typing import Annotated

import typer

from dilabench.cli.options import OUTPUT_DIR, OldNames

SuiteName = Annotated[
    str | None,
    typer.Argument(
        metavar="SUITE", help="The question; see `dilabench list suites`. With --resume it is the run's, and optional."
    ),
]
Implementations = Annotated[
    list[str] | None,
    typer.Option(
        "--implementations",
        "--implementation",
        "-i",
        metavar="NAME...",
        help="Implementation to run, or all. Repeatable.",
    ),
]
Lengths = Annotated[
    list[str] | None,
    typer.Option(
        "--lengths", "--sequence-lengths", metavar="N...", help="Lengths to run, one after another: 2K,4K,8K."
    ),
]
CustomLengths = Annotated[
    list[str] | None, typer.Option("--custom-lengths", metavar="N...", help="The lengths of --range custom.")
]
RangeName = Annotated[
    str | None, typer.Option("--range", metavar="NAME", help="A named range of lengths, all or custom.")
]
Plan = Annotated[bool, typer.Option("--plan", help="Show predicted memory and time of each case and exit.")]
Density = Annotated[
    str | None, typer.Option("--density", metavar="D", help="Share of blocks computed, 0.1; block-sparse pattern.")
]
# 1 - density, the former option.
Sparsity = Annotated[str | None, typer.Option("--sparsity", metavar="S", hidden=True)]
BlockSize = Annotated[str | None, typer.Option("--block-size", metavar="N", help="Tokens in a block of the mask.")]
MaskFile = Annotated[
    Path | None,
    typer.Option("--mask-file", metavar="FILE", help="Block mask: .npy [n, n], or .json with key blocks per row."),
]
Timing = Annotated[
    str | None,
    typer.Option(
        "--timing", "--timing-method", metavar="METHOD", help="simple, warmup (default), profiler, or a timer."
    ),
]
WarmupRuns = Annotated[
    int | None,
    typer.Option("--warmup-runs", metavar="N", help="Calls before the first sample (default: until times settle)."),
    OldNames(["--warmup", "--warmup-iters", "--num-warmup"]),
]
TimingRuns = Annotated[
    int | None,
    typer.Option(
        "--timing-runs", "--num-runs", metavar="N", help="Samples of each case (default: until precise enough)."
    ),
    OldNames(["--iterations", "--num-iterations", "--iters", "--repeats", "--runs"]),
]
PatternCache = Annotated[
    bool | None,
    typer.Option("--enable-pattern-cache/--disable-pattern-cache", help="Keep index tensors (on by default)."),
]
MemoryPool = Annotated[
    bool | None,
    typer.Option("--enable-memory-pool/--disable-memory-pool", help="Keep up to 1 GiB of workspace (off by default)."),
]
CudaGraph = Annotated[bool | None, typer.Option("--cuda-graph/--no-cuda-graph", help="Replay calls as a CUDA graph.")]
Compile = Annotated[bool | None, typer.Option("--compile/--no-compile", help="Wrap calls in torch.compile.")]
Processes = Annotated[
    int | None,
    typer.Option("--nproc", metavar="N", help="Processes, one per device."),
    OldNames(["--world-size", "--num-gpus", "--nproc-per-node"]),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="TIME",
        help="Time the run may take: 60s, 5m, none (default: the suite's own). The first row of each length may "
        "together exceed it by the same time.",
    ),
]
AllowIncomplete = Annotated[
    bool,
    typer.Option("--allow-incomplete", help="Exit with 0, not 9, if a length has no measured row."),
]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="Seed of the inputs and of the order.")]
ShardOption = Annotated[
    str | None,
    typer.Option("--shard", metavar="K/N", help="Only the K-th of N parts; `dilabench merge` joins them: 2/8."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="List the cases with their FLOPs and exit.")]
Sessions = Annotated[
    int,
    typer.Option(
        "--sessions", metavar="N", min=1, help="Runs in fresh processes, one after another, each with the budget."
    ),
]
Output = Annotated[
    Path,
    typer.Option("--output", "-o", metavar="DIR", help="Output directory; the run creates a subdirectory in it."),
    OUTPUT_DIR,
]
Formats = Annotated[
    list[str] | None,
    typer.Option("--format", "-f", metavar="FORMAT", help="Output format (default table). Repeatable."),
]
KeepInStore = Annotated[bool, typer.Option("--store/--no-store", help="Keep the record for history and baselines.")]
