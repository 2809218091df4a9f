"""Tensors whose memory does not hold their values: as torch's own attention has them, by every entry."""

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dilabench.attention import (
    MultiheadDilatedAttention,
    attention,
    block_sparse_attention,
    dilated_attention,
    operands,
)
from dilabench.compat.torchscale import DilatedAttention as FromTorchscale
from dilabench.patterns.window_sink import WindowSinkPattern
from tests.attention.every_pattern import CASES, Case

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]

BRANCHES: dict[str, Any] = {"segment_lengths": (16, 64), "dilation_rates": (1, 2)}
SHAPE = (2, 64, 4, 16)

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


@cache
def made(kind: str, device: str) -> Any:
    torch.manual_seed(0)
    if kind == "module":
        return MultiheadDilatedAttention(64, 4, **BRANCHES).to(device).requires_grad_(False)
    args = SimpleNamespace(
        segment_length=[16, 64], dilated_ratio=[1, 2], multiway=False, layernorm_eps=1e-5, xpos_rel_pos=False
    )
    return FromTorchscale(args, 64, 4, self_attention=True).to(device).requires_grad_(False)


def torchscale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = made("torchscale", q.device.type)(q.flatten(2), k.flatten(2), v.flatten(2))[0]
    return out.unflatten(2, (4, 16))


def module(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = made("module", q.device.type)((q + k + v).flatten(2))
    return out.unflatten(2, (4, 16))


ENTRIES: dict[str, Function] = {
    "attention": attention,
    "flash-cpu": lambda q, k, v: attention(q, k, v, backend="flash-cpu"),
    "lse": lambda q, k, v: attention(q, k, v, causal=True, return_lse=True)[0],
    "sink": lambda q, k, v: attention(q, k, v, sink=q.new_ones(4)),
    "packed": lambda q, k, v: attention(q[0], k[0], v[0], cu_seqlens=(0, 20, 64)),
    "dilated": lambda q, k, v: dilated_attention(q, k, v, **BRANCHES),
    "detached": lambda q, k, v: dilated_attention(q, k, v, merge_grad="detached", **BRANCHES),
    "module": module,
    "torchscale": torchscale,
    "block_sparse": lambda q, k, v: block_sparse_attention(q, k, v, block_size=16, density=0.5),
    "indices": lambda q, k, v: block_sparse_attention(
        q, k, v, block_size=16, indices=torch.arange(4, device=q.device)[:, None]
    ),
    "window_sink": lambda q, k, v: attention(q, k, v, pattern=WindowSinkPattern(sinks=4, window_size=16), causal=True),
}
entries = pytest.mark.parametrize("function", ENTRIES.values(), ids=ENTRIES.keys())


def tensors() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(SHAPE) for _ in range(3)]


@entries
@pytest.mark.parametrize("grad", [False, True])
def test_tensors_without_data_give_shapes(function: Function, grad: bool) -> None:
    real = function(*tensors())
    leaves = [torch.empty(SHAPE, device="meta", requires_grad=grad) for _ in range(3)]
    out = function(*leaves)
    assert out.is_meta
    assert (out.shape, out.dtype) == (real.shape, real.dtype)
    if grad:
        out.sum().backward()
        assert all(x.grad is not None and x.grad.is_meta and x.grad.shape == x.shape for x in leaves)


def zeros(x: Tensor) -> Tensor:
    return torch._efficientzerotensor(tuple(x.shape))


@entries
@pytest.mark.parametrize("unlike", [torch._neg_view, zeros, lambda x: torch.complex(x, x).conj().imag])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_views_and_zero_tensors_count_by_their_values(
    function: Function, unlike: Callable[[Tensor], Tensor], place: int
) -> None:
    given = tensors()
    given[place] = unlike(given[place])
    expected = function(*(torch.zeros(x.shape) + x for x in given))
    torch.testing.assert_close(function(*given), expected, rtol=0, atol=0)


def with_gaps(x: Tensor) -> Tensor:
    """The same numbers, NaN between those of the last dim."""
    return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]


def in_a_larger_tensor(x: Tensor) -> Tensor:
    """The same numbers, NaN before and behind them on each axis but the first."""
    whole = x.new_full((x.shape[0], *(size + 3 for size in x.shape[1:])), torch.nan)
    part = whole[:, 1:-2, 2:-1, 1:-2] if x.ndim == 4 else whole[:, 1:-2, 2:-1]
    return part.copy_(x)


