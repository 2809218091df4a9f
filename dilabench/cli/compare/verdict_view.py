"""Comparisons as a table with the verdict below it, several runs as a matrix, two machines as ratios; and as JSON."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dilabench.cli.terminal import print_items, print_table, say, say_folded, say_page
from dilabench.comparison.gate import anything_decided, anything_worse
from dilabench.errors import IMPOSSIBLE_TIME, ExitCode, gravest
from dilabench.record import Case
from dilabench.report.columns import Column, case_name, implementation_text, pair_columns, workload_title
from dilabench.stats.decisions.decide import evidence
from dilabench.stats.decisions.memory import MemoryCode
from dilabench.stats.decisions.verdicts import Code
from dilabench.store.calibrations import Calibration
from dilabench.units import counted

if TYPE_CHECKING:
    from pathlib import Path

    from dilabench.comparison.across import MachineRatio
    from dilabench.comparison.comparison import ComparedPair, Comparison, Uncompared
    from dilabench.comparison.matrix import Matrix
    from dilabench.comparison.view import RowView
    from dilabench.record import RunRecord

LEGEND = "before, after: the median of all samples; ±: half the 95 % interval of the change"
DETAILS_LEGEND = (
    "sessions: of the baseline, of the candidate; p: of the claimed change after correction, else of a slow-down; MDE: "
    "the smallest slow-down that would have been found four times in five; A12: how often a call of the candidate "
    "takes longer than one of the baseline, 0.50 where neither does"
)
# Number of alike pairs, or of rows without a verdict, that are named without --details.
MOST_NAMED = 2
INDENT = "  "
WORDS = {
    ExitCode.CASE_FAILED: "A MEASURED CASE NOW FAILS",
    ExitCode.WRONG_OUTPUT: "WRONG OUTPUT",
    ExitCode.REGRESSION: "REGRESSION",
    ExitCode.INCONCLUSIVE: "UNDECIDED",
    ExitCode.NOTHING_MEASURED: "NOTHING TO COMPARE",
}
COUNTED = {Code.SLOWER: "SLOWER", Code.FASTER: "FASTER", Code.SAME: "no change", Code.UNDECIDED: "undecided"}


def show(
    comparison: "Comparison",
    code: ExitCode,
    calibration: Calibration | None,
    way_out: Sequence[str],
    *,
    details: bool = False,
) -> None:
    """Print the table, what needs a reason, what was not compared, and the verdict with the commands that decide."""
    for warning in comparison.warnings:
        say_folded(f"note: {warning}", INDENT)
    for title, pairs in _by_workload(comparison.pairs).items():
        say()
        baselines = {case_name(pair.baseline) for pair in pairs if pair.baseline != pair.candidate}
        # Said once where all rows face the same one.
        against = f", against {baselines.pop()}" if len(baselines) == 1 and len(pairs) > 1 else ""
        named = (lambda pair: case_name(pair.candidate)) if against else _facing
        print_items(title + against, pair_columns(named, details=details), pairs)
    if comparison.pairs:
        say_folded(f"{LEGEND}; {evidence([pair.verdict.numbers for pair in comparison.pairs])}", INDENT)
        if details:
            say_folded(DETAILS_LEGEND, INDENT)
            say_folded(noise_line(calibration), INDENT)
        say()
    for text in _reasons(comparison.pairs, details=details):
        say_folded(text, INDENT)
    for text in _uncompared(comparison.uncompared, details=details):
        say_folded(text, INDENT)
    say_folded(final_lines(comparison, code, way_out), INDENT)


def _reasons(pairs: Sequence["ComparedPair"], *, details: bool) -> Iterator[str]:
    """Why verdicts are as they are: with `details` of each pair, else the first undecided one of each cause."""
    undecided: dict[str, list[ComparedPair]] = {}
    notes: dict[str, list[ComparedPair]] = {}
    for pair in pairs:
        verdict = pair.verdict
        if details:
            yield _reason(pair, verdict.code, f"[{pair.timer}, {pair.route}] {verdict.reason}", verdict.hint)
        elif verdict.code is Code.UNDECIDED:
            undecided.setdefault(verdict.cause, []).append(pair)
        if pair.first_look:
            yield _reason(pair, f"{verdict.code} after a second measurement", f"at first {pair.first_look}", "")
        if pair.memory is not None and pair.memory.fails_gate:
            yield _reason(pair, "LARGER", pair.memory.reason, pair.memory.hint)
        for note in pair.notes if details else ():
            notes.setdefault(note, []).append(pair)
    for alike in undecided.values():
        for pair in alike if len(alike) <= MOST_NAMED else alike[:1]:
            others = f" ({len(alike) - 1} more pairs are undecided for this cause; --details has all)"
            more = others if len(alike) > MOST_NAMED else ""
            yield _reason(pair, pair.verdict.code, pair.verdict.reason, pair.verdict.hint) + more
    for text, noted in notes.items():
        more = f" and {len(noted) - 1} more" if len(noted) > 1 else ""
        yield f"note: {text} ({_place(noted[0])}{more})"


def _uncompared(cases: Sequence["Uncompared"], *, details: bool) -> Iterator[str]:
    """Cases without a verdict, those that ended alike together; what both sides have in common is said once.

    Without `details`, cases that a record lacks and that had no time on the other side are counted only.
    """
    alike: dict[tuple[str, str, str], list[Uncompared]] = {}
    untimed = 0
    for case in cases:
        if not details and case.lack == "missing" and not case.regressed:
            untimed += 1
            continue
        alike.setdefault((case.lack, case.baseline, case.candidate), []).append(case)
    for (lack, baseline, candidate), members in alike.items():
        shown = members if details or len(members) <= MOST_NAMED else members[:1]
        more = f" and {counted(len(members) - 1, 'other row')}" if len(shown) < len(members) else ""
        names = "; ".join(name(member.case) for member in shown)
        ended = f"both sides {baseline}" if baseline == candidate else f"baseline {baseline}; candidate {candidate}"
        yield f"{lack}: {names}{more}: {ended}"
    if untimed:
        yield f"not compared: {counted(untimed, 'row')} without a time in the baseline; --details says why"


def _reason(pair: "ComparedPair", word: str, reason: str, hint: str) -> str:
    return f"{word}: {_place(pair)}: {reason}" + (f"; {hint}" if hint else "")


def _place(pair: "ComparedPair") -> str:
    return f"{_facing(pair)}, {workload_title(pair.candidate)}"


def as_json(
    comparison: "Comparison", code: ExitCode, calibration: Calibration | None, way_out: Sequence[str] = ()
) -> str:
    """The comparison with every number, for programs; `to_decide`: the commands that would decide what is undecided."""
    ways = list(way_out) if any(pair.verdict.code is Code.UNDECIDED for pair in comparison.pairs) else []
    about = {"exit_code": int(code), "sigma_aa": sigma_of(calibration), "to_decide": ways}
    return json_text({**about, **as_data(comparison)})


def sigma_of(calibration: Calibration | None) -> float | None:
    """The spread between sessions of identical code on this machine, if known."""
    return calibration.sigma_aa if calibration else None


def json_text(document: dict[str, Any]) -> str:
    """A document as commands print it."""
    return json.dumps(document, indent=2, ensure_ascii=False)


def as_data(comparison: "Comparison") -> dict[str, Any]:
    """All that a comparison found."""
    return {
        "cells": [_pair_data(pair) for pair in comparison.pairs],
        "uncompared": [
            {
                "case": entry.case.model_dump(mode="json"),
                "lack": entry.lack,
                "baseline": entry.baseline,
                "candidate": entry.candidate,
                "regressed": entry.regressed,
                "case_id": entry.case.case_id,
            }
            for entry in comparison.uncompared
        ],
        "warnings": list(comparison.warnings),
    }


def as_markdown(comparison: "Comparison", code: ExitCode, way_out: Sequence[str] = ()) -> str:
    """The comparison for a pull request."""
    # It loads the catalogue.
    from dilabench.report.pull_request import of_comparison

    return of_comparison(comparison, final_lines(comparison, code, way_out))


def noise_line(calibration: Calibration | None) -> str:
    """One line on this machine's noise."""
    if calibration is None:
        return "noise between sessions is unknown here; `dilabench calibrate` measures it"
    spread = calibration.sigma_sessions
    return (
        f"noise of identical code: {calibration.sigma_aa:.2%} between interleaved rounds of one session and the next, "
        f"{'unknown' if spread is None else f'{spread:.2%}'} between sessions ({calibration.sessions} sessions, "
        f"calibrated {calibration.measured_at[:10]})"
    )


