"""`--dry-run`: the cases that a request comes to, without running any."""

import json
from collections.abc import Sequence
from typing import Any

from dilabench.cli.terminal import print_table, say, say_folded
from dilabench.errors import counted
from dilabench.record import PlannedCase
from dilabench.units import format_bytes
from dilabench.workload.work import flops, tensor_bytes

RANKS = "ranks"
# Left out first where the terminal is narrow; --json has them.
SPARE = ("tensors", "FLOPs", "pattern")
COLUMNS = ("#", "implementation", "backend", RANKS, "workload", "pattern", "mode", "FLOPs", "tensors", "runs")


def show(planned: Sequence[PlannedCase], as_json: bool = False) -> None:
    """One line per case with its FLOPs, the bytes of its tensors, and why it would be skipped."""
    if as_json:
        say(json.dumps([_as_data(one) for one in planned], indent=1))
        return
    columns = [name for name in COLUMNS if name != RANKS or any(plan.case.world_size > 1 for plan in planned)]
    by_name = [dict(zip(COLUMNS, _cells(index, plan), strict=True)) for index, plan in enumerate(planned, 1)]
    cells = [tuple(row[name] for name in columns) for row in by_name]
    print_table(None, columns, cells, right=(RANKS, "FLOPs", "tensors"), spare=SPARE)
    reasons: dict[str, list[str]] = {}
    for index, plan in enumerate(planned, 1):
        if plan.skip is not None:
            reasons.setdefault(plan.skip.why, []).append(str(index))
    for why, rows in reasons.items():
        say_folded(f"not run, {', '.join(rows)}: {why}", "  ")
    skipped = sum(plan.skip is not None for plan in planned)
    total = sum(flops(plan.case.workload) for plan in planned if plan.skip is None)
    work = f"{total:.3g} FLOPs in one call of each"
    say_folded(f"{counted(len(planned), 'case')}, {skipped} of them skipped; {work}. Nothing was run (--dry-run).")


def _as_data(plan: PlannedCase) -> dict[str, Any]:
    case = plan.case
    return {
        **case.model_dump(mode="json"),
        "case_id": case.case_id,
        "role": plan.role,
        "flops": flops(case.workload),
        "tensor_bytes": sum(tensor_bytes(case.workload).values()),
        "skip": plan.skip and plan.skip.why,
        "skip_code": plan.skip and plan.skip.code,
    }


def _cells(index: int, plan: PlannedCase) -> tuple[str, ...]:
    from dilabench.report.columns import implementation_text

    case, workload = plan.case, plan.case.workload
    return (
        str(index),
        implementation_text(case),
        (case.backend or "-") + ("*" if plan.requested_backend == "auto" and case.backend else ""),
        str(case.world_size),
        workload.label(),
        workload.pattern.details(workload.shapes) + (" (yardstick)" if plan.role == "yardstick" else ""),
        workload.mode,
        f"{flops(workload):.3g}",
        format_bytes(sum(tensor_bytes(workload).values())),
        "yes" if plan.skip is None else "no",
    )
