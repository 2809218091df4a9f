"""The gate: the cases of a baseline, measured again until each is decided, or a run judged by them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean

from dilabench.compare.across import compare_across
from dilabench.compare.comparison import Comparison, is_measured
from dilabench.compare.gate import common_change
from dilabench.compare.selection import Selection
from dilabench.compare.sequential import CaseIds, looked_at, until_decided
from dilabench.engine.progress import Progress
from dilabench.errors import ConfigError, EnvironmentNotReady
from dilabench.plugins.manager import discover
from dilabench.predict.time import elapsed_seconds
from dilabench.record import PlannedCase, RunRecord
from dilabench.runs.remeasure import Remeasure
from dilabench.runs.session_budget import SessionBudget
from dilabench.runs.verdicts import refuse_other_machine
from dilabench.stats.decisions.policy import Policy
from dilabench.store.lookup import Store


@dataclass(slots=True, kw_only=True)
class Check:
    """What the cases of a baseline are held to, and where they are measured again.

    `select`: which of its cases count. `reference`: an implementation that times are relative to. `store` keeps what is
    measured, unless that is None. `complete`: the sessions so far that have all the cases.
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
        self.cases = _cases(self.baseline, self.select, self.reference)
        self.budget = SessionBudget(self.cases, self.budget_s)
        self.budget.learn(self.baseline[-1], mean(map(elapsed_seconds, self.baseline)))

    def of_run(self, records: Sequence[RunRecord]) -> Comparison:
        """The verdicts on sessions that exist; what seems to have changed is measured again, where that can be here."""
        refuse_other_machine(self.baseline, records, ConfigError)
        self.complete.extend(records)
        ids = self._ids(records)
        # Refuses a reference that the baseline does not have.
        self._judge(self.baseline, ids, self.policy)
        return self._hinted(looked_at(records, ids, self._measure_if_possible, self._judge, self.policy))

    def of_sessions(self, sessions: int | None) -> Comparison:
        """The verdicts on so many new sessions; None: until all is decided, or the budget ends."""
        ids = self._ids(())
        itself = self._judge(self.baseline, ids, self.policy)
        if sessions is None:
            self.tell(self.budget.forecast(itself))
            return self._hinted(until_decided(ids, self._measure, self._judge, self.budget.further, self.policy))
        records = self._measure(ids, sessions)
        return self._hinted(looked_at(records, ids, self._measure, self._judge, self.policy))

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
        """New sessions of these cases and of those that took turns with them. Raises EnvironmentNotReady."""
        again = Remeasure(discover(self.strict_plugins), self.baseline[-1], self.output, self.store, self.progress)
        planned = self.budget.groups_of(ids)
        refuse_other_machine(self.baseline, [again.here()], EnvironmentNotReady)
        self.tell(f"measuring {len(planned)} of {len(self.cases)} cases in {count} fresh sessions")
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
        """With which budget would decide the rest, and whether the machine itself may have changed."""
        hints = filter(None, (self.budget.sufficient(found), common_change(found)))
        return replace(found, warnings=(*found.warnings, *hints))


def _cases(baseline: Sequence[RunRecord], select: Selection, reference: str | None) -> list[PlannedCase]:
    """What the baseline measured, each case once, and the reference."""
    rows = [row for record in baseline for row in record.rows if is_measured(row) and select(row.case)]
    groups = {row.case.group_id for row in rows}
    for record in baseline if reference else ():
        rows += [row for row in record.rows if row.case.implementation == reference and row.case.group_id in groups]
    return list({row.case.case_id: row.planned for row in rows}.values())
