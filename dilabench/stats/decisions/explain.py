"""The sentences of a verdict: why it says so, and what to do next."""

from math import ceil, expm1, sqrt

from dilabench.errors import counted
from dilabench.stats.decisions.policy import Margin, Policy
from dilabench.stats.decisions.verdicts import Cause, Code, Numbers
from dilabench.stats.samples.estimate import MIN_ROUNDS, Estimate

_MARGIN_SOURCE = {
    "user": "the threshold",
    "noise": "twice the noise floor of this machine",
    "timer": "twice the floor of the timer",
    "absolute": "the least change in absolute time",
}


def percent(fraction: float) -> str:
    """A signless fraction as per cent with the digits that matter: 0.0312 -> "3.12 %", 0.25 -> "25 %"."""
    return f"{100 * fraction:.3g} %" if fraction < 0.1 else f"{100 * fraction:.0f} %"


def rounds_missing(estimate: Estimate) -> int:
    """Rounds until an interval can be given at all."""
    return max(1, MIN_ROUNDS - estimate.rounds)


def reason(code: Code, cause: Cause, estimate: Estimate, numbers: Numbers, margin: Margin) -> str:
    """One sentence that holds the figures the verdict rests on."""
    if cause is Cause.TOO_FEW_ROUNDS:
        return f"{counted(estimate.rounds, 'round')}; {MIN_ROUNDS} are the least that give an interval"
    if cause is Cause.TOO_FEW_SESSIONS:
        apart = percent(abs(numbers.ratio - 1))
        return f"{apart} apart, but one session on each side tells nothing of the spread between sessions"
    within = f"the margin of {percent(margin.delta)} ({_MARGIN_SOURCE[margin.source]})"
    interval = f"{numbers.ratio:.4g}x the baseline's time, {numbers.ratio_low:.4g} to {numbers.ratio_high:.4g}"
    assert numbers.confidence is not None
    interval += f" ({100 * numbers.confidence:.4g} %)"
    if cause is Cause.CLOCK:
        assert estimate.cycles_log_ratio is not None
        in_cycles = expm1(estimate.cycles_log_ratio) + 1
        return f"{interval}; but {in_cycles:.4g}x its clock cycles: the clock changed between the sides"
    where = {
        Code.SLOWER: "wholly above",
        Code.FASTER: "wholly below",
        Code.SAME: "wholly within",
        Code.INCONCLUSIVE: "not clear of",
    }[code]
    return f"{interval}: {where} {within}"


def hint(code: Code, cause: Cause, estimate: Estimate, numbers: Numbers, policy: Policy) -> str:
    """What the reader can do next; empty when there is nothing to do."""
    hints: list[str] = []
    if cause is Cause.TOO_FEW_ROUNDS:
        hints.append(f"measure {_effort(rounds_missing(estimate), estimate)}")
    elif cause is Cause.TOO_FEW_SESSIONS:
        hints.append("add runs to the baseline (`dilabench baseline save NAME RUN --add`), five at least for a gate")
    elif cause is Cause.CLOCK:
        hints.append("lock the clock or let the device cool down, then measure again (`dilabench doctor`)")
    elif cause in (Cause.IMPRECISE, Cause.OUT_OF_REACH):
        hints.append(_more_sessions(estimate, numbers) if estimate.stored else _more_effort(estimate, numbers))
    elif code in (Code.SLOWER, Code.FASTER) and not estimate.advisory:
        hints.append("measure again in fresh sessions; only the second data decide")
    elif code is Code.SAME and numbers.mde is not None:
        hints.append(f"a slow-down of {percent(numbers.mde)} would have been found four times in five")
    if estimate.advisory:
        hints.append("advisory only: five stored sessions are the least a gate rests on")
    if policy.sigma_aa is None and cause is not Cause.TOO_FEW_ROUNDS and estimate.unit == "round":
        hints.append("the noise between sessions is unknown: run `dilabench calibrate`, or measure three sessions")
    return "; ".join(hints)


def _more_effort(estimate: Estimate, numbers: Numbers) -> str:
    if numbers.rounds_needed is not None:
        return f"about {_effort(numbers.rounds_needed, estimate)} would decide"
    if estimate.fixed_variance > 0:
        return "more rounds will not decide, the noise between sessions is too large: measure three sessions or more"
    return "the effect is too close to the margin for any reasonable number of rounds: choose another margin"


def _more_sessions(estimate: Estimate, numbers: Numbers) -> str:
    spread = percent(sqrt(estimate.reducible_variance))
    if numbers.sessions_needed is not None:
        needed = max(numbers.sessions_needed, 2 * estimate.sessions)
        return f"sessions lie {spread} apart: {needed} new ones should decide"
    if numbers.both_needed is not None:
        what = f"{numbers.both_needed} on either side should decide (`baseline save --add`)"
        return f"sessions lie {spread} apart, too far for the baseline's {estimate.stored}: {what}"
    return f"sessions lie {spread} apart, too far for this margin: choose a wider one (`--threshold`)"


def _effort(rounds: int, estimate: Estimate) -> str:
    """Further rounds in words; as sessions of so many where the error is the spread between sessions."""
    count = rounds if estimate.unit == "round" else ceil(rounds * estimate.sessions / estimate.rounds)
    return f"one more {estimate.unit}" if count == 1 else f"{count} more {estimate.unit}s"
