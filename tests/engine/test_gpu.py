"""The CUDA half of the engine, on a real GPU."""

from types import SimpleNamespace

import pytest
import torch

from dilabench.engine.timers import TimerUnusableError
from dilabench.engine.timers.graph import Graph
from dilabench.machine import detect
from dilabench.record import Case, Failed, Measured, PlannedCase
from dilabench.workload.spec import Workload

pytestmark = pytest.mark.gpu

SHAPE = {
    "pattern": {"kind": "dense"},
    "batch_size": 2,
    "seq_len": 1000,
    "num_heads": 5,
    "num_kv_heads": 5,
    "head_dim": 64,
    "dtype": "bfloat16",
}


@pytest.fixture
def gpu_run(engine):
    def go(*names, timing="warmup", mode="forward", backend=None):
        for name in names:
            engine.register(name)
        workload = Workload.model_validate({**SHAPE, "mode": mode})
        cases = [Case(implementation=name, backend=backend, workload=workload) for name in names]
        planned = [PlannedCase(case=case) for case in cases]
        record = engine(planned=planned, timing=timing, budget_s=60.0, machine=detect("cuda"))
        return {row.case.implementation: row.outcome for row in record.rows}

    return go


def middle(timing):
    ordered = sorted(timing.samples_ns)
    return ordered[len(ordered) // 2]


@pytest.mark.parametrize("mode", ["forward", "backward", "both"])
def test_cold_and_graph_agree_on_a_launch_bound_call(gpu_run, mode):
    """Both time the same kernels from memory; the host takes far longer to launch them than they take."""
    outcome = gpu_run("honest", mode=mode)["honest"]
    assert isinstance(outcome, Measured)
    cold, graph = outcome.timings
    assert (cold.timer, graph.timer) == ("cold", "graph")
    assert "launch_bound" in [note.code for note in outcome.notes]
    assert middle(cold) == pytest.approx(middle(graph), rel=0.3)
    assert all(slot.sm_clock_mhz for slot in cold.slots)
    assert all(len(slot.enqueue_ns) == len(slot.samples_ns) for slot in cold.slots)


@pytest.mark.parametrize("timing", ["hot", "wall", "graph"])
def test_every_timer_can_be_asked_for(gpu_run, timing):
    outcome = gpu_run("honest", timing=timing)["honest"]
    assert outcome.timings[0].timer == timing


def test_kernels_are_those_that_ran_on_the_gpu(gpu_run, named_backend):
    named_backend("flashy", ("pytorch_flash::",))
    found = gpu_run("uses_backend", "ignores_backend", backend="flashy", timing="simple")
    assert any("flash" in kernel.name for kernel in found["uses_backend"].kernels)
    assert "claims flashy but no such kernel ran" in found["ignores_backend"].why


def test_memory_holds_the_inputs_and_more(gpu_run):
    memory = gpu_run("honest", mode="both", timing="simple")["honest"].memory
    tensor = 2 * 1000 * 5 * 64 * 2
    assert memory.inputs_bytes == 4 * tensor
    # Three gradients and the saved out at least.
    assert memory.peak_bytes >= 8 * tensor
    assert memory.saved_for_backward_bytes >= tensor


def test_a_lost_cuda_context_ends_one_case(gpu_run):
    found = gpu_run("asserts_on_device", "honest", timing="simple")
    assert isinstance(found["asserts_on_device"], Failed)
    assert "the CUDA context is lost" in found["asserts_on_device"].why
    assert isinstance(found["honest"], Measured)


def test_memory_that_is_not_there_ends_one_case(gpu_run):
    found = gpu_run("takes_too_much", "honest", timing="simple")
    assert found["takes_too_much"].why.startswith("out of memory: ")
    assert isinstance(found["honest"], Measured)


def test_a_capture_that_fails_leaves_the_stream_and_the_device_usable():
    stream = torch.cuda.current_stream()
    x = torch.ones(1024, device="cuda")

    def reads_on_the_host():
        return float(x.sum())

    call = SimpleNamespace(
        device=x.device,
        working_set_bytes=x.nbytes,
        fresh=lambda: reads_on_the_host,
        capturable=lambda: (reads_on_the_host, None),
    )
    with pytest.raises(TimerUnusableError, match="cannot be captured"):
        Graph(call)
    assert torch.cuda.current_stream() == stream
    assert float(x.sum()) == 1024
    assert torch.randn(3, device="cuda").isfinite().all()
