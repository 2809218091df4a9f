"""torch.compile and CUDA graphs: what they count, what cannot be switched on, and results that stay the caller's."""

import gc

import pytest
import torch

from dilabench.distributed.world import World
from dilabench.engine.call import prepared_call as call_module
from dilabench.engine.call.compile_and_graph import OptimizationUnusableError, compiling, graphed
from dilabench.engine.call.inputs import InputSet, InputStore
from dilabench.engine.call.peak_memory import measure_memory
from dilabench.engine.call.prepared_call import PreparedCall
from dilabench.engine.call.specs import CaseSpec
from dilabench.engine.verify.case_verifier import CaseVerifier
from dilabench.plugins.descriptors import Capabilities, Implementation
from dilabench.record import Case, Optimizations, Skipped
from dilabench.workload.spec import Workload

DENSE = Capabilities(patterns=frozenset({"dense"}))


def test_an_optimization_that_cannot_be_is_skipped_with_its_reason(engine):
    engine.catalogue.implementations.add(Implementation("Graphless", "", "unusable:build", supports=DENSE), "builtin")
    record = engine("Graphless", "honest")
    outcomes = {row.case.implementation: row.outcome for row in record.rows}
    assert outcomes["Graphless"] == Skipped(
        code="unusable_optimization", why="a CUDA graph cannot capture it: it waits for the device"
    )
    assert outcomes["honest"].status == "measured"


def test_what_torch_cannot_compile_is_told_in_its_words():
    with pytest.raises(OptimizationUnusableError, match=r"cannot compile it: backend raised: no luck$"), compiling({}):
        raise torch._dynamo.exc.TorchDynamoException("backend raised:\n\n  no luck\n  much more")


def test_what_cannot_be_compiled_over_ranks_says_that_ranks_may_be_why():
    with (
        pytest.raises(OptimizationUnusableError, match=r"no luck; torch does not .* ranks: leave"),
        compiling({}, True),
    ):
        raise torch._dynamo.exc.TorchDynamoException("backend raised:\n\n  no luck\n  much more")


def test_other_errors_are_left_alone():
    with pytest.raises(ZeroDivisionError), compiling({}):
        raise ZeroDivisionError


def test_graphs_and_breaks_of_one_compilation_are_counted():
    counters = {}
    function = torch.compile(lambda x: x.sin() + 1, backend="eager")
    function(torch.ones(2))
    with compiling(counters):
        torch.compile(lambda x: x.cos() - 1, backend="eager")(torch.ones(3))
    assert counters == {"compile_graphs": 1, "compile_breaks": 0}


@pytest.mark.parametrize(("entries", "pool_bytes"), [(0, 0), (64, 0), (64, 2**20)])
def test_what_is_kept_between_calls_counts_into_the_peak_until_it_is_forgotten(entries, pool_bytes):
    pattern = {"kind": "dilated", "segment_lengths": (64, 192), "dilation_rates": (1, 3)}
    workload = Workload.model_validate(
        {"pattern": pattern, "batch_size": 1, "seq_len": 389, "num_heads": 5, "num_kv_heads": 5, "head_dim": 24}
    )
    optimizations = Optimizations(pattern_cache_entries=entries, buffer_pool_bytes=pool_bytes)
    backend = {"name": "math", "target": "dilabench.backends.math:attend"}
    case = Case(implementation="gather", backend="math", workload=workload, optimizations=optimizations)
    spec = CaseSpec.model_validate({"case": case, "target": "dilabench.impls.gather:build", "backend": backend})
    call = PreparedCall(spec, torch.device("cpu"), InputStore(torch.device("cpu")))
    assert (call.counters()["pattern_cache_bytes"] > 0) == (entries > 0)
    assert (call.counters().get("buffer_pool_held_bytes", 0) > 0) == (pool_bytes > 0)
    assert (call.held_bytes > 0) == (entries > 0)
    assert measure_memory(call).workspace_bytes >= call.held_bytes
    call.forget()
    assert call.held_bytes == 0


# Dynamo looks at the autograd function that it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("optimization", ["compile", "gradient_checkpointing"])
def test_an_optimized_function_of_shards_is_verified_by_its_whole_tensors(optimization, monkeypatch):
    """What is around it has neither shards nor a world of its own."""
    monkeypatch.setattr(call_module, "compiled", lambda function: torch.compile(function, backend="eager"))
    fields = {"pattern": {"kind": "dense"}, "batch_size": 1, "seq_len": 48, "num_heads": 2, "num_kv_heads": 2}
    workload = Workload.model_validate({**fields, "head_dim": 8, "mode": "both"})
    switched = Optimizations.model_validate({optimization: True})
    case = Case(implementation="ring", backend="math", workload=workload, optimizations=switched)
    math = "dilabench.backends.math:"
    backend = {"name": "math", "target": f"{math}attend", "backward_target": f"{math}attend_backward"}
    spec = CaseSpec.model_validate({"case": case, "target": "dilabench.impls.ring.rings:build", "backend": backend})
    device = torch.device("cpu")
    call = PreparedCall(spec, device, InputStore(device), World.single(device))
    verification, why = CaseVerifier(device).verify(call)
    assert verification.passed, why


