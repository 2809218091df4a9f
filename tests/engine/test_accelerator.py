"""A device that dilabench has no kernel for, from the request to the row. It is faked: its tensors lie on the CPU."""

import sys
from types import SimpleNamespace

import pytest
import torch

from dilabench.choice.computation import machine_of
from dilabench.choice.ways import Way, own_ways
from dilabench.engine import runner
from dilabench.engine.case_spec import case_spec
from dilabench.engine.device import device as device_module
from dilabench.engine.device.device import Device, device_of
from dilabench.engine.device.environment import snapshot
from dilabench.engine.method import choose_method
from dilabench.engine.verify.call import OnHost
from dilabench.engine.worker import handlers as handlers_module
from dilabench.engine.worker.client import answered
from dilabench.engine.worker.handlers import Handlers
from dilabench.engine.worker.isolated_call import measure_isolated
from dilabench.errors import ConfigError, EnvironmentNotReady
from dilabench.machine import Machine, detect, device_named
from dilabench.plugins.manager import discover
from dilabench.record import Measured, RunHeader
from dilabench.request import run_request
from dilabench.suites.planner import Planner
from dilabench.suites.range.cases import expand
from dilabench.workload.spec import Workload
from tests.conftest import slow

HOST = torch.device("cpu")
FEW = {"seq_len": 96, "batch_size": 1, "num_heads": 2, "head_dim": 16, "segment_lengths": [32, 96]}


class InProcess:
    """A worker in this process, where the fake is."""

    alive = True

    def __init__(self, key, settings):
        self.key, self._handlers = key, Handlers(settings)
        self.hello = self._handlers.hello()

    def ask(self, command, handle="", *, timeout_s):
        return answered(self._handlers.answer(command.model_copy(update={"handle": handle, "timeout_s": timeout_s})))

    def meet(self):
        return self

    def kill(self):
        self.alive = False


@pytest.fixture
def waits():
    """How often the accelerator was waited for."""
    return []


@pytest.fixture
def accelerator(monkeypatch, waits):
    """`torch.accelerator` finds an mps, whose tensors are the CPU's."""

    class Fake(Device):
        def __init__(self, where):
            super().__init__(where)
            self.facts = device_named("mps")

    found = SimpleNamespace(type="mps")
    for name, value in (
        ("is_available", lambda: True),
        ("current_accelerator", lambda: found),
        ("synchronize", waits.append),
        ("empty_cache", lambda: None),
        ("memory_allocated", lambda _device: 1000),
        ("max_memory_allocated", lambda _device: 5000),
        ("reset_peak_memory_stats", lambda _device: None),
    ):
        monkeypatch.setattr(torch.accelerator, name, value, raising=False)
    monkeypatch.setattr(device_module, "KINDS", {"cpu": Fake})
    monkeypatch.setattr(handlers_module, "torch_device", lambda _kind, _index=0: HOST)
    device_of.cache_clear()
    yield detect("mps")
    device_of.cache_clear()


def planned(machine, *implementations, **fields):
    catalogue = discover().catalogue
    chosen = {"implementations": list(implementations), "device": machine.device}
    request = run_request(catalogue, suite="range", workload={**FEW, **fields}, run={**chosen, "timing": "simple"})
    return catalogue, request, expand(request, Planner(catalogue, machine, request))


def test_auto_is_never_an_accelerator_without_kernels(accelerator, monkeypatch):
    monkeypatch.setattr("dilabench.machine._nvml_gpus", lambda: ())
    assert accelerator == Machine(device="mps", no_cuda="device mps was requested")
    assert detect("auto").device == "cpu"


def test_a_device_that_is_not_there_is_refused_with_those_that_are(accelerator, monkeypatch):
    monkeypatch.setattr("dilabench.machine._nvml_gpus", lambda: ())
    with pytest.raises(EnvironmentNotReady, match=r"device 'xpu' is not on this machine; .* one of: cpu, mps"):
        detect("xpu")


def test_without_torch_another_process_is_asked(monkeypatch):
    monkeypatch.setattr("dilabench.machine._nvml_gpus", lambda: ())
    monkeypatch.setattr("dilabench.machine._accelerator_by_process", lambda: "xpu")
    monkeypatch.delitem(sys.modules, "torch")
    assert detect("xpu").device == "xpu"
    with pytest.raises(EnvironmentNotReady, match="device 'mps' is not on this machine"):
        detect("mps")


def test_what_is_planned_runs_over_torchs_own_attention(accelerator):
    _, _, cases = planned(accelerator)
    able = {(one.case.implementation, one.case.backend) for one in cases if one.skip is None}
    assert able == {("strided", "sdpa"), ("dense", "sdpa")}
    assert {one.case.workload.dtype for one in cases} == {"float32"}
    fused = next(one for one in cases if one.case.implementation == "fused")
    assert "needs a CUDA GPU (device mps was requested)" in fused.skip.why


