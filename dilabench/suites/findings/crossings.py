"""At which length one implementation overtakes another of its family."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import log

from dilabench.compare.pairing import common_timings, pair
from dilabench.record import Row
from dilabench.report.findings import Section
from dilabench.stats.decisions.paired import estimate
from dilabench.stats.samples.location import Location
from dilabench.stats.scaling import Crossover, crossover
from dilabench.suites.findings.series import Series
from dilabench.units import format_count


@dataclass(frozen=True, slots=True)
class _Ratio:
    """ln(candidate / baseline) at one length, per session; `winner` is the side that is faster beyond doubt."""

    length: int
    sessions: tuple[float, ...]
    winner: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Crossing:
    baseline: str
    candidate: str
    place: Crossover
    proven: bool

    @property
    def above(self) -> str:
        return self.baseline if self.place.faster_above == "baseline" else self.candidate

    @property
    def below(self) -> str:
        return self.candidate if self.place.faster_above == "baseline" else self.baseline


def crossover_section(series: Sequence[Series]) -> Section | None:
    """Every pair of rivals that changes places along the lengths; None where nobody has a rival."""
    pairs = [(a, b) for a, b in combinations(series, 2) if a.rivals == b.rivals]
    compared = [(a, b, ratios) for a, b in pairs if len(ratios := _ratios(a, b)) > 1]
    if not compared:
        return None
    found = [crossing for entry in compared if (crossing := _crossing(*entry))]
    proven = [one for one in found if one.proven]
    texts = [f"{one.above} overtakes {one.below} at about {_length(one.place.length)}" for one in proven]
    columns = ("faster below", "faster above", "crossover length", "95 % CI", "proven on both sides")
    return Section(
        title="Crossover lengths",
        sentence=f"{'; '.join(texts)}." if texts else "None provably overtakes another along these lengths.",
        columns=columns if found else (),
        rows=tuple(tuple(_row(one)) for one in found),
        numeric=frozenset({"crossover length", "95 % CI"}),
    )


def _ratios(baseline: Series, candidate: Series) -> list[_Ratio]:
    others = {row.case.workload.seq_len: (row, found) for row, found in candidate.measured}
    return [
        _ratio(row, found, *others[row.case.workload.seq_len])
        for row, found in baseline.measured
        if row.case.workload.seq_len in others
    ]


def _ratio(baseline: Row, at: Location, candidate: Row, other_at: Location) -> _Ratio:
    """From the rounds that both took turns in; where they took none, from their medians, which prove nothing."""
    length = baseline.case.workload.seq_len
    timings = common_timings(baseline, candidate)
    cell = pair([timings]).rounds if timings else None
    if cell is None:
        return _Ratio(length, (log(other_at.median_ns / at.median_ns),), None)
    found = estimate(cell)
    winner = None
    if found.interval is not None and found.interval.low > 0:
        winner = "baseline"
    elif found.interval is not None and found.interval.high < 0:
        winner = "candidate"
    return _Ratio(length, found.session_log_ratios, winner)


def _crossing(baseline: Series, candidate: Series, ratios: Sequence[_Ratio]) -> _Crossing | None:
    sessions = {len(ratio.sessions) for ratio in ratios}
    columns = [r.sessions if len(sessions) == 1 else (sum(r.sessions) / len(r.sessions),) for r in ratios]
    place = crossover([ratio.length for ratio in ratios], list(zip(*columns, strict=True)))
    if place.length is None:
        return None
    below = {ratio.winner for ratio in ratios if ratio.length < place.length}
    above = {ratio.winner for ratio in ratios if ratio.length > place.length}
    loser = "candidate" if place.faster_above == "baseline" else "baseline"
    proven = place.faster_above in above and loser in below
    return _Crossing(baseline=baseline.label, candidate=candidate.label, place=place, proven=proven)


def _row(crossing: _Crossing) -> Iterator[str]:
    place = crossing.place
    yield crossing.below
    yield crossing.above
    yield _length(place.length)
    if place.confidence is None:
        yield "fewer than 3 sessions, no CI"
    else:
        yield f"{_length(place.low)}–{_length(place.high)}"
    yield "yes" if crossing.proven else "no"


def _length(length: float | None) -> str:
    """A length between measured ones; two digits are all that it deserves. None lies beyond the lengths measured."""
    if length is None:
        return "beyond"
    return format_count(round(length)) if length < 1024 else f"{length / 1024:.3g}K"
