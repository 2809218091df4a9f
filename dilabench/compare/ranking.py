"""The rows of a workload in order, and what is proven of it.

Rows are ranked by the rule that `compare` decides with. The ratio of two rows comes from the rounds that both took part
in, so that drift and load cancel; without common rounds it comes from their medians, which prove nothing. Rounds are
compared by their undisturbed samples. If most rounds of a row are disturbed (kernel launches on a busy host, say),
these samples differ from what its user sees: the row is proven faster only if its median is smaller, too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dilabench.compare.view import estimated, is_quotable, measured_view, pair_views
from dilabench.record import Row
from dilabench.stats.decisions.decide import Policy, decide
from dilabench.stats.decisions.verdicts import Cause, Code


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Rows that compute the same function of the same inputs, compared.

    `baseline`: the row that speed-ups refer to. `speedups`: by case id, time of the baseline / time of the row.
    `tied`: rows that are not proven slower than the fastest; its median is the smallest of them.
    `too_few_rounds`: all of `tied` shared too few rounds with the fastest to be decided. `probable`: then the intervals
    of their medians do not overlap its own.
    """

    fastest: Row
    baseline: Row
    speedups: dict[str, float]
    tied: tuple[Row, ...]
    too_few_rounds: bool
    probable: bool

    @property
    def proven(self) -> bool:
        """Return True if every other row is proven to be slower by more than the margin."""
        return not self.tied and len(self.speedups) > 1


def rank(rows: Sequence[Row], device: str) -> Ranking | None:
    """The ranking of one group of rows; see `rankings`."""
    return rankings([rows], device)[0]


def rankings(groups: Sequence[Sequence[Row]], device: str) -> list[Ranking | None]:
    """Rank the quotable rows of each group; None if it has none. The statistics of all are computed together.

    Speed-ups refer to the plain method, else to the first row. A row of a plug-in is the baseline only if no row of
    dilabench's has a time to quote.
    """
    quotable = [[row for row in rows if is_quotable(row)] for rows in groups]
    ranked = [rows for rows in quotable if rows]
    baselines = [
        min(rows, key=lambda row: (row.planned.source is not None, row.planned.role != "plain")) for rows in ranked
    ]
    views = iter(pair_views([(base, row) for base, rows in zip(baselines, ranked, strict=True) for row in rows]))
    ratios = [[next(views).ratio for _ in rows] for rows in ranked]
    fastest = [rows[times.index(min(times))] for rows, times in zip(ranked, ratios, strict=True)]
    others = [[row for row in rows if row is not best] for rows, best in zip(ranked, fastest, strict=True)]
    found = iter(
        [
            _ranking(*group)
            for group in zip(ranked, baselines, ratios, fastest, _standings(fastest, others, device), strict=True)
        ]
    )
    return [next(found) if rows else None for rows in quotable]


def _ranking(
    rows: Sequence[Row], baseline: Row, ratios: Sequence[float], fastest: Row, standing: "_Standing"
) -> Ranking:
    ahead, tied = standing.ahead, standing.tied
    too_few_rounds = bool(tied) and tied == standing.unheard
    return Ranking(
        fastest=ahead,
        baseline=baseline,
        speedups={row.case.case_id: 1 / ratio for row, ratio in zip(rows, ratios, strict=True)},
        tied=tuple(row for row in (fastest, *tied) if row is not ahead),
        too_few_rounds=too_few_rounds,
        probable=too_few_rounds and all(_reach(ahead)[1] < _reach(row)[0] for row in tied),
    )


def _reach(row: Row) -> tuple[float, float]:
    """The ends of the interval of its median in ns; below five samples the smallest and the largest."""
    view = measured_view(row)
    samples = view.timing.samples_ns
    return (view.interval.low, view.interval.high) if view.interval else (min(samples), max(samples))


@dataclass(frozen=True, slots=True)
class _Standing:
    """Rows against the fastest. `tied`: not proven slower; `unheard`: those of them with too few common rounds for a
    proof; `ahead`: the row with the smallest medians in common rounds."""

    tied: tuple[Row, ...]
    unheard: tuple[Row, ...]
    ahead: Row


def _standings(fastest: Sequence[Row], others: Sequence[Sequence[Row]], device: str) -> Iterator[_Standing]:
    common = iter(estimated([(best, row) for best, rows in zip(fastest, others, strict=True) for row in rows]))
    policy = Policy.for_device(device)
    for best, rows in zip(fastest, others, strict=True):
        ahead, least = best, 0.0
        tied, unheard = [], []
        for row in rows:
            known = next(common)
            if known.estimate is None or known.throttled:
                tied.append(row)
                unheard.append(row)
                continue
            verdict, by_median = decide(known.estimate, policy), known.estimate.median_log_ratio or 0.0
            if by_median < least:
                ahead, least = row, by_median
            if verdict.cause is Cause.TOO_FEW_ROUNDS:
                unheard.append(row)
            if verdict.cause is Cause.TOO_FEW_ROUNDS or verdict.code is not Code.SLOWER or by_median < 0:
                tied.append(row)
        yield _Standing(tuple(tied), tuple(unheard), ahead)
