"""Cases that are measured alone: chunks, recomputation, the memory limit, and sampled rows that catch mistakes."""

import errno
import sys
import threading
from pathlib import Path

import pytest
import torch

from dilabench.choice.descriptors import load_target
from dilabench.contracts import BuildContext, LoadedBackend
from dilabench.engine.call.chunked_queries import build_in_chunks, checkpointed
from dilabench.engine.call.inputs import InputStore, make_inputs
from dilabench.engine.call.prepared_call import PreparedCall
from dilabench.engine.call.specs import BackendSpec, CaseSpec
from dilabench.engine.worker.client import Worker
from dilabench.engine.worker.isolated_call import measure_isolated, memory_limited, verify_sampled_rows
from dilabench.engine.worker.protocol import MeasureIsolated, WorkerSettings
from dilabench.impls import gather
from dilabench.record import Case, Optimizations
from dilabench.workload.cuts import cut_into, cut_length
from dilabench.workload.spec import Workload
from tests.conftest import slow

CPU = torch.device("cpu")
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: RLIMIT_DATA counts mappings there only")
FLASH = BackendSpec(
    name="sdpa-flash",
    target="dilabench.backends.sdpa.flash:attend",
    backward_target="dilabench.backends.sdpa.flash:attend_backward",
)


def workload_of(**fields):
    shape = {"batch_size": 2, "seq_len": 250, "num_heads": 5, "num_kv_heads": 5, "head_dim": 24, "dtype": "float64"}
    pattern = {"kind": "dilated", "segment_lengths": (24, 48), "dilation_rates": (1, 5)}
    return Workload.model_validate({"pattern": pattern, **shape, **fields})


def context():
    loaded = LoadedBackend("sdpa-flash", load_target(FLASH.target), load_target(FLASH.backward_target))
    return BuildContext(device=CPU, backend=loaded)


def out_and_gradients(function, inputs, dout):
    out = function(inputs.q, inputs.k, inputs.v)
    return out, *torch.autograd.grad(out, inputs.distinct, dout)


@pytest.mark.parametrize("tokens", [48, 96, 144, 240, 1000])
def test_chunks_give_what_the_whole_gives(tokens):
    workload = workload_of(mode="both")
    inputs = make_inputs(workload, "heads", 3, CPU)
    dout = torch.randn_like(inputs.q)
    whole = out_and_gradients(gather.build(workload, context()), inputs, dout)
    chunked = out_and_gradients(build_in_chunks(gather.build, workload, context(), tokens), inputs, dout)
    for one, other in zip(whole, chunked, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)


def test_a_chunk_ends_at_a_cut_or_not_at_all():
    workload = workload_of()
    assert cut_length(workload) == 48
    assert cut_into(workload, 96) == (96, 96, 58)
    with pytest.raises(ValueError, match="cuts lie every 48"):
        build_in_chunks(gather.build, workload, context(), 50)
    dense = workload_of(pattern={"kind": "dense"})
    with pytest.raises(ValueError, match="has no cut"):
        cut_into(dense, 100)
    assert cut_length(workload_of(seq_len=48)) is None


def test_recomputation_changes_no_value():
    workload = workload_of(mode="both")
    inputs = make_inputs(workload, "heads", 4, CPU)
    dout = torch.randn_like(inputs.q)
    function = gather.build(workload, context())
    for one, other in zip(
        out_and_gradients(function, inputs, dout), out_and_gradients(checkpointed(function), inputs, dout), strict=True
    ):
        assert torch.equal(one, other)


def spec_of(workload, target="dilabench.impls.gather:build", **switched):
    case = Case(
        implementation="gather", backend="sdpa-flash", workload=workload, optimizations=Optimizations(**switched)
    )
    return CaseSpec(case=case, target=target, backend=FLASH, seed=11)


@pytest.mark.parametrize("mode", [slow("forward"), "both"])
@pytest.mark.parametrize(
    "switched", [{}, slow({"query_chunk": 96}), {"query_chunk": 96, "offload_inputs": True}], ids=str
)
def test_a_right_call_passes_and_is_weighed_and_timed(mode, switched):
    found = measure_isolated(spec_of(workload_of(mode=mode), **switched), CPU, None, 0.01)
    assert found.verification.passed, found.why
    names = [check.name for check in found.verification.checks]
    tensors = ["out", "dq", "dk", "dv"] if mode == "both" else ["out"]
    before = ["shape", "dtype", "device", "finite", *(one for x in tensors for one in (x, f"{x}_slope"))]
    assert names == [*before, "timed_inputs", *(f"timed_{x}" for x in tensors)]
    assert found.memory.peak_bytes >= found.memory.inputs_bytes > 0
    assert len(found.slot.samples_ns) >= 1


