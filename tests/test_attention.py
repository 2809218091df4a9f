"""The public library: torch's conventions, autograd, torch.compile, clear refusals."""

import copy
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

from dilabench.attention import DilatedAttention, MultiheadDilatedAttention, dilated_attention
from dilabench.attention import call as library
from dilabench.choice.computation import backend_of, over
from dilabench.choice.ways import Way
from dilabench.contracts import BuildContext
from dilabench.engine.verify.oracle import reference
from dilabench.impls import one_operator
from dilabench.impls.call import written
from dilabench.impls.null_mass import log_zero_keys
from dilabench.impls.union.union import Rows, Union
from dilabench.impls.visible_keys import multiplicity
from dilabench.patterns.dilated import DilatedPattern
from dilabench.workload.spec import Workload
from tests.conftest import slow

BRANCHES: dict[str, Any] = {"segment_lengths": (7, 24), "dilation_rates": (1, 3)}


def tensors(dtype: torch.dtype = torch.float64, kv_heads: int = 5) -> list[Tensor]:
    """q [2, 29, 5, 4], k and v [2, 29, K, 4], requiring gradients."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, 29, heads, 4, generator=generator).to(dtype).requires_grad_()
        for heads in (5, kv_heads, kv_heads)
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "window": (6, 0), "scale": 0.3},
        {"heads": "grouped"},
        {"offset": "blocked", "offset_by": "kv_head"},
        {"padding": "zero_key"},
        {"merge_grad": "detached"},
        {"padding": "zero_key", "merge_grad": "detached", "offset": "blocked"},
        {"backend": "math"},
    ],
    ids=str,
)
@pytest.mark.parametrize("kv_heads", [5, 1])
def test_equals_the_formula(options: dict[str, Any], kv_heads: int) -> None:
    inputs = tensors(kv_heads=kv_heads)
    fields = {name: value for name, value in options.items() if name in DilatedPattern.model_fields}
    workload = Workload.model_validate(
        {
            "pattern": {"kind": "dilated", **BRANCHES, **fields},
            "batch_size": 2,
            "seq_len": 29,
            "num_heads": 5,
            "num_kv_heads": kv_heads,
            "head_dim": 4,
            "dtype": "float64",
            "causal": options.get("causal", False),
            **{name: options[name] for name in ("window", "scale") if name in options},
        }
    )
    expected = reference.build(workload, BuildContext(device=torch.device("cpu")))(*inputs)
    actual = dilated_attention(*inputs, **BRANCHES, **options)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    dout = torch.randn(expected.shape, dtype=torch.float64)
    gradients = zip(torch.autograd.grad(actual, inputs, dout), torch.autograd.grad(expected, inputs, dout), strict=True)
    for gradient, value in gradients:
        torch.testing.assert_close(gradient, value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", [{}, {"padding": "zero_key", "merge_grad": "detached"}, {"causal": True}], ids=str)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_packed_sequences_equal_separate_ones(options: dict[str, Any], as_tensor: bool) -> None:
    bounds = [0, 1, 14, 27, 58]
    q, k, v = (x.detach().flatten(0, 1).requires_grad_() for x in tensors(kv_heads=1))
    packed = dilated_attention(
        q, k, v, cu_seqlens=torch.tensor(bounds, dtype=torch.int32) if as_tensor else bounds, **BRANCHES, **options
    )
    alone = [
        dilated_attention(*(x[None, start:stop] for x in (q, k, v)), **BRANCHES, **options)[0]
        for start, stop in itertools.pairwise(bounds)
    ]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=0, atol=1e-14)
    dout = torch.randn(packed.shape, dtype=torch.float64)
    for gradient, value in zip(
        torch.autograd.grad(packed, (q, k, v), dout),
        torch.autograd.grad(torch.cat(alone), (q, k, v), dout),
        strict=True,
    ):
        torch.testing.assert_close(gradient, value, rtol=0, atol=1e-13)


def test_refuses_packed_tensors_that_do_not_fit() -> None:
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"with cu_seqlens must be \[T, H, D\].*leave out the batch axis"):
        dilated_attention(q, k, v, cu_seqlens=[0, 29], **BRANCHES)
    with pytest.raises(ValueError, match=r"cu_seqlens \[0, 30\] must rise from 0 to 29"):
        dilated_attention(q[0], k[0], v[0], cu_seqlens=[0, 30], **BRANCHES)
    for bounds in ([], torch.tensor([]), torch.tensor([[0, 29]])):
        with pytest.raises(ValueError, match="must be one row of bounds that rise from 0 to 29"):
            dilated_attention(q[0], k[0], v[0], cu_seqlens=bounds, **BRANCHES)


@given(data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_sinks_are_a_key_of_value_zero(data: st.DataObject) -> None:
    """With the sink as one more key of each head, in every row: odd N, D and heads, K < H, zero keys, causal."""
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    N, D = data.draw(st.sampled_from((1, 7, 13, 24))), data.draw(st.integers(1, 5))
    H, causal = kv_heads * group, data.draw(st.booleans())
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    q, k, v, dout = (
        torch.randn(2, N, heads, D, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (H, kv_heads, kv_heads, H)
    )
    sink = torch.randn(H, generator=generator, dtype=torch.float64).requires_grad_()
    options: dict[str, Any] = {
        "segment_lengths": (6, 24),
        "dilation_rates": (data.draw(st.sampled_from((1, 2, 3))), 4),
        "padding": data.draw(st.sampled_from(("masked", "zero_key"))),
        "causal": causal,
    }
    actual = dilated_attention(q, k, v, sink=sink, **options)
    # The formula, differentiated by autograd: log C, the zero keys' log n and the sink are all biases.
    workload = Workload.model_validate(
        {
            "pattern": {"kind": "dilated", **{name: options[name] for name in options if name != "causal"}},
            "batch_size": 2,
            "seq_len": N,
            "num_heads": H,
            "num_kv_heads": kv_heads,
            "head_dim": D,
            "dtype": "float64",
            "causal": causal,
        }
    )
    counts = torch.stack([multiplicity(workload, head, torch.arange(N)) for head in range(H)])
    null = log_zero_keys(workload, torch.device("cpu"))
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(group, 2)) * D**-0.5 + counts.double().log()
    nothing = torch.full((1, H, N), -torch.inf, dtype=torch.float64) if null is None else null
    extra = torch.stack([nothing[0], sink[:, None].expand(H, N)], -1).expand(2, H, N, 2)
    weights = torch.cat([scores, extra], -1).softmax(-1)[..., :N]
    expected = torch.einsum("bhij,bjhd->bihd", weights, v.repeat_interleave(group, 2))
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    leaves = (q, k, v, sink)
    for gradient, value in zip(
        torch.autograd.grad(actual, leaves, dout), torch.autograd.grad(expected, leaves, dout), strict=True
    ):
        torch.testing.assert_close(gradient, value, rtol=1e-10, atol=1e-10)


DETACHED: dict[str, Any] = {**BRANCHES, "merge_grad": "detached", "padding": "zero_key"}


def test_a_detached_backward_computes_no_branch_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    attend = Union._attend

    def counted(self: Union, rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(tuple(q.shape))
        return attend(self, rows, q, k, v)

    monkeypatch.setattr(Union, "_attend", counted)
    inputs = tensors()
    out = dilated_attention(*inputs, **DETACHED)
    branches = len(calls)
    gradients = torch.autograd.grad(out.square().sum(), inputs)
    assert branches
    assert len(calls) == branches
    # Nothing but speed hangs on it: the operator, which the compiler takes, computes branches again.
    monkeypatch.setattr(library, "is_plain_eager_call", lambda *_: False)
    again = torch.autograd.grad(dilated_attention(*inputs, **DETACHED).square().sum(), inputs)
    assert len(calls) == 3 * branches
    for gradient, value in zip(gradients, again, strict=True):
        assert torch.equal(gradient, value)


def test_a_detached_merge_of_tensors_that_have_but_a_shape() -> None:
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 29, 5, 4, requires_grad=True) for _ in range(3))
        dilated_attention(q, k, v, **DETACHED).sum().backward()
        assert q.grad is not None
        assert q.grad.shape == q.shape


def test_a_detached_merge_under_a_transform() -> None:
    q, k, v = tensors()
    mapped = torch.func.vmap(lambda x: dilated_attention(x, k, v, **DETACHED))(torch.stack([q, q]))
    assert torch.equal(mapped[1], dilated_attention(q, k, v, **DETACHED))


WAYS: tuple[dict[str, Any], ...] = ({}, DETACHED, {"sink": torch.linspace(-1, 1, 5, dtype=torch.float64)})


@pytest.mark.parametrize("options", WAYS, ids=["exact", "detached", "sink"])
def test_transforms_give_autograds_gradients(options: dict[str, Any]) -> None:
    leaves = tensors()
    loss = lambda *inputs: dilated_attention(*inputs, **{**BRANCHES, **options}).square().sum()  # noqa: E731
    expected = torch.autograd.grad(loss(*leaves), leaves)
    q, k, v = (x.detach() for x in leaves)
    for gradient, value in zip(torch.func.grad(loss, (0, 1, 2))(q, k, v), expected, strict=True):
        torch.testing.assert_close(gradient, value, rtol=0, atol=1e-12)
    each = torch.func.vmap(torch.func.grad(loss), (0, None, None))(torch.stack([q, q]), k, v)
    torch.testing.assert_close(each[1], expected[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", WAYS, ids=["exact", "detached", "sink"])
def test_refuses_derivatives_that_it_has_not(options: dict[str, Any]) -> None:
    """Autograd would take the missing terms for zeros."""
    q, k, v = tensors()

    def attend(x: Tensor) -> Tensor:
        return dilated_attention(x, k, v, **{**BRANCHES, **options})

    gradient = torch.autograd.grad(attend(q).sum(), q, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="first derivatives only"):
        gradient.square().sum().backward()
    for primal in (q, q.detach()):
        with pytest.raises(RuntimeError, match="no forward-mode derivatives"):
            torch.func.jvp(attend, (primal,), (primal,))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward-mode derivatives"):
        attend(forward_ad.make_dual(q.detach(), q.detach()))


def test_refuses_the_derivative_of_a_sinks_gradient() -> None:
    sink = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    out = dilated_attention(*tensors(), sink=sink, **BRANCHES)
    gradient = torch.autograd.grad(out.square().sum(), sink, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="first derivatives only"):
        gradient.sum().backward()


@pytest.mark.parametrize("backend", ["auto", "math"])
def test_autocast_casts_once(backend: str) -> None:
    """Query, key and value before anything runs, and nothing inside."""
    inputs = tensors(torch.float32)
    rounded = [x.detach().bfloat16().requires_grad_() for x in inputs]
    expected = dilated_attention(*rounded, **BRANCHES, backend=backend)
    gradients = torch.autograd.grad(expected.square().sum(), rounded)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = dilated_attention(*inputs, **BRANCHES, backend=backend)
        found = torch.autograd.grad(out.square().sum(), inputs)
    assert torch.equal(out, expected)
    assert all(map(torch.equal, found, (x.float() for x in gradients)))


def test_zero_keys_lie_where_the_query_does() -> None:
    """Not on torch's default device, which may be another."""
    q, k, v = (x.detach()[:, :23] for x in tensors())
    with torch.device("meta"):
        out = dilated_attention(q, k, v, **BRANCHES, padding="zero_key")
    assert out.device == q.device


