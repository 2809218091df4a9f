"""Decoding on a GPU over a cache that grows there: the host waits for nothing, and nothing is compiled again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: no kernel reads lengths on the device")


from dilabench.attention import attention
from dilabench.patterns import DilatedPattern

pytestmark = pytest.mark.gpu
STEPS, WARM = 1000, 4
LONGNET = DilatedPattern(segment_lengths=(64, 256, 1024), dilation_rates=(1, 2, 4))
CALLS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window and sinks": {"window": (127, 0), "sink": torch.linspace(-1, 1, 8)},
    "dilated": {"causal": True, "pattern": LONGNET},
}


@pytest.fixture
def waiting() -> Iterator[Callable[[str], None]]:
    """Sets what torch does where the host waits for the GPU."""
    yield torch.cuda.set_sync_debug_mode
    torch.cuda.set_sync_debug_mode("default")


def graph_of(step: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


# torch says of its mode that it does not detect every wait.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("run", ["eager", "CUDA graph", "torch.compile"])
@pytest.mark.parametrize("name", CALLS)
def test_a_thousand_steps_equal_the_square(
    compiled_kernels: list[str], waiting: Callable[[str], None], name: str, run: str
) -> None:
    torch._dynamo.reset()
    options = {key: x.cuda() if isinstance(x, Tensor) else x for key, x in CALLS[name].items()}
    # Items of the batch are of different lengths.
    tokens, behind = STEPS + 2 * WARM, 37
    torch.manual_seed(0)
    of_queries, of_keys, of_values = (
        torch.randn(2, tokens + behind, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2)
    )
    keys, values = (torch.full_like(x, torch.nan) for x in (of_keys, of_values))
    for item, there in enumerate((0, behind)):
        keys[item, :there], values[item, :there] = of_keys[item, :there], of_values[item, :there]
    lengths = torch.tensor([1, 1 + behind], device="cuda", dtype=torch.int32)
    results = torch.zeros_like(of_queries)

    def attend(query: Tensor) -> Tensor:
        return attention(query, keys, values, key_lengths=lengths, **options)

    called = torch.compile(attend, fullgraph=True) if run == "torch.compile" else attend

    def step() -> None:
        place = (lengths - 1).long()[:, None, None, None]
        for cache, source in ((keys, of_keys), (values, of_values)):
            here = place.expand(-1, 1, *source.shape[2:])
            cache.scatter_(1, here, source.gather(1, here))
        here = place.expand(-1, 1, *of_queries.shape[2:])
        results.scatter_(1, here, called(of_queries.gather(1, here)))
        lengths.add_(1)

    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    repeated = graph_of(step) if run == "CUDA graph" else step
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compiled_kernels.clear()
    waiting("error")
    for _ in range(STEPS):
        repeated()
    waiting("default")
    assert compiled_kernels == []
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert lengths.tolist() == [1 + WARM + STEPS, 1 + WARM + STEPS + behind]
    for item, first in enumerate((0, behind)):
        there = slice(item, item + 1), slice(0, first + WARM + STEPS)
        whole = of_queries[there], of_keys[there], of_values[there]
        exact = attention(*(x.double() for x in whole), **options)[:, first:]
        error, of_square = ((x[:, first:] - exact).abs().max() for x in (results[there], attention(*whole, **options)))
        assert error <= 2 * of_square + torch.finfo(torch.bfloat16).eps, (error, of_square)
