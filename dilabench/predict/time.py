"""How long a run might take, from FLOPs and an assumed rate: a prediction to decide by, never a result."""

from dataclasses import dataclass

from dilabench.machine import Machine
from dilabench.record import Case
from dilabench.workload.work import flops

# Rates that good attention kernels reach in half precision, by compute capability; per core in float32 on a CPU.
HALF_FLOPS_PER_S = {90: 350e12, 80: 150e12, 70: 50e12}
OLDER_FLOPS_PER_S = 5e12
CORE_FLOPS_PER_S = 20e9
SLOWDOWN = {"float64": 16.0, "float32": 8.0, "float16": 1.0, "bfloat16": 1.0}
# Starting a worker, building, verifying: what a case takes before its first sample.
OVERHEAD_S = 5.0
CALLS_PER_CASE = 10


@dataclass(frozen=True, slots=True)
class TimePlan:
    """Seconds of all calls of a case that count, and the rate they were predicted with."""

    seconds: float
    assumed_flops_per_s: float


def plan_time(case: Case, machine: Machine, cores: int) -> TimePlan:
    """One call, or all pieces of a stream, at the assumed rate of each device; over ranks, the even share of each."""
    rate = _rate(case, machine, cores)
    workload = case.workload
    calls = max(1, -(-case.optimizations.stream_tokens // workload.tokens))
    # Ranks on a CPU share its cores.
    devices = case.world_size if machine.device == "cuda" else 1
    return TimePlan(calls * flops(workload) / devices / rate, rate)


def sufficient_budget_s(case: Case, machine: Machine, cores: int) -> float:
    """A budget with which at least this case should get its samples, in seconds."""
    return OVERHEAD_S + CALLS_PER_CASE * plan_time(case, machine, cores).seconds


def _rate(case: Case, machine: Machine, cores: int) -> float:
    dtype = case.workload.dtype
    if machine.device == "cpu":
        return CORE_FLOPS_PER_S * cores / (2.0 if dtype == "float64" else 1.0)
    capability = machine.compute_capability
    known = [rate for least, rate in HALF_FLOPS_PER_S.items() if capability >= least]
    return (known[0] if known else OLDER_FLOPS_PER_S) / SLOWDOWN[dtype]