@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck(causal: bool) -> None:
    inputs = [x[:1, :11, :3, :2].detach().clone().requires_grad_() for x in tensors()]
    assert torch.autograd.gradcheck(lambda q, k, v: dilated_attention(q, k, v, **BRANCHES, causal=causal), inputs)


@pytest.mark.parametrize("with_sink", [slow(False), True])
def test_operators_keep_torchs_rules(with_sink: bool) -> None:
    """Schemas, fake kernels and autograd registration, by torch's own checker."""
    words = "?kind=dilated\x1fsegment_lengths#2\x1fdilation_rates#2"
    options = (words, [7, 24, 1, 3], [], True, [-1, -1], 0.5, [], 0, True, "math", "", [], None)
    inputs, number = tensors(), one_operator.ON_ONE_DEVICE
    sink = torch.randn(5, requires_grad=True) if with_sink else None
    torch.library.opcheck(one_operator._attention_op, (*inputs, sink, None, None, None, number, *options))
    detached, asked = [x.detach() for x in inputs], (number, written(*options))
    torch.library.opcheck(one_operator._forward_op, (*detached, None, None, None, None, *asked))
    results = one_operator._forward_op(*detached, None, None, None, None, *asked)
    for dlse in (None, torch.ones_like(results[1])):
        given = (torch.ones_like(results[0]), dlse, *detached, *results, None, None, None, *asked)
        torch.library.opcheck(one_operator._backward_op, given)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"causal": True}, {"padding": "zero_key", "merge_grad": "detached"}], ids=str)
