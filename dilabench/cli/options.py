"""Options that several commands share, how their values become a request, and the plug-ins that they may name."""

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dilabench.cli.terminal import note
from dilabench.errors import ConfigError
from dilabench.units import parse_count
from dilabench.workload.ranges import CUSTOM, range_lengths

if TYPE_CHECKING:
    from dilabench.plugins.boundary import Problem
    from dilabench.plugins.manager import Found
    from dilabench.record import PlannedCase


class OldNames(tuple[str, ...]):
    """Names of an option in other benchmarks and older scripts: accepted, but not shown by --help.

    They are part of the option's annotation: `Annotated[str, typer.Option("--dtype"), OldNames(["--precision"])]`.
    """

    __slots__ = ()


Configs = Annotated[
    list[str] | None,
    typer.Option(
        "--config", "-c", metavar="PRESET|FILE", help="A named workload, a set of them, or a TOML file. Repeatable."
    ),
    OldNames(["--config-file"]),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set any field of the workload or the run, causal=false, or an option of the suite. Repeatable.",
    ),
]
BatchSize = Annotated[
    str | None,
    typer.Option("--batch-size", metavar="B", help="Sequences per call, or auto."),
    OldNames(["--batch"]),
]
SeqLength = Annotated[
    str | None,
    typer.Option("--seq-length", "--seqlen", metavar="N", help="Tokens per sequence: 4096, 4K, 1M."),
    OldNames(["--seq-len", "--sequence-length"]),
]
QueryLength = Annotated[
    str | None,
    typer.Option("--query-len", metavar="M", help="Queries: the last M of the tokens, 1 or 2K (default: every token)."),
]
NumHeads = Annotated[
    str | None,
    typer.Option("--num-heads", "--nheads", metavar="H", help="Query heads."),
    OldNames(["--heads", "--n-heads"]),
]
NumKvHeads = Annotated[
    str | None,
    typer.Option("--num-kv-heads", metavar="K", help="Key/value heads (GQA)."),
    OldNames(["--kv-heads"]),
]
HeadDim = Annotated[str | None, typer.Option("--head-dim", metavar="D", help="Size of one head."), OldNames(["--dim"])]
DTypeName = Annotated[
    str | None,
    typer.Option("--dtype", metavar="DTYPE", help="float64, float32, float16, bfloat16 or auto."),
    OldNames(["--precision"]),
]
ModeName = Annotated[
    str | None, typer.Option("--mode", metavar="MODE", help="forward, backward or both; of a model also generate.")
]
Backends = Annotated[
    list[str] | None,
    typer.Option("--backend", "-b", metavar="NAME", help="A dense kernel, auto or all. Repeatable."),
    OldNames(["--backends"]),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="auto (default), cpu, cuda, or another of torch.accelerator: mps, xpu.",
    ),
]
StrictPlugins = Annotated[bool, typer.Option("--strict-plugins", help="Stop when a plug-in cannot be loaded.")]
RelativeTo = Annotated[
    str | None,
    typer.Option(
        "--relative-to", metavar="IMPL", help="Relative to an implementation with unchanged code: noise cancels."
    ),
]
Columns = Annotated[
    list[str] | None,
    typer.Option("--columns", metavar="NAME,...", help="Columns of the tables, mean and std among them. Repeatable."),
]
Details = Annotated[
    bool,
    typer.Option("--details", "-v", help="Every table, note and reason, however many."),
    OldNames(["--verbose"]),
]
# Every command that has --output takes it.
OUTPUT_DIR = OldNames(["--output-dir"])
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def require_one_format(as_json: bool, formats: Iterable[str]) -> None:
    """Raise ConfigError if --json is given together with other formats, because one would be ignored."""
    others = [name for name in formats if name != "json"]
    if as_json and others:
        raise ConfigError(f"--json and -f {','.join(others)} each say what to print; leave one out")


def given(**values: Any) -> dict[str, Any]:
    """Return the values that are neither None nor an empty collection."""
    return {name: value for name, value in values.items() if value is not None and value not in ([], (), {})}


def workload_fields(
    batch_size: str | None,
    seq_length: str | None,
    num_heads: str | None,
    num_kv_heads: str | None,
    head_dim: str | None,
    dtype: str | None,
    mode: str | None,
    query_len: str | None = None,
) -> dict[str, Any]:
    """The fields of WorkloadRequest that the short options set."""
    return given(
        batch_size=batch_size,
        seq_len=seq_length,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        mode=mode,
        query_len=query_len,
    )


def names(*options: Sequence[str] | None) -> list[str]:
    """Return the names from a repeatable option, whose values may hold several names separated by commas."""
    return [part for option in options for text in option or () for part in re.split(r"[,\s]+", text) if part]


def backend_text(planned: "PlannedCase") -> str:
    """The backend of a case, with a star if `auto` chose it; '-' for a case without one."""
    backend = planned.case.backend
    return (backend or "-") + ("*" if planned.requested_backend == "auto" and backend else "")


def column_names(options: Sequence[str] | None) -> list[str]:
    """The requested columns, checked; names may contain blanks, so only commas separate them. Raises ConfigError."""
    from dilabench.report.columns import chosen_columns

    wanted = [name.strip() for text in options or () for name in text.split(",") if name.strip()]
    chosen_columns(wanted)
    return wanted


def lengths_of(range_name: str | None, lengths: list[str], custom: list[str]) -> list[int] | None:
    """The requested lengths, given directly or as a named range. Raises ConfigError if they are given twice."""
    if lengths and custom:
        raise ConfigError("--lengths and --custom-lengths mean the same; give one of them")
    counts = [parse_count(length, "length") for length in lengths or custom]
    if range_name is None and custom:
        range_name = CUSTOM
    return list(range_lengths(range_name, counts)) if range_name else counts


def discovered(strict: bool = False, extra: Sequence[object] = ()) -> "Found":
    """Load the plug-ins, `extra` ones too; name failed ones on stderr. `strict`: raise PluginError for the first."""
    from dilabench.plugins.manager import discover

    found = discover(strict, extra)
    if found.catalogue.problems:
        tell_of(found.catalogue.problems)
    return found


def tell_of(problems: Iterable["Problem"]) -> None:
    """Print on stderr which plug-ins, or parts of them, failed, and why."""
    for problem in problems:
        note(problem.text)


def real_names(
    implementations: Sequence[str] | None, backends: Sequence[str] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Resolve aliases of -i and -b to the names of implementations and backends in records.

    An unknown name is kept, because it may belong to a plug-in that made the record.
    """
    wanted = names(implementations), names(backends)
    if not any(wanted):
        return (), ()
    from dilabench.plugins.manager import discover

    catalogue = discover().catalogue
    known, kernels = catalogue.implementations, catalogue.backends
    return (
        tuple(known.get(name).name if name in known else name for name in wanted[0]),
        tuple(kernels.get(name).name if name in kernels else name for name in wanted[1]),
    )