def final_lines(comparison: "Comparison", code: ExitCode, way_out: Sequence[str] = ()) -> str:
    """The verdict that a CI log ends with; before it the commands that decide what is undecided, or narrow the rest.

    "ok" is said only if something was decided and nothing is worse.
    """
    counts = Counter(pair.verdict.code for pair in comparison.pairs)
    parts = [f"{counts[verdict]} {text}" for verdict, text in COUNTED.items() if counts[verdict]]
    for memory, text in ((MemoryCode.LARGER, "larger"), (MemoryCode.SMALLER, "smaller")):
        peaks = sum(pair.memory is not None and pair.memory.code is memory for pair in comparison.pairs)
        parts += [f"{counted(peaks, f'{text} peak')}"] if peaks else []
    parts += [f"{len(comparison.uncompared)} not compared"] if comparison.uncompared else []
    if code is not ExitCode.OK:
        word = WORDS[code]
        if code is ExitCode.WRONG_OUTPUT and all(case.lack != "wrong output" for case in comparison.uncompared):
            word = IMPOSSIBLE_TIME
    elif not anything_decided(comparison):
        word = "UNDECIDED"
    else:
        word = "slower or larger, which is not gated here" if anything_worse(comparison) else "ok"
    verdict = f"verdict: {word} ({', '.join(parts) or 'no pairs'}; exit code {int(code)})"
    narrows = any(pair.verdict.imprecise for pair in comparison.pairs)
    purpose = "to decide" if counts[Code.UNDECIDED] else "to exclude smaller changes" if narrows else ""
    ways = [f"{purpose}: {text}" for text in way_out] if purpose else []
    return "\n".join([*ways, verdict])


