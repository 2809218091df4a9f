"""Modules with a cache: tokens that come one after another get the results of one call over all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dilabench.attention import (
    DilatedAttention,
    KeyValueCache,
    MultiheadDilatedAttention,
    NativeSparseAttention,
)
from tests.attention.compared import BOUNDS

BRANCHES: dict[str, Any] = {"segment_lengths": (8, 16, 64), "dilation_rates": (1, 2, 4), "causal": True}


@pytest.mark.parametrize("sizes", [(1,) * 40, (17, 1, 1, 20, 1), (40,)], ids=len)
@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "norm": True}, {"window": (9, 0)}], ids=str)
def test_a_module_generates_the_rows_of_the_whole_pass(options: dict[str, Any], sizes: tuple[int, ...]) -> None:
    module = MultiheadDilatedAttention(32, 4, **BRANCHES, **options).double()
    x = torch.randn(2, 40, 32, dtype=torch.float64)
    cache = KeyValueCache(capacity=4)
    with torch.no_grad():
        parts = [module(part, cache=cache) for part in x.split(sizes, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), module(x), rtol=0, atol=1e-12)
    assert len(cache) == 40


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary embeddings of x [B, N, heads, D], whose first token is at position 0."""
    angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None, None] / torch.arange(1, x.shape[3] // 2 + 1)
    first, second = x.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], -1)


SPARSE: dict[str, Any] = {"compression_length": 8, "compression_stride": 4, "block_size": 16, "top_k": 2, "window": 6}


def on(device: str, *dtypes: torch.dtype) -> list[Any]:
    """Parameters of a test: dtypes on a device, those of a GPU marked."""
    marks = [pytest.mark.gpu] if device == "cuda" else []
    return [pytest.param(device, dtype, id=f"{device}-{dtype}", marks=marks) for dtype in dtypes]


@pytest.mark.parametrize(("device", "dtype"), on("cpu", torch.float32) + on("cuda", torch.float32, torch.bfloat16))
@pytest.mark.parametrize("sizes", [(1,) * 40, (17, 1, 1, 20, 1)], ids=len)
def test_a_module_generates_in_every_dtype(device: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    """Beside the whole pass in float64."""
    torch.manual_seed(0)
    # Heads of 16 numbers and more are what kernels of a GPU take.
    exact = MultiheadDilatedAttention(64, 4, **BRANCHES).double()
    module = MultiheadDilatedAttention(64, 4, **BRANCHES).double()
    module.load_state_dict(exact.state_dict())
    module.to(device, dtype)
    x, cache = torch.randn(2, 40, 64, dtype=torch.float64), KeyValueCache(capacity=4)
    with torch.no_grad():
        parts = [module(part, cache=cache) for part in x.to(device, dtype).split(sizes, 1)]
        found, right = torch.cat(parts, 1).cpu().double(), exact(x)
    assert (found - right).norm() <= BOUNDS[dtype] * right.norm()


MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "dilated": lambda: MultiheadDilatedAttention(32, 4, **BRANCHES),
    "native sparse": lambda: NativeSparseAttention(32, 4, 2, **SPARSE),
    "native sparse, rotated": lambda: NativeSparseAttention(32, 4, 2, **SPARSE, position=rotated),
}


@pytest.mark.parametrize("sizes", [(1,) * 90, (3, 1, 50, 4, 32), (90,)], ids=len)
@pytest.mark.parametrize("kind", ["native sparse", "native sparse, rotated"])
def test_compressed_keys_are_kept(kind: str, sizes: tuple[int, ...]) -> None:
    """Only blocks that became whole are compressed, each once."""
    torch.manual_seed(0)
    module = MODULES[kind]().double()
    x = torch.randn(2, 90, 32, dtype=torch.float64)
    compressed = 0

    def count(_module: Any, _inputs: Any, out: torch.Tensor) -> None:
        nonlocal compressed
        compressed += out.shape[1]

    with torch.no_grad():
        whole = module(x)
        cache = KeyValueCache(capacity=4)
        module.compress_key.register_forward_hook(count)
        found = torch.cat([module(part, cache=cache) for part in x.split(sizes, 1)], 1)
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)
    assert cache.compressed is not None
    assert compressed == len(cache.compressed) == (90 - 8) // 4 + 1


