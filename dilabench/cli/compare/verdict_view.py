"""Comparisons as a table with reasons below it, or as JSON."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dilabench.cli.terminal import print_table, say
from dilabench.errors import ExitCode
from dilabench.record import Case
from dilabench.store.calibrations import Calibration
from dilabench.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from dilabench.compare.comparison import ComparedPair, Comparison

COLUMNS = ("verdict", "case", "baseline", "candidate", "ratio", "CI", "MDE", "A12", "memory")
NUMBERS = ("baseline", "candidate", "ratio", "CI", "MDE", "A12")
UNKNOWN = "—"
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
        say(f"note: {warning}")
    say(noise_line(calibration))
    for title, pairs in _by_workload(comparison.pairs).items():
        say()
        print_table(title, COLUMNS, [_row(pair) for pair in pairs], right=NUMBERS)
        for pair in pairs:
            _explain(pair)
    say()
    for one in comparison.uncompared:
        say(f"{one.lack}: {name(one.case)}: baseline {one.baseline}; candidate {one.candidate}")
    say(final_line(comparison, code))


def as_json(comparison: "Comparison", code: ExitCode, calibration: Calibration | None) -> str:
    """The comparison with every number, for programs."""
    document = {
        "exit_code": int(code),
        "sigma_aa": calibration.sigma_aa if calibration else None,
        "cells": [_plain(asdict(pair), pair.baseline, pair.candidate) for pair in comparison.pairs],
        "uncompared": [
            {**asdict(one), "case": one.case.model_dump(mode="json"), "case_id": one.case.case_id}
            for one in comparison.uncompared
        ],
        "warnings": list(comparison.warnings),
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


def noise_line(calibration: Calibration | None) -> str:
    """What is known of this machine's noise."""
    if calibration is None:
        return "note: noise between sessions is unknown here; `dilabench calibrate` measures it"
    return (
        f"noise between sessions {calibration.sigma_aa:.2%} (sigma of identical code, {calibration.sessions} sessions, "
        f"calibrated {calibration.measured_at[:10]})"
    )


def final_line(comparison: "Comparison", code: ExitCode) -> str:
    """The line that a CI log ends with."""
    counts = Counter(pair.verdict.code.value for pair in comparison.pairs)
    verdicts = [f"{counts[one]} {one}" for one in ("SLOWER", "FASTER", "SAME", "INCONCLUSIVE") if counts[one]]
    larger = sum(pair.memory is not None and pair.memory.fails_gate for pair in comparison.pairs)
    parts = [*verdicts, *([f"{larger} larger peaks"] if larger else [])]
    parts += [f"{len(comparison.uncompared)} not compared"] if comparison.uncompared else []
    return f"verdict: {WORDS[code]} ({', '.join(parts) or 'no pairs'}; exit code {int(code)})"


def name(case: Case) -> str:
    """A case in one line."""
    from dilabench.report.rows import workload_title

    return f"{_state(case)}, {workload_title(case)}"


def _state(case: Case) -> str:
    from dilabench.report.rows import implementation_text

    return implementation_text(case) + (f" over {case.backend}" if case.backend else "")


def _by_workload(pairs: Sequence["ComparedPair"]) -> dict[str, list["ComparedPair"]]:
    from dilabench.report.rows import workload_title

    groups: dict[str, list[ComparedPair]] = {}
    for pair in pairs:
        groups.setdefault(workload_title(pair.candidate), []).append(pair)
    return groups


def _row(pair: "ComparedPair") -> Sequence[str]:
    numbers = pair.verdict.numbers
    known = numbers.ratio_low is not None
    return (
        pair.verdict.code + (" (advisory)" if pair.verdict.advisory else ""),
        _facing(pair),
        format_seconds(numbers.baseline_ns * 1e-9),
        format_seconds(numbers.candidate_ns * 1e-9),
        f"{numbers.ratio:.3f}",
        f"{numbers.ratio_low:.3f} to {numbers.ratio_high:.3f} ({100 * (numbers.confidence or 0):.4g} %)"
        if known
        else UNKNOWN,
        f"{numbers.mde:.1%}" if numbers.mde is not None else UNKNOWN,
        f"{numbers.a12:.2f}",
        _memory(pair),
    )


def _facing(pair: "ComparedPair") -> str:
    text = _state(pair.candidate)
    return text if pair.baseline == pair.candidate else f"{text} against {_state(pair.baseline)}"


def _memory(pair: "ComparedPair") -> str:
    if pair.memory is None:
        return UNKNOWN
    change = pair.memory.candidate_bytes - pair.memory.baseline_bytes
    sign = "-" if change < 0 else "+"
    return pair.memory.code + ("" if pair.memory.code == "SAME" else f" {sign}{format_bytes(abs(change))}")


def _explain(pair: "ComparedPair") -> None:
    verdict = pair.verdict
    lines = []
    if verdict.code != "SAME":
        lines.append(f"{verdict.code}: {verdict.reason}" + (f"; {verdict.hint}" if verdict.hint else ""))
    if pair.memory is not None and pair.memory.fails_gate:
        lines.append(f"LARGER: {pair.memory.reason}; {pair.memory.hint}")
    lines += pair.notes
    if lines:
        say(f"{_facing(pair)} [{pair.timer}, {pair.route}]")
        for line in lines:
            say(f"  {line}")


def _plain(fields: dict[str, Any], baseline: Case, candidate: Case) -> dict[str, Any]:
    cases = {"baseline": baseline.model_dump(mode="json"), "candidate": candidate.model_dump(mode="json")}
    return {**fields, **cases, "case_id": candidate.case_id}
