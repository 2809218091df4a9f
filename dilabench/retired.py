"""Names that dilabench has removed: the reason, and the replacement.

A registry answers with these when a name is missing, so that a plug-in may register one of them again. Records keep
the names as text and still load.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from dilabench.errors import ConfigError, unknown_name


@dataclass(frozen=True, slots=True)
class Retired:
    """`kind`: of a registry (pattern, implementation, reporter, ...), or command, option, pytest fixture.

    `instead`: what to use.
    """

    kind: str
    name: str
    reason: str
    instead: str


NEVER_RAN = "it never ran against the real library"
NO_RECORD = "no record shows a gain"
NEVER_ON_GPUS = "it never ran on GPUs"
NO_NEIGHBORHOOD = "the peer that it was for, NATTEN, never ran here"
ONE_FLEX = "`flex` computes every pattern"
PYTEST_BENCHMARK = "pytest-benchmark, or `dilabench compare` on two runs"
NO_FASTER_TILES = "none of its twelve shapes was faster than the default of `fused`"
A_CALL = "one call of your configuration, or `dilabench verify -i fused --head-dim 96`, which makes one"
NPROC = "`run billion --nproc N` for ranks, or `run billion` for every GPU or one device"

RETIRED = (
    Retired("implementation", "flex-permuted", "147.7 ms for longnet_32k where `flex` took 86.2 on an H200", "flex"),
    Retired("implementation", "block-sparse-flex", ONE_FLEX, "flex"),
    Retired("implementation", "block-sparse-flex-planned", ONE_FLEX, "flex, whose mask is made before the call"),
    Retired("implementation", "block-sparse-flash4", NO_RECORD, "block-sparse"),
    Retired("implementation", "dense-masked", "a mask that skips no work costs what full attention costs", "dense"),
    Retired("implementation", "fused-documents", NO_RECORD, "ring-varlen"),
    Retired("implementation", "strided-documents", NO_RECORD, "ring-varlen"),
    Retired("implementation", "transformer-engine-p2p", NEVER_RAN, "zigzag-ring"),
    Retired("implementation", "transformer-engine-a2a", NEVER_RAN, "ulysses"),
    Retired("implementation", "magi-attention", NEVER_RAN, "balanced-allgather"),
    Retired("implementation", "natten", NEVER_RAN, "NATTEN itself, or block-sparse with pattern=window_sink"),
    Retired("implementation", "ulysses-ring", NEVER_ON_GPUS, "ulysses or zigzag-ring"),
    Retired("implementation", "usp", NEVER_ON_GPUS, "ulysses or zigzag-ring"),
    Retired("implementation", "column-bounds-ring", NEVER_ON_GPUS, "block-sparse on one device"),
    Retired("implementation", "neighborhood", NO_NEIGHBORHOOD, "block-sparse with pattern=window_sink"),
    Retired(
        "pattern",
        "neighborhood",
        NO_NEIGHBORHOOD,
        "pattern=window_sink for a sliding window, or pattern=dense with --set window=LEFT,RIGHT",
    ),
    Retired(
        "suite",
        "tiles",
        NO_FASTER_TILES,
        "`run implementations -i fused`, which has the measured default",
    ),
    Retired("reporter", "flashinfer-bench", "its datasets never ran in FlashInfer-Bench here", "csv, parquet or json"),
    Retired("pytest fixture", "dilabench_benchmark", "it timed as pytest-benchmark does", PYTEST_BENCHMARK),
    Retired("pytest option", "--dilabench-json", "pytest-benchmark could not compare its files", PYTEST_BENCHMARK),
    Retired(
        "command",
        "recheck",
        "`check` measures the rows of a run again, too",
        "`dilabench check --against RUN --sessions 1`, with --only or -i for some of the rows",
    ),
    Retired("command", "leaderboard", "`report` of several runs shows the same", "`dilabench report RUN...`"),
    Retired("option", "run --form", "the pieces of a stream were separate sequences, never one", NPROC),
    Retired(
        "option",
        "run --tiles",
        NO_FASTER_TILES,
        "`run implementations -i fused`, which has the measured default",
    ),
    Retired(
        "option", "tune --compile", "a first call compiles the same kernels, and Triton keeps them on disk", A_CALL
    ),
)

ANY_KIND = "name"


def is_retired(kind: str, name: str) -> bool:
    """Return True if a name of this kind was removed; a plug-in may have registered it again."""
    return any((retired.kind, retired.name) == (kind, name) for retired in RETIRED)


def removed(kind: str, name: str) -> ConfigError | None:
    """The error for a retired name: the reason and what to use instead; None for others.

    `kind` may be ANY_KIND, for names of every kind.
    """
    answers = [
        f"{retired.kind} {retired.name!r} was removed: {retired.reason}; use {retired.instead}"
        for retired in RETIRED
        if retired.name == name and kind in (retired.kind, ANY_KIND)
    ]
    return ConfigError("; ".join(answers)) if answers else None


def no_such_name(kind: str, name: str, known: Iterable[str], left_out: Iterable[str] = ()) -> ConfigError:
    """The error for a name that is not registered: why it was retired, or else the nearest known names.

    `kind`: of a registry, or 'name' for all of them; `left_out`: plug-ins that could not be used.
    """
    return removed(kind, name) or unknown_name(kind, name, known, left_out=left_out)
