"""The result of a comparison: verdicts on pairs, and by name every row without a verdict."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from dilabench.record import Case, Failed, Measured, Row, Skipped
from dilabench.stats.decisions.memory import MemoryVerdict
from dilabench.stats.decisions.verdicts import Verdict

Route = Literal["interleaved", "stored"]
Selection = Callable[[Case], bool]
Lack = Literal["missing", "new", "skipped", "failed", "wrong output", "impossible time", "not comparable"]

ABSENT = "not in the record"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPair:
    """One case against its baseline: the same case in other records, or another case of the same workload group.

    route: "interleaved" if both sides were measured in the same rounds, "stored" if in different sessions. baseline_ns,
    candidate_ns: the median of all samples of each side; the verdict's ratio is their quotient. memory: None if a side
    has no peak, or the peaks were measured in different ways. notes: warnings of the rows.
    first_look: the verdict before a second measurement decided; empty without one.
    """

    baseline: Case
    candidate: Case
    timer: str
    route: Route
    baseline_ns: float
    candidate_ns: float
    verdict: Verdict
    memory: MemoryVerdict | None = None
    notes: tuple[str, ...] = ()
    first_look: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncompared:
    """A case without a verdict: how it ended on each side, and what the candidate side lacks.

    regressed: the baseline was measured and the candidate was not, so something that used to work may be broken.
    """

    case: Case
    lack: Lack
    baseline: str
    candidate: str
    regressed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison:
    """All verdicts of one comparison, corrected together, and the warnings that belong to them."""

    pairs: tuple[ComparedPair, ...]
    uncompared: tuple[Uncompared, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def flagged(self) -> tuple[Case, ...]:
        """Candidates that look slower or faster and are to be measured once more."""
        return tuple(pair.candidate for pair in self.pairs if pair.verdict.flagged)

    def __repr__(self) -> str:
        codes = Counter(pair.verdict.code.value for pair in self.pairs)
        counts = ", ".join(f"{count} {code}" for code, count in codes.items())
        return f"<Comparison: {counts or 'no pair'}, {len(self.uncompared)} not compared>"

    def updated(self, later: "Comparison", judged: Collection[str]) -> "Comparison":
        """Replace the pairs of the cases with these ids by the pairs of a later comparison; the order stays."""
        pairs = {pair.candidate.case_id: pair for pair in (*self.pairs, *later.pairs)}
        gone = set(judged) - {pair.candidate.case_id for pair in later.pairs}
        return Comparison(
            pairs=tuple(pair for case_id, pair in pairs.items() if case_id not in gone),
            uncompared=(*self.uncompared, *later.uncompared),
            warnings=tuple(dict.fromkeys([*self.warnings, *later.warnings])),
        )


def imprecise_pairs(pairs: Sequence[ComparedPair]) -> list[ComparedPair]:
    """The undecided pairs that more sessions can decide; if there is none, the pairs that they can narrow."""
    imprecise = [pair for pair in pairs if pair.verdict.imprecise]
    return [pair for pair in imprecise if pair.verdict.undecided] or imprecise


def is_measured(row: Row | None) -> bool:
    """The row has samples of an output that was verified, and no note says that its time cannot be true."""
    if row is None or not isinstance(row.outcome, Measured):
        return False
    return row.outcome.verification.passed and not row.is_impossible


def is_wrong(row: Row | None) -> bool:
    """Return True if the row did not pass verification; a row that raised or hung there has no output to judge."""
    if row is None or isinstance(row.outcome, Skipped):
        return False
    outcome = row.outcome
    return outcome.code == "wrong_output" if isinstance(outcome, Failed) else not outcome.verification.passed


def ending(row: Row | None) -> str:
    """How a row ended, in a few words."""
    if row is None:
        return ABSENT
    outcome = row.outcome
    if isinstance(outcome, Skipped):
        return f"skipped: {outcome.why}"
    if isinstance(outcome, Failed):
        return f"failed at {outcome.stage}: {outcome.why}"
    if not outcome.verification.passed:
        return "measured, but the output is wrong"
    return "measured, but the time cannot be true" if row.is_impossible else "measured"


def lack_of(candidate: Row | None) -> Lack | None:
    """Return why a candidate's row cannot be compared; None if it was measured."""
    if is_wrong(candidate):
        return "wrong output"
    if candidate is None:
        return "missing"
    if is_measured(candidate):
        return None
    if candidate.is_impossible:
        return "impossible time"
    return "failed" if isinstance(candidate.outcome, Failed) else "skipped"


def uncompared(baseline: Row | None, candidate: Row | None) -> Uncompared:
    """Return the entry of a case that was not measured on both sides; at least one row is given."""
    row = candidate or baseline
    assert row is not None
    return Uncompared(
        case=row.case,
        lack=lack_of(candidate) or "new",
        baseline=ending(baseline),
        candidate=ending(candidate),
        regressed=is_measured(baseline) and not is_measured(candidate),
    )


def everything(case: Case) -> bool:  # noqa: ARG001
    """The selection of every case."""
    return True


def selection(texts: Sequence[str], implementations: Collection[str] = (), backends: Collection[str] = ()) -> Selection:
    """Cases that contain any of the texts in their name; all words of one text must be there, in any order.

    The name holds implementation, backend, shape label, pattern, mode and case id, so that "strided 8K fp32" works.
    `implementations` and `backends` narrow the selection further.
    """
    if not texts and not implementations and not backends:
        return everything
    wanted = [text.lower().split() for text in texts] or [[]]
    return lambda case: (
        (not implementations or case.implementation in implementations)
        and (not backends or case.backend in backends)
        and any(all(word in searchable(case) for word in words) for words in wanted)
    )


def searchable(case: Case) -> str:
    """The text in which a selection looks."""
    workload = case.workload
    parts = (case.implementation, case.backend or "", workload.label(), workload.pattern.kind, workload.mode)
    return " ".join((*parts, case.case_id)).lower()
