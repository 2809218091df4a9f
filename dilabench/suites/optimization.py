"""Suite `optimization`: the gain or cost of pattern cache, buffer pool, CUDA graph and torch.compile."""

import collections
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dilabench.comparison.comparison import ComparedPair
from dilabench.comparison.within import compare_within
from dilabench.machine import Machine
from dilabench.metadata import (
    BUFFER_POOL_HELD_BYTES,
    BUFFER_POOL_PEAK_BYTES,
    BUFFER_POOL_REQUESTS,
    BUFFER_POOL_REUSES,
    PATTERN_CACHE_HITS,
    PATTERN_CACHE_MISSES,
    VARIANT,
    Counter,
)
from dilabench.record import Optimizations, PlannedCase, Row, RunRecord
from dilabench.report.columns import ABSENT
from dilabench.report.findings import BarPlot, Bars, Section
from dilabench.request import RunRequest
from dilabench.stats.decisions.decide import Policy
from dilabench.stats.decisions.verdicts import Code
from dilabench.suites.planner import Planner, reasons_against_optimizations
from dilabench.units import MIB, counted, format_bytes, format_count, format_ratio

# Launches and tables weigh most in short calls, copies and workspace in long ones.
LENGTHS = {"small": (1024, 4096), "large": (4096, 16384, 65536)}


