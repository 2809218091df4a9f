"""Under torch.compile, a computation is one operator: one graph, no break, the results of the plain call."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dilabench.attention import attention, dilated_attention
from dilabench.backends import math
from dilabench.backends.sdpa import flash as sdpa_flash
from dilabench.contracts import AttentionFn, BuildContext, LoadedBackend
from dilabench.impls import gather, one_operator, operator_rules, strided
from dilabench.workload.spec import Workload
from tests.conftest import half_are_slow, slow

# Heads that no rate divides, a short last segment, shared keys.
WORKLOAD = Workload.model_validate(
    {
        "pattern": {"kind": "dilated", "segment_lengths": (16, 48, 200), "dilation_rates": (1, 3, 8)},
        "batch_size": 2,
        "seq_len": 97,
        "num_heads": 6,
        "num_kv_heads": 3,
        "head_dim": 8,
        "causal": True,
    }
)
BACKENDS = {
    "math": LoadedBackend("math", math.attend, math.attend_backward),
    "sdpa-flash": LoadedBackend("sdpa-flash", sdpa_flash.attend, sdpa_flash.attend_backward),
}


def context(backend: str = "math") -> BuildContext:
    return BuildContext(device=torch.device("cpu"), backend=BACKENDS[backend])


def inputs() -> tuple[Tensor, ...]:
    """q, k and v, of which k and v are slices of one packed projection."""
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(2, 97, 6, 8, generator=generator).requires_grad_()
    packed = torch.randn(2, 97, 6, 8, generator=generator).requires_grad_()
    return q, packed[:, :, :3], packed[:, :, 3:]


def results(function: AttentionFn) -> list[Tensor]:
    """out, dq, dk, dv."""
    q, k, v = inputs()
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(5))
    out = function(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("backend", "build"),
    half_are_slow(BACKENDS, [gather.build, strided.build]),
    ids=lambda value: getattr(value, "__module__", value),
)
def test_is_one_graph_and_gives_the_same(build: Any, backend: str) -> None:
    function = build(WORKLOAD, context(backend))
    explanation = torch._dynamo.explain(function)(*inputs())
    assert (explanation.graph_count, explanation.graph_break_count) == (1, 0)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(results(compiled), results(function), strict=True):
        assert torch.equal(actual, expected)


def test_lse_carries_no_gradient() -> None:
    function = strided.build(WORKLOAD, context())
    _, lse = torch.compile(function.with_lse, fullgraph=True, backend="aot_eager")(*inputs())
    assert not lse.requires_grad
    assert torch.equal(lse, function.with_lse(*inputs())[1])


def test_a_second_derivative_is_refused() -> None:
    """Also where the gradient of out is a constant, and autograd sees nothing to differentiate."""
    q, k, v = inputs()
    out = strided.build(WORKLOAD, context())(q, k, v)
    for loss in (out.square().sum(), out.sum()):
        (dq,) = torch.autograd.grad(loss, q, create_graph=True)
        with pytest.raises(RuntimeError, match="first derivatives only"):
            (loss + dq.sum()).backward()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_detached_merge_is_not_one_operator_and_gives_the_same() -> None:
    workload = WORKLOAD.replace(pattern={**WORKLOAD.pattern.model_dump(), "merge_grad": "detached"})
    function = strided.build(workload, context())
    for actual, expected in zip(results(torch.compile(function, backend="eager")), results(function), strict=True):
        assert torch.equal(actual, expected)


def test_each_computation_has_an_operator_of_its_own() -> None:
    """Two of the same shapes share what was compiled, not what they compute."""
    causal, full = (strided.build(WORKLOAD.replace(causal=causal), context()) for causal in (True, False))
    for function in (causal, full):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        assert torch.equal(results(compiled)[0], results(function)[0])


def test_operators_keep_torchs_rules() -> None:
    """Schemas, fake kernels and autograd registration, by torch's own checker."""
    function = strided.build(WORKLOAD, context())
    plain = tuple(x.detach().clone().requires_grad_() for x in inputs())
    torch.library.opcheck(
        one_operator._attention_op, (*plain, None, None, None, None, function.number, *one_operator._NO_CALL)
    )
    detached = tuple(x.detach() for x in plain)
    torch.library.opcheck(one_operator._forward_op, (*detached, None, None, None, None, function.number, ""))
    results = one_operator._forward_op(*detached, None, None, None, None, function.number, "")
    for of_lse in (None, torch.ones_like(results[1])):
        given = (torch.ones_like(results[0]), of_lse, *detached, *results, None, None, None, function.number, "")
        torch.library.opcheck(one_operator._backward_op, given)


def test_a_computation_that_is_gone_is_told() -> None:
    number = strided.build(WORKLOAD, context()).number
    with pytest.raises(RuntimeError, match="attention function or the SequenceShards of this call are gone; keep them"):
        one_operator._attention_op(*inputs(), None, None, None, None, number, *one_operator._NO_CALL)


def test_one_graph_takes_any_bounds_in_a_tensor() -> None:
    torch._dynamo.reset()
    graphs = []

    def attend(q: Tensor, k: Tensor, v: Tensor, bounds: Any) -> Tensor:
        return dilated_attention(q, k, v, segment_lengths=(8, 16), dilation_rates=(1, 2), cu_seqlens=bounds)

    def count(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(attend, backend=count, fullgraph=True)
    several = [(0, 5, 30), (0, 7, 9, 30), (0, 1, 2, 3, 30), (0, 30), (0, 0, 11, 25), (0, 4, 8, 12, 16, 30)]
    for bounds in [*several, *((0, at, 2 * at, 30) for at in range(6, 12))]:
        q, k, v = (torch.randn(30, 2, 8, requires_grad=True) for _ in range(3))
        found = []
        for function, given in ((compiled, torch.tensor(bounds)), (attend, bounds)):
            out = function(q, k, v, given)
            found.append((out, *torch.autograd.grad(out.cos().sum(), (q, k, v))))
        assert all(map(torch.equal, *found))
    # Of so many bounds, and of any number.
    assert len(graphs) <= 2
    torch._dynamo.reset()


@pytest.mark.parametrize("fullgraph", [True, slow(False)])
def test_packings_are_right_up_to_torchs_limit_of_graphs_which_is_told(
    fullgraph: bool, caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    operator_rules._packings.clear()
    x = torch.randn(16, 2, 8)

    def attend(x: Tensor, bounds: Any) -> Tensor:
        return attention(x, x, x, cu_seqlens=bounds, causal=True)

    compiled = torch.compile(attend, backend="eager", fullgraph=fullgraph)
    limit = torch._dynamo.config.recompile_limit
    with torch._dynamo.config.patch(recompile_limit=4):
        for at in range(1, 5):
            assert torch.equal(compiled(x, (0, at, 16)), attend(x, (0, at, 16)))
            # Of a list that comes again nothing is compiled.
            assert torch.equal(compiled(x, (0, at, 16)), attend(x, (0, at, 16)))
            assert ("4 lists cu_seqlens are compiled" in caplog.text) == (at == 4)
        assert "raise torch._dynamo.config.recompile_limit" in caplog.text
        if fullgraph:
            with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
                compiled(x, (0, 5, 16))
        else:
            assert torch.equal(compiled(x, (0, 5, 16)), attend(x, (0, 5, 16)))
    assert torch._dynamo.config.recompile_limit == limit
    torch._dynamo.reset()
