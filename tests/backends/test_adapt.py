"""What is changed for a kernel on the way in and undone on the way out, over a kernel that records its inputs."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from dilabench.backends import math
from dilabench.backends.adapt import Plain, adapted
from dilabench.backends.sdpa import cudnn, flash
from dilabench.contracts import LoadedBackend
from dilabench.impls.dense import Dense
from dilabench.impls.one_operator import eager


class Recorder:
    """A kernel that computes through math and keeps what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, ...]] = []
        self.places: list[Tensor | None] = []

    def forward(self, *arguments: Any) -> Any:
        *tensors, call = arguments
        place = {} if call.place is None else {"out": call.place}
        return math.attend(*tensors, **self._options(arguments), **place)

    def backward(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        *tensors, call = arguments
        place = {} if call.place is None else {"dq": call.place}
        return math.attend_backward(*tensors, **self._options(arguments), **place)

    def _options(self, arguments: tuple[Any, ...]) -> dict[str, Any]:
        *tensors, call = arguments
        self.calls.append(tuple(tensors))
        self.places.append(call.place)
        return {"causal": call.band.causal, "window": (call.band.left, call.band.right), "scale": call.scale}


def run(plain: Plain, q: Tensor, k: Tensor, v: Tensor) -> list[tuple[Tensor, ...]]:
    """Forward and backward agree with math; returns what the kernel was given."""
    kernel = Recorder()
    attend, attend_backward = adapted(kernel.forward, kernel.backward, plain)
    options = {"causal": False, "scale": 0.4}
    out, lse = attend(q, k, v, **options)
    right_out, right_lse = math.attend(q, k, v, **options)
    torch.testing.assert_close((out, lse), (right_out, right_lse))
    found = attend_backward(out, q, k, v, out, lse, **options)
    torch.testing.assert_close(found, math.attend_backward(out, q, k, v, out, lse, **options))
    return kernel.calls


def test_a_plain_call_passes_views_through() -> None:
    q, k, v = torch.randn(3, 2, 10, 4, 16, dtype=torch.float64)[:, :, ::2, ::2]
    forward, _ = run(Plain(), q, k, v)
    assert [x.data_ptr() for x in forward] == [x.data_ptr() for x in (q, k, v)]


def test_head_dim_is_padded_with_zeros() -> None:
    q, k, v = torch.randn(3, 2, 5, 4, 13, dtype=torch.float64)
    for call in run(Plain(head_dim_multiple=8), q, k, v):
        assert {x.shape[-1] for x in call if x.ndim == 4} == {16}
        assert not any(x[..., 13:].any() for x in call if x.ndim == 4)


def test_heads_are_repeated_and_their_gradients_summed() -> None:
    q = torch.randn(2, 5, 6, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 5, 3, 8, dtype=torch.float64)
    for call in run(Plain(grouped_heads=False), q, k, v):
        assert {x.shape[2] for x in call if x.ndim == 4} == {6}


def test_a_single_kv_head_is_expanded_without_a_copy() -> None:
    q = torch.randn(2, 5, 6, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 5, 1, 8, dtype=torch.float64)
    forward, _ = run(Plain(grouped_heads=False), q, k, v)
    assert forward[1].data_ptr() == k.data_ptr()


def test_a_large_batch_is_split() -> None:
    q, k, v = torch.randn(3, 7, 3, 2, 8, dtype=torch.float64)
    calls = run(Plain(max_batch=3), q, k, v)
    assert [call[0].shape[0] for call in calls] == [3, 3, 1, 3, 3, 1]


@pytest.mark.parametrize(
    ("rows", "span", "batches"),
    [
        # Gaps count: seven batch items of 48 elements, 96 apart.
        (slice(0, 14, 2), 48, [1] * 7),
        (slice(0, 14, 2), 48 + 2 * 96 - 1, [2, 2, 2, 1]),
        (slice(0, 14, 2), 48 + 2 * 96, [3, 3, 1]),
        (slice(0, 7), 7 * 48, [7]),
    ],
)
def test_a_backward_over_a_long_span_is_split(rows: slice, span: int, batches: list[int]) -> None:
    q, k, v = torch.randn(3, 14, 3, 2, 8, dtype=torch.float64)[:, rows]
    forward, *backward = run(Plain(backward_span=span), q, k, v)
    assert forward[0].shape[0] == 7
    assert [call[0].shape[0] for call in backward] == batches
    *forward, whole = run(Plain(forward_span=span), q, k, v)
    assert [call[0].shape[0] for call in forward] == batches
    assert whole[0].shape[0] == 7


def test_a_batch_item_beyond_reach_is_refused() -> None:
    q, k, v = torch.randn(3, 2, 3, 2, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="spans 48 elements for each batch item, but this kernel can address 47"):
        run(Plain(backward_span=47), q, k, v)


@pytest.mark.parametrize("columns", [slice(1, 9), slice(0, 16, 2)])
def test_what_the_kernel_cannot_read_is_copied(columns: slice) -> None:
    q, k, v = torch.randn(3, 2, 5, 4, 17, dtype=torch.float64)[..., columns]
    for call in run(Plain(alignment_bytes=16), q, k, v):
        assert all(x.data_ptr() % 16 == 0 and x.stride(-1) == 1 for x in call[:3])


def test_half_precision_gradients_of_repeated_heads_are_summed_in_float32() -> None:
    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
        # 256 + 1 is 256 in bfloat16: only a wider sum keeps the ones.
        ones = torch.ones_like(k)
        ones[:, :, 0] = 256
        return q, ones, ones

    _, attend_backward = adapted(Recorder().forward, backward, Plain(grouped_heads=False))
    q = torch.randn(1, 2, 8, 4, dtype=torch.bfloat16)
    k = torch.randn(1, 2, 1, 4, dtype=torch.bfloat16)
    _, dk, dv = attend_backward(q, q, k, k, q, torch.zeros(1, 8, 2), causal=False, scale=1.0)
    assert (dk == torch.tensor(263.0).bfloat16()).all()
    assert (dv == torch.tensor(263.0).bfloat16()).all()
    assert torch.tensor(263.0).bfloat16() != 256


def test_a_mask_over_different_lengths_is_refused() -> None:
    attend, _ = adapted(Recorder().forward, Recorder().backward, Plain())
    q, k = torch.randn(1, 5, 2, 8), torch.randn(1, 7, 2, 8)
    with pytest.raises(ValueError, match=r"5 queries and 7 keys.*math"):
        attend(q, k, k, causal=True, scale=1.0)


@pytest.mark.parametrize(
    ("plain", "goes_to_the_kernel"),
    [
        (Plain(places_results=True), True),
        (Plain(), False),
        (Plain(places_results=True, head_dim_multiple=16), False),
        (Plain(places_results=True, max_batch=2), False),
        (Plain(places_results=True, alignment_bytes=128), False),
    ],
    ids=["as it is", "places nothing", "padded", "in several launches", "not aligned"],
)
def test_results_come_to_their_place_by_the_kernel_or_by_a_copy(plain: Plain, goes_to_the_kernel: bool) -> None:
    kernel = Recorder()
    attend, attend_backward = adapted(kernel.forward, kernel.backward, plain)
    q, k, v, dout = torch.randn(4, 3, 5, 2, 24)
    wholes = torch.zeros(2, 3, 9, 2, 24)
    out, lse = attend(q, k, v, causal=True, scale=0.4, out=wholes[0, :, 3:8])
    right = math.attend(q, k, v, causal=True, scale=0.4)
    dq, dk, dv = attend_backward(dout, q, k, v, out, lse, causal=True, scale=0.4, dq=wholes[1, :, 3:8])
    gradients = math.attend_backward(dout, q, k, v, *right, causal=True, scale=0.4)
    assert [x.data_ptr() for x in (out, dq)] == [x[:, 3:8].data_ptr() for x in wholes]
    torch.testing.assert_close((out, lse), right)
    torch.testing.assert_close((dq, dk, dv), gradients)
    assert all((place is not None) == goes_to_the_kernel for place in kernel.places)


class OfTorch(torch.autograd.Function):
    """Stands for an operator of torch with a derivative, which keeps the gradients that it is given."""

    given: ClassVar[list[Tensor]] = []

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = math.attend(q, k, v, causal=causal, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = {"causal": causal, "scale": scale}
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _dlse: Tensor) -> tuple[Any, ...]:
        OfTorch.given.append(dout)
        return *math.attend_backward(dout, *ctx.saved_tensors, **ctx.options), None, None


def dense_with_a_derivative(plain: Plain, derivative: Any = "of one layout") -> Dense:
    def forward(q: Tensor, k: Tensor, v: Tensor, call: Any) -> tuple[Tensor, Tensor]:
        return OfTorch.apply(q, k, v, call.band.causal, call.scale)

    attend, attend_backward = adapted(forward, Recorder().backward, plain, derivative)
    options = {"causal": True, "window": (-1, -1), "scale": 0.4}
    return Dense(LoadedBackend("of-torch", attend, attend_backward), options)


GRADIENTS = {
    "contiguous": lambda shape: torch.randn(shape, dtype=torch.float64),
    "of a sum": lambda shape: torch.ones((), dtype=torch.float64).expand(shape),
    "heads first": lambda shape: torch.randn(2, 4, 6, 8, dtype=torch.float64).transpose(1, 2),
    "a part of others": lambda shape: torch.randn(2, 6, 4, 16, dtype=torch.float64)[..., 8:],
}


@pytest.mark.parametrize("derivative", ["of one layout", "of any layout"])
@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
def test_torch_differentiates_what_it_can(gradient: Any, derivative: str) -> None:
    """With the bits of the backward pass, and the kernel gets gradients whose rows are as those of out, or any."""
    dense = dense_with_a_derivative(Plain(), derivative)
    leaves = [torch.randn(2, 6, heads, 8, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2)]
    out, lse = eager(dense, *leaves, only_out=True)
    dout = gradient(out.shape)
    OfTorch.given.clear()
    found = torch.autograd.grad(out, leaves, dout)
    (given,) = OfTorch.given
    if derivative == "of any layout":
        # Without a further step in the graph.
        assert given.stride() == dout.stride()
        assert type(out.grad_fn).__name__ == "OfTorchBackward"
    else:
        # Kernels copy gradients whose last axis has gaps.
        assert given.is_contiguous() or given.stride(-1) != 1
    assert not lse.requires_grad
    detached = [x.detach() for x in leaves]
    expected = dense.backward(dout, *detached, *dense.forward(*detached))
    assert all(map(torch.equal, found, expected))


def test_lse_that_is_asked_for_has_its_gradient() -> None:
    """Operators of torch have none for it."""
    dense = dense_with_a_derivative(Plain())
    leaves = [torch.randn(1, 5, heads, 8, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2)]
    assert torch.autograd.gradcheck(dense.with_lse, leaves)


def test_python_differentiates_the_rest() -> None:
    """Queries of another layout, tensors that a kernel cannot read, and an operator without a derivative."""
    OfTorch.given.clear()
    q, k, v = (torch.randn(2, 4, 6, 8).requires_grad_() for _ in range(3))
    strided = [x.transpose(1, 2) for x in (q, k, v)]
    assert dense_with_a_derivative(Plain()).differentiable(*strided) is None
    assert dense_with_a_derivative(Plain(head_dim_multiple=16)).differentiable(q, k, v) is None
    assert dense_with_a_derivative(Plain()).differentiable(*(x.detach() for x in (q, k, v))) is None
    torch.autograd.grad(dense_with_a_derivative(Plain())(*strided).sum(), (q, k, v))
    assert OfTorch.given == []


@pytest.mark.gpu
@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
@pytest.mark.parametrize("backend", [cudnn, flash], ids=["cudnn", "flash"])
def test_operators_of_torch_have_the_bits_of_their_backward_pass(backend: Any, gradient: Any) -> None:
    options = {"causal": True, "window": (-1, -1), "scale": 0.4}
    dense = Dense(LoadedBackend("of-torch", backend.attend, backend.attend_backward), options)
    leaves = [torch.randn(2, 6, heads, 8, device="cuda").half().requires_grad_() for heads in (4, 2, 2)]
    dout = gradient((2, 6, 4, 8)).to("cuda").half()
    out, lse = eager(dense, *leaves, only_out=True)
    assert "WithGradient" not in type(out.grad_fn).__name__
    assert not lse.requires_grad
    detached = [x.detach() for x in leaves]
    results = dense.forward(*detached)
    assert all(map(torch.equal, (out, lse), results))
    expected = dense.backward(dout, *detached, *results)
    # Another layout of the gradient must not meet a plan that cuDNN made for the one before.
    torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)
    found = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    assert all(map(torch.equal, found, expected))
    batched = torch.autograd.grad(out, leaves, torch.stack([dout, dout]), retain_graph=True, is_grads_batched=True)
    assert all(torch.equal(x[1], y) for x, y in zip(batched, expected, strict=True))
    (first,) = torch.autograd.grad(out, leaves[:1], dout, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        torch.autograd.grad(first.sum(), leaves)
    with torch.autograd.graph.save_on_cpu():
        out, _ = eager(dense, *leaves, only_out=True)
    assert all(map(torch.equal, torch.autograd.grad(out, leaves, dout), expected))
