"""Bounds of packed sequences in a tensor: whether they are read, and how often."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dilabench.attention import call as library
from dilabench.attention import dilated_attention, operands
from dilabench.choice.computation import backend_of, over
from dilabench.choice.ways import Way
from dilabench.workload.spec import Workload


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Tokens and longest length of each computation from bounds that stay in their tensor, as on a GPU."""
    asked: list[Workload] = []
    found: list[tuple[int, int]] = []

    class Packings:
        def of(self, bounds: Tensor, tokens: int, longest: int) -> Any:
            found.append((tokens, longest))
            workload = asked[0].replace(cu_seqlens=tuple(sorted({*bounds.tolist()})))
            return over(backend_of("math", Way("gather", None, workload), q.device), "gather", workload, q.device)

    def choose(workload: Workload, _device: torch.device) -> tuple[None, Any]:
        asked.append(workload)
        return None, SimpleNamespace(packings=Packings())

    q = torch.empty(0)
    monkeypatch.setattr(library, "automatic", choose)
    monkeypatch.setattr(operands, "may_stay", lambda _: True)
    library._packings.cache_clear()
    yield found
    library._packings.cache_clear()


PACKED: dict[str, Any] = {"segment_lengths": (8, 16), "dilation_rates": (1, 2)}


def of_each(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, **options: Any) -> Tensor:
    ends = itertools.pairwise(sorted({*bounds.tolist()}))
    parts = [[x[None, a:b] for x in (q, k, v)] for a, b in ends]
    return torch.cat([dilated_attention(*part, **PACKED, **options, backend="math")[0] for part in parts])


@pytest.mark.parametrize("with_sink", [False, True])
def test_bounds_that_stay_on_the_device_are_planned_once(unread: list[tuple[int, int]], with_sink: bool) -> None:
    """For all layers of a model, until they are written to."""
    q, k, v = torch.randn(3, 2064, 2, 8).unbind()
    bounds = torch.tensor([0, 500, 500, 1900, 2064], dtype=torch.int64)
    options: dict[str, Any] = {"sink": torch.randn(2)} if with_sink else {}
    for _ in range(2):
        for _layer in range(2):
            out = dilated_attention(q, k, v, **PACKED, **options, cu_seqlens=bounds, max_seqlen=1400)
            torch.testing.assert_close(out, of_each(q, k, v, bounds, **options), rtol=1e-5, atol=1e-5)
        bounds[1] = 700
    assert unread == [(2064, 2048)] * 2


def test_bounds_of_unsupported_calls_are_read(unread: list[tuple[int, int]]) -> None:
    """Without the longest length, and with another backend."""
    q, k, v = torch.randn(3, 64, 2, 8).unbind()
    bounds = torch.tensor([0, 30, 64])
    out = dilated_attention(q, k, v, **PACKED, cu_seqlens=bounds, max_seqlen=34, backend="math")
    torch.testing.assert_close(out, of_each(q, k, v, bounds), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="max_seqlen is a tensor"):
        dilated_attention(q, k, v, **PACKED, cu_seqlens=bounds, max_seqlen=torch.tensor(34))
    with pytest.raises(ValueError, match="one row of bounds"):
        dilated_attention(q, k, v, **PACKED, cu_seqlens=bounds[None], max_seqlen=34)
    assert not unread


def test_a_graph_takes_any_bounds_and_longest_length(unread: list[tuple[int, int]]) -> None:
    """One for each power of two."""
    from torch._dynamo.testing import CompileCounterWithBackend

    q, k, v = (x.requires_grad_() for x in torch.randn(3, 64, 2, 8).unbind())
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")

    @partial(torch.compile, fullgraph=True, backend=graphs)
    def packed(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int) -> Tensor:
        return dilated_attention(q, k, v, **PACKED, cu_seqlens=bounds, max_seqlen=longest)

    for ends in ((30,), (10, 50), (20, 20, 33), (1,)):
        bounds = torch.tensor([0, *ends, 64])
        longest = int(bounds.diff().max())
        out = packed(q, k, v, bounds, longest)
        right = of_each(q, k, v, bounds)
        torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-5)
        found = torch.autograd.grad(out.square().sum(), (q, k, v))
        torch.testing.assert_close(found, torch.autograd.grad(right.square().sum(), (q, k, v)), rtol=1e-4, atol=1e-4)
    # The first one holds its length for a constant.
    assert graphs.frame_count == 2
    torch._dynamo.reset()
