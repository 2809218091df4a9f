"""Suite `range`: growth of time with length, and the lengths at which implementations overtake others."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from dilabench.comparison.view import Ranking, measured_view, rank, view_of
from dilabench.record import Failed, Row, RunRecord
from dilabench.report.columns import ABSENT
from dilabench.report.findings import Curve, CurvePlot, Point, Section
from dilabench.stats.scaling import PowerLaw, fit_power_law
from dilabench.suites.findings.crossings import crossover_section
from dilabench.suites.findings.series import (
    Series,
    batch_spans,
    batch_text,
    families,
    ns_per_sequence,
    plots_over_length,
    series_of,
)
from dilabench.units import NS_PER_MS, format_count, format_latency, format_rate, format_ratio

SKIPPED = "skipped"
# Cells of rows without a time.
NO_TIMES = frozenset({ABSENT, SKIPPED})


def analyse(record: RunRecord) -> tuple[Section, ...]:
    """Medians by length, fitted exponents and crossover lengths; empty for a record of a single length."""
    series = [member for member in series_of(record) if member.measured]
    if len({view.row.case.workload.seq_len for member in series for view in member.measured}) < 2:
        return ()
    sections = (_by_length(series, record.device), _growth(series), crossover_section(series, record.device))
    return tuple(section for section in sections if section)


def _by_length(series: Sequence[Series], device: str) -> Section:
    """One line per length: median and speed-up of every series."""
    by_length = {member.label: _rows_by_length(member) for member in series}
    lengths = sorted({length for rows in by_length.values() for length in rows})
    rankings = {
        (rivals, length): rank([row for member in members for row in by_length[member.label].get(length, ())], device)
        for rivals, members in families(series).items()
        for length in lengths
    }
    table = []
    for length in lengths:
        at = [next(iter(by_length[member.label].get(length, ())), None) for member in series]
        batch = next(batch_text(row) for row in at if row is not None)
        cells = [_median_text(row, rankings[member.rivals, length]) for member, row in zip(series, at, strict=True)]
        table.append((format_count(length), batch, *cells))
    without = [count for count, (_, _, *cells) in zip(lengths, table, strict=True) if set(cells) <= NO_TIMES]
    if len(without) > 1:
        # A line for each would add no information.
        table = [row for row in table if row[0] not in set(map(format_count, without))]
    starred = " A star marks a batch size chosen by auto." if any("*" in row[1] for row in table) else ""
    return Section(
        title="Latency by length",
        sentence=f"{_leaders(series, rankings, lengths)}{starred}{_untimed(without)}",
        columns=("length", "batch", *(member.label for member in series)),
        rows=tuple(table),
        numeric=frozenset({"length", "batch", *(member.label for member in series)}),
        plots=plots_over_length(series),
    )


def _untimed(lengths: Sequence[int]) -> str:
    if len(lengths) < 2:
        return ""
    return f" {len(lengths)} lengths from {format_count(lengths[0])} to {format_count(lengths[-1])} have no time."


def _rows_by_length(series: Series) -> dict[int, list[Row]]:
    rows = groupby(series.rows, key=lambda row: row.case.workload.seq_len)
    return {length: list(at_length) for length, at_length in rows}


def _leaders(
    series: Sequence[Series], rankings: Mapping[tuple[str, int], Ranking | None], lengths: Sequence[int]
) -> str:
    """The fastest series at the largest measured length in each set of rivals, with ties."""
    texts = []
    for rivals, members in families(series).items():
        longest = max(length for length in lengths if rankings[rivals, length])
        ranking = rankings[rivals, longest]
        if len(members) < 2 or ranking is None:
            continue
        names = {row.case.case_id: member.label for member in members for row in member.rows}
        row = ranking.fastest
        view = measured_view(row)
        best = f"{names[row.case.case_id]}, {format_latency(view.median_ns)}, {format_rate(view.tokens_per_s)} tok/s"
        if len(ranking.speedups) == 1:
            texts.append(f"At {format_count(longest)} one measured row, no comparison: {best}.")
        elif ranking.probable:
            texts.append(f"Probably fastest at {format_count(longest)}: {best}.")
        elif ranking.tied:
            tied = ", ".join(names[tied_row.case.case_id] for tied_row in ranking.tied)
            texts.append(f"At {format_count(longest)} no proven difference: {best}; {tied}.")
        else:
            texts.append(f"Fastest at {format_count(longest)}: {best}.")
    return " ".join(texts) or f"Measured at {', '.join(map(format_count, lengths))} tokens."


def _median_text(row: Row | None, ranking: Ranking | None) -> str:
    if row is None:
        return ABSENT
    view = view_of(row)
    if view is None:
        return "FAILED" if isinstance(row.outcome, Failed) else SKIPPED
    gain = None if ranking is None or row is ranking.baseline else ranking.speedups.get(row.case.case_id)
    return f"{format_latency(view.median_ns)}{'' if gain is None else f' ({format_ratio(gain)})'}"


# Width of the interval of an exponent at which it says nothing.
WIDEST_EXPONENT = 2.0


def _growth(series: Sequence[Series]) -> Section | None:
    """Power laws of the time per sequence, because the batch shrinks along a range; None if no law can be told.

    A line through two lengths fits any times, and an exponent known to two or worse cannot tell linear from quadratic.
    """
    fits: list[tuple[Series, PowerLaw]] = []
    for member in series:
        if len(member.measured) > 2:
            lengths, times = zip(*_points_ns(member), strict=True)
            fit = fit_power_law(lengths, times)
            assert fit.exponent_interval is not None, "of three lengths there is one"
            if fit.exponent_interval.high - fit.exponent_interval.low < WIDEST_EXPONENT:
                fits.append((member, fit))
    if not fits:
        return None
    columns = ("series", "exponent", "95 % CI", "R²", "lengths", "per sequence, longest")
    claims = [f"N^{fit.exponent:.2f} (95 %: {_interval_text(fit)}) for {member.label}" for member, fit in fits]
    return Section(
        title="Growth with length",
        sentence=f"Time per sequence grows as {'; '.join(claims)}. Fits hold for the lengths measured and no others.",
        columns=columns,
        rows=tuple(tuple(_fit_row(member, fit)) for member, fit in fits),
        numeric=frozenset(columns[1:]),
        plots=(
            CurvePlot(
                name="scaling",
                title="Time per sequence with fitted power laws",
                y_label="time per sequence (ms)",
                curves=tuple(curve for member, fit in fits for curve in _curves(member, fit)),
                spans=batch_spans(series),
            ),
        ),
    )


def _points_ns(series: Series) -> list[tuple[int, float]]:
    return [
        (view.row.case.workload.seq_len, ns_per_sequence(view.row.case, view.median_ns)) for view in series.measured
    ]


def _interval_text(fit: PowerLaw) -> str:
    interval = fit.exponent_interval
    assert interval is not None, "of three lengths there is one"
    return f"{interval.low:.2f}–{interval.high:.2f}"


def _fit_row(series: Series, fit: PowerLaw) -> Iterator[str]:
    points = _points_ns(series)
    yield series.label
    yield f"{fit.exponent:.3f}"
    yield _interval_text(fit)
    yield f"{fit.r_squared:.4f}"
    yield f"{len(points)}: {format_count(points[0][0])} to {format_count(points[-1][0])}"
    yield format_latency(points[-1][1])


def _curves(series: Series, fit: PowerLaw) -> tuple[Curve, Curve]:
    points = _points_ns(series)
    ends = (points[0][0], points[-1][0])
    measured = tuple(Point(length, time / NS_PER_MS) for length, time in points)
    return (
        Curve(label=series.label, points=measured),
        Curve(
            label=series.label,
            points=tuple(Point(length, fit.predict_ns(length) / NS_PER_MS) for length in ends),
            fitted=True,
        ),
    )