def name(case: Case) -> str:
    """A case in one line."""
    return f"{case_name(case)}, {workload_title(case)}"


def _by_workload(pairs: Sequence["ComparedPair"]) -> dict[str, list["ComparedPair"]]:
    groups: dict[str, list[ComparedPair]] = {}
    for pair in pairs:
        groups.setdefault(workload_title(pair.candidate), []).append(pair)
    return groups


def _facing(pair: "ComparedPair") -> str:
    text = case_name(pair.candidate)
    return text if pair.baseline == pair.candidate else f"{text} against {case_name(pair.baseline)}"


def _pair_data(pair: "ComparedPair") -> dict[str, Any]:
    verdict = asdict(pair.verdict)
    verdict["numbers"] |= {"baseline_ns": pair.baseline_ns, "candidate_ns": pair.candidate_ns}
    candidate = pair.candidate.model_dump(mode="json")
    return {
        "baseline": candidate if pair.baseline == pair.candidate else pair.baseline.model_dump(mode="json"),
        "candidate": candidate,
        "timer": pair.timer,
        "route": pair.route,
        "verdict": verdict,
        "memory": pair.memory and asdict(pair.memory),
        "notes": pair.notes,
        "first_look": pair.first_look,
        "case_id": pair.candidate.case_id,
    }


def show_matrix(
    matrix: "Matrix",
    codes: Sequence[ExitCode],
    calibration: Calibration | None,
    way_out: Sequence[str],
    *,
    details: bool = False,
) -> None:
    """Print warnings, a table per workload with a line per case and run, what some runs lack, and the verdicts."""
    from dilabench.report import matrix as texts

    for warning in matrix.warnings:
        say_folded(f"note: {warning}", INDENT)
    if details:
        say_folded(noise_line(calibration), INDENT)
    by_workload: dict[str, list[tuple[str, ...]]] = {}
    for case in matrix.cases:
        by_workload.setdefault(workload_title(case.case), []).extend(texts.rows(matrix, case))
    compared = {title: rows for title, rows in by_workload.items() if rows}
    for title, rows in compared.items():
        say()
        print_table(title, texts.columns(matrix), rows)
    say()
    if compared:
        say_folded(texts.HOW_TO_READ, INDENT)
    for text in texts.lacking(matrix):
        say_folded(f"not compared everywhere: {text}", INDENT)
    for line in _final_lines(matrix, codes, way_out):
        say_folded(line, INDENT)


