"""Suite `ring`: several ranks against one device, and against a model of their efficiency."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median

from dilabench.comparison.view import measured_view
from dilabench.machine import device_named
from dilabench.metadata import CHOSEN_BY, RECEIVED_BYTES
from dilabench.plugins.catalogue import Catalogue
from dilabench.record import Measured, Row, RunRecord
from dilabench.report.columns import ABSENT, COLUMNS, implementation_text, row_name
from dilabench.report.findings import BarPlot, Bars, Plot, Section
from dilabench.suites.findings.exposure import expected_bytes, exposure, modelled
from dilabench.suites.findings.parallel_efficiency import MODES, Comparison, comparisons
from dilabench.units import (
    NS_PER_MS,
    format_bytes,
    format_latency,
    format_rate,
    format_ratio,
    gigabytes_per_second,
    significant,
)

TEXT_COLUMNS = ("workload", "mode", "implementation")
# The columns of each mode, and its word among speed-ups.
MODE_COLUMNS = {"forward": ("forward", "fwd"), "backward": ("backward", "bwd"), "both": ("total", "total")}
MODEL = (
    "workload",
    "implementation",
    "ranks",
    "computation alone",
    "communication alone",
    "exposed (95 % CI)",
    "overlap",
    "model",
    "efficiency / model",
)
BALANCE = (
    "workload",
    "implementation",
    "ranks",
    "λ",
    "efficiency / λ",
    "received, formula",
    "received, counted",
    "GB/s",
    "median of each rank",
    "peak per rank",
)
MODEL_MEANING = (
    "Parts were timed interleaved with the whole call. Exposed communication = whole call - computation alone; "
    "overlap is "
    "the share of communication alone that this leaves hidden. Modelled efficiency = λ · T_comp / (T_comp + "
    "T_exposed), T_comp = T_single / P, T_exposed = max(0, V/B - T_local): V the received bytes by formula, B those "
    "counted over communication alone, T_local the part of T_comp that waits for no key. The model is no "
    "bound: ranks may compute at another rate than one device, and communication alone includes packing and launches."
)
BALANCE_MEANING = (
    "λ is the mean over the maximum of the ranks' work: the efficiency with free communication. Bytes are received "
    "in one call by the rank that receives most; GB/s divides them by the time of communication alone."
)
# Columns that a narrow terminal may drop, in this order, because other columns or the record hold their figures.
SPARE = (
    "efficiency / model",
    "received, formula",
    "computation alone",
    "communication alone",
    "median of each rank",
    "peak per rank",
    "tok/s",
    "host",
    "devices",
    "efficiency",
)
NONE = ABSENT
ABOVE_ONE = "‡ An efficiency above 100 % is not to be quoted: the one device was slower than it can be."
HOST_MEANING = "host: the time that the host takes to launch a call"
HOST_BOUND = "§ The host takes longer than its device: outside a CUDA graph a program waits for it, not for this time."
SHARED_CORES = "Ranks share this processor, so their efficiency does not predict that of separate devices."
OUTSIDE = "cutting whole tensors into shards and joining results is outside the timed call"
INSIDE = "each timed call begins and ends with whole tensors on every rank: cutting and joining are inside"


def analyse(record: RunRecord, catalogue: Catalogue) -> tuple[Section, ...]:
    """Speed-up and efficiency, exposed communication against a model, balance and traffic; empty without rows."""
    compared = comparisons(record)
    if not compared:
        return ()
    best = max(compared, key=lambda comparison: comparison.efficiency)
    case = best.row.case
    sharding = {INSIDE if comparison.row.case.optimizations.sharding_inside else OUTSIDE for comparison in compared}
    sentence = (
        f"Best parallel efficiency: {best.efficiency:.0%} of {case.world_size} ranks, {case.implementation} at "
        f"{case.workload.label()} ({format_ratio(best.gain)} {row_name(best.single_row)} on one device). "
        f"Times are the slowest rank's of each sample; {'; '.join(sorted(sharding))}."
    )
    if any(comparison.efficiency > 1 for comparison in compared):
        sentence += f" {ABOVE_ONE}"
    if not device_named(record.device).own_memory:
        sentence += f" {SHARED_CORES}"
    sentence = " ".join((sentence, *_choices(compared)))
    name = namer(compared)
    return (
        _times_section(compared, name, sentence),
        *_model_section(compared, name, catalogue),
        section(
            "Balance and traffic of each rank",
            BALANCE_MEANING,
            BALANCE,
            (_balance(comparison, name, catalogue) for comparison in compared),
        ),
    )


def _choices(found: Sequence[Comparison]) -> list[str]:
    """The choices of `auto` over ranks, with the expected times."""
    chosen = {
        (row.case.implementation, row.case.workload.label(), reason)
        for comparison in found
        for row in comparison.parallel.values()
        if (reason := CHOSEN_BY.of(row.planned)) is not None
    }
    return [f"{name} at {workload} by {reason}." for name, workload, reason in sorted(chosen)]


def section(
    title: str,
    sentence: str,
    columns: tuple[str, ...],
    rows: Iterable[Iterable[str]],
    plots: tuple[Plot, ...] = (),
) -> Section:
    """A section whose columns are figures, except those that name a row."""
    numeric = frozenset(columns) - frozenset(TEXT_COLUMNS)
    cells = tuple(map(tuple, rows))
    return Section(
        title=title,
        sentence=sentence,
        columns=columns,
        rows=cells,
        numeric=numeric,
        plots=plots,
        headed=True,
        spare=SPARE,
    )


def efficiency_text(comparison: Comparison, name: Callable[[Row], str]) -> str:
    """The parallel efficiency and its base, the fastest on one device, with a mark above 100 %."""
    mark = "‡" if comparison.efficiency > 1 else ""
    return f"{comparison.efficiency:.1%}{mark} of {name(comparison.single_row)}"


def workload_text(row: Row) -> str:
    """The workload without its mode."""
    return f"{row.case.workload.label()}, {row.case.workload.pattern.label()}"


def namer(found: Sequence[Comparison]) -> Callable[[Row], str]:
    """A function that names rows, with their backend if there are several."""
    backends = {
        row.case.backend
        for comparison in found
        for by_mode in (comparison.parallel, *comparison.singles)
        for row in by_mode.values()
        if row.case.backend is not None
    }
    return row_name if len(backends) > 1 else lambda row: implementation_text(row.case)


def _times_section(found: Sequence[Comparison], name: Callable[[Row], str], sentence: str) -> Section:
    """The times in the modes that were measured, and the gain over one device in each."""
    measured = {
        mode for comparison in found for by_mode in (comparison.parallel, *comparison.singles) for mode in by_mode
    }
    modes = tuple(mode for mode in MODES if mode in measured)
    times, words = zip(*(MODE_COLUMNS[mode] for mode in modes), strict=True)
    rows = [
        row
        for comparison in found
        for by_mode in (comparison.parallel, *comparison.singles)
        for row in by_mode.values()
    ]
    hosts = {row.case.case_id: (host_ns(row), measured_view(row).median_ns) for row in rows}
    shown = any(spent_ns is not None for spent_ns, _ in hosts.values())
    host = ("host",) if shown else ()
    columns = ("workload", "mode", "devices", *times, *host, "tok/s", f"speed-up {', '.join(words)}", "efficiency")
    lines = _times(found, name, modes, shown)
    if shown:
        sentence += f" {HOST_MEANING}."
    if any(spent_ns is not None and spent_ns > median_ns for spent_ns, median_ns in hosts.values()):
        sentence += f" {HOST_BOUND}"
    return section("Several ranks against one device", sentence, columns, lines, _efficiencies(found, name))


def host_ns(row: Row) -> float | None:
    """The median time that the slowest host takes to launch a call; None if the timer did not take it."""
    slots = measured_view(row).timing.slots
    spent_ns = [sample_ns for slot in slots for sample_ns in slot.enqueue_ns]
    return median(spent_ns) if spent_ns else None


def _host_text(row: Row | None) -> str:
    spent_ns = None if row is None else host_ns(row)
    if row is None or spent_ns is None:
        return NONE
    return f"{format_latency(spent_ns)}{'§' if spent_ns > measured_view(row).median_ns else ''}"


def _times(
    found: Sequence[Comparison], name: Callable[[Row], str], modes: Sequence[str], with_host: bool
) -> Iterator[Iterator[str]]:
    """For each workload the single-device implementations, then everything parallel."""
    shown = set()
    for comparison in found:
        for by_mode in comparison.singles:
            single = next(iter(by_mode.values()))
            if single.case.case_id not in shown:
                shown.add(single.case.case_id)
                yield _line(by_mode, modes, f"single: {name(single)}", (NONE, NONE), with_host)
        gains = [NONE if gain is None else format_ratio(gain) for gain in map(comparison.gain_in, modes)]
        gain = " ".join(gains), efficiency_text(comparison, name)
        yield _line(comparison.parallel, modes, f"parallel: {name(comparison.row)}", gain, with_host)


def _line(
    rows: dict[str, Row], modes: Sequence[str], what: str, gain: tuple[str, str], with_host: bool
) -> Iterator[str]:
    row = next(iter(rows.values()))
    # The rate is that of forward and backward together, or of the requested mode.
    total = row if len(rows) == 1 else rows.get("both")
    yield workload_text(row)
    yield what
    yield str(row.case.world_size)
    yield from (format_latency(measured_view(rows[mode]).median_ns) if mode in rows else NONE for mode in modes)
    if with_host:
        yield _host_text(total)
    yield NONE if total is None else format_rate(measured_view(total).tokens_per_s)
    yield from gain


def _model_section(found: Sequence[Comparison], name: Callable[[Row], str], catalogue: Catalogue) -> Iterator[Section]:
    """The section on exposed communication; empty for a record without diagnostics."""
    timed = [comparison for comparison in found if exposure(comparison.row).computation_ns is not None]
    if timed:
        lines = (_modelled(comparison, name, catalogue) for comparison in timed)
        yield section("Exposed communication and a model", MODEL_MEANING, MODEL, lines, _parts(timed, name))


def _efficiencies(found: Sequence[Comparison], name: Callable[[Row], str]) -> tuple[Plot, ...]:
    return (
        BarPlot(
            name="efficiency",
            title="Parallel efficiency",
            value_label="efficiency (%)",
            categories=_categories(found, name),
            bars=(Bars(label="efficiency", values=tuple(100 * comparison.efficiency for comparison in found)),),
        ),
    )


def _parts(timed: Sequence[Comparison], name: Callable[[Row], str]) -> tuple[Plot, ...]:
    """The times of a call's parts alone, and its exposed communication."""
    parts = [exposure(comparison.row) for comparison in timed]
    intervals = [part.interval for part in parts]
    return (
        BarPlot(
            name="exposed",
            title="Parts of a call alone, and exposed communication",
            value_label="time (ms)",
            categories=_categories(timed, name),
            bars=(
                Bars(label="computation alone", values=tuple(_ms(part.computation_ns) for part in parts)),
                Bars(label="communication alone", values=tuple(_ms(part.communication_ns) for part in parts)),
                Bars(
                    label="exposed communication",
                    values=tuple(_ms(part.exposed_ns) for part in parts),
                    low=tuple(_ms(interval.low if interval else None) for interval in intervals),
                    high=tuple(_ms(interval.high if interval else None) for interval in intervals),
                ),
            ),
        ),
    )


