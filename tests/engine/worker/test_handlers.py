"""What happens inside a worker, in this process: preparation, modes, memory, kernels, out-of-memory."""

import errno
import os
import re

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from dilabench.comparison.across import compare_across
from dilabench.distributed.world import World
from dilabench.engine.call.buffer_pool import SizedBufferPool
from dilabench.engine.call.inputs import InputStore
from dilabench.engine.call.kernel_trace import kernel_ledger, profiled
from dilabench.engine.call.peak_memory import measure_memory
from dilabench.engine.call.prepared_call import PreparedCall
from dilabench.engine.call.specs import CaseSpec, TimerSpec
from dilabench.engine.timers.wall import Wall
from dilabench.engine.worker import handlers as desk_module
from dilabench.engine.worker.handlers import IDLE_NS, Handlers, is_out_of_memory
from dilabench.engine.worker.protocol import Prepare, Release, WarmUp, WorkerSettings
from dilabench.engine.worker.warmup import WarmUpLimits, WarmUpResult
from dilabench.errors import PluginError
from dilabench.record import Case, Note, Optimizations
from dilabench.stats.decisions.decide import Policy
from dilabench.workload.spec import Workload

CPU = torch.device("cpu")


@pytest.fixture
def spec(dense_case):
    def make(name, **fields):
        optimizations = fields.pop("optimizations", Optimizations())
        case = dense_case(name, **fields).case.model_copy(update={"optimizations": optimizations})
        takes = "embeddings" if name == "Projection" else "heads"
        return CaseSpec(case=case, target=f"misbehaving:{name}", takes=takes, seed=3)

    return make


@pytest.fixture
def prepared(spec):
    def make(name, **fields):
        return PreparedCall(spec(name, **fields), CPU, InputStore(CPU))

    return make


def test_set_up_is_timed_in_parts(prepared):
    call = prepared("honest")
    assert set(call.setup_ns) == {"import", "build", "inputs", "optimize", "first_call"}
    assert call.call_ns >= 1


def test_forward_makes_no_graph(prepared):
    out = prepared("honest").fresh()()
    assert not out.requires_grad


@pytest.mark.parametrize("mode", ["backward", "both"])
def test_gradients_are_those_of_a_random_dout(prepared, mode):
    call = prepared("honest", mode=mode)
    found = call.fresh()()
    inputs = call.inputs(0)
    out = call.function(inputs.q, inputs.k, inputs.v)
    expected = torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), call.output_gradient())
    assert call.output_gradient().std() == pytest.approx(1.0, abs=0.1)
    for gradient, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, wanted)


def test_backward_alone_makes_its_graph_before_the_call(prepared, monkeypatch):
    call = prepared("honest", mode="backward")
    forward_calls = []
    function = call.function
    call.function = lambda *inputs: forward_calls.append(1) or function(*inputs)
    ready = call.fresh()
    assert forward_calls == [1]
    ready()
    assert forward_calls == [1]


def test_parameters_get_gradients_as_well(prepared):
    call = prepared("Projection", mode="both")
    x_gradient, weight_gradient = call.fresh()()
    assert x_gradient.shape == (1, 129, 72)
    assert weight_gradient.shape == (72, 72)


def test_cases_of_a_cell_share_one_set_of_inputs(spec):
    shelf = InputStore(CPU)
    first = PreparedCall(spec("honest"), CPU, shelf)
    second = PreparedCall(spec("noisy"), CPU, shelf)
    assert first.inputs(0).q is second.inputs(0).q
    assert not torch.equal(first.inputs(0).q, first.inputs(1).q)


def test_a_graph_on_a_cpu_is_refused(prepared):
    with pytest.raises(ValueError, match="needs a CUDA device"):
        prepared("honest", optimizations=Optimizations(cuda_graph=True))


