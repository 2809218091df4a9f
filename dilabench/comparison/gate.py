"""From looks at sessions that grow in number to verdicts, and from these to an exit code.

Every look has its own confidence level (`Policy.confidence_at`), so that measuring until SAME is proven errs no more
often than promised. A change, in either direction, is claimed only from fresh sessions, which no look has selected.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from math import log1p

from dilabench.comparison.comparison import ComparedPair, Comparison
from dilabench.errors import ExitCode, exit_code_for
from dilabench.record import RunRecord
from dilabench.stats.decisions.decide import Policy
from dilabench.stats.decisions.verdicts import Code, Verdict, confirm

CaseIds = Collection[str]


def exit_code(comparison: Comparison, fail_on: Collection[str] = ("slower", "larger")) -> ExitCode:
    """The gravest thing that a comparison found. `fail_on` may hold "slower", "larger" and "undecided".

    Wrong output and times that cannot be true count always, and so does a case that the baseline had measured and that
    now fails. Slower pairs and larger peaks count as regressions; `undecided` also counts cases without a verdict that
    the baseline has. A comparison without any pair counts as "nothing compared".
    """
    rest, pairs = comparison.uncompared, comparison.pairs
    undecided = any(pair.verdict.code is Code.UNDECIDED for pair in pairs) or any(case.regressed for case in rest)
    slower = "slower" in fail_on and any(pair.verdict.fails_gate for pair in pairs)
    larger = "larger" in fail_on and any(pair.memory is not None and pair.memory.fails_gate for pair in pairs)
    return exit_code_for(
        wrong=any(case.lack in ("wrong output", "impossible time") for case in rest),
        failed=any(case.lack == "failed" and case.regressed for case in rest),
        slower=slower or larger,
        undecided="undecided" in fail_on and undecided and bool(pairs),
        nothing=not pairs,
    )


def anything_decided(comparison: Comparison) -> bool:
    """Return True if a pair is slower, faster or shown not to have changed."""
    return any(pair.verdict.code is not Code.UNDECIDED for pair in comparison.pairs)


def anything_worse(comparison: Comparison) -> bool:
    """Return True if a time is proven slower or a peak is larger, whether or not that fails the gate."""
    pairs = comparison.pairs
    return any(pair.verdict.fails_gate or (pair.memory is not None and pair.memory.fails_gate) for pair in pairs)


def common_change(comparison: Comparison) -> str | None:
    """Return a warning if all of several cases moved beyond their margins in one direction, else None.

    A case whose interval contains 1 says nothing.
    """
    logs = [pair.verdict.numbers.log_ratio for pair in comparison.pairs]
    beyond = all(_moved(pair.verdict) for pair in comparison.pairs)
    if len(logs) < 2 or not beyond or min(logs) < 0 < max(logs):
        return None
    direction = "slower" if logs[0] > 0 else "faster"
    return (
        f"all {len(logs)} cases look {direction}: either code that they share has changed, or the machine; "
        "`--relative-to IMPL`, with an implementation whose code did not change, decides which"
    )


def _moved(verdict: Verdict) -> bool:
    """Return True if the ratio is beyond the margin, and 1 outside of its interval."""
    numbers = verdict.numbers
    low, high = numbers.ratio_low, numbers.ratio_high
    certain = low is not None and high is not None and not low <= 1 <= high
    return certain and abs(numbers.log_ratio) > log1p(verdict.threshold)


def confirmed(first: Comparison, second: Comparison | None) -> Comparison:
    """Return the final comparison: a pair flagged at first has the verdict of the second data alone.

    A flagged pair that the second comparison lacks is undecided; that names what went wrong there.
    """
    again = {pair.candidate.case_id: pair for pair in second.pairs} if second else {}
    flagged = {case.case_id for case in first.flagged}
    pairs = [_decided(pair, again.get(pair.candidate.case_id)) for pair in first.pairs]
    extra = [entry for entry in second.uncompared if entry.case.case_id in flagged] if second else []
    warnings = dict.fromkeys([*first.warnings, *(second.warnings if second else ())])
    return Comparison(pairs=tuple(pairs), uncompared=(*first.uncompared, *extra), warnings=tuple(warnings))


def _decided(first: ComparedPair, second: ComparedPair | None) -> ComparedPair:
    if not first.verdict.flagged:
        return first
    verdict = confirm(first.verdict, second.verdict if second else None)
    # The times are those of the verdict.
    return replace(second or first, verdict=verdict, first_look=f"{first.verdict.code}, {first.verdict.reason}")


def until_decided(
    cases: CaseIds,
    measure: Callable[[CaseIds, int], Sequence[RunRecord]],
    judge: Callable[[Sequence[RunRecord], CaseIds, Policy], Comparison],
    further: Callable[[CaseIds, int], int],
    again: Callable[[CaseIds, int], int],
    policy: Policy,
) -> Comparison:
    """The verdicts on all cases, each from the look that decided it as precisely as is wanted, else from the last.

    measure(cases, n): measures n sessions of the cases and returns their records; empty if it cannot. further(cases,
    n): how many sessions to measure next of cases that have n; 0 ends the looks. again(cases, n): how many fresh
    sessions decide on cases that seem to have changed in n.
    """
    final, records, look = Comparison(pairs=()), list[RunRecord](), 0
    while cases and (count := further(cases, len(records))):
        records += measure(cases, count)
        look += 1
        comparison = looked_at(records, cases, measure, judge, again, replace(policy, look=look))
        judged, cases = cases, {pair.candidate.case_id for pair in comparison.pairs if pair.verdict.imprecise}
        final = final.updated(comparison, judged)
    return final


def looked_at(
    records: Sequence[RunRecord],
    cases: CaseIds,
    measure: Callable[[CaseIds, int], Sequence[RunRecord]],
    judge: Callable[[Sequence[RunRecord], CaseIds, Policy], Comparison],
    again: Callable[[CaseIds, int], int],
    policy: Policy,
) -> Comparison:
    """Return the verdicts of one look; cases that seem to have changed are judged on fresh sessions instead."""
    comparison = judge(records, cases, policy)
    flagged = {case.case_id for case in comparison.flagged}
    if not flagged:
        return comparison
    fresh = measure(flagged, again(flagged, len(records)))
    # Judged at the level of a second look, because the baseline is the same as for the first data.
    return confirmed(comparison, judge(fresh, flagged, replace(policy, look=2)) if fresh else None)
