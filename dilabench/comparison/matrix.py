"""Several runs, each compared with each: a matrix of verdicts per case."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import PurePath

from dilabench.comparison.across import compare_each
from dilabench.comparison.comparison import ComparedPair, Comparison, Selection, everything
from dilabench.record import Case, RunRecord
from dilabench.stats.decisions.decide import Policy

# Longer names would make the columns below them too wide.
MOST_CHARACTERS = 16


@dataclass(frozen=True, slots=True)
class CaseMatrix:
    """One case: its compared pairs by the numbers of (base, new), and how it ended in runs that lack a counterpart."""

    case: Case
    pairs: dict[tuple[int, int], ComparedPair] = field(default_factory=dict)
    endings: dict[int, str] = field(default_factory=dict)

    @property
    def times_ns(self) -> dict[int, float]:
        """The median of all samples in each run that was compared, by its number."""
        times: dict[int, float] = {}
        for (base, new), pair in self.pairs.items():
            times |= {base: pair.baseline_ns, new: pair.candidate_ns}
        return times


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Runs in the order given, and the comparison of every earlier one with every later one, by their numbers."""

    names: tuple[str, ...]
    comparisons: dict[tuple[int, int], Comparison]

    @property
    def cases(self) -> tuple[CaseMatrix, ...]:
        """Every case of any run, in the order in which it is first met."""
        by_id: dict[str, CaseMatrix] = {}
        for (base, new), comparison in self.comparisons.items():
            for pair in comparison.pairs:
                by_id.setdefault(pair.candidate.case_id, CaseMatrix(pair.candidate)).pairs[base, new] = pair
            for entry in comparison.uncompared:
                endings = by_id.setdefault(entry.case.case_id, CaseMatrix(entry.case)).endings
                endings |= {base: entry.baseline, new: entry.candidate}
        return tuple(by_id.values())

    @property
    def with_first(self) -> tuple[Comparison, ...]:
        """Return the first run's comparisons with all others, which determine the exit code."""
        return tuple(comparison for (base, _), comparison in self.comparisons.items() if base == 0)

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings of all comparisons, each once."""
        return tuple(dict.fromkeys(text for comparison in self.comparisons.values() for text in comparison.warnings))


def compare_all(
    names: Sequence[str],
    sides: Sequence[Sequence[RunRecord]],
    *,
    policy: Policy,
    select: Selection = everything,
    reference: str | None = None,
) -> Matrix:
    """Compare every run with every later one by `compare_across`, and correct all verdicts together."""
    places = list(combinations(range(len(sides)), 2))
    pairs = [(sides[base], sides[new]) for base, new in places]
    comparisons = compare_each(pairs, policy=policy, select=select, reference=reference)
    return Matrix(names=tuple(names), comparisons=dict(zip(places, comparisons, strict=True)))


def run_names(given: Sequence[str], sides: Sequence[Sequence[RunRecord]]) -> tuple[str, ...]:
    """Short names of the runs: as they were given, a file without its folders and ending, or else their ids."""
    names = [PurePath(text).name.removesuffix(".json") for text in given]
    if len(set(names)) == len(names) and max(map(len, names)) <= MOST_CHARACTERS:
        return tuple(names)
    return tuple(side[-1].run_id for side in sides)
