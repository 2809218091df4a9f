"""`compare --across-machines`: times of two machines side by side, without a verdict."""

import json
from typing import TYPE_CHECKING

from dilabench.cli.terminal import print_table, say, say_folded
from dilabench.errors import ExitCode, counted
from dilabench.report.columns import implementation_text, workload_title
from dilabench.report.content import device_text
from dilabench.units import format_latency, format_ratio

if TYPE_CHECKING:
    from dilabench.compare.across import MachineRatio
    from dilabench.record import Case, RunRecord

COLUMNS = ("case", "base", "new", "base / new")


def show_machines(base: "RunRecord", new: "RunRecord", as_json: bool) -> ExitCode:
    """Print the ratios of what both measured; exit code 8 when that is nothing."""
    from dilabench.compare.across import machine_ratios

    ratios = list(machine_ratios(base, new))
    if as_json:
        say(json.dumps({"cells": [_as_data(one) for one in ratios]}, indent=2, ensure_ascii=False))
    else:
        say_folded(f"base: {device_text(base)} (run {base.run_id})", "  ")
        say_folded(f"new: {device_text(new)} (run {new.run_id})", "  ")
        by_workload: dict[str, list[tuple[str, ...]]] = {}
        for one in ratios:
            by_workload.setdefault(workload_title(one.new), []).append(_cells(one))
        for title, rows in by_workload.items():
            say()
            print_table(title, COLUMNS, rows, right=COLUMNS[1:])
        say()
        say_folded(
            f"{counted(len(ratios), 'workload')} measured by the same implementation on both. Ratios of medians, each "
            "over its fastest backend; two machines did not take turns, so there is no verdict."
        )
    return ExitCode.OK if ratios else ExitCode.NOTHING_MEASURED


def _cells(one: "MachineRatio") -> tuple[str, ...]:
    backends = dict.fromkeys(case.backend or "no backend" for case in (one.base, one.new))
    name = f"{implementation_text(one.new)} ({' against '.join(backends)})"
    times = (format_latency(one.base_time.median_ns), format_latency(one.new_time.median_ns))
    return name, *times, format_ratio(one.ratio)


def _as_data(one: "MachineRatio") -> dict[str, object]:
    return {
        "base": _side(one.base, one.base_time.median_ns),
        "new": _side(one.new, one.new_time.median_ns),
        "base_over_new": one.ratio,
    }


def _side(case: "Case", median_ns: float) -> dict[str, object]:
    return {**case.model_dump(mode="json"), "case_id": case.case_id, "median_ns": median_ns}