def test_sampled_rows_of_a_long_sequence_pass_with_gradients():
    workload = workload_of(batch_size=1, seq_len=40_000, num_heads=1, num_kv_heads=1, dtype="float32", mode="both")
    workload = workload.replace(pattern={**workload.pattern.model_dump(), "segment_lengths": (600, 1200)})
    found = measure_isolated(spec_of(workload), CPU, None, 0.01)
    assert found.verification.passed, found.why
    assert 24 <= found.verification.sampled_rows <= 64


class Spoiled:
    """A function with a mistake in one place of one of its results."""

    def __init__(self, function, where):
        self.function, self.where = function, where

    def __call__(self, q, k, v):
        out = self.function(q, k, v)
        if self.where == "out":
            return out + torch.zeros_like(out).index_fill_(1, torch.tensor([0]), 0.01)
        if self.where == "finite":
            return out + torch.zeros_like(out).index_fill_(1, torch.tensor([q.shape[1] // 2]), float("nan"))
        if self.where == "dtype":
            return out.float()
        return out[:, 1:] if self.where == "shape" else out + 0 * v


@pytest.mark.parametrize("where", ["out", "finite", "dtype", "shape"])
def test_a_mistake_shows(where):
    call = PreparedCall(spec_of(workload_of()), CPU, InputStore(CPU))
    call.function = Spoiled(call.function, where)
    verification = verify_sampled_rows(call)
    assert next(check.name for check in verification.checks if not check.passed) == where


HERE = Path(__file__).parent.parent / "impls_under_test"


@pytest.mark.parametrize("name", ["every_second_row_when_timed", "zeroes_v_when_timed", "no_gradients_when_timed"])
def test_a_mistake_in_timed_calls_alone_shows(name, monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    mode = "both" if name == "no_gradients_when_timed" else "forward"
    workload = workload_of(pattern={"kind": "dense"}, dtype="float32", mode=mode)
    spec = CaseSpec(case=Case(implementation="adversary", workload=workload), target=f"adversaries:{name}")
    found = measure_isolated(spec, CPU, None, 0.1)
    assert not found.verification.passed
    assert found.why.startswith("timed_")


def test_an_isolated_row_has_checked_timed_calls():
    found = measure_isolated(spec_of(workload_of(mode="both")), CPU, None, 3.0)
    assert found.verification.passed, found.why
    assert found.verification.timed_calls > 1


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.01


@pytest.mark.parametrize("index", [slow(0), 1, slow(2)])
def test_a_wrong_gradient_shows(index):
    call = PreparedCall(spec_of(workload_of(mode="both")), CPU, InputStore(CPU))
    right = call.function

    def wrong(*inputs):
        return right(*(WrongGradient.apply(x) if at == index else x for at, x in enumerate(inputs)))

    call.function = wrong
    failing = [check.name for check in verify_sampled_rows(call).checks if not check.passed]
    assert failing == [("dq", "dk", "dv")[index]]


@ON_LINUX
def test_the_limit_makes_a_large_allocation_fail_and_ends_with_its_block():
    with memory_limited(CPU, 32 * 2**20):
        torch.empty(16 * 2**20, dtype=torch.uint8).fill_(1)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.empty(2**28, dtype=torch.uint8)
    torch.empty(2**28, dtype=torch.uint8)
    with memory_limited(CPU, None):
        torch.empty(2**28, dtype=torch.uint8)


@ON_LINUX
@pytest.mark.parametrize(("mode", "limit"), [slow("forward", 8), ("both", 14)])
def test_nothing_of_the_measuring_comes_out_of_the_limit(mode, limit):
    # Each tensor is half a MiB. In a fresh process, for torch has been used in this one.
    worker = Worker("", WorkerSettings(device="cpu")).meet()
    try:
        spec = spec_of(workload_of(mode=mode))
        command = MeasureIsolated(spec=spec, limit_bytes=limit * 2**20, seconds=0.01)
        reply = worker.ask(command, timeout_s=60.0)
    finally:
        worker.kill()
    assert reply.verification.passed


def start_threads():
    """More at a time than the C library keeps stacks of threads that have ended, which need no memory."""
    over = threading.Event()
    try:
        for _ in range(16):
            threading.Thread(target=over.wait).start()
    finally:
        over.set()


@ON_LINUX
def test_a_thread_without_room_is_out_of_memory_and_one_refused_otherwise_is_not(monkeypatch):
    with pytest.raises(MemoryError, match="none is left for a thread"), memory_limited(CPU, 2**20):
        start_threads()
    start_threads()
    with pytest.raises(MemoryError, match="none is left for a thread"), memory_limited(CPU, 2**20):
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
    with pytest.raises(RuntimeError, match="no kernel"), memory_limited(CPU, 2**20):
        raise RuntimeError("no kernel")

    def refused(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(RuntimeError, match="can't start"), memory_limited(CPU, 2**30):
        start_threads()
