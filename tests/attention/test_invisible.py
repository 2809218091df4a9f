"""What an invisible key may hold (docs/explanation/semantics.md), by every way on a CPU and a GPU."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dilabench.attention import attention, block_sparse_attention, dilated_attention
from dilabench.patterns.window_sink import WindowSinkPattern

N, H, D = 640, 2, 16
# Keys from here on are seen by no row before.
HIDDEN = 333
BRANCHES: dict[str, Any] = {"segment_lengths": (128, 640), "dilation_rates": (1, 2)}
BOUNDS = (0, 100, 400, N)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
WAYS: dict[str, Attend] = {
    "automatic": lambda q, k, v: attention(q, k, v, causal=True),
    "math": lambda q, k, v: attention(q, k, v, causal=True, backend="math"),
    "torch": lambda q, k, v: attention(q, k, v, causal=True, backend="sdpa-flash"),
    "window": lambda q, k, v: attention(q, k, v, causal=True, window=(50, 0)),
    "dilated": lambda q, k, v: dilated_attention(q, k, v, causal=True, **BRANCHES),
    "detached": lambda q, k, v: dilated_attention(q, k, v, causal=True, merge_grad="detached", **BRANCHES),
    "packed": lambda q, k, v: attention(q[0], k[0], v[0], cu_seqlens=BOUNDS, causal=True)[None],
    "blocks": lambda q, k, v: block_sparse_attention(q, k, v, block_size=64, causal=True, density=0.5),
    "window and sinks": lambda q, k, v: attention(
        q, k, v, pattern=WindowSinkPattern(sinks=4, window_size=64), causal=True
    ),
}


# On a GPU dense attention is another package's, and has its rule.
OURS = ("math", "dilated", "detached", "blocks", "window and sinks")
CASES = [
    *(pytest.param(attend, "cpu", id=name) for name, attend in WAYS.items()),
    *(pytest.param(WAYS[name], "cuda", id=f"{name} on cuda", marks=pytest.mark.gpu) for name in OURS),
]
ways = pytest.mark.parametrize(("attend", "device"), CASES)


@pytest.fixture(autouse=True)
def repeatable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same kernels, which add in one order."""
    monkeypatch.setenv("DILABENCH_FIRST_USE", "0")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def results(attend: Attend, device: str, hidden: float | None = None, of: str = "kv") -> list[Tensor]:
    """out and the gradients of the rows that see nothing hidden, where the hidden keys hold this number."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, N, H, D, generator=generator).to(device) for _ in range(4))
    if hidden is not None:
        for x in (k,) * ("k" in of) + (v,) * ("v" in of):
            x[:, HIDDEN:] = hidden
    # Rows that see the hidden keys do not count.
    dout[:, HIDDEN:] = 0
    for x in (q, k, v):
        x.requires_grad_()
    out = attend(q, k, v)
    return [x[:, :HIDDEN].detach() for x in (out, *torch.autograd.grad(out, (q, k, v), dout))]


@ways
def test_any_finite_number_leaves_every_bit_as_it_is(attend: Attend, device: str) -> None:
    assert [*map(torch.equal, results(attend, device, 1e30, "v"), results(attend, device))] == [True] * 4
    # A key that large gives scores of inf to the rows that see it, whose gradients are multiplied with.
    assert torch.equal(results(attend, device, 1e30, "k")[0], results(attend, device)[0])


@ways
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_what_is_not_finite_in_a_key_does_not_reach_out(attend: Attend, device: str, number: float) -> None:
    assert torch.equal(results(attend, device, number, "k")[0], results(attend, device)[0])


@ways
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_what_is_not_finite_in_a_value_gives_nan_or_nothing_at_all(attend: Attend, device: str, number: float) -> None:
    """Never another number; not to rows of the segment, window or document before, nor far from the hidden keys."""
    out, expected = results(attend, device, number, "v")[0], results(attend, device)[0]
    right = (out == expected).all(-1)
    assert out[~right].isnan().all()
    # On a GPU tiles are larger, and a dilated one is of tokens far apart.
    if device == "cpu" and attend not in (WAYS["math"], WAYS["torch"]):
        assert right[:, :100].all()
