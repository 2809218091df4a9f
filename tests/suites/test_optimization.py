"""Suite `optimization`: everything off, each alone, all together."""

from dilabench.machine import Machine
from dilabench.record import GpuInfo
from dilabench.request import run_request
from dilabench.suites import planner
from dilabench.suites.planner import expand

CPU = Machine(device="cpu", no_cuda="no NVIDIA GPU is visible")
HOPPER = Machine(device="cuda", gpus=(GpuInfo(name="H200", compute_capability="9.0"),))
NAMES = ["nothing", "pattern cache", "buffer pool", "CUDA graph", "torch.compile", "all together"]


def plan(catalogue, machine=HOPPER, **run):
    run = {"implementations": ["gather"], "lengths": [4096], **run}
    return expand(catalogue, machine, run_request(catalogue, suite="optimization", run=run))


def switched(planned):
    changed = planned.case.optimizations
    return (changed.pattern_cache_entries > 0, changed.buffer_pool_bytes > 0, changed.cuda_graph, changed.compile)


def test_each_is_switched_on_alone_and_all_together(catalogue):
    planned = plan(catalogue)
    assert [p.labels["variant"] for p in planned] == NAMES
    assert [switched(p) for p in planned] == [
        (False, False, False, False),
        (True, False, False, False),
        (False, True, False, False),
        (False, False, True, False),
        (False, False, False, True),
        (True, True, True, True),
    ]
    assert len({p.case.group_id for p in planned}) == 1, "all variants are timed in the same rounds"


def test_on_a_cpu_the_graph_is_skipped_and_left_out_of_all_together(catalogue):
    planned = {p.labels["variant"]: p for p in plan(catalogue, CPU)}
    assert planned["CUDA graph"].skip.why == "cuda_graph needs a CUDA GPU"
    assert planned["all together"].skip is None
    assert switched(planned["all together"]) == (True, True, False, True)


def test_without_a_compiler_a_cpu_cannot_compile(catalogue, monkeypatch):
    monkeypatch.setattr(planner, "cxx_compiler", lambda: None)
    planned = {p.labels["variant"]: p for p in plan(catalogue, CPU)}
    assert planned["torch.compile"].skip.why.startswith("compile needs a C++ compiler on a CPU")
    assert switched(planned["all together"]) == (True, True, False, False)
    assert next(p for p in plan(catalogue) if p.labels["variant"] == "torch.compile").skip is None


def test_sizes_that_are_asked_for_are_those_that_run(catalogue):
    planned = plan(catalogue, pattern_cache_entries=3, buffer_pool_bytes=2**20)
    assert max(p.case.optimizations.pattern_cache_entries for p in planned) == 3
    assert {p.case.optimizations.buffer_pool_bytes for p in planned} == {0, 2**20}


def test_host_time_is_what_is_measured_unless_another_timer_is_named(catalogue):
    assert run_request(catalogue, suite="optimization").timing == "wall"
    assert run_request(catalogue, suite="optimization", run={"timing": "cold"}).timing == "cold"
    assert run_request(catalogue, suite="range").timing == "warmup"


def test_with_a_backward_pass_checkpointing_stands_beside_the_others_for_its_memory(catalogue):
    request = run_request(
        catalogue, suite="optimization", workload={"mode": "both"}, run={"implementations": ["gather"], "lengths": [64]}
    )
    planned = {p.labels["variant"]: p.case.optimizations for p in expand(catalogue, CPU, request)}
    assert [name for name, one in planned.items() if one.gradient_checkpointing] == ["gradient checkpointing"]