def _categories(found: Sequence[Comparison], name: Callable[[Row], str]) -> tuple[str, ...]:
    """Names of bars, with the workload if there are several."""
    rows = [comparison.row for comparison in found]
    workloads = {row.case.workload for row in rows}
    where = [f", {row.case.workload.label()}" if len(workloads) > 1 else "" for row in rows]
    return tuple(f"{name(row)}{at}, {row.case.world_size} ranks" for row, at in zip(rows, where, strict=True))


def _ms(time_ns: float | None) -> float | None:
    return None if time_ns is None else time_ns / NS_PER_MS


def _modelled(comparison: Comparison, name: Callable[[Row], str], catalogue: Catalogue) -> Iterator[str]:
    found = exposure(comparison.row)
    expected = modelled(
        comparison.row,
        measured_view(comparison.single_row).median_ns,
        catalogue.sharding_of(comparison.row.case.implementation),
    )
    yield from (workload_text(comparison.row), name(comparison.row), str(comparison.row.case.world_size))
    yield _signed(found.computation_ns)
    yield _signed(found.communication_ns)
    low, high = (found.interval.low, found.interval.high) if found.interval else (None, None)
    yield f"{_signed(found.exposed_ns)} ({'n<5, no CI' if low is None else f'{_signed(low)} to {_signed(high)}'})"
    yield NONE if found.overlap is None else f"{found.overlap:.0%}"
    yield NONE if expected is None else f"{expected:.1%}"
    yield NONE if expected is None else f"{comparison.efficiency / expected:.1%}"


