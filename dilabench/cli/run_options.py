"""The options of `dilabench run` that no other command has."""

from pathlib import Path
from typing import Annotated

import typer

SuiteName = Annotated[str, typer.Argument(metavar="SUITE", help="The question; see `dilabench list suites`.")]
Implementations = Annotated[
    list[str] | None,
    typer.Option(
        "--implementations", "--implementation", "-i", metavar="NAME...", help="What to run, or all. Repeatable."
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
MaxSeqLength = Annotated[
    str | None, typer.Option("--max-seq-length", metavar="N", help="Longest sequence that a search may try.")
]
Timing = Annotated[
    str | None,
    typer.Option(
        "--timing", "--timing-method", metavar="METHOD", help="simple, warmup (default), profiler, or a timer."
    ),
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
Processes = Annotated[int | None, typer.Option("--nproc", metavar="N", help="Processes, one per device.")]
Budget = Annotated[str | None, typer.Option("--budget", metavar="TIME", help="Time the whole run may take: 60s, 5m.")]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="Seed of the inputs and of the order.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the cases with their work and leave.")]
Resume = Annotated[
    Path | None, typer.Option("--resume", metavar="RUN", help="Go on with an interrupted run: its folder or file.")
]
Output = Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder that gets a folder for this run.")]
Formats = Annotated[
    list[str] | None,
    typer.Option("--format", "-f", metavar="FORMAT", help="What to print (default table). Repeatable."),
]
KeepInStore = Annotated[bool, typer.Option("--store/--no-store", help="Keep the record for history and baselines.")]