@pytest.mark.parametrize("mode", ["forward", "both"])
def test_memory_adds_up_to_its_peak(prepared, mode):
    call = prepared("Projection", mode=mode, seq_len=1023)
    memory = measure_memory(call)
    x_bytes = 1023 * 72 * 4
    assert memory.inputs_bytes == x_bytes * (1 if mode == "forward" else 2)
    assert memory.parameters_bytes == 72 * 72 * 4
    parts = (memory.inputs_bytes, memory.parameters_bytes, memory.workspace_bytes, memory.saved_for_backward_bytes or 0)
    assert sum(parts) == memory.peak_bytes
    if mode == "forward":
        assert memory.saved_for_backward_bytes is None
    else:
        # Projected heads, output and lse at least; the input and the parameters are not counted again.
        assert x_bytes < memory.saved_for_backward_bytes < 5 * x_bytes
    assert memory.method


@pytest.mark.parametrize("mode", ["forward", "both"])
def test_the_call_that_shows_the_kernels_shows_the_same_memory(prepared, mode):
    call = prepared("Projection", mode=mode, seq_len=1023)
    seen = profiled(call.fresh(), CPU, memory=True)
    assert measure_memory(call, seen) == measure_memory(call)
    assert "[memory]" not in [kernel.name for kernel in kernel_ledger(seen, CPU)]


class _KeepsWrapped(torch.autograd.Function):
    """Keeps two tensors of 1 MiB in one wrapper, as DTensors are kept: its own storage has no address."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(TwoTensor(torch.ones(1 << 18), torch.zeros(1 << 18)))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_what_a_wrapper_of_tensors_keeps_for_backward_is_counted(prepared):
    call = prepared("honest", mode="both")
    function = call.function
    before = measure_memory(call).saved_for_backward_bytes
    call.function = lambda q, k, v: _KeepsWrapped.apply(function(q, k, v))
    assert measure_memory(call).saved_for_backward_bytes - before == 2 << 20


def test_the_peak_of_a_call_is_seen_even_when_it_is_freed_inside(prepared):
    """64 MiB live only inside the call."""
    call = prepared("honest")
    function = call.function

    def greedy(q, k, v):
        torch.ones(16 << 20).sum()
        return function(q, k, v)

    before = measure_memory(call).workspace_bytes
    call.function = greedy
    assert measure_memory(call).workspace_bytes - before > 60 << 20


def test_a_fifth_more_memory_is_a_regression(prepared, make_row, make_record):
    call = prepared("honest", batch_size=4, seq_len=4095)
    function = call.function
    before = measure_memory(call)
    # A fifth of the peak's bytes, of four each.
    call.function = lambda q, k, v: (torch.empty(before.peak_bytes // 20), function(q, k, v))[1]
    after = measure_memory(call)
    assert before.source == after.source == "allocator"
    sides = [[make_record([make_row(peak=one.peak_bytes)], run_id=f"{one.peak_bytes}")] for one in (before, after)]
    (pair,) = compare_across(*sides, policy=Policy.for_device("cpu")).pairs
    assert pair.memory.fails_gate


def test_the_ledger_counts_operators(prepared, tmp_path):
    trace = tmp_path / "trace.json"
    kernels = kernel_ledger(profiled(prepared("honest").fresh(), CPU), CPU, trace)
    names = {kernel.name: kernel.count for kernel in kernels}
    assert names["aten::_scaled_dot_product_flash_attention_for_cpu"] == 1
    assert [k.duration_ns for k in kernels] == sorted((k.duration_ns for k in kernels), reverse=True)
    assert "traceEvents" in trace.read_text()


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("x"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.EAGAIN, "Resource temporarily unavailable"), False),
    ],
)
def test_out_of_memory_is_told_from_other_errors(error, memory):
    assert is_out_of_memory(error) == memory


def test_the_desk_tells_what_a_command_raised(spec):
    handlers = Handlers(WorkerSettings(device="cpu"))
    trouble = handlers.answer(Prepare(spec=spec("cannot_build")))
    # With the line of the plug-in: a message alone does not say where.
    assert re.fullmatch(r"RuntimeError: no kernel for head_dim 24 \(/.*/misbehaving\.py:\d+\)", trouble.why)
    assert "second line" in trouble.traceback
    assert not trouble.fatal


def test_an_absurd_allocation_is_out_of_memory(spec):
    handlers = Handlers(WorkerSettings(device="cpu"))
    huge = Workload.model_validate({**spec("honest").case.workload.model_dump(), "seq_len": 2**40})
    case = Case(implementation="honest", workload=huge)
    trouble = handlers.answer(Prepare(spec=spec("honest").model_copy(update={"case": case})))
    assert trouble.code == "out_of_memory"
    assert trouble.why.startswith("out of memory: ")


def test_only_a_device_that_was_idle_has_a_shortest_warm_up(spec, monkeypatch):
    """Clocks rise in the first one; after that, a case is warm as soon as its times have settled."""
    shortest = []
    monkeypatch.setattr(
        "dilabench.engine.worker.handlers.warm_up",
        lambda take, _call_ns, limits: shortest.append(limits.min_s) or WarmUpResult(tuple(take(1)), settled=True),
    )
    handlers, one = Handlers(WorkerSettings(device="cpu")), spec("honest")
    handlers.answer(Prepare(spec=one))
    timing = TimerSpec(name="wall", target=f"{Wall.__module__}:Wall", proves="time")
    command = WarmUp(handle=one.handle, timer=timing, limits=WarmUpLimits(min_s=0.3, max_s=5.0))
    for idle_ns in (0, 0, 2 * IDLE_NS, 0):
        handlers._busy_until_ns -= idle_ns
        assert handlers.answer(command).samples_ns
    assert shortest == [0.3, 0.0, 0.3, 0.0]


class Talkative(Wall):
    """A plug-in's timer with a note of its own."""

    code = "heat"

    def notes(self):
        return (Note(code=self.code, message="it is hot"),)