def expand(request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """Each implementation at each length with everything off, each optimization alone, and all of them together; with a
    backward pass also gradient checkpointing, whose gain is in memory.

    "All together" omits those that this device lacks. All variants of a length are timed in the same rounds. For
    torch.compile each implementation of heads is one operator: it compiles the code around it, not inside.
    """
    defaults = [{"seq_len": length} for length in LENGTHS[planner.machine.facts.size]]
    cases: list[PlannedCase] = []
    for workload in planner.workload_requests(defaults):
        for implementation in planner.implementations(planner.on_one_device(workload.pattern)):
            for name, fields in variants(request, planner.machine, workload.mode).items():
                cases += planner.plan(implementation, workload, VARIANT.entry(name), **fields)
    return tuple(cases)


NONE = "nothing"
ALL_TOGETHER = "all together"
CACHE_ENTRIES = 64
POOL_BYTES = 2**30


def variants(request: RunRequest, machine: Machine, mode: str) -> dict[str, dict[str, Any]]:
    """Fields of Optimizations by the name of the variant; "all together" holds those that this device supports.

    A size in the request is used. Gradient checkpointing is included if there is a backward pass.
    """
    alone: dict[str, dict[str, Any]] = {
        "pattern cache": {"pattern_cache_entries": request.pattern_cache_entries or CACHE_ENTRIES},
        "buffer pool": {"buffer_pool_bytes": request.buffer_pool_bytes or POOL_BYTES},
        "CUDA graph": {"cuda_graph": True},
        "torch.compile": {"compile": True},
    }
    off = Optimizations(pattern_cache_entries=0).model_dump()
    together = {
        name: value
        for fields in alone.values()
        for name, value in fields.items()
        if not any(reasons_against_optimizations(Optimizations(**fields), machine))
    }
    return {
        NONE: off,
        **{name: {**off, **fields} for name, fields in alone.items()},
        ALL_TOGETHER: {**off, **together},
        # It trades time for memory, so it is not part of "all together".
        **({"gradient checkpointing": {**off, "gradient_checkpointing": True}} if mode != "forward" else {}),
    }


WORDS = {Code.FASTER: "helps", Code.SLOWER: "COSTS", Code.SAME: "no difference", Code.UNDECIDED: "not proven"}
COLUMNS = ("implementation", "length", "switched on", "speed-up", "95 % CI", "verdict", "peak saved", "cache hits")
POOL_COLUMNS = ("implementation", "length", "switched on", "requests", "reused", "peak of the pool", "held after")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """One variant against the same implementation with everything off. Times are paired; memory is exact."""

    row: Row
    variant: str
    cell: ComparedPair

    @property
    def speedup(self) -> float:
        """Time without / time with: below one the optimization costs."""
        return 1 / self.cell.verdict.numbers.ratio

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval of the speed-up."""
        low, high = self.cell.verdict.numbers.ratio_low, self.cell.verdict.numbers.ratio_high
        return None if low is None or high is None else (1 / high, 1 / low)

    @property
    def interval_text(self) -> str:
        """The interval, as tables show it."""
        return "n<5, no CI" if self.interval is None else f"{self.interval[0]:.2f}–{self.interval[1]:.2f}"

    @property
    def verdict_text(self) -> str:
        """The verdict on the variant, as text."""
        return WORDS[self.cell.verdict.code]

    @property
    def saved_bytes(self) -> int | None:
        """Peak without - peak with; memory that an optimization keeps between calls is part of its peak."""
        memory = self.cell.memory
        return None if memory is None else memory.baseline_bytes - memory.candidate_bytes

    def count(self, counter: Counter) -> int:
        """The counters of the timed calls."""
        return counter.of(self.row.outcome) or 0


def analyse(record: RunRecord) -> tuple[Section, ...]:
    """The gain of each optimization, alone and together, then the statistics of the pool."""
    gains = gains_of(record)
    if not gains:
        return ()
    pools = [gain for gain in gains if BUFFER_POOL_REQUESTS.of(gain.row.outcome) is not None]
    return (_effects(gains), *([_pools(pools)] if pools else []))


def gains_of(record: RunRecord) -> tuple[Gain, ...]:
    """Every measured variant whose implementation was also measured with everything off."""
    rows = {row.case.case_id: row for row in record.rows}
    bases: set[str] = set()
    for row in record.rows:
        if VARIANT.of(row.planned) == NONE:
            switched = row.case.optimizations.model_dump(exclude_defaults=True)
            bases.add(",".join(f"{name}={value}" for name, value in switched.items()) or "default")
    if len(bases) != 1:
        return ()
    comparison = compare_within([record], policy=Policy.for_device(record.device), by="optimizations", base=bases.pop())
    return tuple(
        Gain(row=row, variant=VARIANT.of(row.planned) or "?", cell=cell)
        for cell in comparison.pairs
        if (row := rows[cell.candidate.case_id])
    )


def _effects(gains: Sequence[Gain]) -> Section:
    variants = list(dict.fromkeys(gain.variant for gain in gains))
    return Section(
        title="What each optimization brings",
        sentence=" ".join(_claim(variant, [gain for gain in gains if gain.variant == variant]) for variant in variants),
        columns=COLUMNS,
        rows=tuple(tuple(_row(gain)) for gain in gains),
        numeric=frozenset({"length", "speed-up", "95 % CI", "peak saved", "cache hits"}),
        plots=tuple(_plots(gains, variants)),
    )


def _claim(variant: str, gains: Sequence[Gain]) -> str:
    """'memory pool: costs in 3 of 4 cases (down to 0.61x at gather 4K), helps in none.'"""
    codes = collections.Counter(gain.cell.verdict.code for gain in gains)
    texts = []
    for code, verb, pick in ((Code.FASTER, "helps", max), (Code.SLOWER, "costs", min)):
        if codes[code]:
            most = pick((g for g in gains if g.cell.verdict.code is code), key=lambda gain: gain.speedup)
            reach = f"{'up' if code is Code.FASTER else 'down'} to {format_ratio(most.speedup)} at {_place(most)}"
            texts.append(f"{verb} in {codes[code]} of {counted(len(gains), 'case')} ({reach})")
    undecided = len(gains) - codes[Code.FASTER] - codes[Code.SLOWER]
    if undecided:
        texts.append(f"no proven difference in {undecided} of {counted(len(gains), 'case')}")
    return f"{variant}: {', '.join(texts)}."


def _place(gain: Gain) -> str:
    return f"{gain.row.case.implementation} {format_count(gain.row.case.workload.seq_len)}"


def _row(gain: Gain) -> Iterator[str]:
    yield gain.row.case.implementation
    yield format_count(gain.row.case.workload.seq_len)
    yield gain.variant
    yield format_ratio(gain.speedup)
    yield gain.interval_text
    yield gain.verdict_text
    saved = gain.saved_bytes
    yield ABSENT if saved is None else ("-" if saved < 0 else "") + format_bytes(abs(saved))
    yield _share(gain.count(PATTERN_CACHE_HITS), gain.count(PATTERN_CACHE_MISSES))


def _share(hits: int, misses: int) -> str:
    return f"{hits / (hits + misses):.1%}" if hits + misses else "not asked"


def _pools(gains: Sequence[Gain]) -> Section:
    idle = sorted({g.row.case.implementation for g in gains if not g.count(BUFFER_POOL_REQUESTS)})
    reused = sum(gain.count(BUFFER_POOL_REUSES) for gain in gains)
    requests = sum(gain.count(BUFFER_POOL_REQUESTS) for gain in gains)
    texts = [f"{_share(reused, requests - reused)} of {requests} requests for a buffer got one that was used before."]
    if not requests:
        texts = ["No buffer was requested: differences here do not come from the pool."]
    elif idle:
        texts.append(f"{', '.join(idle)} requested no buffer: differences there do not come from the pool.")
    return Section(
        title="Use of the buffer pool",
        sentence=" ".join(texts),
        columns=POOL_COLUMNS,
        rows=tuple(tuple(_pool_row(gain)) for gain in gains),
        numeric=frozenset({"length", *POOL_COLUMNS[3:]}),
    )


def _pool_row(gain: Gain) -> Iterator[str]:
    requests, reuses = gain.count(BUFFER_POOL_REQUESTS), gain.count(BUFFER_POOL_REUSES)
    yield gain.row.case.implementation
    yield format_count(gain.row.case.workload.seq_len)
    yield gain.variant
    yield BUFFER_POOL_REQUESTS.shown(requests)
    yield _share(reuses, requests - reuses)
    for counter in (BUFFER_POOL_PEAK_BYTES, BUFFER_POOL_HELD_BYTES):
        yield counter.shown(gain.count(counter))


def _plots(gains: Sequence[Gain], variants: Sequence[str]) -> Iterator[BarPlot]:
    places = list(dict.fromkeys(map(_place, gains)))
    by_place = {(_place(gain), gain.variant): gain for gain in gains}
    speeds = [
        Bars(
            label=variant,
            values=tuple(gain.speedup if (gain := by_place.get((place, variant))) else None for place in places),
            low=tuple(_end(by_place.get((place, variant)), 0) for place in places),
            high=tuple(_end(by_place.get((place, variant)), 1) for place in places),
        )
        for variant in variants
    ]
    yield BarPlot(
        name="optimization-impact",
        title="Speed-up over everything off (left of the line: slower)",
        value_label="speed-up (x)",
        categories=tuple(places),
        bars=tuple(speeds),
        reference=1.0,
    )
    saved = [
        Bars(label=variant, values=tuple(_saved_mib(by_place.get((place, variant))) for place in places))
        for variant in variants
    ]
    if any(value is not None for bars in saved for value in bars.values):
        yield BarPlot(
            name="optimization-memory",
            title="Peak memory saved against everything off (left of zero: more was needed)",
            value_label="peak memory saved (MiB)",
            categories=tuple(places),
            bars=tuple(saved),
            reference=0.0,
        )


def _end(gain: Gain | None, side: int) -> float | None:
    return gain.interval[side] if gain is not None and gain.interval is not None else None


def _saved_mib(gain: Gain | None) -> float | None:
    return None if gain is None or gain.saved_bytes is None else gain.saved_bytes / MIB
