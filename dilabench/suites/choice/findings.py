"""Suite `choice`: the regret of the library's choice, the time of what it took over that of the fastest other way."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from dilabench.choice.ways import way_name
from dilabench.compare.view import common_timings, is_quotable, measured_view, pair, rank
from dilabench.metadata import CHOSEN, INTERFERENCE, LAUNCH_BOUND, SHAPE
from dilabench.plugins.catalogue import Catalogue
from dilabench.predict.time import budget_option, elapsed_seconds
from dilabench.record import Measured, Row, RunRecord
from dilabench.report.columns import ABSENT, row_name
from dilabench.report.findings import Section
from dilabench.request import resume_command, shard_of
from dilabench.stats.decisions.decide import Policy, judge
from dilabench.suites.choice.cases import cut_short, shapes_asked
from dilabench.units import counted, format_latency, format_seconds

TITLE = "Regret of the choice"
# Beyond this the choice was wrong; below, another machine or day might turn it round.
MUCH = 1.1
SHOWN = 10
COLUMNS = ("shape", "workload", "took", "time", "fastest other", "its time", "regret", "95 % CI", "over 1.1")
NUMERIC = frozenset({"shape", "time", "its time", "regret", "95 % CI"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Regret:
    """One shape: `ratio` is the time of the choice over that of the fastest other way, from their common rounds.

    `low` and `high` are the ends of its interval; None where they did not take turns often enough for one. `disturbed`:
    a way of the shape took another time by itself than in turn, so that more than chance may be in the ratio.
    `awaited`: the ratio of what callers wait for, with launches that take longer than the GPU; None without any such.
    `itself`: what is waited for the least is the way that was chosen, called without the library around it.
    """

    number: int
    chosen: Row
    other: Row
    ratio: float
    low: float | None
    high: float | None
    disturbed: bool
    awaited: float | None = None
    itself: bool = False

    @property
    def is_much(self) -> bool:
        """Over 1.1, beyond doubt or not."""
        return self.ratio > MUCH

    @property
    def is_proven(self) -> bool:
        """Over 1.1 with its whole interval, and nothing disturbed it."""
        return self.low is not None and self.low > MUCH and not self.disturbed


def analyse(record: RunRecord, catalogue: Catalogue) -> tuple[Section, ...]:
    """The answer: how large the regret is over all shapes, the worst of them, what is left out and how to go on."""
    found = list(regrets(record, catalogue))
    asked = len(shapes_asked(record.config.get("options", {}), shard_of(record.config)))
    sentences = [
        _summary(found),
        *_awaiting(found),
        *_measuring(found),
        *_without_regret(record, found),
        *_left_out(record, asked),
    ]
    worst = sorted(found, key=lambda regret: -regret.ratio)[:SHOWN]
    return (
        Section(
            title=TITLE,
            sentence=" ".join(sentences),
            columns=COLUMNS if worst else (),
            rows=tuple(_line(regret) for regret in worst),
            numeric=NUMERIC if worst else frozenset(),
            answers=True,
        ),
    )


def regrets(record: RunRecord, catalogue: Catalogue) -> Iterator[Regret]:
    """The shapes of which the choice and another way were measured, all ways of each having had their time."""
    registry = catalogue.implementations
    choosing = {implementation.name for implementation in registry if implementation.chooses}
    for number, rows in _whole_shapes(record).items():
        chosen = next((row for row in rows if row.case.implementation in choosing and is_quotable(row)), None)
        others = [row for row in rows if row.case.implementation not in choosing]
        ranking = rank(others, record.device)
        if chosen is not None and ranking is not None:
            disturbed = any(INTERFERENCE.among(row.outcome.notes) for row in rows if isinstance(row.outcome, Measured))
            found = _regret(number, chosen, ranking.fastest, record.device, disturbed)
            yield replace(found, **_awaited(chosen, [row for row in others if is_quotable(row)]))


def _whole_shapes(record: RunRecord) -> dict[int, list[Row]]:
    """The rows by shape, without shapes that the budget cut short."""
    shapes: dict[int, list[Row]] = {}
    for row in record.rows:
        number = SHAPE.of(row.planned)
        if number is not None:
            shapes.setdefault(number, []).append(row)
    return {number: rows for number, rows in sorted(shapes.items()) if not any(map(cut_short, rows))}


def _awaited(chosen: Row, others: Sequence[Row]) -> dict[str, Any]:
    """How many times as long who calls the choice waits as who calls the way that is waited for the least, and whether
    that is what was chosen.
    """
    if not any(_launching_ns(row) for row in (chosen, *others)):
        return {}
    least = min(others, key=_awaited_ns)
    itself = _taken(chosen).partition(" ")[0] == way_name(least.case)
    return {"awaited": _awaited_ns(chosen) / _awaited_ns(least), "itself": itself}


def _awaited_ns(row: Row) -> float:
    return max(measured_view(row).median_ns, _launching_ns(row))


def _launching_ns(row: Row) -> float:
    """How long the host takes to launch a call, where that is longer than the GPU takes; else 0."""
    assert isinstance(row.outcome, Measured)
    return next((note.observed or 0.0 for note in LAUNCH_BOUND.among(row.outcome.notes)), 0.0)


def _regret(number: int, chosen: Row, other: Row, device: str, disturbed: bool) -> Regret:
    # Without common rounds, as where a run went on in the middle of a shape, there is no interval.
    ratio, low, high = measured_view(chosen).median_ns / measured_view(other).median_ns, None, None
    timings = common_timings(other, chosen)
    rounds = pair([timings]).rounds if timings else None
    if rounds is not None:
        numbers = judge(rounds, Policy.for_device(device)).numbers
        ratio, low, high = numbers.ratio, numbers.ratio_low, numbers.ratio_high
    return Regret(
        number=number,
        chosen=chosen,
        other=other,
        ratio=ratio,
        low=low,
        high=high,
        disturbed=disturbed,
    )


def _summary(found: Sequence[Regret]) -> str:
    if not found:
        return "No shape was measured."
    ratios = [regret.ratio for regret in found]
    over = [regret for regret in found if regret.is_much]
    proven = sum(regret.is_proven for regret in over)
    doubt = f", {proven} of them beyond doubt" if over else ""
    return (
        f"Over {counted(len(found), 'shape')} the choice took {fmean(ratios):.2f} times as long as the fastest other "
        f"way in the mean, {median(ratios):.2f} in the median and {max(ratios):.2f} at worst; it was over {MUCH} times "
        f"slower in {len(over)} ({len(over) / len(found):.1%}){doubt}."
    )


def _awaiting(found: Sequence[Regret]) -> Iterator[str]:
    """The same by what callers wait for, where some launches take longer than what they launch."""
    bound = [regret for regret in found if regret.awaited is not None]
    if bound:
        ratios = [regret.ratio if regret.awaited is None else regret.awaited for regret in found]
        over = [regret for regret, ratio in zip(found, ratios, strict=True) if ratio > MUCH]
        itself = sum(regret.itself for regret in over)
        front_end = f", in {itself} of these against the chosen way itself, called directly" if itself else ""
        yield (
            f"Launches are in none of these times. In {counted(len(bound), 'shape')} some way takes longer to launch "
            f"than to compute; by what a caller waits for, the longer of both, the choice took {fmean(ratios):.2f} "
            f"times as long in the mean, {median(ratios):.2f} in the median and {max(ratios):.2f} at worst, over "
            f"{MUCH} in {len(over)}{front_end}."
        )


def _measuring(found: Sequence[Regret]) -> Iterator[str]:
    """How long the library took to choose, before any timed call."""
    seconds = [took * 1e-9 for regret in found if (took := _choosing_ns(regret.chosen)) is not None]
    if seconds:
        yield (
            f"To choose took {format_seconds(median(seconds))} per shape in the median, {format_seconds(max(seconds))} "
            "at most, before any timed call."
        )


def _without_regret(record: RunRecord, found: Sequence[Regret]) -> Iterator[str]:
    measured = {regret.number for regret in found}
    missing = [number for number in _whole_shapes(record) if number not in measured]
    if missing:
        numbers = ", ".join(map(str, missing))
        yield f"Without a time of the choice or of another way: {counted(len(missing), 'shape')} ({numbers})."


def _left_out(record: RunRecord, asked: int) -> Iterator[str]:
    """How many shapes there was no time for, and what would do for them."""
    done = len(_whole_shapes(record))
    if done >= asked:
        return
    if record.argv[:1] == ("merge",):
        yield f"{asked - done} of {counted(asked, 'shape')} are left out; go on with the merged runs, then merge again."
        return
    needed = budget_option((asked - done) * elapsed_seconds(record) / done) if done else ""
    yield (
        f"{asked - done} of {counted(asked, 'shape')} are left out; go on with "
        f"`{resume_command(record.suite, record.run_id, needed)}`."
    )


def _line(regret: Regret) -> tuple[str, ...]:
    workload = regret.chosen.case.workload
    doubt = "disturbed" if regret.disturbed else "within noise"
    verdict = ("yes" if regret.is_proven else doubt) if regret.is_much else "no"
    interval = ABSENT if regret.low is None or regret.high is None else f"{regret.low:.2f}–{regret.high:.2f}"
    return (
        str(regret.number),
        f"{workload.label()} · {workload.pattern.label()} · {workload.mode}",
        _taken(regret.chosen),
        format_latency(measured_view(regret.chosen).median_ns),
        row_name(regret.other),
        format_latency(measured_view(regret.other).median_ns),
        f"{regret.ratio:.2f}",
        interval,
        verdict,
    )


def _taken(row: Row) -> str:
    """What the library says that it took: 'strided:math (rule)'."""
    assert isinstance(row.outcome, Measured)
    return next((note.message for note in CHOSEN.among(row.outcome.notes)), row_name(row))


def _choosing_ns(row: Row) -> float | None:
    assert isinstance(row.outcome, Measured)
    return next((note.observed for note in CHOSEN.among(row.outcome.notes)), None)
