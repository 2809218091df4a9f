"""How many sessions the budget of a check holds, and which budget its cases need."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dilabench.compare.comparison import ComparedPair, Comparison
from dilabench.compare.sequential import CaseIds
from dilabench.errors import counted
from dilabench.predict.time import budget_option, case_seconds
from dilabench.record import PlannedCase, RunRecord
from dilabench.stats.decisions.history import LOOK_SESSIONS
from dilabench.units import format_seconds


@dataclass(slots=True)
class SessionBudget:
    """Shares `total_s` seconds, from now on, between looks and the second measurement of what seems to have changed.

    That takes as many sessions again, so a look is taken only where both fit.
    """

    cases: Sequence[PlannedCase]
    total_s: float
    clock: Callable[[], float] = time.monotonic
    took_s: dict[str, float] = field(default_factory=dict)
    started_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.started_s = self.clock()

    def learn(self, record: RunRecord, session_s: float) -> None:
        """What cases take, from a session and the seconds that such a session takes."""
        self.took_s |= case_seconds(record.rows, session_s)

    def groups_of(self, ids: CaseIds) -> list[PlannedCase]:
        """All cases of the workload groups that these cases are in: what a session of them measures."""
        groups = {one.case.group_id for one in self.cases if one.case.case_id in ids}
        return [one for one in self.cases if one.case.group_id in groups]

    def session_s(self, ids: CaseIds) -> float:
        """Seconds that a session of these cases takes."""
        return sum(self.took_s.get(one.case.case_id, 0.0) for one in self.groups_of(ids))

    def further(self, ids: CaseIds, measured: int) -> int:
        """Sessions up to the next look at cases that have `measured`; 0 where half as many again do not fit."""
        left_s = self.total_s - (self.clock() - self.started_s)
        fits = (left_s / max(self.session_s(ids), 1e-3) + measured) / 2
        if not measured:
            return max(1, min(LOOK_SESSIONS[0], int(fits)))
        return min(2 * measured, int(fits)) - measured if fits >= 1.5 * measured else 0

    def forecast(self, itself: Comparison) -> str:
        """What SAME is expected to take, from the baseline compared with itself."""
        ids = {one.case.case_id for one in self.cases}
        session_s = self.session_s(ids)
        text = f"a session of {counted(len(self.cases), 'case')} takes about {format_seconds(session_s)} here"
        needed = [pair.verdict.numbers.sessions_needed for pair in itself.pairs]
        known = [one for one in needed if one is not None]
        if known:
            wanted_s = 2 * max(known) * session_s
            enough = "" if wanted_s <= self.total_s else f", for which {budget_option(wanted_s)} should suffice"
            time_s = format_seconds(max(known) * session_s)
            text += f"; SAME is expected after {max(known)} sessions ({time_s}){enough}"
        return text + _out_of_reach(itself.pairs)

    def sufficient(self, final: Comparison) -> str | None:
        """The budget that should decide what is undecided; None where nothing is, or no budget would."""
        undecided = [pair for pair in final.pairs if pair.verdict.undecided]
        numbers = [pair.verdict.numbers for pair in undecided if pair.verdict.numbers.sessions_needed is not None]
        if not numbers:
            return None
        measured = max(one.sessions for one in numbers)
        needed = max(max(one.sessions_needed or 0, 2 * one.sessions) for one in numbers)
        session_s = self.session_s({pair.candidate.case_id for pair in undecided})
        more_s = (2 * needed - measured) * session_s
        option = budget_option(self.clock() - self.started_s + more_s)
        return (
            f"{len(undecided)} of {len(final.pairs)} cases are undecided: {option} should suffice ({needed} sessions "
            f"of {format_seconds(session_s)}, verification included, and as many again where a change shows)"
        )


def _out_of_reach(pairs: Sequence[ComparedPair]) -> str:
    """What to say of cases that no number of new sessions can show to be the same."""
    beyond = [pair.verdict.numbers for pair in pairs if pair.verdict.numbers.sessions_needed is None]
    if not beyond:
        return ""
    both = [one.both_needed for one in beyond if one.both_needed is not None]
    if both:
        way = f"{max(both)} on either side would do"
    else:
        way = "one tells nothing of their spread" if beyond[0].confidence is None else "they lie too far apart"
    return (
        f"; the baseline has too few sessions to show SAME in {len(beyond)} of {len(pairs)} cases: {way} "
        "(`baseline save --add` adds some, `--relative-to` an unchanged implementation brings them together)"
    )