class Named(Talkative):
    code = "ours:heat"


@pytest.mark.parametrize(("timer", "code"), [("Named", "ours:heat"), ("Talkative", None)])
def test_a_timer_of_a_plug_in_names_its_notes_after_it(spec, timer, code):
    handlers = Handlers(WorkerSettings(device="cpu"))
    one = spec("honest")
    handlers.answer(Prepare(spec=one))
    timing = TimerSpec(name=timer, target=f"{__name__}:{timer}", proves="nothing")
    reply = handlers.answer(WarmUp(handle=one.handle, timer=timing, limits=WarmUpLimits(min_s=0.0, max_s=0.0)))
    if code:
        assert [note.code for note in reply.notes] == [code]
    else:
        assert reply.code == "exception"
        assert "note 'heat' is not one of dilabench's own" in reply.why


def test_what_is_counted_under_a_key_of_nobody_is_refused(prepared):
    call = prepared("honest")
    call._traffic = {"ours:sent_rows_bytes": 1}
    assert call.counters()["ours:sent_rows_bytes"] == 1
    call._traffic = {"sent_rows_bytes": 1}
    with pytest.raises(PluginError, match="counter 'sent_rows_bytes'"):
        call.counters()


@pytest.mark.parametrize(("ranks", "code"), [(1, "exception"), (2, "peer_lost")])
def test_a_rank_that_misses_another_says_so_by_its_code(ranks, code):
    handlers = Handlers(WorkerSettings(device="cpu", world_size=ranks))
    assert handlers._trouble(RuntimeError("[gloo] Connection closed by peer")).code == code
    assert handlers._trouble(ValueError("a fault of its own")).code == "exception"


class Transfers:
    """Stands for the copy engines of a world: keeps the limit, and may have lost a message."""

    def __init__(self, lost: str = "") -> None:
        self.timeout_s, self.lost, self.checks = 300.0, lost, 0

    def check(self) -> None:
        self.checks += 1
        if self.lost:
            raise RuntimeError(self.lost)


def with_transfers(transfers):
    handlers = Handlers(WorkerSettings(device="cpu", world_size=2))
    handlers._world = World(0, 2, CPU, timeout_s=300.0, copies=transfers)
    return handlers