def heads_first(x: Tensor) -> Tensor:
    """The same numbers, with tokens next to channels in memory."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize(
    "laid_out", [with_gaps, *(pytest.param(x, marks=pytest.mark.slow) for x in (in_a_larger_tensor, heads_first))]
)
def test_every_pattern_reads_any_memory_layout(
    laid_out: Callable[[Tensor], Tensor], case: Case, dtype: torch.dtype
) -> None:
    given = case.tensors(dtype)
    names = ("query", "key", "value")

    def results(laid_out: Callable[[Tensor], Tensor]) -> list[Tensor]:
        tensors = given | {name: laid_out(given[name]).requires_grad_() for name in names}
        out = case(tensors)
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
        return [out, *torch.autograd.grad(out, [tensors[name] for name in names], laid_out(dout))]

    bound = {torch.float64: 1e-12, torch.float32: 1e-5}[dtype]
    for result, expected in zip(results(laid_out), results(torch.clone), strict=True):
        torch.testing.assert_close(result, expected, rtol=bound, atol=bound)


@entries
@pytest.mark.parametrize("unlike", [torch._neg_view, zeros])
def test_gradients_of_and_along_views(function: Function, unlike: Callable[[Tensor], Tensor]) -> None:
    leaves = [x.requires_grad_() for x in tensors()]
    dout = torch.randn(function(*leaves).shape)
    along = torch.autograd.grad(function(*leaves), leaves, unlike(dout))
    torch.testing.assert_close(along, torch.autograd.grad(function(*leaves), leaves, torch.zeros(()) + unlike(dout)))
    viewed = torch.autograd.grad(function(torch._neg_view(leaves[0]), *leaves[1:]), leaves, dout)
    torch.testing.assert_close(viewed, torch.autograd.grad(function(-leaves[0], *leaves[1:]), leaves, dout))


@entries
def test_a_jit_trace_holds_the_operator(function: Function) -> None:
    # A module that is made inside of a trace is part of it.
    function(*tensors())
    traced = torch.jit.trace(function, tensors(), check_trace=False)
    leaves = [(x * 2).requires_grad_() for x in tensors()]
    assert "dilabench::attention" in str(traced.inlined_graph)
    out, expected = traced(*leaves), function(*leaves)
    torch.testing.assert_close(out, expected)
    gradients = [torch.autograd.grad(x.sum(), leaves) for x in (out, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("function", [attention, block_sparse_attention])
@pytest.mark.parametrize("grad", [True, False])
def test_what_is_no_tensor_is_refused_by_name(function: Function, grad: bool) -> None:
    q, k, v = tensors()
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=r"key is a numpy\.ndarray; give a tensor"):
        function(q, k.detach().numpy(), v)


@pytest.mark.parametrize("function", [attention, block_sparse_attention])
def test_a_shape_that_looks_like_the_other_layout_warns_once(function: Function) -> None:
    operands._warn_of_layout.cache_clear()
    swapped = [torch.randn(1, 2, 300, 16) for _ in range(3)]
    with pytest.warns(UserWarning, match=r"300 heads of 2 tokens: the layout is \[B, N, H, D\]"):
        function(*swapped)
    # A second warning would be an error.
    function(*swapped)


def test_tensors_on_different_devices_are_refused() -> None:
    q, k, v = tensors()
    for function in (attention, block_sparse_attention):
        with pytest.raises(ValueError, match="share dtype and device"):
            function(q, k, v.to("meta"))


def test_addresses_are_taken_of_what_holds_its_values() -> None:
    from dilabench.kernels.cpu import flash

    if not flash.serves(torch.float32):
        pytest.skip("needs a C++ compiler, none works here")
    mask = flash.Mask(-1, -1, 0.25)
    q, k, v = tensors()
    for x in (q.to("meta"), torch._neg_view(q), zeros(q)):
        with pytest.raises(ValueError, match=r"does not hold its values .*; give a copy"):
            flash.attend(q, x, v, mask)
    with pytest.raises(ValueError, match=r"under torch\.jit\.trace"):
        torch.jit.trace(lambda q, k, v: flash.attend(q, k, v, mask), (q, k, v), check_trace=False)