def _balance(comparison: Comparison, name: Callable[[Row], str], catalogue: Catalogue) -> Iterator[str]:
    case, outcome = comparison.row.case, comparison.row.outcome
    assert isinstance(outcome, Measured)
    sharding = catalogue.sharding_of(case.implementation)
    balance = sharding.load_balance(case.workload, case.world_size) if sharding else None
    formula = expected_bytes(comparison.row, sharding)
    counted = RECEIVED_BYTES.of(outcome) or 0
    alone_ns = exposure(comparison.row).communication_ns
    yield from (workload_text(comparison.row), name(comparison.row), str(case.world_size))
    yield NONE if balance is None else f"{balance:.3f}"
    yield NONE if balance is None else f"{comparison.efficiency / balance:.1%}"
    yield NONE if formula is None else format_bytes(formula)
    # Messages of other projects bypass `World` and are not counted; a formula may give their bytes.
    yield RECEIVED_BYTES.shown(counted) if counted or formula == 0 else NONE
    yield NONE if alone_ns is None else significant(gigabytes_per_second(counted, alone_ns), 3)
    yield ", ".join(map(format_latency, measured_view(comparison.row).timing.rank_medians_ns)) or NONE
    yield COLUMNS["peak mem."].value_text(measured_view(comparison.row))


def _signed(time_ns: float | None) -> str:
    """A time, or the difference of two."""
    if time_ns is None:
        return NONE
    return f"{'-' if time_ns < 0 else ''}{format_latency(abs(time_ns))}"
