"""Records made by hand: chosen times in interleaved rounds, chosen peaks, counters and kernels."""

import pytest

from dilabench import record as results
from dilabench.workload.spec import Workload, WorkloadRequest

DILATED = {"kind": "dilated", "segment_lengths": (96, 192), "dilation_rates": (1, 2)}
ROUNDS = 8
# Both sides of a pair jitter alike, so that the ratio of two rows is what the test asked for.
JITTER = (1.0, 1.02, 0.99, 1.01, 1.03, 0.98, 1.0, 1.01)


@pytest.fixture
def row():
    """row(name, milliseconds): a measured row; without milliseconds a skipped one. `at` is its turn in a round.

    `ranks`: so many, the last one half as fast as the others. `parts`: milliseconds of parts of a call, by name.
    `rounds`: at most as many as there are by default.
    """

    def make(
        name,
        ms=None,
        *,
        at=0,
        labels=None,
        role=None,
        takes="heads",
        backend="math",
        peak_mib=None,
        counters=None,
        kernels=(),
        ranks=1,
        parts=(),
        rounds=ROUNDS,
        **changes,
    ):
        optimizations = changes.pop("optimizations", {})
        fields = {"pattern": DILATED, "batch_size": 1, "seq_len": 384, "num_heads": 5, "num_kv_heads": 5}
        workload = Workload.model_validate({**fields, "head_dim": 24, **changes})
        case = results.Case(
            implementation=name,
            backend=backend,
            workload=workload,
            optimizations=results.Optimizations(**optimizations),
            world_size=ranks,
        )
        planned = results.PlannedCase(
            case=case,
            role=role or ("plain" if name.startswith("gather") else "method"),
            takes=takes,
            labels=labels or {},
            requested_workload=WorkloadRequest(seq_len=workload.seq_len),
        )
        if ms is None:
            return results.Row(planned=planned, outcome=results.Skipped(code="unsupported", why="not here"))
        times = [(round(ms * JITTER[index] * 1e6),) * 3 for index in range(rounds)]
        slots = tuple(
            results.Slot(
                round=index,
                position=at,
                samples_ns=samples,
                rank_samples_ns=(*[tuple(x // 2 for x in samples)] * (ranks - 1), samples) if ranks > 1 else (),
            )
            for index, samples in enumerate(times)
        )
        measured = results.Measured(
            verification=results.Verification(checks=(results.Check(name="out", passed=True),)),
            timings=(results.Timing(timer="wall", proves="host time", slots=slots),),
            memory=None if peak_mib is None else results.Memory(peak_bytes=peak_mib * 2**20, method="by hand"),
            counters=counters or {},
            diagnostics=tuple(
                results.Diagnostic(part=part, samples_ns=tuple(round(part_ms * step * 1e6) for step in JITTER))
                for part, part_ms in dict(parts).items()
            ),
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


def table(section):
    """The rows of a section's table by column."""
    return [dict(zip(section.columns, cells, strict=True)) for cells in section.rows]
