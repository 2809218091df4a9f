"""Which of several rows of one workload is the fastest, and how much faster, by the rule that `compare` decides with.

One estimator for all: the ratio of two rows comes from the rounds that both took turns in (`stats.decisions.paired`),
so that drift and load cancel; where they shared none, from their medians, which prove nothing. Rounds are compared by
their undisturbed samples. A row that is disturbed in most of them, as one whose launches are waited for on a busy host,
is not what its user sees there: it is proven to be faster only if its median says so, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dilabench.compare.view import common_timings, pair, pair_views
from dilabench.metadata import NOTES
from dilabench.record import Measured, Row
from dilabench.stats.decisions.verdicts import Cause, Code


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Rows that compute the same function of the same inputs, compared.

    `baseline`: the row that speed-ups refer to. `speedups`: by case id, time of the baseline / time of the row.
    `tied`: rows of which nobody can say that they are slower than the fastest, whose median is the smallest of theirs.
    `too_few_rounds`: of none of these, because they did not take enough turns with it.
    """

    fastest: Row
    baseline: Row
    speedups: dict[str, float]
    tied: tuple[Row, ...]
    too_few_rounds: bool

    @property
    def proven(self) -> bool:
        """Every other row is slower, beyond the margin and beyond doubt."""
        return not self.tied and len(self.speedups) > 1


def is_quotable(row: Row) -> bool:
    """Whether its time stands for what it claims to: measured, and no note says that it cannot be true."""
    if not isinstance(row.outcome, Measured) or not any(timing.has_samples for timing in row.outcome.timings):
        return False
    return not any(kind.disqualifies for note in row.outcome.notes if (kind := NOTES.get(note.code)))


def rank(rows: Sequence[Row], device: str) -> Ranking | None:
    """Speed-ups refer to the plain method where it was measured, else to the first row; None without a row to quote."""
    quotable = [row for row in rows if is_quotable(row)]
    if not quotable:
        return None
    baseline = next((row for row in quotable if row.planned.role == "plain"), quotable[0])
    ratios = [view.ratio for view in pair_views([(baseline, row) for row in quotable])]
    speedups = {row.case.case_id: 1 / ratio for row, ratio in zip(quotable, ratios, strict=True)}
    fastest = quotable[ratios.index(min(ratios))]
    others = [row for row in quotable if row is not fastest]
    tied, unheard, ahead = _not_slower(fastest, others, device)
    return Ranking(
        fastest=ahead,
        baseline=baseline,
        speedups=speedups,
        tied=tuple(row for row in (fastest, *tied) if row is not ahead),
        too_few_rounds=bool(tied) and tied == unheard,
    )


def _not_slower(fastest: Row, others: Sequence[Row], device: str) -> tuple[tuple[Row, ...], tuple[Row, ...], Row]:
    """The rows that are not proven to be slower, those of them with too few common rounds to prove anything, and the
    row of all with the smallest medians in common rounds."""
    from dilabench.stats.decisions.decide import Policy, judge_many
    from dilabench.stats.decisions.paired import estimate_many

    compared, unheard, undecided = [], [], []
    for row in others:
        timings = common_timings(fastest, row)
        pairing = pair([timings]) if timings else None
        if pairing is None or pairing.rounds is None or pairing.throttled:
            unheard.append(row)
        else:
            compared.append((row, pairing.rounds))
    in_common = [rounds for _, rounds in compared]
    verdicts = judge_many(in_common, Policy.for_device(device))
    ahead, least = fastest, 1.0
    for (row, _), found, by_median in zip(
        compared, verdicts, estimate_many(in_common, statistic="median"), strict=True
    ):
        if by_median.ratio < least:
            ahead, least = row, by_median.ratio
        if found.cause is Cause.TOO_FEW_ROUNDS:
            unheard.append(row)
        elif found.code is not Code.SLOWER or by_median.ratio < 1:
            undecided.append(row)
    # By identity: to compare rows takes long.
    chosen = {id(row) for row in (*undecided, *unheard)}, {id(row) for row in unheard}
    tied, alone = (tuple(row for row in others if id(row) in some) for some in chosen)
    return tied, alone, ahead
