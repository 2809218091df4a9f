"""Decoding over a cache that grows: on a GPU the host waits for nothing, and nothing is compiled again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: no kernel reads lengths on the device")


from dilabench.attention import attention
from dilabench.patterns import DilatedPattern

STEPS, WARM = {"cuda": 1000, "cpu": 40}, 4
# Tokens of padding before the keys of each item.
PADDING = [5, 0]
LONGNET = DilatedPattern(segment_lengths=(64, 256, 1024), dilation_rates=(1, 2, 4))
CALLS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window and sinks": {"window": (127, 0), "sink": torch.linspace(-1, 1, 8)},
    "dilated": {"causal": True, "pattern": LONGNET},
    "behind padding": {"causal": True},
    "dilated behind padding": {"causal": True, "pattern": LONGNET},
    "MLA": {"causal": True, "scale": 192**-0.5},
}
# Heads of queries and of keys, channels of keys and of values.
SHAPES = {"MLA": (8, 1, 576, 512)}


@pytest.fixture
def waiting() -> Iterator[Callable[[str], None]]:
    """Sets what torch does where the host waits for the GPU."""
    yield torch.cuda.set_sync_debug_mode
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")


def graph_of(step: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


# torch says of its mode that it does not detect every wait.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize(
    ("run", "device"),
    [
        pytest.param("eager", "cpu", id="eager on a CPU"),
        *(pytest.param(run, "cuda", id=run, marks=pytest.mark.gpu) for run in ("eager", "CUDA graph", "torch.compile")),
    ],
)
@pytest.mark.parametrize("name", CALLS)
def test_many_steps_equal_the_square(
    compiled_kernels: list[str], waiting: Callable[[str], None], name: str, run: str, device: str
) -> None:
    if run == "torch.compile":
        torch._dynamo.reset()
    options = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in CALLS[name].items()}
    # Items of the batch are of different lengths.
    steps, behind = STEPS[device], 37
    torch.manual_seed(0)
    heads, kv_heads, dim, value_dim = SHAPES.get(name, (8, 2, 64, 64))
    of_queries, of_keys, of_values = (
        torch.randn(2, steps + 2 * WARM + behind, *shape).to(device, torch.bfloat16)
        for shape in ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
    )
    padding = PADDING if "padding" in name else [0, 0]
    keys, values = (x.new_full((2, x.shape[1] + max(PADDING), *x.shape[2:]), torch.nan) for x in (of_keys, of_values))
    for item, (there, first) in enumerate(zip((0, behind), padding, strict=True)):
        here = slice(first, first + there)
        keys[item, here], values[item, here] = of_keys[item, :there], of_values[item, :there]
    lengths = torch.tensor([1, 1 + behind], device=device, dtype=torch.int32)
    firsts = torch.tensor(padding, device=device, dtype=torch.int32)
    results = of_queries.new_zeros((*of_queries.shape[:3], value_dim))

    def attend(query: Tensor) -> Tensor:
        there = torch.stack([firsts, firsts + lengths], 1) if "padding" in name else lengths
        return attention(query, keys, values, key_lengths=there, **options)

    called = torch.compile(attend, fullgraph=True) if run == "torch.compile" else attend

    def step() -> None:
        place = (lengths - 1).long()[:, None, None, None]
        for cache, source in ((keys, of_keys), (values, of_values)):
            here = place.expand(-1, 1, *source.shape[2:])
            cache.scatter_(1, here + firsts[:, None, None, None], source.gather(1, here))
        queries = of_queries.gather(1, place.expand(-1, 1, *of_queries.shape[2:]))
        results.scatter_(1, place.expand(-1, 1, *results.shape[2:]), called(queries))
        lengths.add_(1)

    for _ in range(WARM):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    repeated = graph_of(step) if run == "CUDA graph" else step
    # torch loads its compiler to look.
    graphs = torch._dynamo.utils.counters["stats"].copy() if run == "torch.compile" else None
    compiled_kernels.clear()
    if device == "cuda":
        waiting("error")
    for _ in range(steps):
        repeated()
    if device == "cuda":
        waiting("default")
    assert compiled_kernels == []
    if graphs is not None:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs["unique_graphs"] > 0
    assert lengths.tolist() == [1 + WARM + steps, 1 + WARM + steps + behind]
    for item, first in enumerate((0, behind)):
        there = slice(item, item + 1), slice(0, first + WARM + steps)
        whole = of_queries[there], of_keys[there], of_values[there]
        exact = attention(*(x.double() for x in whole), **options)[:, first:]
        error, of_square = ((x[:, first:] - exact).abs().max() for x in (results[there], attention(*whole, **options)))
        assert error <= 2 * of_square + torch.finfo(torch.bfloat16).eps, (error, of_square)
