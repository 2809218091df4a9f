"""lse is differentiable: for every pattern, and where results over parts of the keys are merged by it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dilabench.attention import attention, block_sparse_attention, dilated_attention
from dilabench.patterns import ColumnBoundsPattern, SelectedBlocksPattern, WindowSinkPattern

BRANCHES = {"segment_lengths": (7, 24), "dilation_rates": (1, 3)}
WINDOW_SINK = WindowSinkPattern(sinks=2, window_size=4)
DOCUMENTS = ColumnBoundsPattern(document_lengths=(4, 7))
SELECTED, INDICES = SelectedBlocksPattern(block_size=1), torch.arange(33).view(11, 3, 1) // 4
BLOCKS = torch.tensor([[0], [1], [1]])

Call = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
CALLS: dict[str, Call] = {
    "dense": lambda q, k, v: attention(q, k, v, return_lse=True),
    "window": lambda q, k, v: attention(q, k, v, causal=True, window=(3, 0), return_lse=True),
    "last_rows": lambda q, k, v: attention(q[:, -4:], k, v, causal=True, return_lse=True),
    "dilated": lambda q, k, v: dilated_attention(q, k, v, **BRANCHES, return_lse=True),  # type: ignore[arg-type]
    "zero_key": lambda q, k, v: dilated_attention(q, k, v, **BRANCHES, padding="zero_key", return_lse=True),  # type: ignore[arg-type]
    "window_sink": lambda q, k, v: attention(q, k, v, pattern=WINDOW_SINK, causal=True, return_lse=True),
    "column_bounds": lambda q, k, v: attention(q, k, v, pattern=DOCUMENTS, causal=True, return_lse=True),
    "block_sparse": lambda q, k, v: block_sparse_attention(q, k, v, block_size=4, density=0.5, return_lse=True),
    "topk_blocks": lambda q, k, v: block_sparse_attention(q, k, v, block_size=4, indices=BLOCKS, return_lse=True),
    "selected_blocks": lambda q, k, v: attention(q, k, v, pattern=SELECTED, indices=INDICES, return_lse=True),
    "sdpa-flash": lambda q, k, v: attention(q, k, v, causal=True, backend="sdpa-flash", return_lse=True),
    "math": lambda q, k, v: attention(q, k, v, causal=True, backend="math", return_lse=True),
}


def _inputs(dtype: torch.dtype = torch.float64, tokens: int = 11, dim: int = 2) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, tokens, 3, dim, dtype=dtype, requires_grad=True) for _ in range(3)]


def _seen(results: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Without the -inf of rows that see no key."""
    out, lse = results
    return out, lse.masked_fill(lse.isinf(), 0.0)


@pytest.mark.parametrize(
    "fast", [pytest.param(True, id="projected"), pytest.param(False, id="whole", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_gradcheck(call: Call, fast: bool) -> None:
    assert torch.autograd.gradcheck(lambda *x: _seen(call(*x)), _inputs(), fast_mode=fast)
    of_lse = [*_inputs()[:2], _inputs()[2].detach()]
    assert torch.autograd.gradcheck(lambda *x: _seen(call(*x))[1], of_lse, fast_mode=True)


def test_gradcheck_of_a_sink_and_of_packed_sequences() -> None:
    sink = torch.randn(3, dtype=torch.float64, requires_grad=True)
    options = {"causal": True, "return_lse": True}
    assert torch.autograd.gradcheck(lambda q, k, v, s: attention(q, k, v, sink=s, **options), [*_inputs(), sink])
    # Two tokens are behind the last sequence.
    assert torch.autograd.gradcheck(
        lambda q, k, v: _seen(attention(q[0], k[0], v[0], cu_seqlens=[0, 4, 9], **options)), _inputs()
    )


def test_gradients_of_a_batch() -> None:
    assert torch.autograd.gradcheck(CALLS["dense"], _inputs(), check_batched_grad=True)


def _merged(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What a caller's own ring computes."""
    parts = [call(q, k[:, some], v[:, some]) for some in (slice(0, 5), slice(5, None))]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    return sum((part * (part_lse - lse).exp().transpose(1, 2)[..., None]).to(part.dtype) for part, part_lse in parts)  # type: ignore[return-value]


@pytest.mark.parametrize("backend", ["auto", "math", "sdpa-flash"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_results_merged_by_a_caller_have_the_gradients_of_the_whole(backend: str, dtype: torch.dtype) -> None:
    inputs = _inputs(dtype, 13, 8)
    dout = torch.randn_like(inputs[0])
    merged = _merged(lambda q, k, v: attention(q, k, v, backend=backend, return_lse=True), *inputs)
    found = torch.autograd.grad(merged, inputs, dout)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    right = torch.autograd.grad(attention(*wide), wide, dout.double())
    bound = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2e-2}[dtype]
    for gradient, expected in zip(found, right, strict=True):
        assert (gradient.double() - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_of_lse_keeps_its_digits(dtype: torch.dtype) -> None:
    """dlse is float32, and the values of half precision that it passes through hold its parts."""
    q, k, v = _inputs(dtype, 16, 8)
    dlse = torch.full((1, 3, 16), 1 + 2.0**-12)
    _, lse = attention(q, k, v, backend="math", return_lse=True)
    found = torch.autograd.grad(lse, q, dlse - 1, retain_graph=True)[0]
    whole, one = (torch.autograd.grad(lse, q, x, retain_graph=True)[0] for x in (dlse, torch.ones_like(dlse)))
    assert found.norm() > 0
    if dtype == torch.float32:
        torch.testing.assert_close(whole - one, found, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("name", ["dense", "dilated", "window_sink"])
def test_under_compilers_and_transforms(name: str) -> None:
    call, inputs = CALLS[name], _inputs()
    out, lse = call(*inputs)
    given = torch.randn_like(out), torch.randn_like(lse)
    right = torch.autograd.grad((out, lse), inputs, given)
    compiled = torch.compile(call, backend="aot_eager")(*inputs)
    transformed = torch.func.vjp(call, *(x.detach() for x in inputs))[1](given)
    for found in (torch.autograd.grad(compiled, inputs, given), transformed):
        for gradient, expected in zip(found, right, strict=True):
            torch.testing.assert_close(gradient, expected)


def test_lse_of_a_detached_merge_is_a_constant() -> None:
    """The weights that branches are merged with are made of it."""
    q, k, v = _inputs()
    _, lse = dilated_attention(q, k, v, **BRANCHES, merge_grad="detached", return_lse=True)  # type: ignore[call-overload]
    assert not lse.requires_grad
