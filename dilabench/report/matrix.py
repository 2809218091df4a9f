"""A matrix of runs as rows of text, which the terminal and Markdown both show.

A line per case and run: its time, then the comparison of each later run with it.
"""

from collections.abc import Iterator

from dilabench.comparison.comparison import ComparedPair
from dilabench.comparison.matrix import CaseMatrix, Matrix
from dilabench.report.columns import ABSENT, case_name, plus_minus, verdict_text, workload_title
from dilabench.units import change_text, format_latency

CORNER = "base ↓ new →"
HOW_TO_READ = (
    "Each cell: how the time of the run to the left changed to that of the run above, and the verdict. If both are the "
    "same run: its time."
)


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
    """'SLOWER: +25 %, 1.3x slower (±3 %), LARGER', 'no change above 4 %', or a dash without a comparison."""
    if pair is None:
        return ABSENT
    memory = f", {pair.memory.code}" if pair.memory is not None and pair.memory.code != "SAME" else ""
    changed = "" if pair.verdict.code == "SAME" else f": {changed_by(pair)}"
    return f"{verdict_text(pair)}{changed}{memory}"


def changed_by(pair: ComparedPair) -> str:
    """'+25 %, 1.3x slower (±3 %)', without the interval if none is known."""
    reach = plus_minus(pair)
    return change_text(pair.verdict.numbers.ratio) + (f" (±{reach})" if reach else "")


def lacking(matrix: Matrix) -> Iterator[str]:
    """A sentence on each case that some runs lack: how it ended in which."""
    for case in matrix.cases:
        if case.endings:
            endings = "; ".join(f"{matrix.names[run]}: {text}" for run, text in sorted(case.endings.items()))
            yield f"{case_name(case.case)}, {workload_title(case.case)}: {endings}"
