"""Suite `choice`: the regret of the library's choice, its time over that of the fastest other implementation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from dilabench.choice.ways import way_name
from dilabench.comparison.view import is_quotable, measured_view, pair_views, rank
from dilabench.metadata import CHOSEN, INTERFERENCE, LAUNCH_BOUND, SHAPE
from dilabench.plugins.catalogue import Catalogue
from dilabench.predict.time import budget_option
from dilabench.record import Measured, Row, RunRecord
from dilabench.report.columns import ABSENT, row_name
from dilabench.report.findings import Section
from dilabench.request import resume_command, shard_of
from dilabench.suites.choice.cases import cut_short, shapes_asked
from dilabench.units import counted, format_latency, format_seconds

TITLE = "Regret of the choice"
# Above this ratio the choice was wrong; below it, another machine or day might reverse the order.
MUCH = 1.1
SHOWN = 10
COLUMNS = ("shape", "workload", "took", "time", "fastest other", "its time", "regret", "95 % CI", "over 1.1")
NUMERIC = frozenset({"shape", "time", "its time", "regret", "95 % CI"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Regret:
    """One shape: `ratio` is the time of the choice over that of the fastest other way.

    `low` and `high`: the ends of its interval; None with too few common rounds. `disturbed`: an implementation took
    another time alone than interleaved, so that the ratio may have a bias. `awaited`: the ratio of the times that
    callers wait, if launches take longer than the GPU; None otherwise. `itself`: the shortest wait is that of the
    chosen implementation, called directly.
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
        """Return True if the ratio is over 1.1, proven or not."""
        return self.ratio > MUCH

    @property
    def is_proven(self) -> bool:
        """Return True if the whole interval is over 1.1, undisturbed."""
        return self.low is not None and self.low > MUCH and not self.disturbed


def analyse(record: RunRecord, catalogue: Catalogue) -> tuple[Section, ...]:
    """The answer: the regret over all shapes, the worst of them, the missing shapes and how to continue."""
    all_regrets = list(regrets(record, catalogue))
    asked = len(shapes_asked(record.config.get("options", {}), shard_of(record.config)))
    sentences = [
        _summary(all_regrets),
        *_awaiting(all_regrets),
        *_measuring(all_regrets),
        *_without_regret(record, all_regrets),
        *_left_out(record, asked),
    ]
    worst = sorted(all_regrets, key=lambda regret: -regret.ratio)[:SHOWN]
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
    """The completed shapes for which the choice and another implementation were measured."""
    registry = catalogue.implementations
    choosing = {implementation.name for implementation in registry if implementation.chooses}
    for number, rows in _whole_shapes(record).items():
        chosen = next((row for row in rows if row.case.implementation in choosing and is_quotable(row)), None)
        others = [row for row in rows if row.case.implementation not in choosing]
        ranking = rank(others, record.device)
        if chosen is not None and ranking is not None:
            disturbed = any(INTERFERENCE.among(row.outcome.notes) for row in rows if isinstance(row.outcome, Measured))
            regret = _regret(number, chosen, ranking.fastest, record.device, disturbed)
            yield replace(regret, **_awaited(chosen, [row for row in others if is_quotable(row)]))


def _whole_shapes(record: RunRecord) -> dict[int, list[Row]]:
    """The rows by shape, without shapes that the budget cut short."""
    shapes: dict[int, list[Row]] = {}
    for row in record.rows:
        number = SHAPE.of(row.planned)
        if number is not None:
            shapes.setdefault(number, []).append(row)
    return {number: rows for number, rows in sorted(shapes.items()) if not any(map(cut_short, rows))}


def _awaited(chosen: Row, others: Sequence[Row]) -> dict[str, Any]:
    """The ratio of the times that callers wait, of the choice over the best one, and whether that one was chosen."""
    if not any(_launching_ns(row) for row in (chosen, *others)):
        return {}
    least = min(others, key=_awaited_ns)
    itself = _taken(chosen).partition(" ")[0] == way_name(least.case)
    return {"awaited": _awaited_ns(chosen) / _awaited_ns(least), "itself": itself}


def _awaited_ns(row: Row) -> float:
    return max(measured_view(row).median_ns, _launching_ns(row))


def _launching_ns(row: Row) -> float:
    """The host's launch time of a call if it exceeds the GPU time; else 0."""
    assert isinstance(row.outcome, Measured)
    return next((note.observed or 0.0 for note in LAUNCH_BOUND.among(row.outcome.notes)), 0.0)


def _regret(number: int, chosen: Row, other: Row, device: str, disturbed: bool) -> Regret:
    # Without common rounds (a run resumed in the middle of a shape, say) there is no interval.
    (view,) = pair_views([(other, chosen)], device)
    return Regret(
        number=number,
        chosen=chosen,
        other=other,
        ratio=view.ratio,
        low=None if view.interval is None else view.interval.low,
        high=None if view.interval is None else view.interval.high,
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
    """The same summary by the times that callers wait, if some launches take longer than the GPU."""
    bound = [regret for regret in found if regret.awaited is not None]
    if bound:
        ratios = [regret.ratio if regret.awaited is None else regret.awaited for regret in found]
        over = [regret for regret, ratio in zip(found, ratios, strict=True) if ratio > MUCH]
        itself = sum(regret.itself for regret in over)
        front_end = f", in {itself} of these against the chosen implementation called directly" if itself else ""
        yield (
            f"These times exclude launches. In {counted(len(bound), 'shape')} some way takes longer to launch "
            f"than to compute; by what a caller waits for, the longer of both, the choice took {fmean(ratios):.2f} "
            f"times as long in the mean, {median(ratios):.2f} in the median and {max(ratios):.2f} at worst, over "
            f"{MUCH} in {len(over)}{front_end}."
        )


def _measuring(found: Sequence[Regret]) -> Iterator[str]:
    """The time of the library's choosing, before any timed call."""
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
    """The number of shapes that the budget skipped, and the command that measures them."""
    done = len(_whole_shapes(record))
    if done >= asked:
        return
    if record.argv[:1] == ("merge",):
        yield f"{asked - done} of {counted(asked, 'shape')} are missing; continue the merged runs, then merge again."
        return
    needed = budget_option((asked - done) * record.duration_s / done) if done else ""
    yield (
        f"{asked - done} of {counted(asked, 'shape')} are missing; continue with "
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
    """The library's choice, as it reports it: 'strided:math (rule)'."""
    assert isinstance(row.outcome, Measured)
    return next((note.message for note in CHOSEN.among(row.outcome.notes)), row_name(row))


def _choosing_ns(row: Row) -> float | None:
    assert isinstance(row.outcome, Measured)
    return next((note.observed for note in CHOSEN.among(row.outcome.notes)), None)