def matrix_as_json(matrix: "Matrix", codes: Sequence[ExitCode], calibration: Calibration | None) -> str:
    """Every number of every pair of runs, for programs."""
    document = {
        "exit_code": int(gravest(codes)),
        "sigma_aa": sigma_of(calibration),
        "runs": list(matrix.names),
        "comparisons": [
            {"base": matrix.names[base], "new": matrix.names[new], **as_data(comparison)}
            for (base, new), comparison in matrix.comparisons.items()
        ],
    }
    return json_text(document)


def matrix_as_markdown(matrix: "Matrix", codes: Sequence[ExitCode]) -> str:
    """The matrix for a pull request."""
    from dilabench.report.pull_request import of_matrix

    return of_matrix(matrix, _final_lines(matrix, codes))


def write_matrix_page(
    matrix: "Matrix", codes: Sequence[ExitCode], records: Sequence["RunRecord"], output: "Path | None"
) -> None:
    """Print the page, or write it into a folder and print the verdicts. `records`: the newest of each run."""
    from dilabench.report.html import comparison

    lines = _final_lines(matrix, codes)
    text = comparison.to_text(matrix, records, "; ".join(lines), gravest(codes))
    say_page(text, output, comparison.FILENAME)
    for line in lines if output else ():
        say(line)


def _final_lines(matrix: "Matrix", codes: Sequence[ExitCode], way_out: Sequence[str] = ()) -> list[str]:
    """The verdict of each run against the first, after the commands that decide what is undecided."""
    lines = [final_lines(comparison, code) for comparison, code in zip(matrix.with_first, codes, strict=True)]
    pairs = [pair for comparison in matrix.with_first for pair in comparison.pairs]
    ways = way_out if any(pair.verdict.code is Code.UNDECIDED for pair in pairs) else ()
    verdicts = [f"{name} against {matrix.names[0]}: {line}" for name, line in zip(matrix.names[1:], lines, strict=True)]
    return [*(f"to decide: {text}" for text in ways), *verdicts]


MACHINE_COLUMNS = (
    Column(name="case", cell=lambda pair: _backends_beside(pair), right=False, spare=None),
    Column(name="base", cell=lambda pair: pair.base_time.median_ns, unit="ns", spare=None),
    Column(name="new", cell=lambda pair: pair.new_time.median_ns, unit="ns", spare=None),
    Column(name="base / new", cell=lambda pair: pair.ratio, unit="times", spare=None),
)


def show_machines(base: "RunRecord", new: "RunRecord", *, as_json: bool) -> ExitCode:
    """Print the ratios of cases that two machines both measured, without a verdict; exit code 8 if there are none."""
    from dilabench.comparison.across import machine_ratios
    from dilabench.report.content import device_text

    ratios = list(machine_ratios(base, new))
    if as_json:
        cells = [
            {"base": _side(ratio.base_time), "new": _side(ratio.new_time), "base_over_new": ratio.ratio}
            for ratio in ratios
        ]
        say(json_text({"cells": cells}))
    else:
        say_folded(f"base: {device_text(base)} (run {base.run_id})", INDENT)
        say_folded(f"new: {device_text(new)} (run {new.run_id})", INDENT)
        by_workload: dict[str, list[MachineRatio]] = {}
        for ratio in ratios:
            by_workload.setdefault(workload_title(ratio.new), []).append(ratio)
        for title, alike in by_workload.items():
            say()
            print_items(title, MACHINE_COLUMNS, alike)
        say()
        say_folded(
            f"{counted(len(ratios), 'workload')} measured by the same implementation on both. Ratios of medians, each "
            "over its fastest backend; two machines are not interleaved, so there is no verdict."
        )
    return ExitCode.OK if ratios else ExitCode.NOTHING_MEASURED


def _backends_beside(pair: "MachineRatio") -> str:
    backends = dict.fromkeys(case.backend or "no backend" for case in (pair.base, pair.new))
    return f"{implementation_text(pair.new)} ({' against '.join(backends)})"


def _side(view: "RowView") -> dict[str, object]:
    case = view.row.case
    return {**case.model_dump(mode="json"), "case_id": case.case_id, "median_ns": view.median_ns}
