"""A matrix of runs as rows of text, which the terminal and Markdown both show.

A line per case and run: its time, then the comparison of each later run with it.
"""

from collections.abc import Iterator

from dilabench.comparison.comparison import ComparedPair
from dilabench.comparison.matrix import CaseMatrix, Matrix
from dilabench.report.columns import ABSENT, case_name, ratio_interval, workload_title
from dilabench.units import format_latency

CORNER = "base ↓ new →"
ADVISORY = "*"
HOW_TO_READ = (
    "Each cell: time of the run above / time of the run to the left, its interval, the verdict; above 1 is slower. "
    "If both are the same run: its time."
)
ADVISORY_MEANS = f"{ADVISORY} advisory: the base has too few sessions for a verdict that counts"


def columns(matrix: Matrix) -> tuple[str, ...]:
    """The heads of a table of `rows`."""
    return ("case", CORNER, *matrix.names)


def rows(matrix: Matrix, case: CaseMatrix) -> Iterator[tuple[str, ...]]:
    """The lines of one case; empty if no two runs have it."""
    times = case.times_ns
    for base, name in enumerate(matrix.names) if case.pairs else ():
        cells = (
            time_text(times, base) if new == base else "" if new < base else pair_text(case.pairs.get((base, new)))
            for new in range(len(matrix.names))
        )
        yield (case_name(case.case), name, *cells)


def time_text(times_ns: dict[int, float], run: int) -> str:
    """The time of the case in a run, or a dash."""
    return format_latency(times_ns[run]) if run in times_ns else ABSENT


def pair_text(pair: ComparedPair | None) -> str:
    """'1.052 (1.031–1.074) SLOWER*, LARGER', or a dash without a comparison."""
    if pair is None:
        return ABSENT
    memory = f", {pair.memory.code}" if pair.memory is not None and pair.memory.code != "SAME" else ""
    return f"{ratio_text(pair)} {pair.verdict.code}{ADVISORY * pair.verdict.advisory}{memory}"


def ratio_text(pair: ComparedPair) -> str:
    """The ratio candidate / baseline with its interval, if known."""
    interval = ratio_interval(pair)
    return f"{pair.verdict.numbers.ratio:.3f}" + (f" ({interval})" if interval else "")


def is_advisory(matrix: Matrix) -> bool:
    """Whether any verdict is advisory, so that its mark needs its meaning."""
    return any(pair.verdict.advisory for comparison in matrix.comparisons.values() for pair in comparison.pairs)


def lacking(matrix: Matrix) -> Iterator[str]:
    """A sentence on each case that some runs lack: how it ended in which."""
    for case in matrix.cases:
        if case.endings:
            endings = "; ".join(f"{matrix.names[run]}: {text}" for run, text in sorted(case.endings.items()))
            yield f"{case_name(case.case)}, {workload_title(case.case)}: {endings}"