def test_the_library_takes_torchs_own_attention_there():
    machine, ways = machine_of("xpu"), own_ways()
    shape = {"batch_size": 1, "seq_len": 64, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16}
    way = Way("strided", None, Workload(pattern={"kind": "dense"}, **shape))
    assert (machine.device, machine.device_class, machine.auto_dtype) == ("xpu", "accelerator", "float32")
    assert ways.choose_backend(way, machine) == ("sdpa", "")
    assert machine_of("meta").device in ("cpu", "cuda")


def test_its_timer_is_the_hosts_clock(accelerator):
    catalogue = discover().catalogue
    method = choose_method("warmup", accelerator.device, catalogue)
    assert (method.timer.name, method.graph_timer) == ("wall", None)
    with pytest.raises(ConfigError, match="timer 'cold' works on cuda, not on mps"):
        choose_method("cold", accelerator.device, catalogue)


@pytest.mark.parametrize("mode", [slow("forward"), "both"])
def test_a_case_is_verified_timed_and_noted(accelerator, waits, monkeypatch, mode):
    monkeypatch.setattr(runner, "Worker", lambda key, settings, launcher=None: InProcess(key, settings))
    catalogue, request, cases = planned(accelerator, "strided", mode=mode)
    header = RunHeader(
        tool_version="0",
        run_id="test",
        suite="range",
        started_at="now",
        device=accelerator.device,
        environment=snapshot(accelerator),
    )
    sink = SimpleNamespace(start=lambda _: None, row=lambda _: None, finish=lambda _: None)
    record = runner.run(cases, request, catalogue, accelerator, header, sink)
    (row,) = record.rows
    found = row.outcome
    assert isinstance(found, Measured), found
    assert found.verification.passed
    assert [timing.timer for timing in found.timings] == ["wall"]
    assert waits, "the clock stopped before the device had computed"
    (note,) = [note for note in found.notes if note.code == "untuned_device"]
    assert "no kernel of dilabench is tuned for mps" in note.message
    assert found.memory.method.startswith("torch.accelerator.max_memory_allocated")
    assert found.memory.workspace_bytes + (found.memory.saved_for_backward_bytes or 0) >= 4000
    assert record.environment.torch["accelerator"] == "mps"
    assert record.environment.fingerprint_hard["device"] == "mps"


def test_an_isolated_case_is_verified_on_its_rows(accelerator):
    catalogue, _, (case,) = planned(accelerator, "strided", mode="both")
    found = measure_isolated(case_spec(case.case, catalogue, 0), HOST, None, 0.01)
    assert found.verification.passed, found.why
    assert [note.code for note in found.notes] == ["untuned_device"]


def test_memory_that_torch_does_not_count_is_left_out(accelerator, monkeypatch):
    def unknown(_device):
        raise RuntimeError("no statistics")

    monkeypatch.setattr(torch.accelerator, "memory_allocated", unknown)
    catalogue, _, (case,) = planned(accelerator, "strided", mode="forward")
    assert measure_isolated(case_spec(case.case, catalogue, 0), HOST, None, 0.01).memory is None


def test_a_limit_that_torch_cannot_set_is_refused(accelerator):
    catalogue, _, (case,) = planned(accelerator, "strided", mode="forward")
    with pytest.raises(ValueError, match="memory of mps cannot be limited"):
        measure_isolated(case_spec(case.case, catalogue, 0), HOST, 2**20, 0.01)


def test_a_call_from_the_host_shows_what_it_did_to_its_inputs():
    def rude(q, k, v):
        q.zero_()
        return k + v

    meta = torch.device("meta")
    q, k, v = (torch.ones(2, 3) for _ in range(3))
    OnHost(rude, HOST)(q, k, v)
    assert not q.any()
    with pytest.raises(ValueError, match="a result is on meta, not on cpu"):
        OnHost(lambda q, k, v: q.to(meta), HOST)(q, k, v)


@pytest.mark.parametrize(
    ("wall_s", "processor_s", "threads", "seconds"),
    [(1.0, 2.0, 2, 1.0), (8.0, 2.0, 2, 1.0), (1.0, 3.0, 2, 1.0), (4.0, 4.0, 1, 4.0)],
    ids=["alone", "other programs have the cores", "threads that wait", "one thread"],
)
def test_a_processors_peak_is_that_of_its_own_time(monkeypatch, wall_s, processor_s, threads, seconds):
    clocks = {"perf_counter_ns": [0, int(wall_s * 1e9)], "process_time_ns": [0, int(processor_s * 1e9)]}
    for name, readings in clocks.items():
        monkeypatch.setattr(device_module.time, name, iter(readings).__next__)
    monkeypatch.setattr(device_module.torch, "get_num_threads", lambda: threads)
    cpu = device_module.Cpu(torch.device("cpu"))
    found = cpu.seconds_of(lambda: None)
    monkeypatch.undo()
    assert found == pytest.approx(seconds)