def test_compiles_without_a_graph_break(options: dict[str, Any]) -> None:
    module = MultiheadDilatedAttention(20, 5, **BRANCHES, norm=True, **options)
    compiled = torch.compile(copy.deepcopy(module), fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 29, 20)
    results = []
    for function in (module, compiled):
        leaf = x.clone().requires_grad_()
        out = function(leaf)
        (out * out.detach().cos()).sum().backward()
        results.append((out, leaf.grad))
    for actual, value in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(actual, value)


@pytest.mark.parametrize(
    ("length", "heads", "segment"),
    [(301, 1, 70), (64, 2, 32)],
    ids=["parts of queries", "gradients that are the kernel's own"],
)
def test_inductor_finds_results_as_it_was_told(length: int, heads: int, segment: int) -> None:
    """Contiguous and apart from each other, whatever kernel is taken."""
    q, k, v, weights = (torch.randn(1, length, heads, 20, requires_grad=True) for _ in range(4))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        lengths = segment, q.shape[1]
        return dilated_attention(q, k, v, segment_lengths=lengths, dilation_rates=(1, 2), window=(21, 0))

    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    expected, actual = (
        (out, *torch.autograd.grad(out, (q, k, v), weights)) for out in (attend(q, k, v), compiled(q, k, v))
    )
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_keeps_the_dtype(dtype: torch.dtype) -> None:
    inputs = tensors(dtype)
    out = dilated_attention(*inputs, **BRANCHES)
    out.sum().backward()
    assert out.dtype == dtype
    assert [x.grad.dtype for x in inputs if x.grad is not None] == [dtype] * 3
    wide = dilated_attention(*(x.double() for x in inputs), **BRANCHES)
    torch.testing.assert_close(out.double(), wide, rtol=0, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout_p": 0.1}, r"dropout_p 0\.1 is not supported.*use 0"),
        ({"backend": "mat"}, r"unknown backend 'mat'; did you mean math"),
        ({"backend": "sdpa-cudnn"}, r"backend 'sdpa-cudnn' cannot serve this call: needs a CUDA GPU"),
        ({"dilation_rates": (1,)}, r"2 segment lengths \[7, 24\] but 1 dilation rates \[1\]"),
        ({"heads": "some"}, r"heads 'some' should be 'all' or 'grouped'"),
        ({"padding": "zero"}, r"padding 'zero' should be 'masked' or 'zero_key'"),
        ({"padding": "zero_key", "dilation_rates": (1, 5)}, r"in segments of 24 at rate 5: 5 does not divide 24.*use"),
        ({"sink": torch.zeros(4)}, r"sink torch.float32 \(4,\) must be one logit per query head.*give \[5\]"),
        ({"sink": torch.zeros(5), "merge_grad": "detached"}, r"use merge_grad='exact'"),
        ({"sink": torch.zeros(5, device="meta")}, r"sink is on meta and query on cpu"),
        ({"window": (3, 1), "causal": True}, r"looks 1 positions ahead but causal"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refuses_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dilated_attention(*tensors(), **{**BRANCHES, **options})


def test_refuses_tensors_that_do_not_fit() -> None:
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"query \(\) must be \[B, N, H, D\]"):
        dilated_attention(q.sum(), k, v, **BRANCHES)
    with pytest.raises(ValueError, match="head dim of 0"):
        dilated_attention(q[..., :0], k[..., :0], v[..., :0], **BRANCHES)
    with pytest.raises(ValueError, match="29 queries over 9 keys"):
        dilated_attention(q, k[:, :9], v[:, :9], **BRANCHES)
    with pytest.raises(ValueError, match=r"key \(1, 29, 5, 4\) must agree with query \(2, 29, 5, 4\)"):
        dilated_attention(q, k[:1], v[:1], **BRANCHES)
    with pytest.raises(ValueError, match=r"equal but for its last dim, \[B, N, K, Dv\]"):
        dilated_attention(q, k, v[:, :, :1], **BRANCHES)
    with pytest.raises(ValueError, match="device, got query float64 on cpu, key float32 on cpu, value float64 on cpu"):
        dilated_attention(q, k.float(), v, **BRANCHES)
    with pytest.raises(ValueError, match="num_heads=5 is not a multiple of num_kv_heads=2"):
        dilated_attention(q, k[:, :, :2], v[:, :, :2], **BRANCHES)


def test_a_module_refuses_unknown_options_when_it_is_made() -> None:
    with pytest.raises(TypeError, match="unknown option casual; known: causal"):
        MultiheadDilatedAttention(20, 5, **BRANCHES, casual=True)  # type: ignore[call-arg]


def test_modules_equal_the_function() -> None:
    q, k, v = tensors()
    module = DilatedAttention(**BRANCHES, causal=True)
    assert torch.equal(module(q, k, v), dilated_attention(q, k, v, **BRANCHES, causal=True))
    assert not list(module.parameters())
    assert str(module) == "DilatedAttention(segment_lengths=(7, 24), dilation_rates=(1, 3), causal=True)"


def test_state_dict_keys_are_stable() -> None:
    """Golden: saved models must load in every later version."""
    module = MultiheadDilatedAttention(20, 5, **BRANCHES, num_kv_heads=1, norm=True)
    assert {name: tuple(value.shape) for name, value in module.state_dict().items()} == {
        "q_proj.weight": (20, 20),
        "q_proj.bias": (20,),
        "k_proj.weight": (4, 20),
        "k_proj.bias": (4,),
        "v_proj.weight": (4, 20),
        "v_proj.bias": (4,),
        "norm.weight": (20,),
        "norm.bias": (20,),
        "out_proj.weight": (20, 20),
        "out_proj.bias": (20,),
    }
    without = MultiheadDilatedAttention(20, 5, **BRANCHES, bias=False)
    assert list(without.state_dict()) == ["q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.weight"]


def test_multihead_trains() -> None:
    torch.manual_seed(0)
    module = MultiheadDilatedAttention(20, 5, **BRANCHES, causal=True)
    x, target = torch.randn(2, 29, 20), torch.randn(2, 29, 20)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = (module(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().item())
    assert losses[-1] < 0.8 * losses[0]


def test_one_choice_serves_packings_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many tokens and about the same lengths; others are chosen for anew."""
    asked: list[Any] = []

    class Packings:
        def of(self, bounds: tuple[int, ...]) -> Any:
            found.append(bounds)
            workload, device = asked[0].replace(cu_seqlens=bounds), torch.device("cpu")
            return over(backend_of("math", Way("gather", None, workload), device), "gather", workload, device)

    def choose(workload: Workload, _device: torch.device) -> tuple[None, Any]:
        asked.append(workload)
        return None, SimpleNamespace(packings=Packings())

    found: list[tuple[int, ...]] = []
    monkeypatch.setattr(library, "automatic", choose)
    library._packings.cache_clear()
    q, k, v = torch.randn(3, 64, 2, 8)
    branches: dict[str, Any] = {"segment_lengths": (8, 16), "dilation_rates": (1, 2)}
    for bounds in ((0, 10, 30, 40, 64), (0, 25, 30, 36, 64), (0, 0, 20, 45, 45, 64)):
        out = dilated_attention(q, k, v, **branches, cu_seqlens=bounds)
        ends = itertools.pairwise(sorted({*bounds}))
        alone = [dilated_attention(*(x[None, a:b] for x in (q, k, v)), **branches, backend="math")[0] for a, b in ends]
        torch.testing.assert_close(out, torch.cat(alone), rtol=1e-5, atol=1e-5)
    assert found == [(0, 10, 30, 40, 64), (0, 25, 30, 36, 64), (0, 20, 45, 64)]
    assert len(asked) == 1
    dilated_attention(q, k, v, **branches, cu_seqlens=range(0, 65, 4))
    assert len(asked) == 2
    library._packings.cache_clear()
