"""Suites `ring` and `distributed`: several ranks against one device, beside what is possible at best."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dilabench.distributed.model import load_balance, received_bytes
from dilabench.reporters import figures
from dilabench.reporters.rows import location, pattern_text
from dilabench.results import Measured, Row, RunRecord
from dilabench.sections import Section
from dilabench.stats.derive import speedup, tokens_per_second
from dilabench.units import format_bytes, format_count

SINGLE = "single"
MODES = ("forward", "backward", "both")
NONE = "–"
MEANING = (
    "λ is mean over maximum of the ranks' work: the efficiency that free communication would leave. Bytes are those of "
    "one call at the rank that receives most."
)
TIMES = (
    "workload",
    "implementation",
    "ranks",
    "single fwd + bwd = total",
    "parallel fwd + bwd = total",
    "tok/s",
    "speed-up",
    "efficiency",
)
BALANCE = (
    "workload",
    "implementation",
    "ranks",
    "λ",
    "efficiency / λ",
    "received, formula",
    "received, counted",
    "slowest / fastest rank",
    "peak per rank",
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A parallel implementation on one workload, and the single device: rows by mode."""

    parallel: dict[str, Row]
    single: dict[str, Row]

    @property
    def total(self) -> Row | None:
        """The row that speed-up is taken from: forward and backward together where that was measured."""
        shared = [mode for mode in reversed(MODES) if mode in self.parallel and mode in self.single]
        return self.parallel[shared[0]] if shared else None

    @property
    def efficiency(self) -> float:
        """T_single / (P · T_parallel)."""
        row = self.total
        assert row is not None
        return self.gain / row.case.world_size

    @property
    def gain(self) -> float:
        """T_single / T_parallel."""
        row = self.total
        assert row is not None
        return speedup(_median(self.single[row.case.workload.mode]), _median(row))


def analyse(record: RunRecord) -> tuple[Section, ...]:
    """Speed-up and parallel efficiency with λ, the best that any communication allows; nothing without both sides."""
    found = [one for one in comparisons(record) if one.total is not None]
    if not found:
        return ()
    best = max(found, key=lambda one: one.efficiency)
    assert best.total is not None
    case = best.total.case
    sentence = (
        f"Best parallel efficiency: {best.efficiency:.0%} of {case.world_size} ranks, {case.implementation} at "
        f"{case.workload.label()} ({figures.ratio(best.gain)} one device). Times are the slowest rank's of each "
        "sample; cutting tensors into shards is outside them."
    )
    return (
        _section("Several ranks against one device", sentence, TIMES, [tuple(_times(one)) for one in found]),
        _section("Balance and traffic of each rank", MEANING, BALANCE, [tuple(_balance(one)) for one in found]),
    )


def _section(title: str, sentence: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Section:
    numeric = frozenset(columns[2:])
    return Section(title=title, sentence=sentence, columns=columns, rows=tuple(rows), numeric=numeric)


def comparisons(record: RunRecord) -> tuple[Comparison, ...]:
    """Every parallel implementation per workload (whatever the mode) and number of ranks, in the record's order."""
    singles: dict[str, dict[str, Row]] = {}
    parallels: dict[tuple[str, str, str | None, int], dict[str, Row]] = {}
    for row in record.rows:
        if not isinstance(row.outcome, Measured) or location(row) is None:
            continue
        case, shape = row.case, row.case.workload.replace(mode="both").model_dump_json()
        if row.planned.labels.get("role") == SINGLE:
            singles.setdefault(shape, {})[case.workload.mode] = row
        else:
            key = shape, case.implementation, case.backend, case.world_size
            parallels.setdefault(key, {})[case.workload.mode] = row
    return tuple(Comparison(rows, singles.get(key[0], {})) for key, rows in parallels.items())


def _times(one: Comparison) -> Iterator[str]:
    row = one.total
    assert row is not None
    yield from _name(row)
    yield _by_mode(one.single)
    yield _by_mode(one.parallel)
    yield format_count(round(tokens_per_second(row.case.workload.tokens, _median(row))))
    yield figures.ratio(one.gain)
    yield f"{one.efficiency:.1%}"


def _balance(one: Comparison) -> Iterator[str]:
    row = one.total
    assert row is not None
    assert isinstance(row.outcome, Measured)
    case, outcome, counters = row.case, row.outcome, row.outcome.counters
    balance = load_balance(case.workload, case.implementation, case.world_size)
    formula = received_bytes(case.workload, case.implementation, case.world_size)
    slowest, fastest = counters.get("slowest_rank_ns"), counters.get("fastest_rank_ns")
    yield from _name(row)
    yield NONE if balance is None else f"{balance:.3f}"
    yield NONE if balance is None else f"{one.efficiency / balance:.1%}"
    yield NONE if formula is None else format_bytes(formula)
    yield format_bytes(counters.get("received_bytes", 0))
    yield figures.ratio(slowest / fastest) if slowest and fastest else NONE
    yield format_bytes(outcome.memory.peak_bytes) if outcome.memory else NONE


def _name(row: Row) -> tuple[str, str, str]:
    workload = row.case.workload
    return f"{workload.label()}, {pattern_text(workload.pattern)}", row.case.implementation, str(row.case.world_size)


def _by_mode(rows: dict[str, Row]) -> str:
    parts = [figures.latency(_median(rows[mode])) if mode in rows else NONE for mode in MODES]
    return f"{parts[0]} + {parts[1]} = {parts[2]}"


def _median(row: Row) -> float:
    found = location(row)
    assert found is not None
    return found.median_ns
