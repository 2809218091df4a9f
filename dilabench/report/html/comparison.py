"""comparison.html: a baseline and one or more candidates, case by case, and in what their environments differ."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dilabench.compare.comparison import ComparedPair, Comparison
from dilabench.record import Case, RunRecord
from dilabench.report import figures
from dilabench.report.html.page import page
from dilabench.report.rows import implementation_text, workload_title
from dilabench.report.summary import device_text, environment_rows, reproduce_command

FILENAME = "comparison.html"
# How a verdict looks; what is decided nowhere else.
LOOKS = {"SLOWER": "failed", "FASTER": "won", "SAME": "tied", "INCONCLUSIVE": "skipped"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A candidate's side of one case: the time, the ratio with its interval, the verdict with its reason."""

    look: str
    word: str
    time: str
    ratio: str
    reason: str
    memory: str


def to_text(
    baseline: RunRecord, candidates: Sequence[RunRecord], comparisons: Sequence[Comparison], verdict: str
) -> str:
    """The page: a line per case, a column per candidate. `verdict` is the sentence on top."""
    by_case: dict[str, tuple[Case, str, dict[int, Entry]]] = {}
    for number, comparison in enumerate(comparisons):
        for pair in comparison.pairs:
            time = figures.latency(pair.verdict.numbers.baseline_ns)
            known = by_case.setdefault(pair.candidate.case_id, (pair.candidate, time, {}))
            known[2][number] = _entry(pair)
    codes = Counter(pair.verdict.code.value for comparison in comparisons for pair in comparison.pairs)
    return page(
        "comparison.html.j2",
        baseline=baseline,
        candidates=candidates,
        verdict=verdict,
        worst="failed" if codes["SLOWER"] else "skipped" if codes["INCONCLUSIVE"] else "",
        device=device_text(baseline),
        lines=[
            (_name(case), workload_title(case), time, [entries.get(number) for number in range(len(candidates))])
            for case, time, entries in by_case.values()
        ],
        uncompared=[
            (one, _name(one.case), workload_title(one.case)) for each in comparisons for one in each.uncompared
        ],
        warnings=list(dict.fromkeys(text for each in comparisons for text in each.warnings)),
        differences=_differences([baseline, *candidates]),
        commands=[(record.run_id, reproduce_command(record)) for record in (baseline, *candidates)],
    )


def _entry(pair: ComparedPair) -> Entry:
    verdict = pair.verdict
    numbers = verdict.numbers
    known = numbers.ratio_low is not None and numbers.ratio_high is not None
    return Entry(
        look=LOOKS[verdict.code],
        word=verdict.code + (" (advisory)" if verdict.advisory else ""),
        time=figures.latency(numbers.candidate_ns),
        ratio=f"{numbers.ratio:.3f}" + (f" ({numbers.ratio_low:.3f} to {numbers.ratio_high:.3f})" if known else ""),
        reason=verdict.reason + (f"; {verdict.hint}" if verdict.hint else ""),
        memory="" if pair.memory is None or pair.memory.code == "SAME" else f"memory {pair.memory.code}",
    )


def _name(case: Case) -> str:
    return implementation_text(case) + (f" over {case.backend}" if case.backend else "")


def _differences(records: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """What is not the same in all environments; times of day aside."""
    tables = [dict(environment_rows(record)) for record in records]
    for table, record in zip(tables, records, strict=True):
        table["dilabench"] = record.tool_version
    names = dict.fromkeys(name for table in tables for name in table)
    rows = [(name, [table.get(name, figures.ABSENT) for table in tables]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1 and name not in {"started", "finished"}]
