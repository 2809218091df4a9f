"""Nothing to compute is valid: no batch, no tokens, empty sequences, and tokens beyond the last bound."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dilabench.attention import MultiheadDilatedAttention, attention, block_sparse_attention, dilated_attention
from dilabench.compat.torchscale import DilatedAttention as FromTorchscale
from dilabench.patterns import TopKBlocksPattern
from dilabench.patterns.window_sink import WindowSinkPattern
from tests.attention.every_pattern import CASES, Case

BRANCHES: dict[str, Any] = {"segment_lengths": (16, 64), "dilation_rates": (1, 2)}


def multihead(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = MultiheadDilatedAttention(64, 4, **BRANCHES)((q + k + v).flatten(2))
    return out.unflatten(2, (4, 16))


def torchscale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    args = SimpleNamespace(
        segment_length=[16, 64], dilated_ratio=[1, 2], multiway=False, xpos_rel_pos=True, xpos_scale_base=512
    )
    module = FromTorchscale(args, 64, 4, self_attention=True)
    out: Tensor = module(q.flatten(2), k.flatten(2), v.flatten(2))[0]
    return out.unflatten(2, (4, 16))


ENTRIES: dict[str, Callable[..., Tensor]] = {
    "attention": attention,
    "lse": lambda q, k, v: attention(q, k, v, causal=True, return_lse=True)[0],
    "sink": lambda q, k, v: attention(q, k, v, sink=torch.zeros(4)),
    "compiled": lambda q, k, v: torch.compile(attention, backend="eager", fullgraph=True)(q, k, v),
    "dilated": lambda q, k, v: dilated_attention(q, k, v, **BRANCHES),
    "detached": lambda q, k, v: dilated_attention(q, k, v, merge_grad="detached", padding="zero_key", **BRANCHES),
    "multihead": multihead,
    "torchscale": torchscale,
    "block_sparse": lambda q, k, v: block_sparse_attention(q, k, v, block_size=16),
    "block_sparse sink": lambda q, k, v: block_sparse_attention(q, k, v, block_size=16, sink=torch.zeros(4)),
    "indices": lambda q, k, v: block_sparse_attention(
        q, k, v, block_size=16, indices=torch.zeros(-(-q.shape[1] // 16), 1, dtype=torch.int32)
    ),
    "window_sink": lambda q, k, v: attention(q, k, v, pattern=WindowSinkPattern(sinks=4, window_size=16), causal=True),
}


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES.keys())
@pytest.mark.parametrize("shape", [(0, 64, 4, 16), (2, 0, 4, 16), (0, 0, 4, 16)])
def test_no_batch_and_no_tokens(entry: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
    leaves = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    assert entry(*(x.detach() for x in leaves)).shape == shape
    out = entry(*leaves)
    assert out.shape == shape
    out.sum().backward()
    assert all(x.grad is not None and x.grad.shape == shape for x in leaves)


@pytest.mark.parametrize("options", [{}, {"causal": True, "window": (3, 0)}, BRANCHES, {"sink": None}], ids=str)
@pytest.mark.parametrize("backend", ["auto", "math"])
@pytest.mark.parametrize(
    ("bounds", "tokens", "others"),
    [
        ([0, 0, 3, 3, 5], 5, [0, 3, 5]),
        ([0, 5, 5], 5, [0, 5]),
        ([0, 3, 5], 9, [0, 3, 5]),
        ([0, 0, 4, 4], 9, [0, 4]),
        (torch.tensor([0, 0, 4, 4]), 9, [0, 4]),
        ([0, 0], 0, []),
        ([0], 0, []),
        ([0], 4, []),
        ([0, 0, 0], 4, []),
    ],
    ids=str,
)
def test_empty_sequences_and_tokens_beyond_the_last_bound(
    bounds: Any, tokens: int, others: list[int], backend: str, options: dict[str, Any]
) -> None:
    options = {"segment_lengths": (), "dilation_rates": (), **options}
    leaves = [torch.randn(tokens, 4, 16, requires_grad=True) for _ in range(3)]
    if "sink" in options:
        options["sink"] = torch.randn(4, requires_grad=True)
        leaves.append(options["sink"])
    out, lse = dilated_attention(*leaves[:3], cu_seqlens=bounds, backend=backend, return_lse=True, **options)
    assert (out.shape, lse.shape) == ((tokens, 4, 16), (4, tokens))
    last = others[-1] if others else 0
    assert not out[last:].any()
    if "sink" not in options:
        assert torch.equal(lse[:, last:], torch.full((4, tokens - last), float("-inf")))
    dout = torch.randn(out.shape)
    gradients = torch.autograd.grad(out, leaves, dout)
    assert not any(x[last:].any() for x in gradients[:3])
    if others:
        inside = [x[:last] for x in leaves[:3]]
        expected = dilated_attention(*inside, cu_seqlens=others, backend=backend, return_lse=True, **options)
        # A sink is added to all rows at once, whose last ones are not in a vector's lanes: other last bits.
        exactly: dict[str, float] = {} if "sink" in options else {"rtol": 0, "atol": 0}
        torch.testing.assert_close((out[:last], lse[:, :last]), expected, **exactly)
        of_inside = torch.autograd.grad(expected[0], leaves, dout[:last])
        torch.testing.assert_close(gradients, of_inside, **exactly)


@pytest.mark.parametrize("bounds", [[1, 5], [0, 4, 3], [0, 6], [0, -1]], ids=str)
def test_bounds_that_fall_or_end_beyond_the_tokens_are_refused(bounds: list[int]) -> None:
    q = torch.randn(5, 4, 16)
    with pytest.raises(ValueError, match=r"cu_seqlens \[.*\] must rise from 0 to 5, the tokens T of .* or less"):
        attention(q, q, q, cu_seqlens=bounds)


def test_options_are_checked_where_nothing_is_computed() -> None:
    q = torch.randn(0, 0, 4, 16)
    for options in ({"scale": -1.0}, {"window": (1, 1), "causal": True}):
        with pytest.raises(ValueError, match=next(iter(options))):
            attention(q, q, q, **options)


@pytest.mark.parametrize("case", [x for x in CASES.values() if x.packed], ids=[x for x in CASES if CASES[x].packed])
@pytest.mark.parametrize("ends", [None, (0, 7, 30)], ids=["of queries", "of keys"])
def test_sequences_without_queries_leave_all_rows_behind_them(case: Case, ends: tuple[int, ...] | None) -> None:
    tensors = case.tensors() | {"cu_seqlens": torch.tensor([0, 0, 0], dtype=torch.int32)}
    if isinstance(case.options.get("pattern"), TopKBlocksPattern):
        tensors["indices"] = tensors["indices"][:0]
    leaves = [tensors[name].requires_grad_() for name in ("query", "key", "value")]
    out = case(tensors, **({} if ends is None else {"cu_seqlens_k": ends}))
    assert not out.any()
    assert not any(x.any() for x in torch.autograd.grad(out, leaves, torch.ones_like(out), materialize_grads=True))
