"""Records made by hand: chosen times in interleaved rounds, chosen peaks, counters and kernels."""

import pytest

from dilabench import results
from dilabench.spec import Workload, WorkloadRequest

DILATED = {"kind": "dilated", "segment_lengths": (96, 192), "dilation_rates": (1, 2)}
ROUNDS = 8
# Both sides of a pair jitter alike, so that the ratio of two rows is what the test asked for.
JITTER = (1.0, 1.02, 0.99, 1.01, 1.03, 0.98, 1.0, 1.01)


@pytest.fixture
def row():
    """row(name, milliseconds): a measured row; without milliseconds a skipped one. `at` is its turn in a round."""

    def make(name, ms=None, *, at=0, labels=None, backend="math", peak_mib=None, counters=None, kernels=(), **changes):
        optimizations = changes.pop("optimizations", {})
        fields = {"pattern": DILATED, "batch_size": 1, "seq_len": 384, "num_heads": 5, "num_kv_heads": 5}
        workload = Workload.model_validate({**fields, "head_dim": 24, **changes})
        case = results.Case(
            implementation=name,
            backend=backend,
            workload=workload,
            optimizations=results.Optimizations(**optimizations),
        )
        planned = results.PlannedCase(
            case=case, labels=labels or {}, requested_workload=WorkloadRequest(seq_len=workload.seq_len)
        )
        if ms is None:
            return results.Row(planned=planned, outcome=results.Skipped(why="not here"))
        slots = tuple(
            results.Slot(round=index, position=at, samples_ns=(round(ms * JITTER[index] * 1e6),) * 3)
            for index in range(ROUNDS)
        )
        measured = results.Measured(
            verification=results.Verification(checks=(results.Check(name="out", passed=True),)),
            timings=(results.Timing(timer="wall", proves="host time", slots=slots),),
            memory=None if peak_mib is None else results.Memory(peak_bytes=peak_mib * 2**20, method="by hand"),
            counters=counters or {},
            kernels=tuple(results.KernelUse(name=kernel, count=1, duration_ns=ns) for kernel, ns in kernels),
        )
        return results.Row(planned=planned, outcome=measured)

    return make


@pytest.fixture
def record():
    def make(*rows, suite="range", device="cpu"):
        environment = results.Environment(
            os="Linux", python="3.12", cpu=results.CpuInfo(model="test CPU", cores=1, threads=1)
        )
        return results.RunRecord(
            tool_version="0",
            run_id="by-hand",
            suite=suite,
            started_at="now",
            device=device,
            environment=environment,
            rows=rows,
        )

    return make
