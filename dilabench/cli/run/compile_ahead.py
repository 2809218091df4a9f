"""`dilabench tune --compile`: have Triton compile the kernels of common cases now, for every later process."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from dilabench.cli.terminal import Lines, say
from dilabench.engine.worker.outcomes import first_call_in
from dilabench.errors import ExitCode, counted, exit_code_for
from dilabench.record import Failed, PlannedCase, Skipped
from dilabench.suites.planner import Planner
from dilabench.units import format_seconds

# Heads of LongNet and of models (GigaPath has 48); a user's own fields go before these.
HEAD_DIMS = (48, 64, 96, 128)
DTYPES = ("bfloat16", "float16")
# LongNet's segments and rates ("auto") at this length need every form of the kernels: the first group of branches, and
# later ones that add to its results. Lengths that cut tiles are compiled with those that do not.
SHAPE: dict[str, Any] = {"batch_size": 1, "seq_len": 32768, "num_heads": 16, "mode": "both"}
FACTS = ("implementation", "head_dim", "dtype", "causal", "mode")
COLUMNS = (*(fact.replace("_", " ") for fact in FACTS), "compiled", "first call", "")


@dataclass(frozen=True, slots=True)
class Compiled:
    """A case whose first call was made in a worker: kernels new in Triton's cache; or why it was not made."""

    planned: PlannedCase
    kernels: int
    outcome: int | Skipped | Failed

    def as_data(self) -> dict[str, Any]:
        """The same as plain data."""
        made = self.outcome if isinstance(self.outcome, int) else None
        return {
            **dict(zip(FACTS, head_of(self.planned), strict=True)),
            "kernels": self.kernels,
            "first_call_ns": made,
            "why_not": None if isinstance(self.outcome, int) else self.outcome.why,
        }


def head_of(planned: PlannedCase) -> tuple[str, ...]:
    """What the kernels of a case are compiled for."""
    workload = planned.case.workload
    causal = "yes" if workload.causal else "no"
    return (planned.case.implementation, str(workload.head_dim), workload.dtype, causal, workload.mode)


def wanted(head_dims: Sequence[str], dtypes: Sequence[str]) -> list[dict[str, Any]]:
    """Workload fields of each case, common values where none are named."""
    return [
        {**SHAPE, "head_dim": head_dim, "dtype": dtype, "causal": causal}
        for head_dim in head_dims or HEAD_DIMS
        for dtype in dtypes or DTYPES
        for causal in (False, True)
    ]


def planned_for(planner: Planner, shapes: Sequence[dict[str, Any]]) -> tuple[PlannedCase, ...]:
    """What is to be compiled: unless named, whatever has Triton kernels of its own for the pattern."""
    planned: dict[str, PlannedCase] = {}
    for asked in planner.workload_requests(shapes):
        able = planner.on_one_device(asked.pattern)
        shelf = planner.catalogue.implementations
        for implementation in planner.implementations(name for name in able if "triton" in shelf.get(name).requires):
            for one in planner.plan(implementation, asked):
                planned.setdefault(one.case.case_id, one)
    return tuple(planned.values())


def compiled(planned: Sequence[PlannedCase], planner: Planner) -> Iterator[Compiled]:
    """Each case with what its first call compiled, one after another in one worker process."""
    from dilabench.engine.worker.client import WorkerPool
    from dilabench.engine.worker.protocol import WorkerSettings
    from dilabench.engine.worker.rank_group import start_worker

    pool = WorkerPool(WorkerSettings(device=planner.machine.device), start_worker)
    try:
        for one in planned:
            before = _cached_kernels()
            outcome = one.skip or first_call_in(pool, one.case, planner.catalogue, planner.request.seed)
            yield Compiled(one, len(_cached_kernels() - before), outcome)
    finally:
        pool.close()


def show(found: Iterator[Compiled], heads: Sequence[Sequence[str]]) -> list[Compiled]:
    """A line per case as soon as it is done, and what it comes to."""
    started, shown = monotonic(), []
    lines = Lines(COLUMNS, heads)
    for head, one in zip(heads, found, strict=True):
        shown.append(one)
        if isinstance(one.outcome, int):
            lines.print((*head, str(one.kernels), format_seconds(one.outcome * 1e-9), ""))
        else:
            lines.print((*head, "-", "-", f"{one.outcome.status}: {one.outcome.why}"))
    total = sum(one.kernels for one in shown)
    say(
        f"{counted(total, 'kernel')} compiled in {format_seconds(monotonic() - started)}, into {triton_cache()}; what "
        "was there already is not counted"
    )
    return shown


def verdict(found: Sequence[Compiled]) -> ExitCode:
    """4 when a case failed, 8 when nothing could be called."""
    return exit_code_for(
        failed=any(isinstance(one.outcome, Failed) for one in found),
        nothing=not any(isinstance(one.outcome, int) for one in found),
    )


def triton_cache() -> Path:
    """Where Triton keeps compiled kernels."""
    home = Path(os.environ.get("TRITON_HOME", Path.home()))
    return Path(os.environ.get("TRITON_CACHE_DIR", home / ".triton" / "cache"))


def _cached_kernels() -> set[str]:
    """A folder of the cache for each kernel."""
    return {path.parent.name for path in triton_cache().glob("*/*.cubin")}
