"""The rows of a workload in order, and what is proven of it (by the rule of `compare.view`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from dilabench.compare.view import PairView, disjoint, is_quotable, pair_views
from dilabench.record import Row


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
    """Rank the quotable rows of each group; None if it has none. The statistics of all groups are computed together.

    Speed-ups refer to the plain method, else to the first row. A row of a plug-in is the baseline only if no row of
    dilabench's has a time to quote.
    """
    quotable = [[row for row in rows if is_quotable(row)] for rows in groups]
    ranked = [rows for rows in quotable if rows]
    baselines = [
        min(rows, key=lambda row: (row.planned.source is not None, row.planned.role != "plain")) for rows in ranked
    ]
    ratios = [[view.ratio for view in views] for views in _views(baselines, ranked, device)]
    sharpest = [rows[times.index(min(times))] for rows, times in zip(ranked, ratios, strict=True)]
    others = [[row for row in rows if row is not best] for rows, best in zip(ranked, sharpest, strict=True)]
    versus = _views(sharpest, others, device)
    found = map(_ranking, ranked, baselines, ratios, sharpest, others, versus)
    return [next(found) if rows else None for rows in quotable]


def _views(baselines: Sequence[Row], groups: Sequence[Sequence[Row]], device: str) -> list[list[PairView]]:
    """The view of each row of each group against the group's baseline."""
    pairs = [(baseline, row) for baseline, rows in zip(baselines, groups, strict=True) for row in rows]
    views = iter(pair_views(pairs, device))
    return [list(islice(views, len(rows))) for rows in groups]


def _ranking(
    rows: Sequence[Row],
    baseline: Row,
    ratios: Sequence[float],
    sharpest: Row,
    others: Sequence[Row],
    views: Sequence[PairView],
) -> Ranking:
    compared = zip(others, views, strict=True)
    undecided = [(row, view) for row, view in compared if not view.proven or view.faster != "baseline"]
    too_few_rounds = bool(undecided) and all(view.too_few_rounds for _, view in undecided)
    # Another row may have the smallest median in common rounds.
    by_median = [(sharpest, 1.0), *((row, view.median_ratio) for row, view in undecided)]
    fastest, _ = min(by_median, key=lambda entry: entry[1])
    tied = tuple(row for row, _ in by_median if row is not fastest)
    return Ranking(
        fastest=fastest,
        baseline=baseline,
        speedups={row.case.case_id: 1 / ratio for row, ratio in zip(rows, ratios, strict=True)},
        tied=tied,
        too_few_rounds=too_few_rounds,
        probable=too_few_rounds and all(disjoint(fastest, row) == "baseline" for row in tied),
    )
