"""Predicted time of a run, from measured times or from FLOPs: a planning figure, never a result."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from dilabench.machine import Machine
from dilabench.record import Case, Measured, Row
from dilabench.units import format_seconds
from dilabench.workload.spec import Workload, flops

# Rates that good attention kernels reach in half precision, by compute capability; per core in float32 on a CPU.
HALF_FLOPS_PER_S = {90: 350e12, 80: 150e12, 70: 50e12}
OLDER_FLOPS_PER_S = 5e12
CORE_FLOPS_PER_S = 40e9
SLOWDOWN = {"float64": 16.0, "float32": 8.0, "float16": 1.0, "bfloat16": 1.0}
# Starting a worker, building, verifying: what a case takes before its first sample.
OVERHEAD_S = 5.0
# The same in a worker that has had other cases.
CASE_OVERHEAD_S = 1.0
# Sampling of a short call without a budget: a case takes 1 to 5 s in the records of docs/results. A budget shortens it.
SAMPLING_S = 2.0
CALLS_PER_CASE = 10
SECONDS_PER_HOUR = 3600
ROUND_TO_S = 10


@dataclass(frozen=True, slots=True)
class TimePlan:
    """Seconds of all calls of a case that count, and the rate they were predicted with."""

    seconds: float
    assumed_flops_per_s: float


def plan_time(case: Case, machine: Machine, cores: int) -> TimePlan:
    """Predict one call at the assumed rate of each device; over ranks, the work is shared evenly."""
    rate = _rate(case, machine, cores)
    workload = case.workload
    # Ranks on a CPU share its cores.
    devices = case.world_size if machine.facts.own_memory else 1
    return TimePlan(_work(workload) / devices / rate, rate)


def _work(workload: Workload) -> float:
    """The FLOPs of a call; for a step of a model, plus its projections, feed-forward layers and head."""
    model = workload.model
    if model is None:
        return flops(workload)
    projections = 2 * (workload.num_heads + workload.num_kv_heads) * workload.head_dim
    of_layer = model.width * (projections + 3 * (model.inner or 4 * model.width))
    trained = workload.mode != "forward"
    # Of a prefill the last token of each sequence has logits.
    with_logits = workload.tokens if trained or workload.query_len else workload.batch_size
    weights = model.layers * of_layer * workload.tokens + model.vocabulary * model.width * with_logits
    return model.layers * flops(workload) + 2.0 * weights * (3 if trained else 1)


def sufficient_budget_s(case: Case, machine: Machine, cores: int) -> float:
    """Return a budget in seconds that should be enough for this case."""
    return OVERHEAD_S + CALLS_PER_CASE * plan_time(case, machine, cores).seconds


def expected_seconds(cases: Sequence[Case], machine: Machine, cores: int) -> float:
    """Return the expected seconds of all cases together, builds and verification included."""
    calls_s = sum(CALLS_PER_CASE * plan_time(case, machine, cores).seconds for case in cases)
    return OVERHEAD_S + CASE_OVERHEAD_S * len(cases) + calls_s


def case_expected_s(case: Case, machine: Machine, cores: int) -> float:
    """Return the expected seconds of a case in a worker that has started, sampling included."""
    return CASE_OVERHEAD_S + SAMPLING_S + CALLS_PER_CASE * plan_time(case, machine, cores).seconds


def expected_time(cases: Sequence[Case], machine: Machine, cores: int, budget_s: float | None) -> str:
    """Return a sentence about the expected time and the budget."""
    seconds = expected_seconds(cases, machine, cores)
    text = f"about {format_seconds(seconds)} expected, verification included"
    if budget_s is None:
        return f"{text}, no limit"
    if seconds <= budget_s:
        return f"{text}, at most {format_seconds(budget_s)}"
    enough = budget_option(seconds)
    return f"{text}; the budget is {format_seconds(budget_s)}, so some cases will be skipped ({enough} measures all)"


def slow_dtypes(cases: Iterable[Case], machine: Machine) -> str | None:
    """Return a note on dtypes that most processors convert at every step; None on a GPU or without such a dtype."""
    halves = sorted({case.workload.dtype for case in cases} & {"float16", "bfloat16"})
    return f"most processors are slow at {' and '.join(halves)}" if halves and machine.device == "cpu" else None


def budget_option(seconds: float) -> str:
    """Return the `--budget` option that allows at least this many seconds."""
    if seconds > 2 * SECONDS_PER_HOUR:
        return f"--budget {math.ceil(seconds / SECONDS_PER_HOUR)}h"
    return f"--budget {ROUND_TO_S * max(1, math.ceil(seconds / ROUND_TO_S))}s"


def case_seconds(rows: Sequence[Row], wall_s: float) -> dict[str, float]:
    """Estimate the seconds of each measured case, by its id, if all together took `wall_s` seconds.

    Overhead that no row records is distributed like the recorded times: verification, set-up, warm-up and samples.
    """
    shown_s = {row.case.case_id: _shown_s(row.outcome) for row in rows if isinstance(row.outcome, Measured)}
    total_s = sum(shown_s.values())
    return {
        case_id: wall_s * (seconds / total_s if total_s else 1 / len(shown_s)) for case_id, seconds in shown_s.items()
    }


def seconds_like(case: Case, rows: Sequence[Row], took_s: Mapping[str, float]) -> float:
    """Predict the seconds of a case from measured rows, which took `took_s`.

    Calls beyond the longest of them grow with the FLOPs, verification, which samples rows, with the keys.
    """
    measured = [row for row in rows if row.case.case_id in took_s]
    longest = max(measured, key=lambda row: flops(row.case.workload))
    assert isinstance(longest.outcome, Measured)
    workload, known = case.workload, longest.case.workload
    more_flops = max(0.0, flops(workload) / max(1, flops(known)) - 1)
    more_keys = max(0.0, workload.tokens / known.tokens - 1)
    calls_ns = [sample for timing in longest.outcome.timings for sample in timing.samples_ns]
    growing_ns = more_flops * CALLS_PER_CASE * median(calls_ns or [0])
    growing_ns += min(more_keys, more_flops) * longest.outcome.verification.duration_ns
    return max(took_s[longest.case.case_id], sum(took_s.values()) / len(took_s)) + growing_ns * 1e-9


def _shown_s(outcome: Measured) -> float:
    timed_ns = sum(sum(timing.warmup_ns) + sum(timing.samples_ns) for timing in outcome.timings)
    return (outcome.verification.duration_ns + sum(outcome.setup_ns.values()) + timed_ns) * 1e-9


def _rate(case: Case, machine: Machine, cores: int) -> float:
    dtype = case.workload.dtype
    if machine.device == "cpu":
        return CORE_FLOPS_PER_S * cores / (2.0 if dtype == "float64" else 1.0)
    capability = machine.compute_capability
    known = [rate for least, rate in HALF_FLOPS_PER_S.items() if capability >= least]
    return (known[0] if known else OLDER_FLOPS_PER_S) / SLOWDOWN[dtype]
