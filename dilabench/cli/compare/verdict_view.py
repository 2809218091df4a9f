"""Comparisons as a table with reasons below it, several runs as a matrix, two machines as ratios; and as JSON."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dilabench.cli.terminal import print_items, print_table, say, say_folded, say_page
from dilabench.errors import ExitCode, gravest
from dilabench.record import Case
from dilabench.report.columns import Column, case_name, implementation_text, pair_columns, workload_title
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

LEGEND = (
    "baseline, candidate: the median of all samples; ratio: the candidate's time over the baseline's, from the lower "
    "samples of each slot, and its interval (CI); MDE: the smallest slow-down that would "
    "have been found four times in five; A12: how often a call of the candidate takes longer than one of the baseline, "
    "0.50 where neither does"
)
# Number of undecided pairs of one cause that are printed in full.
MAX_TOLD = 2
INDENT = "  "
WORDS = {
    ExitCode.OK: "ok",
    ExitCode.CASE_FAILED: "A MEASURED CASE NOW FAILS",
    ExitCode.WRONG_OUTPUT: "WRONG OUTPUT",
    ExitCode.REGRESSION: "REGRESSION",
    ExitCode.INCONCLUSIVE: "INCONCLUSIVE",
    ExitCode.NOTHING_MEASURED: "NOTHING TO COMPARE",
}


def show(comparison: "Comparison", code: ExitCode, calibration: Calibration | None) -> None:
    """Print the table, the reasons of verdicts that matter, what was not compared, and the final line."""
    for warning in comparison.warnings:
        say_folded(f"note: {warning}", INDENT)
    say_folded(noise_line(calibration), INDENT)
    confidences = {pair.verdict.numbers.confidence for pair in comparison.pairs} - {None}
    alike = confidences.pop() if len(confidences) == 1 else None
    for title, pairs in _by_workload(comparison.pairs).items():
        say()
        baselines = {case_name(pair.baseline) for pair in pairs if pair.baseline != pair.candidate}
        # Said once where all rows face the same one.
        against = f", against {baselines.pop()}" if len(baselines) == 1 and len(pairs) > 1 else ""
        columns = pair_columns((lambda pair: case_name(pair.candidate)) if against else _facing, alike)
        print_items(title + against, columns, pairs)
    if comparison.pairs:
        say_folded(LEGEND, INDENT)
        say()
    for text in _reasons(comparison.pairs):
        say_folded(text, INDENT)
    for text in _uncompared(comparison.uncompared):
        say_folded(text, INDENT)
    say_folded(final_line(comparison, code), INDENT)


def _reasons(pairs: Sequence["ComparedPair"]) -> Iterator[str]:
    """Why verdicts are as they are: each change in full, of many undecided pairs with one cause the first."""
    undecided: dict[str, list[ComparedPair]] = {}
    notes: dict[str, list[ComparedPair]] = {}
    for pair in pairs:
        verdict = pair.verdict
        if verdict.code is Code.INCONCLUSIVE:
            undecided.setdefault(verdict.cause, []).append(pair)
        elif verdict.code is not Code.SAME:
            yield _reason(pair, verdict.code, verdict.reason, verdict.hint)
        if pair.memory is not None and pair.memory.fails_gate:
            yield _reason(pair, "LARGER", pair.memory.reason, pair.memory.hint)
        for note in pair.notes:
            notes.setdefault(note, []).append(pair)
    for alike in undecided.values():
        for pair in alike if len(alike) <= MAX_TOLD else alike[:1]:
            others = f" ({len(alike) - 1} more pairs are undecided for this cause; --json has all)"
            more = others if len(alike) > MAX_TOLD else ""
            yield _reason(pair, pair.verdict.code, pair.verdict.reason, pair.verdict.hint) + more
    for text, noted in notes.items():
        more = f" and {len(noted) - 1} more" if len(noted) > 1 else ""
        yield f"note: {text} ({_place(noted[0])}{more})"


def _uncompared(cases: Sequence["Uncompared"]) -> Iterator[str]:
    """Cases without a verdict, those that ended alike together; what both sides have in common is said once."""
    alike: dict[tuple[str, str, str], list[Uncompared]] = {}
    for case in cases:
        alike.setdefault((case.lack, case.baseline, case.candidate), []).append(case)
    for (lack, baseline, candidate), members in alike.items():
        names = "; ".join(name(member.case) for member in members)
        ended = f"both sides {baseline}" if baseline == candidate else f"baseline {baseline}; candidate {candidate}"
        yield f"{lack}: {names}: {ended}"


def _reason(pair: "ComparedPair", word: str, reason: str, hint: str) -> str:
    return f"{word}: {_place(pair)} [{pair.timer}, {pair.route}]: {reason}" + (f"; {hint}" if hint else "")


def _place(pair: "ComparedPair") -> str:
    return f"{_facing(pair)}, {workload_title(pair.candidate)}"


def as_json(comparison: "Comparison", code: ExitCode, calibration: Calibration | None) -> str:
    """The comparison with every number, for programs."""
    return json_text({"exit_code": int(code), "sigma_aa": sigma_of(calibration), **as_data(comparison)})


def sigma_of(calibration: Calibration | None) -> float | None:
    """The spread between sessions of identical code on this machine, if known."""
    return calibration.sigma_aa if calibration else None


def json_text(document: dict[str, Any]) -> str:
    """A document as commands print it."""
    return json.dumps(document, indent=2, ensure_ascii=False)


def as_data(comparison: "Comparison") -> dict[str, Any]:
    """All that a comparison found."""
    return {
        "cells": [_plain(asdict(pair), pair.baseline, pair.candidate) for pair in comparison.pairs],
        "uncompared": [
            {**asdict(case), "case": case.case.model_dump(mode="json"), "case_id": case.case.case_id}
            for case in comparison.uncompared
        ],
        "warnings": list(comparison.warnings),
    }


def as_markdown(comparison: "Comparison", code: ExitCode) -> str:
    """The comparison for a pull request."""
    # It loads the catalogue.
    from dilabench.report.pull_request import of_comparison

    return of_comparison(comparison, final_line(comparison, code))


def noise_line(calibration: Calibration | None) -> str:
    """One line on this machine's noise."""
    if calibration is None:
        return "note: noise between sessions is unknown here; `dilabench calibrate` measures it"
    return (
        f"noise between sessions {calibration.sigma_aa:.2%} (sigma of identical code, {calibration.sessions} sessions, "
        f"calibrated {calibration.measured_at[:10]})"
    )