@pytest.mark.parametrize("before", [None, 10.0])
@pytest.mark.parametrize(("timeout_s", "share"), [(None, None), (100.0, 100.0), (1e6, None)])
def test_a_commands_limit_of_waits_ends_with_it(before, timeout_s, share):
    transfers = Transfers()
    handlers = with_transfers(transfers)
    for limit in (before, timeout_s):
        handlers.answer(Release(timeout_s=limit))
    assert transfers.timeout_s == (300.0 if share is None else desk_module.SHARE_OF_TIMEOUT * share)


@pytest.mark.parametrize("lost", ["", "a message did not come"])
def test_a_failed_call_is_fatal_if_a_message_was_lost(lost):
    transfers = Transfers(lost)
    trouble = with_transfers(transfers)._trouble(ValueError("a fault"))
    assert (trouble.fatal, trouble.why, transfers.checks) == (bool(lost), "ValueError: a fault", 1)


def test_a_pool_reuses_the_smallest_buffer_that_fits_and_stays_below_its_bound():
    pool = SizedBufferPool(max_bytes=1 << 12)
    first = pool.take((16, 16), torch.float32, CPU)
    pool.give(first)
    again = pool.take((15, 17), torch.float32, CPU)
    assert again.data_ptr() == first.data_ptr()
    assert again.shape == (15, 17)
    pool.give(again)
    large = pool.take((1 << 14,), torch.uint8, CPU)
    pool.give(large)
    counters = pool.counters()
    assert (counters["buffer_pool_requests"], counters["buffer_pool_reuses"]) == (3, 1)
    assert counters["buffer_pool_held_bytes"] == 1 << 10
    assert counters["buffer_pool_peak_bytes"] == (1 << 10) + (1 << 14)


def test_a_pool_never_lends_one_buffer_twice():
    pool = SizedBufferPool(max_bytes=1 << 20)
    lent = [pool.take((5, 7), torch.float64, CPU) for _ in range(4)]
    assert len({buffer.data_ptr() for buffer in lent}) == 4
    for buffer in lent:
        pool.give(buffer)
    pool.give(torch.empty(3))
    assert len({pool.take((5, 7), torch.float64, CPU).data_ptr() for _ in range(4)}) == 4


@pytest.mark.parametrize(
    ("num_workers", "ranks", "environment", "threads", "compiling"),
    [
        (1, 1, {}, [], None),
        (4, 1, {}, [4], "4"),
        (4, 1, {"LOCAL_WORLD_SIZE": "8"}, [4], "4"),
        (1, 2, {}, [8], "8"),
        (1, 2, {"LOCAL_WORLD_SIZE": "8"}, [2], "2"),
        (4, 2, {}, [2], "2"),
        (1, 2, {"LOCAL_WORLD_SIZE": "32"}, [1], "1"),
        (1, 2, {"OMP_NUM_THREADS": "5"}, [], "8"),
        (1, 2, {"TORCHINDUCTOR_COMPILE_THREADS": "5"}, [8], "5"),
    ],
)
def test_workers_and_ranks_share_the_cores_of_a_machine(
    num_workers, ranks, environment, threads, compiling, monkeypatch
):
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", "TORCHINDUCTOR_COMPILE_THREADS"):
        # Set first, so that what `share_cores` sets is removed after the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = []
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    Handlers(WorkerSettings(device="cpu", num_workers=num_workers, world_size=ranks))
    assert found == threads
    assert os.environ.get("TORCHINDUCTOR_COMPILE_THREADS") == compiling


def test_the_world_is_joined_once(monkeypatch):
    joined = []
    monkeypatch.setattr(desk_module, "share_cores", lambda _: None)
    monkeypatch.setattr(desk_module, "meeting_store", lambda *_: None)
    monkeypatch.setattr(desk_module.World, "join", lambda *_, **__: joined.append(1) or "the world")
    handlers = Handlers(WorkerSettings(device="cpu", world_size=2))
    assert [handlers._joined(), handlers._joined()] == ["the world"] * 2
    assert joined == [1]
