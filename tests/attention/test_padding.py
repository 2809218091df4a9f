"""key_padding and query_padding: the results of masks at the cost of packed sequences."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dilabench.attention import attention
from dilabench.patterns import DilatedPattern

B, N, H, K, D = 3, 29, 4, 2, 8
# Left, right, none of the tokens.
THERE = torch.zeros(B, N, dtype=torch.bool)
THERE[0, 5:], THERE[1, :17] = True, True
HOLES = torch.rand(B, N, generator=torch.Generator().manual_seed(0)) < 0.6


def _inputs(rows: int = N, keys: int = N, value_dim: int = D) -> list[Tensor]:
    torch.manual_seed(1)
    shapes = (B, rows, H, D), (B, keys, K, D), (B, keys, K, value_dim)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def _masked(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """seen: [B, M, N]. Rows without a query, or without a key, are 0."""
    k, v = (x.repeat_interleave(H // K, 2) for x in (k, v))
    seen = (seen & queries[..., None])[:, None]
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * D**-0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    there = seen.any(-1)
    weights = scores.masked_fill(~there[..., None], 0.0).softmax(-1) * there[..., None]
    return torch.einsum("bhij,bjhd->bihd", weights, v), scores.logsumexp(-1)


@pytest.mark.parametrize("padding", [THERE, HOLES], ids=["ends", "holes"])
@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({}, N),
        ({"causal": True}, N),
        ({"causal": True, "softcap": 1.5}, N),
        ({"causal": True, "window": (6, 0)}, N),
        ({"window": (3, 4)}, N),
        ({"causal": True}, 3),
        ({"causal": True, "window": (6, 0)}, 3),
    ],
    ids=str,
)
def test_it_equals_a_mask(padding: Tensor, options: dict[str, Any], rows: int) -> None:
    if padding is HOLES and "window" in options:
        with pytest.raises(ValueError, match="padding between tokens that are there"):
            attention(*_inputs(rows), key_padding=padding, **options)
        return
    inputs = _inputs(rows, value_dim=5)
    queries = padding[:, N - rows :]
    ahead = torch.arange(N) - torch.arange(N - rows, N)[:, None]
    left, right = options.get("window", (-1, -1))
    right = 0 if options.get("causal") else right
    seen = padding[:, None] & ((ahead >= -left) | (left < 0)) & ((ahead <= right) | (right < 0))
    given = {"query_padding": queries} if not options else {}
    out, lse = attention(*inputs, key_padding=padding, return_lse=True, **given, **options)
    scaled = [*inputs]
    expected, expected_lse = _masked(*scaled, seen, queries)
    if "softcap" not in options:
        torch.testing.assert_close((out, lse), (expected, expected_lse))
        dout = torch.randn_like(out)
        gradients = torch.autograd.grad(out, inputs, dout)
        torch.testing.assert_close(gradients, torch.autograd.grad(expected, inputs, dout))
    assert not out[~queries].any()
    assert (lse.transpose(1, 2)[~queries] == -torch.inf).all()


def test_cross_attention_has_its_own_paddings() -> None:
    inputs = _inputs(rows=7)
    queries = torch.rand(B, 7, generator=torch.Generator().manual_seed(2)) < 0.5
    for key_padding, query_padding in ((HOLES, None), (None, queries), (HOLES, queries)):
        out, lse = attention(*inputs, key_padding=key_padding, query_padding=query_padding, return_lse=True)
        seen = torch.ones(B, N, dtype=torch.bool) if key_padding is None else key_padding
        there = torch.ones(B, 7, dtype=torch.bool) if query_padding is None else query_padding
        expected = _masked(*inputs, seen[:, None].expand(B, 7, N), there)
        torch.testing.assert_close((out, lse), expected)


def test_a_pattern_starts_at_the_first_token_that_is_there() -> None:
    pattern = DilatedPattern(segment_lengths=(8, 16), dilation_rates=(1, 2))
    inputs = _inputs()
    out = attention(*inputs, pattern=pattern, key_padding=THERE)
    alone = [attention(*(x[item : item + 1, some] for x in inputs), pattern=pattern) for item, some in _PARTS]
    for (item, some), expected in zip(_PARTS, alone, strict=True):
        torch.testing.assert_close(out[item : item + 1, some], expected)
    assert not out[~THERE].any()


_PARTS = ((0, slice(5, None)), (1, slice(0, 17)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key_padding": THERE.float()}, r"key_padding is torch.float32 \(3, 29\) and must be a bool tensor \[3, 29\]"),
        ({"key_padding": THERE[:, 1:]}, "must be a bool tensor"),
        ({"key_padding": THERE, "query_padding": ~THERE, "causal": True}, "query_padding differs from key_padding"),
        ({"key_padding": THERE, "key_lengths": (1, 2, 3)}, "key_lengths with key_padding"),
        ({"key_padding": THERE.to("meta")}, "key_padding is on meta and query on cpu"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(*_inputs(), **options)


def test_a_compiled_graph_breaks_at_the_call() -> None:
    inputs = _inputs()
    call = torch.compile(lambda q, k, v: attention(q, k, v, causal=True, key_padding=THERE) * 2, backend="eager")
    torch.testing.assert_close(call(*inputs), attention(*inputs, causal=True, key_padding=THERE) * 2)
