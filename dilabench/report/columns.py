"""The columns of tables and exports: one object each, read by table, Markdown, HTML, CSV, Parquet and JSON.

A new column is one more object in `COLUMNS`: tables show it if it is requested by name. With an `export` name, CSV,
Parquet, data frames and `report --json` hold its raw value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dilabench.errors import unknown_name
from dilabench.record import Case, Failed, Row
from dilabench.units import (
    change_text,
    format_bytes,
    format_count,
    format_latency,
    format_rate,
    format_ratio,
    percent_text,
    significant,
    time_unit,
)
from dilabench.workload.spec import Workload

if TYPE_CHECKING:
    # Their statistics take a while to load, and columns of stored figures need none.
    from dilabench.comparison.comparison import ComparedPair
    from dilabench.comparison.view import RowView
    from dilabench.stats.decisions.verdicts import Numbers
    from dilabench.stats.samples.location import Interval

ABSENT = "–"
DOUBTFUL = "‡"
Unit = Literal["", "ns", "bytes", "tokens/s", "TFLOP/s", "GB/s", "times", "share"]
_FORMATS: dict[Unit, Callable[[Any], str]] = {
    "": str,
    "ns": format_latency,
    "bytes": format_bytes,
    "tokens/s": format_rate,
    "TFLOP/s": lambda value: significant(value, 3),
    "GB/s": lambda value: significant(value / 1e9, 3),
    "times": format_ratio,
    "share": lambda value: f"{value:.1%}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DisplayRow:
    """One line of a table: `status` is the outcome's, `fastest` marks the best of a section, `view` has its figures.

    `view` is None of a row that was not measured, `speedup` of one that is not ranked. `ceilings`: of the record.
    """

    row: Row
    view: RowView | None
    speedup: float | None = None
    status: str
    fastest: bool = False
    ceilings: Mapping[str, float] = field(default_factory=dict)

    def text(self, name: str) -> str:
        """The cell of a column, by the column's name."""
        return COLUMNS[name].text(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column. `cell`: its value in the view of a row or in a pair, None if there is none; `unit`: how to write it.

    `shown`: its text if that is more than the value in its unit; called for every row. `right`: a number, aligned to
    the right. `spare`: the order in which a narrow terminal omits columns, the smallest first; None: never. `usual`:
    shown unless columns are requested, `usual_with`: if the record has such a workload. `export`: its name in CSV,
    Parquet and data frames; None: not there. `absent`: the text for a missing value.
    """

    name: str
    cell: Callable[[Any], Any] = lambda _: None
    unit: Unit = ""
    shown: Callable[[DisplayRow], str] | None = None
    right: bool = True
    spare: int | None = 0
    usual: bool = False
    usual_with: Callable[[Workload], bool] | None = None
    export: str | None = None
    absent: str = ABSENT

    def text(self, line: DisplayRow) -> str:
        """The cell of a line."""
        if self.shown is not None:
            return self.shown(line)
        return ABSENT if line.view is None else self.value_text(line.view)

    def value_text(self, view: Any) -> str:
        """The value in its unit, of a measured row, a compared pair, or another line of a table."""
        value = self.cell(view)
        return self.absent if value is None else _FORMATS[self.unit](value)


def workload_title(case: Case) -> str:
    """The title of a table: shape, pattern, mode and world size."""
    workload = case.workload
    world = f" · {case.world_size} devices" if case.world_size > 1 else ""
    return f"{workload.label()} · {workload.pattern.label()} · {workload.mode}{world}"


def implementation_text(case: Case) -> str:
    """The implementation with the optimizations that are not the default ones: 'strided +pool 1G'."""
    words = {
        "pattern_cache_entries": "cache",
        "buffer_pool_bytes": "pool",
        "cuda_graph": "cuda-graph",
        "compile": "compile",
        "gradient_checkpointing": "checkpointing",
        "query_chunk": "chunk",
        "offload_inputs": "offload",
        "stream_tokens": "streamed",
        "sharding_inside": "sharding",
        "tiles": "tiles",
    }
    changed = case.optimizations.model_dump(exclude_defaults=True)
    texts = []
    for name, value in changed.items():
        # A field of another version has its own name, and a value of any kind.
        word = words.get(name, name.replace("_", "-"))
        shown_value = format_count(value) if type(value) is int else f"{value!s:.80}"
        texts.append(word if value is True else f"{word} {shown_value}")
    return " +".join([case.implementation, *texts])


def case_name(case: Case) -> str:
    """Implementation and backend as one name: 'gather over sdpa-flash'."""
    return implementation_text(case) + (f" over {case.backend}" if case.backend else "")


def row_name(row: Row) -> str:
    """The name of its case."""
    return case_name(row.case)


def implementation_cell(row: Row) -> str:
    """Its implementation; if a plug-in's, with the package that it comes from: 'mine (my-attention 1.0)'."""
    source = row.planned.source
    return implementation_text(row.case) + (f" ({source})" if source else "")


def _backend(line: DisplayRow) -> str:
    """The effective backend; a star marks a choice of `auto`."""
    row = line.row
    if row.case.backend is None:
        return row.planned.requested_backend or ABSENT
    return row.case.backend + ("*" if row.planned.requested_backend == "auto" else "")


def _median(line: DisplayRow) -> str:
    """The median, or how a row without one ended."""
    if line.view is None:
        return "FAILED" if isinstance(line.row.outcome, Failed) else line.status
    return format_latency(line.view.median_ns) + ("" if line.view.is_quotable else DOUBTFUL)


def _bound(line: DisplayRow) -> str:
    """The nearer ceiling and the share of it: 'memory 81 %'."""
    # Statistics take a while to load, and columns of stored figures need none.
    from dilabench.comparison.bounds import nearer_bound

    bound = line.view and nearer_bound(line.view, line.ceilings)
    return f"{bound.name} {percent_text(bound.share)}" if bound else ABSENT


def has_last_rows(workload: Workload) -> bool:
    """Return True if queries of an attention are fewer than its keys: reading these may take longer than computing."""
    return workload.query_len is not None and workload.model is None


def latency_interval(median_ns: float, interval: Interval | None) -> str:
    """The interval of a median in the median's unit and to its decimals; without one, the reason.

    A dagger marks an interval of less than 95 %: the whole range of samples from too few rounds.
    """
    if interval is None:
        return "n<5, no CI"
    _, size = time_unit(median_ns)
    decimals = len(significant(median_ns / size, 4).partition(".")[2])
    text = f"{interval.low / size:.{decimals}f}–{interval.high / size:.{decimals}f}"
    return text if interval.is_certain else text + "†"


_COLUMNS = (
    Column(
        name="implementation",
        shown=lambda line: implementation_cell(line.row),
        right=False,
        spare=None,
        usual=True,
    ),
    Column(name="backend", shown=_backend, right=False, spare=7, usual=True),
    Column(name="timer", cell=lambda view: view.timing.timer, right=False, spare=4, usual=True, export="timer"),
    Column(name="samples", cell=lambda view: view.samples, export="samples"),
    Column(name="sessions", cell=lambda view: view.sessions, export="sessions"),
    Column(
        name="median",
        cell=lambda view: view.median_ns,
        unit="ns",
        shown=_median,
        spare=None,
        usual=True,
        export="median_ns",
    ),
    Column(name="95 % CI", cell=lambda view: latency_interval(view.median_ns, view.interval), spare=5, usual=True),
    Column(name="CI low", cell=lambda view: view.interval and view.interval.low, unit="ns", export="ci_low_ns"),
    Column(name="CI high", cell=lambda view: view.interval and view.interval.high, unit="ns", export="ci_high_ns"),
    Column(
        name="CI confidence",
        cell=lambda view: view.interval and view.interval.confidence,
        unit="share",
        export="ci_confidence",
    ),
    Column(name="p25", cell=lambda view: view.p25_ns, unit="ns", export="p25_ns"),
    Column(name="p75", cell=lambda view: view.p75_ns, unit="ns", export="p75_ns"),
    Column(name="mean", cell=lambda view: view.mean_ns, unit="ns", spare=2, export="mean_ns"),
    Column(name="std", cell=lambda view: view.std_ns, unit="ns", spare=1, export="std_ns"),
    Column(name="min", cell=lambda view: view.min_ns, unit="ns", export="min_ns"),
    Column(
        name="tok/s", cell=lambda view: view.tokens_per_s, unit="tokens/s", spare=8, usual=True, export="tokens_per_s"
    ),
    Column(
        name="TFLOP/s",
        # The rate is of attention alone, a part of a model's step.
        cell=lambda view: None if view.row.case.workload.model else view.tflops_per_s,
        unit="TFLOP/s",
        spare=3,
        usual=True,
        export="tflops_per_s",
    ),
    Column(
        name="GB/s",
        cell=lambda view: None if view.row.case.workload.model else view.bytes_per_s,
        unit="GB/s",
        spare=11,
        usual_with=has_last_rows,
        export="least_bytes_per_s",
    ),
    Column(name="bound", shown=_bound, right=False, spare=10, usual_with=has_last_rows),
    Column(name="peak mem.", cell=lambda view: view.peak_bytes, unit="bytes", spare=6, usual=True, export="peak_bytes"),
    Column(name="density", cell=lambda view: view.density, unit="share"),
    Column(
        name="speed-up",
        shown=lambda line: ABSENT if line.speedup is None else format_ratio(line.speedup),
        spare=None,
        usual=True,
    ),
    Column(name="verified", cell=lambda view: view.verified, right=False, spare=9, usual=True),
)
COLUMNS = {column.name: column for column in _COLUMNS}
# They identify the row, so they are shown with any requested columns.
NAMING_COLUMNS = ("implementation", "backend")


def exported(view: RowView | None) -> dict[str, Any]:
    """The raw figures of a row by their export names; each is None if the row was not measured."""
    return {column.export: view and column.cell(view) for column in COLUMNS.values() if column.export}


def chosen_columns(wanted: Sequence[str] = (), rows: Iterable[Row] = ()) -> tuple[Column, ...]:
    """The columns to show: the usual ones for `rows`, or the naming columns and `wanted`. Raises ConfigError."""
    for name in wanted:
        if name not in COLUMNS:
            raise unknown_name("column", name, COLUMNS)
    if not wanted:
        workloads = tuple(dict.fromkeys(row.case.workload for row in rows))
        return tuple(
            column
            for column in COLUMNS.values()
            if column.usual or (column.usual_with is not None and any(map(column.usual_with, workloads)))
        )
    return tuple(COLUMNS[name] for name in dict.fromkeys((*NAMING_COLUMNS, *wanted)))


def spared(columns: Sequence[Column]) -> list[Column]:
    """The columns that a narrow terminal omits, the first one first."""
    return sorted((column for column in columns if column.spare is not None), key=lambda column: column.spare or 0)


def pair_columns(named: Callable[[ComparedPair], str], *, details: bool = False) -> tuple[Column, ...]:
    """The columns of compared pairs. `named`: a pair's name; `details`: all that is known."""
    usual = (
        Column(name="verdict", cell=verdict_text, right=False, spare=None),
        Column(name="row", cell=named, right=False, spare=None),
        Column(name="before", cell=lambda pair: pair.baseline_ns, unit="ns", spare=None),
        Column(name="after", cell=lambda pair: pair.candidate_ns, unit="ns", spare=None),
        Column(name="change", cell=lambda pair: change_text(pair.verdict.numbers.ratio), spare=None),
        Column(name="±", cell=plus_minus, spare=None),
    )
    if not details:
        return usual
    return (
        *usual,
        Column(name="memory", cell=_memory, right=False, spare=None),
        Column(name="sessions", cell=lambda pair: _sessions(pair.verdict.numbers), spare=3),
        Column(name="p", cell=_p_value, spare=None),
        Column(name="MDE", cell=lambda pair: pair.verdict.numbers.mde, unit="share", spare=2),
        Column(name="A12", cell=lambda pair: f"{pair.verdict.numbers.a12:.2f}", spare=1),
    )


def verdict_text(pair: ComparedPair) -> str:
    """'SLOWER', 'no change above 6.6 %'."""
    within = pair.verdict.numbers.unchanged_within
    if pair.verdict.code != "SAME" or within is None:
        return pair.verdict.code
    return f"no change above {percent_text(within)}"


def plus_minus(pair: ComparedPair) -> str | None:
    """Half the interval of the change, in percentage points, up to 100; None if there is none."""
    numbers = pair.verdict.numbers
    if numbers.ratio_low is None or numbers.ratio_high is None:
        return None
    half = (numbers.ratio_high - numbers.ratio_low) / 2
    return percent_text(half) if half <= 1 else "over 100 %"


def _sessions(numbers: Numbers) -> str:
    return f"{numbers.stored}, {numbers.sessions}" if numbers.stored else str(numbers.sessions)


def _p_value(pair: ComparedPair) -> str | None:
    """The p of the claimed direction after correction; of no claim, of a slow-down."""
    numbers = pair.verdict.numbers
    p = numbers.p_slower if numbers.p_adjusted is None else numbers.p_adjusted
    return None if p is None else f"{p:.2g}"


def _memory(pair: ComparedPair) -> str | None:
    if pair.memory is None:
        return None
    change = pair.memory.candidate_bytes - pair.memory.baseline_bytes
    sign = "-" if change < 0 else "+"
    return pair.memory.code + ("" if pair.memory.code == "SAME" else f" {sign}{format_bytes(abs(change))}")