@pytest.mark.parametrize(
    "target", ["gather:build", "ring.rings:build_zigzag", "ring.gathered:build", "ring.ulysses:build"]
)
def test_what_a_captured_backward_pass_reads_stays_as_long_as_its_results(target):
    fields = {"pattern": {"kind": "dense"}, "batch_size": 1, "seq_len": 48, "num_heads": 2, "num_kv_heads": 2}
    workload = Workload.model_validate({**fields, "head_dim": 8, "causal": True, "mode": "backward"})
    case = Case(implementation="ring", backend="math", workload=workload)
    math = "dilabench.backends.math:"
    backend = {"name": "math", "target": f"{math}attend", "backward_target": f"{math}attend_backward"}
    spec = CaseSpec.model_validate({"case": case, "target": f"dilabench.impls.{target}", "backend": backend})
    device = torch.device("cpu")
    world = World.single(device) if target.startswith("ring") else None
    captured, kept = PreparedCall(spec, device, InputStore(device), world).capturable()
    captured()
    first = kept.gradients
    captured()
    torch.testing.assert_close(kept.gradients, first, rtol=0, atol=0)
    del captured
    again = torch.autograd.grad(kept.out, kept.inputs.distinct, torch.ones_like(kept.out))
    assert all(gradient.abs().sum() > 0 for gradient in again)


def gpu_inputs(seed, grad):
    generator = torch.Generator("cuda").manual_seed(seed)
    return InputSet(
        *(torch.randn(2, 67, 3, 24, generator=generator, device="cuda").requires_grad_(grad) for _ in range(3))
    )


@pytest.mark.gpu
@pytest.mark.parametrize("grad", [False, True])
def test_a_graph_gives_what_the_function_gives_and_keeps_nothing_of_the_callers(grad):
    def function(q, k, v):
        return (q * k.sum(1, keepdim=True)).sin() * v

    first, second = gpu_inputs(1, grad), gpu_inputs(2, grad)
    before = [tensor.detach().clone() for tensor in first.distinct]
    call, kept_bytes = graphed(function, first)
    assert kept_bytes >= first.nbytes
    dout = torch.randn(2, 67, 3, 24, device="cuda")
    found = []
    for inputs in (first, second):
        with torch.set_grad_enabled(grad):
            out = call(inputs.q, inputs.k, inputs.v)
            gradients = torch.autograd.grad(out, inputs.distinct, dout) if grad else ()
        found.append((inputs, out.detach(), gradients))
    for inputs, out, gradients in found:
        wanted = function(inputs.q, inputs.k, inputs.v)
        torch.testing.assert_close(out, wanted.detach())
        if grad:
            torch.testing.assert_close(gradients, torch.autograd.grad(wanted, inputs.distinct, dout))
    assert all(torch.equal(tensor.detach(), old) for tensor, old in zip(first.distinct, before, strict=True))


@pytest.mark.gpu
def test_an_older_graph_that_is_garbage_does_not_end_a_capture():
    x = torch.ones(3, device="cuda")
    older = [torch.cuda.CUDAGraph()]
    with torch.cuda.graph(older[0]):
        x.add_(1)

    def function(q, k, v):
        if older and torch.cuda.is_current_stream_capturing():
            garbage = [older.pop()]
            garbage.append(garbage)
            del garbage
            # More than the collector waits for.
            assert all(not x for x in [[] for _ in range(2 * gc.get_threshold()[0])])
        return q + k * v

    first = gpu_inputs(1, grad=False)
    call, _ = graphed(function, first)
    assert not older
    torch.testing.assert_close(call(first.q, first.k, first.v), first.q + first.k * first.v)


@pytest.mark.gpu
def test_a_function_that_waits_for_the_device_cannot_be_captured_and_harms_nothing():
    stream = torch.cuda.current_stream()
    with pytest.raises(OptimizationUnusableError, match="a CUDA graph cannot capture it"):
        graphed(lambda q, k, v: q * float(k.sum()), gpu_inputs(1, grad=False))
    assert torch.cuda.current_stream() == stream
    assert float(torch.ones(3, device="cuda").sum()) == 3.0
    assert torch.randn(3, device="cuda").isfinite().all()
