"""Measuring until decided: looks at sessions that grow in number, and fresh ones for what seems to have changed.

Every look has a level of its own (`Policy.confidence_at`), so that going on until SAME is proven errs no more often
than promised. A change, in either direction, is claimed on fresh sessions alone, which no look has chosen.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from dilabench.compare.comparison import Comparison
from dilabench.compare.gate import confirmed
from dilabench.record import RunRecord
from dilabench.stats.decisions.history import LOOK_SESSIONS
from dilabench.stats.decisions.policy import Policy

CaseIds = Collection[str]


def until_decided(
    cases: CaseIds,
    measure: Callable[[CaseIds, int], Sequence[RunRecord]],
    judge: Callable[[Sequence[RunRecord], CaseIds, Policy], Comparison],
    further: Callable[[CaseIds, int], int],
    policy: Policy,
) -> Comparison:
    """The verdicts on all cases, each from the look that decided it.

    measure: so many sessions of these cases; none where that cannot be. further: how many sessions to measure next of
    cases that have so many; 0 ends it.
    """
    final, records, look = Comparison(pairs=()), list[RunRecord](), 0
    while cases and (count := further(cases, len(records))):
        records += measure(cases, count)
        look += 1
        found = looked_at(records, cases, measure, judge, replace(policy, look=look))
        judged, cases = cases, {pair.candidate.case_id for pair in found.pairs if pair.verdict.undecided}
        final = final.updated(found, judged)
    return final


def looked_at(
    records: Sequence[RunRecord],
    cases: CaseIds,
    measure: Callable[[CaseIds, int], Sequence[RunRecord]],
    judge: Callable[[Sequence[RunRecord], CaseIds, Policy], Comparison],
    policy: Policy,
) -> Comparison:
    """The verdicts of one look at these sessions; what seems to have changed has that of as many fresh ones."""
    found = judge(records, cases, policy)
    flagged = {case.case_id for case in found.flagged}
    if not flagged:
        return found
    fresh = measure(flagged, max(LOOK_SESSIONS[0], len(records)))
    # At the level of a second look: the baseline is the one that the first data were compared with.
    return confirmed(found, judge(fresh, flagged, replace(policy, look=2)) if fresh else None)