@pytest.mark.parametrize("kind", MODULES)
def test_gradients_reach_earlier_tokens(kind: str) -> None:
    module = MODULES[kind]().double()
    x = torch.randn(1, 24, 32, dtype=torch.float64, requires_grad=True)
    cache = KeyValueCache()
    out = torch.cat([module(part, cache=cache) for part in x.split((9, 15), 1)], 1)
    dout = torch.randn_like(out)
    leaves = [x, *module.parameters()]
    results = (torch.autograd.grad(y, leaves, dout) for y in (out, module(x)))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", MODULES)
def test_queries_have_gradients_beside_keys_and_values_without(kind: str) -> None:
    """Later tokens are written behind the keys that the backward pass of earlier ones reads."""
    module = MODULES[kind]().double().requires_grad_(False)
    weights = [module.q_proj.weight.requires_grad_(), module.out_proj.weight.requires_grad_()]
    x = torch.randn(1, 40, 32, dtype=torch.float64)
    cache = KeyValueCache(capacity=64)
    out = torch.cat([module(part, cache=cache) for part in x.split((9, 1, 25, 1, 4), 1)], 1)
    dout = torch.randn_like(out)
    results = (torch.autograd.grad(y, weights, dout) for y in (out, module(x)))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("later", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("earlier", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("kind", MODULES)
def test_a_cache_outlives_the_mode_that_it_was_filled_in(
    kind: str, earlier: Callable[[], Any], later: Callable[[], Any]
) -> None:
    module = MODULES[kind]().double()
    x = torch.randn(2, 23, 32, dtype=torch.float64)
    cache, out = KeyValueCache(capacity=32), []
    # Of as many tokens as no block becomes whole with, too.
    for mode, part in zip((earlier, later, earlier, later), x.split((15, 1, 4, 3), 1), strict=True):
        with mode():
            out.append(module(part, cache=cache))
    for part in out:
        if part.requires_grad:
            part.sum().backward(retain_graph=True)
    torch.testing.assert_close(torch.cat([part.detach().clone() for part in out], 1), module(x).detach())


def test_earlier_results_stay_as_the_memory_grows() -> None:
    cache, tokens = KeyValueCache(capacity=1), torch.randn(3, 20, 2, 4)
    seen = [cache.append(token, token + 1) for token in tokens.split(1, 1)]
    for length, (key, value) in enumerate(seen, 1):
        assert torch.equal(key, tokens[:, :length])
        assert torch.equal(value, tokens[:, :length] + 1)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 1, 2, 4), torch.float32),
        ((3, 1, 2, 5), torch.float32),
        ((3, 1, 1, 4), torch.float32),
        ((3, 1, 2, 4), torch.float64),
    ],
    ids=str,
)
def test_tokens_of_another_kind_are_refused(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    cache = KeyValueCache()
    cache.append(*torch.randn(2, 3, 5, 2, 4))
    with pytest.raises(ValueError, match=r"must be \[B, M, K, D\] of one kind as those before"):
        cache.append(*torch.randn(2, *shape, dtype=dtype))
    assert len(cache) == 5


def test_a_cache_holds_no_packed_sequences() -> None:
    x = torch.randn(9, 32)
    with pytest.raises(ValueError, match="cache with cu_seqlens"):
        MODULES["native sparse"]()(x, cu_seqlens=(0, 9), cache=KeyValueCache())
    module, x = DilatedAttention(**BRANCHES), torch.randn(9, 4, 8)
    with pytest.raises(ValueError, match="cache with cu_seqlens or key_lengths"):
        module(x, x, x, cu_seqlens=(0, 9), cache=KeyValueCache())
