"""The length at which one implementation overtakes another of its family, and the family overtakes dense.

A crossover is a single change of sides: below it one of the two is faster, above it the other, each proven at some
length by the rule of `comparison.view`. With more changes the lengths that each side wins are listed. Dense attention is
measured separately, so a change of sides against it is only probable, and the sentence says so.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

from dilabench.comparison.view import pair_views
from dilabench.report.findings import Section
from dilabench.stats.scaling import Crossover, crossover
from dilabench.suites.findings.series import Series, families
from dilabench.units import format_count

COLUMNS = ("faster below", "faster above", "crossover length", "95 % CI", "proven between")


@dataclass(frozen=True, slots=True)
class _Ratio:
    """ln(candidate / baseline) at one length, per session; `winner`: the faster series, None if undecided."""

    length: int
    sessions: tuple[float, ...]
    winner: str | None
    proven: bool


@dataclass(frozen=True, slots=True)
class _Crossing:
    """`last`, `first`: the longest length that the side below wins, and the shortest that the side above wins."""

    below: str
    above: str
    place: Crossover
    last: int
    first: int


def crossover_section(series: Sequence[Series], device: str) -> Section | None:
    """Every pair of rivals whose order changes along the lengths, and dense attention against the best of the others.

    None if no series has a rival.
    """
    rivals = [pair for members in families(series).values() for pair in combinations(members, 2)]
    compared = [(a, b, ratios) for a, b in rivals if len(ratios := _ratios(a, b, device)) > 1]
    texts = list(_against_dense(series, device))
    if not compared and not texts:
        return None
    crossings: list[_Crossing] = []
    for a, b, known in compared:
        ratios = [ratio if ratio.proven else replace(ratio, winner=None) for ratio in known]
        changes = _changes(ratios)
        if len(changes) == 1:
            crossings.append(_crossing(a, b, ratios))
            texts.append(
                f"{crossings[-1].above} overtakes {crossings[-1].below} at about {_length(crossings[-1].place.length)}."
            )
        elif changes:
            texts.append(" ".join(_wins(ratios)))
    return Section(
        title="Crossover lengths",
        sentence=" ".join(texts) or "No implementation is proven to overtake another along these lengths.",
        columns=COLUMNS if crossings else (),
        rows=tuple(tuple(_row(crossing)) for crossing in crossings),
        numeric=frozenset({"crossover length", "95 % CI"}),
    )


def _against_dense(series: Sequence[Series], device: str) -> Iterator[str]:
    """The length from which the best of a family is faster than dense attention of the same shape."""
    for dense in series:
        if dense.rows[0].planned.role != "yardstick" or not dense.rows[0].case.workload.is_dense:
            continue
        rivals = [rival for rival in series if _same_shape(rival, dense) and len(_ratios(dense, rival, device)) > 1]
        if not rivals:
            continue
        best = min(rivals, key=lambda rival: 1 / rival.measured[-1].tokens_per_s)
        ratios = _ratios(dense, best, device)
        winners = {ratio.winner for ratio in ratios} - {None}
        is_ = "is" if all(ratio.proven for ratio in ratios if ratio.winner) else "is probably"
        if len(_changes(ratios)) == 1 and ratios[-1].winner == best.label:
            place = _crossing(dense, best, ratios).place.length
            yield f"{best.label} {is_} faster than {dense.label} from about {_length(place)} tokens on."
        elif winners == {best.label}:
            yield f"{best.label} {is_} faster than {dense.label} at every length measured."
        elif best.label not in winners:
            yield f"{best.label} is not shown to be faster than {dense.label} at any length measured."
        else:
            yield " ".join(_wins(ratios, is_))


def _same_shape(candidate: Series, dense: Series) -> bool:
    """Return True if they differ only in pattern and take the same inputs."""
    if candidate.rows[0].planned.role == "yardstick" or candidate.rows[0].planned.takes != dense.rows[0].planned.takes:
        return False
    shapes = [
        row.case.workload.as_dense().model_copy(update={"seq_len": 1, "batch_size": 1, "cu_seqlens": None})
        for row in (candidate.rows[0], dense.rows[0])
    ]
    return shapes[0] == shapes[1] and candidate.rows[0].case.world_size == dense.rows[0].case.world_size


def _ratios(baseline: Series, candidate: Series, device: str) -> list[_Ratio]:
    by_length = {view.row.case.workload.seq_len: view.row for view in candidate.measured if view.is_quotable}
    at = {view.row.case.workload.seq_len: view.row for view in baseline.measured if view.is_quotable}
    lengths = [length for length in at if length in by_length]
    views = pair_views([(at[length], by_length[length]) for length in lengths], device)
    labels = {"baseline": baseline.label, "candidate": candidate.label}
    return [
        _Ratio(length, view.session_log_ratios, view.faster and labels[view.faster], view.proven)
        for length, view in zip(lengths, views, strict=True)
    ]


def _changes(ratios: Sequence[_Ratio]) -> list[tuple[_Ratio, _Ratio]]:
    """Neighbouring decided lengths with different winners."""
    decided = [ratio for ratio in ratios if ratio.winner]
    return [(earlier, later) for earlier, later in pairwise(decided) if earlier.winner != later.winner]


def _crossing(baseline: Series, candidate: Series, ratios: Sequence[_Ratio]) -> _Crossing:
    """The change of sides, from the lengths between the last win below and the first win above."""
    ((last, first),) = _changes(ratios)
    inside = [ratio for ratio in ratios if last.length <= ratio.length <= first.length]
    alike = len({len(ratio.sessions) for ratio in inside}) == 1
    columns = [ratio.sessions if alike else (sum(ratio.sessions) / len(ratio.sessions),) for ratio in inside]
    place = crossover([ratio.length for ratio in inside], list(zip(*columns, strict=True)))
    below, above = (candidate, baseline) if first.winner == baseline.label else (baseline, candidate)
    return _Crossing(below.label, above.label, place, last.length, first.length)


def _wins(ratios: Sequence[_Ratio], is_: str = "is") -> Iterator[str]:
    """The lengths that each side wins."""
    for winner in dict.fromkeys(ratio.winner for ratio in ratios if ratio.winner):
        lengths = ", ".join(format_count(ratio.length) for ratio in ratios if ratio.winner == winner)
        loser = next(other.winner for other in ratios if other.winner not in (None, winner))
        yield f"{winner} {is_} faster than {loser} at {lengths}."


def _row(crossing: _Crossing) -> Iterator[str]:
    place = crossing.place
    yield crossing.below
    yield crossing.above
    yield _length(place.length)
    if place.confidence is None:
        yield "fewer than 3 sessions, no CI"
    else:
        yield f"{_length(place.low)}–{_length(place.high)}"
    yield f"{format_count(crossing.last)} and {format_count(crossing.first)}"


def _length(length: float | None) -> str:
    """A length between measured ones, to about two digits; None is beyond the measured lengths."""
    if length is None:
        return "beyond"
    return format_count(round(length)) if length < 1024 else f"{length / 1024:.3g}K"
