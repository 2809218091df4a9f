"""The gate: the cases of a baseline, measured again until each is decided, or a run judged by them."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean

from dilabench.comparison.across import compare_across, refuse_other_machine
from dilabench.comparison.comparison import Comparison, Selection, imprecise_pairs, is_measured
from dilabench.comparison.gate import CaseIds, common_change, looked_at, until_decided
from dilabench.comparison.relative import require_reference
from dilabench.engine.progress import Progress
from dilabench.errors import ConfigError, EnvironmentNotReady
from dilabench.predict.time import budget_option, case_seconds
from dilabench.record import PlannedCase, RunRecord
from dilabench.stats.decisions.decide import Policy
from dilabench.stats.decisions.history import LOOK_SESSIONS
from dilabench.store.lookup import Store
from dilabench.units import counted, format_seconds


@dataclass(slots=True)
class SessionBudget:
    """Shares `total_s` seconds, from now on, between looks and the second measurement of cases that seem to have
    changed.

    The second measurement takes as many sessions as the first, if they fit; `LOOK_SESSIONS[0]` are kept for it.
    """

    cases: Sequence[PlannedCase]
    total_s: float
    clock: Callable[[], float] = time.monotonic
    took_s: dict[str, float] = field(default_factory=dict)
    started_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.started_s = self.clock()

    def learn(self, record: RunRecord, session_s: float) -> None:
        """Estimate the seconds of each case, from a session and its total seconds."""
        self.took_s |= case_seconds(record.rows, session_s)

    def groups_of(self, ids: CaseIds) -> list[PlannedCase]:
        """All cases of the workload groups of `cases`, which a session measures."""
        groups = {case.case.group_id for case in self.cases if case.case.case_id in ids}
        return [case for case in self.cases if case.case.group_id in groups]

    def session_s(self, ids: CaseIds) -> float:
        """Seconds that a session of these cases takes."""
        return sum(self.took_s.get(case.case.case_id, 0.0) for case in self.groups_of(ids))

    def fits(self, ids: CaseIds) -> int:
        """Sessions of these cases that fit into the time left."""
        left_s = self.total_s - (self.clock() - self.started_s)
        return int(left_s / max(self.session_s(ids), 1e-3))

    def further(self, ids: CaseIds, measured: int) -> int:
        """Sessions up to the next look at cases that have `measured`; 0 if a quarter as many again do not fit."""
        fits = self.fits(ids)
        if not measured:
            return max(1, min(LOOK_SESSIONS[0], fits - 1))
        least = max(1, measured // 4)
        # At the end one session is kept.
        kept = LOOK_SESSIONS[0] if fits - LOOK_SESSIONS[0] >= least else 1
        return min(measured, fits - kept) if fits - kept >= least else 0

    def again(self, ids: CaseIds, measured: int) -> int:
        """Fresh sessions of cases that seem to have changed: as many as before, if they fit."""
        return max(1, min(measured, self.fits(ids)))

    def forecast(self) -> str:
        """Text on the time that a session takes, and how many fit."""
        ids = {case.case.case_id for case in self.cases}
        session_s = format_seconds(self.session_s(ids))
        return (
            f"a session of {counted(len(self.cases), 'case')} takes about {session_s} here; the budget of "
            f"{format_seconds(self.total_s)} has time for {max(1, self.fits(ids))}"
        )

    def sufficient(self, final: Comparison) -> str | None:
        """The budget option that should decide the undecided cases, or narrow the others; None if no budget would."""
        imprecise = imprecise_pairs(final.pairs)
        numbers = [pair.verdict.numbers for pair in imprecise if pair.verdict.numbers.sessions_needed is not None]
        if not numbers:
            return None
        needed = max(max(number.sessions_needed or 0, 2 * number.sessions) for number in numbers)
        session_s = self.session_s({pair.candidate.case_id for pair in imprecise})
        return budget_option((needed + 2 * LOOK_SESSIONS[0]) * session_s)


@dataclass(slots=True, kw_only=True)
class Check:
    """The baseline of the cases, and the plan and folder in which they are measured again.

    `select`: which of its cases count. `reference`: an implementation that times are relative to. `store`: stores the
    new sessions, if not None. `complete`: the sessions so far that have all the cases.
    """

    baseline: Sequence[RunRecord]
    select: Selection
    reference: str | None
    policy: Policy
    budget_s: float
    output: Path
    store: Store | None
    strict_plugins: bool
    tell: Callable[[str], None]
    progress: Callable[[], AbstractContextManager[Progress]]
    cases: list[PlannedCase] = field(init=False)
    budget: SessionBudget = field(init=False)
    complete: list[RunRecord] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        if self.reference is not None:
            require_reference(self.reference, self.baseline)
        self.cases = _cases(self.baseline, self.select, self.reference)
        self.budget = SessionBudget(self.cases, self.budget_s)
        self.budget.learn(self.baseline[-1], mean(record.duration_s for record in self.baseline))

    def of_run(self, records: Sequence[RunRecord]) -> Comparison:
        """The verdicts on existing sessions; cases that seem to have changed are measured again, if possible here."""
        refuse_other_machine(self.baseline, records, ConfigError)
        self.complete.extend(records)
        ids = self._ids(records)
        return self._hinted(
            looked_at(records, ids, self._measure_if_possible, self._judge, self.budget.again, self.policy)
        )

    def of_sessions(self, sessions: int | None) -> Comparison:
        """The verdicts on `sessions` new sessions; with None, sessions are added until all cases are decided or the
        budget ends.
        """
        ids = self._ids(())
        if sessions is None:
            self.tell(self.budget.forecast())
            looks = until_decided(ids, self._measure, self._judge, self.budget.further, self.budget.again, self.policy)
            return self._hinted(looks)
        records = self._measure(ids, sessions)
        return self._hinted(looked_at(records, ids, self._measure, self._judge, self.budget.again, self.policy))

    def _ids(self, records: Sequence[RunRecord]) -> set[str]:
        rows = [row for record in (*self.baseline, *records) for row in record.rows]
        return {row.case.case_id for row in rows if self.select(row.case)}

    def _judge(self, records: Sequence[RunRecord], ids: CaseIds, policy: Policy) -> Comparison:
        return compare_across(
            self.baseline,
            records,
            policy=policy,
            select=lambda case: case.case_id in ids,
            reference=self.reference,
        )

    def _measure(self, ids: CaseIds, count: int) -> Sequence[RunRecord]:
        """New sessions of these cases and of the cases interleaved with them. Raises EnvironmentNotReady."""
        from dilabench.plugins.manager import discover
        from dilabench.runs.remeasure import Remeasure

        found, like = discover(self.strict_plugins), self.baseline[-1]
        again = Remeasure(found, like, self.output, self.store, self.progress, self.budget_s)
        planned = self.budget.groups_of(ids)
        refuse_other_machine(self.baseline, [again.here()], EnvironmentNotReady)
        self.tell(f"measuring {len(planned)} of {len(self.cases)} cases in {counted(count, 'fresh session')}")
        began_s = self.budget.clock()
        records = again.sessions(planned, count)
        self.budget.learn(records[-1], (self.budget.clock() - began_s) / count)
        refuse_other_machine(self.baseline, records, EnvironmentNotReady)
        if len(planned) == len(self.cases):
            self.complete.extend(records)
        return records

    def _measure_if_possible(self, ids: CaseIds, count: int) -> Sequence[RunRecord]:
        try:
            return self._measure(ids, count)
        except EnvironmentNotReady as error:
            self.tell(f"not possible here: {error}")
            return ()

    def _hinted(self, found: Comparison) -> Comparison:
        """Add a warning if the machine may have changed."""
        return replace(found, warnings=(*found.warnings, *filter(None, (common_change(found),))))


def _cases(baseline: Sequence[RunRecord], select: Selection, reference: str | None) -> list[PlannedCase]:
    """The cases that the baseline measured, each once, and the reference."""
    rows = [row for record in baseline for row in record.rows if is_measured(row) and select(row.case)]
    groups = {row.case.group_id for row in rows}
    for record in baseline if reference else ():
        rows += [row for row in record.rows if row.case.implementation == reference and row.case.group_id in groups]
    return list({row.case.case_id: row.planned for row in rows}.values())
