"""`--dry-run`: the cases that a request comes to, without running any."""

from collections.abc import Sequence

from dilabench.cli.terminal import print_table, say
from dilabench.errors import counted
from dilabench.record import PlannedCase
from dilabench.units import format_bytes
from dilabench.workload.work import flops, tensor_bytes

COLUMNS = ("#", "implementation", "backend", "workload", "pattern", "mode", "FLOPs", "tensors", "runs")


def show(planned: Sequence[PlannedCase]) -> None:
    """One line per case with its FLOPs, the bytes of its tensors, and why it would be skipped."""
    print_table(
        None, COLUMNS, [_cells(index, plan) for index, plan in enumerate(planned, 1)], right=("FLOPs", "tensors")
    )
    skipped = sum(plan.skip is not None for plan in planned)
    total = sum(flops(plan.case.workload) for plan in planned if plan.skip is None)
    work = f"{total:.3g} FLOPs in one call of each"
    say(f"{counted(len(planned), 'case')}, {skipped} of them skipped; {work}. Nothing was run (--dry-run).")


def _cells(index: int, plan: PlannedCase) -> tuple[str, ...]:
    case, workload = plan.case, plan.case.workload
    return (
        str(index),
        case.implementation,
        (case.backend or "-") + ("*" if plan.requested_backend == "auto" and case.backend else ""),
        workload.label(),
        workload.pattern.details(workload.shapes) + (" (yardstick)" if plan.role == "yardstick" else ""),
        workload.mode,
        f"{flops(workload):.3g}",
        format_bytes(sum(tensor_bytes(workload).values())),
        "yes" if plan.skip is None else f"no: {plan.skip.why}",
    )