def final_line(comparison: "Comparison", code: ExitCode) -> str:
    """The line that a CI log ends with."""
    counts = Counter(pair.verdict.code.value for pair in comparison.pairs)
    verdicts = [f"{counts[code]} {code}" for code in ("SLOWER", "FASTER", "SAME", "INCONCLUSIVE") if counts[code]]
    larger = sum(pair.memory is not None and pair.memory.fails_gate for pair in comparison.pairs)
    parts = [*verdicts, *([f"{larger} larger peaks"] if larger else [])]
    parts += [f"{len(comparison.uncompared)} not compared"] if comparison.uncompared else []
    return f"verdict: {WORDS[code]} ({', '.join(parts) or 'no pairs'}; exit code {int(code)})"


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


def _plain(fields: dict[str, Any], baseline: Case, candidate: Case) -> dict[str, Any]:
    cases = {"baseline": baseline.model_dump(mode="json"), "candidate": candidate.model_dump(mode="json")}
    medians = {side: fields.pop(side) for side in ("baseline_ns", "candidate_ns")}
    fields["verdict"]["numbers"] |= medians
    return {**fields, **cases, "case_id": candidate.case_id}


def show_matrix(matrix: "Matrix", codes: Sequence[ExitCode], calibration: Calibration | None) -> None:
    """Print warnings, a table per workload with a line per case and run, what some runs lack, and the verdicts."""
    from dilabench.report import matrix as texts

    for warning in matrix.warnings:
        say_folded(f"note: {warning}", INDENT)
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
    if texts.is_advisory(matrix):
        say_folded(texts.ADVISORY_MEANS, INDENT)
    for text in texts.lacking(matrix):
        say_folded(f"not compared everywhere: {text}", INDENT)
    for line in _final_lines(matrix, codes):
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


def _final_lines(matrix: "Matrix", codes: Sequence[ExitCode]) -> list[str]:
    """The final line of each run against the first."""
    lines = map(final_line, matrix.with_first, codes)
    return [f"{name} against {matrix.names[0]}: {line}" for name, line in zip(matrix.names[1:], lines, strict=True)]


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
