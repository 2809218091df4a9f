"""Native sparse attention against the paper's equations, written out by whole matrices, with all gradients."""

import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dilabench.attention import BlockCompression, NativeSparseAttention, native_sparse_attention

N, H, K, D = 93, 6, 2, 8
LENGTH, STRIDE, BLOCK, TOP_K, WINDOW = 16, 8, 32, 3, 11
OPTIONS = {
    "compression_length": LENGTH,
    "compression_stride": STRIDE,
    "block_size": BLOCK,
    "top_k": TOP_K,
    "window": WINDOW,
}


def inputs(length: int = N) -> dict[str, Tensor]:
    """Tensors in float64: keys and values of each branch, and gates."""
    generator = torch.Generator().manual_seed(0)
    count = max(0, (length - LENGTH) // STRIDE + 1)
    shapes = {
        "query": (2, length, H, D),
        "key": (2, length, K, D),
        "value": (2, length, K, D),
        "gates": (2, length, H, 3),
        "compressed_key": (2, count, K, D),
        "compressed_value": (2, count, K, D),
        "window_key": (2, length, K, D),
        "window_value": (2, length, K, D),
    }
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for name, shape in shapes.items()
    }


def shares(query: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
    """[B, K, G, N, M] of query [B, N, H, D] over keys [B, M, K, D]; seen [B or 1, K or 1, N, M]."""
    scores = torch.einsum("bikgd,bjkd->bkgij", query.unflatten(2, (K, -1)), keys) * D**-0.5
    return scores.masked_fill(~seen[:, :, None], -torch.inf).softmax(-1).nan_to_num(0.0)


def by_equations(given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """out, and which blocks are selected, [B, K, N, n]."""
    query, length = given["query"], given["query"].shape[1]
    token = torch.arange(length)
    count, blocks = given["compressed_key"].shape[1], -(-length // BLOCK)
    # Equation 7: a compressed key of tokens i·d to i·d + l - 1 is there once they are.
    complete = torch.arange(count) * STRIDE + LENGTH - 1 <= token[:, None]
    compressed = shares(query, given["compressed_key"], complete[None, None])
    # Equation 9, whose indices count from 1: sum over m < l'/d and n < l/d of p[(l'/d) j - m - n]; equation 10.
    importance = torch.zeros(2, K, length, blocks, dtype=torch.float64)
    for j in range(1, blocks + 1):
        for m in range(BLOCK // STRIDE):
            for n in range(LENGTH // STRIDE):
                at = BLOCK // STRIDE * j - m - n
                if 1 <= at <= count:
                    importance[..., j - 1] += compressed[..., at - 1].sum(2).detach()
    own = (token // BLOCK)[:, None]
    block = torch.arange(blocks)
    always = (block == 0) | (block == own) | (block == own - 1)
    importance = importance.masked_fill(always, torch.inf).masked_fill(block > own, -torch.inf)
    chosen = torch.zeros_like(importance, dtype=torch.bool)
    chosen.scatter_(-1, importance.topk(min(TOP_K, blocks)).indices, True)
    chosen &= block <= own
    causal = token <= token[:, None]
    selected = shares(query, given["key"], chosen[..., token // BLOCK] & causal)
    near = shares(query, given["window_key"], (causal & (token > token[:, None] - WINDOW))[None, None])
    values = given["compressed_value"], given["value"], given["window_value"]
    parts = [torch.einsum("bkgij,bjkd->bikgd", p, v) for p, v in zip((compressed, selected, near), values, strict=True)]
    out = sum(part.flatten(2, 3) * gate[..., None] for part, gate in zip(parts, given["gates"].unbind(-1), strict=True))
    return out, chosen


@pytest.mark.parametrize("length", [N, 10, 1])
def test_out_and_all_gradients_are_those_of_the_equations(length: int) -> None:
    given = inputs(length)
    wanted, _ = by_equations(given)
    out = native_sparse_attention(**given, **OPTIONS)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tensors = [x for x in given.values() if x.numel()]
    torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-10)
    found = torch.autograd.grad(out, tensors, dout)
    for mine, other in zip(found, torch.autograd.grad(wanted, tensors, dout), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-10)


def test_indices_replace_the_selection() -> None:
    given = inputs()
    _, chosen = by_equations(given)
    blocks = torch.arange(chosen.shape[-1]).where(chosen, -1).transpose(1, 2)
    out = native_sparse_attention(**given, **OPTIONS)
    torch.testing.assert_close(native_sparse_attention(**given, **OPTIONS, indices=blocks), out)
    other = native_sparse_attention(**given, **OPTIONS, indices=torch.zeros_like(blocks))
    assert not torch.allclose(other, out)


def test_without_learned_compression_keys_are_means() -> None:
    given = inputs()
    means = {
        f"compressed_{name}": torch.stack(
            [given[name][:, at : at + LENGTH].mean(1) for at in range(0, N - LENGTH + 1, STRIDE)], 1
        )
        for name in ("key", "value")
    }
    few = {name: x for name, x in given.items() if not name.startswith("compressed")}
    found = native_sparse_attention(**few, **OPTIONS)
    torch.testing.assert_close(found, native_sparse_attention(**few, **means, **OPTIONS), rtol=1e-9, atol=1e-10)


@pytest.mark.filterwarnings("ignore:.*batching rule for aten..unfold_backward")
def test_vmap_gives_what_each_sample_gives() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, gates = (
        torch.randn(3, 1, 40, heads, width, generator=generator) for heads, width in ((4, 16), (2, 16), (4, 3))
    )

    def loss(q: Tensor, k: Tensor, gates: Tensor) -> Tensor:
        spans = {"compression_length": 8, "compression_stride": 4, "block_size": 16, "top_k": 2, "window": 9}
        return native_sparse_attention(q, k, k, gates, **spans).sin().sum()

    found = torch.vmap(torch.func.grad(loss, (0, 1, 2)))(q, k, gates)
    wanted = zip(*(torch.func.grad(loss, (0, 1, 2))(*each) for each in zip(q, k, gates, strict=True)), strict=True)
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, torch.stack(other))


def test_the_module_trains_every_parameter_and_is_one_graph() -> None:
    torch.manual_seed(0)
    module = NativeSparseAttention(48, H, K, **OPTIONS)
    x = torch.randn(2, N, 48)
    out = module(x)
    assert out.shape == x.shape
    out.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in module.parameters())
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), out)
    # No token depends on a later one.
    changed = x.clone()
    changed[:, 50:] += 1
    torch.testing.assert_close(module(changed)[:, :50], out[:, :50])


def test_compression_is_a_function_of_each_whole_block() -> None:
    compress = BlockCompression(D, LENGTH, STRIDE)
    x = torch.randn(1, N, K, D)
    found = compress(x)
    assert found.shape == (1, (N - LENGTH) // STRIDE + 1, K, D)
    block = x[0, STRIDE : STRIDE + LENGTH, 1] + compress.places
    wanted = compress.out(torch.nn.functional.gelu(compress.hidden(block.flatten())))
    torch.testing.assert_close(found[0, 1, 1], wanted)


BOUNDS = (0, 1, 50, 50, 62, 90)


@pytest.mark.parametrize("given", [(), ("compressed_key", "compressed_value", "window_key", "window_value")])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_packed_sequences_are_those_alone(as_tensor: bool, given: tuple[str, ...]) -> None:
    """Of one token, of none, shorter than a compressed block, and tokens behind the last one; gradients included."""
    found = inputs()
    packed = {name: found[name][0].detach().requires_grad_() for name in ("query", "key", "value", "gates")}
    counts = [max(0, (last - first - LENGTH) // STRIDE + 1) for first, last in pairwise(BOUNDS)]
    for name in given:
        x = found[name].detach()[0]
        packed[name] = (x[: sum(counts)] if name.startswith("compressed") else x).clone().requires_grad_()
    bounds = torch.tensor(BOUNDS) if as_tensor else BOUNDS
    out = native_sparse_attention(**packed, **OPTIONS, cu_seqlens=bounds)
    assert not out[BOUNDS[-1] :].any()
    parts, at = [], 0
    for (first, last), count in zip(pairwise(BOUNDS), counts, strict=True):
        cuts = {name: (at, at + count) if name.startswith("compressed") else (first, last) for name in packed}
        alone = {name: x[None, slice(*cuts[name])] for name, x in packed.items()}
        parts += [native_sparse_attention(**alone, **OPTIONS)[0]] if last > first else []
        at += count
    dout = torch.randn_like(out)
    expected = torch.cat(parts)
    torch.testing.assert_close(out[: BOUNDS[-1]], expected)
    gradients = torch.autograd.grad(out, [*packed.values()], dout)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, [*packed.values()], dout[: BOUNDS[-1]]))


def test_the_module_takes_packed_sequences() -> None:
    """Positions restart in each."""

    def position(x: Tensor) -> Tensor:
        return x * torch.linspace(1, 2, N, dtype=x.dtype)[: x.shape[1], None, None]

    module = NativeSparseAttention(16, 4, 2, **OPTIONS, position=position, dtype=torch.float64)
    x = torch.randn(N, 16, dtype=torch.float64)
    out = module(x, cu_seqlens=BOUNDS)
    alone = [module(x[None, first:last])[0] for first, last in pairwise(BOUNDS) if last > first]
    torch.testing.assert_close(out[: BOUNDS[-1]], torch.cat(alone))
    assert module(x, cu_seqlens=(0, 0)).shape == x.shape


def test_compressed_keys_of_another_number_of_blocks_are_refused() -> None:
    packed = {name: x[0] for name, x in inputs().items()}
    with pytest.raises(ValueError, match=r"must be \[C, K, D\] with C = 7, the blocks of all packed sequences"):
        native_sparse_attention(**packed, **OPTIONS, cu_seqlens=BOUNDS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gates": torch.zeros(2, N, H)}, "one for each branch"),
        ({"window": 0}, "at least 1"),
        ({"compression_stride": 5}, "multiple of"),
        ({"block_size": 36}, "multiple of"),
        ({"block_size": 0}, "block_size 0 must be a whole number of at least 1"),
        ({"top_k": 2.5}, "top_k 2.5 must be a whole number"),
        ({"scale": -1.0}, "scale -1.0 should be a finite number greater than 0"),
        ({"scale": torch.tensor(1.0)}, "scale is a tensor"),
        ({"gates": torch.zeros(2, N, H, 3, device="meta")}, "gates are on meta and query on cpu"),
        ({"query": torch.zeros(2, N, H, D, dtype=torch.float32)}, "must share dtype and device"),
        ({"compressed_key": torch.zeros(2, 3, K, D, dtype=torch.float64)}, "compressed keys"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        native_sparse_attention(**{**inputs(), **OPTIONS, **changes})


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(1, 20, 15), r"x (1, 20, 15) must be [B, N, E] with E = 16, the embed_dim"),
        (torch.zeros(20, 16), r"x (20, 16) must be [B, N, E] with E = 16; packed sequences [T, E] take cu_seqlens"),
        (np.zeros((1, 20, 16)), r"x is a numpy.ndarray; give a tensor [B, N, E]"),
    ],
    ids=["width", "no batch", "numpy"],
)
def test_other_embeddings_are_refused(x: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        NativeSparseAttention(16, 2, 1)(x)


@pytest.mark.parametrize("size", [0, -2, 2.0, "2"])
@pytest.mark.parametrize("name", ["embed_dim", "num_heads", "num_kv_heads", "head_dim"])
def test_sizes_that_are_no_whole_numbers_above_zero_are_refused(name: str, size: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} {size!r} must be a whole number of at least 1"):
        NativeSparseAttention(**{"embed_dim": 16, "num_heads": 2, "num_kv_heads": 1, name: size})


def test_integers_are_refused() -> None:
    x = torch.ones(1, 40, 2, 16, dtype=torch.int32)
    with pytest.raises(ValueError, match="dtype 'int32' should be 'float64'"):
        native_sparse_attention(x, x, x, torch.ones(1, 40, 2, 3))


def test_no_tokens_give_no_rows() -> None:
    q, gates = torch.zeros(2, 0, 4, 16), torch.zeros(2, 0, 4, 3)
    assert native_sparse_attention(q, q, q, gates).shape == q.shape


@pytest.mark.parametrize(
    ("tokens", "bounds"),
    [(5, None), (31, None), (32, None), (40, (0, 20, 40)), (40, (0, 3, 40)), (40, (0, 0))],
    ids=str,
)
def test_every_parameter_has_a_gradient_at_every_length(tokens: int, bounds: tuple[int, ...] | None) -> None:
    """Zero without a compressed block, as DDP needs it."""
    blocks = {"compression_length": 32, "compression_stride": 16, "block_size": 16, "top_k": 3, "window": 9}
    module = NativeSparseAttention(32, 4, 2, **blocks)
    x = torch.randn(tokens, 32) if bounds else torch.randn(2, tokens, 32)
    module(x, cu_seqlens=bounds).square().sum().backward()
    of_parameters = {name: parameter.grad for name, parameter in module.named_parameters()}
    assert [name for name, grad in of_parameters.items() if grad is None] == []
    longest = max(b - a for a, b in pairwise(bounds)) if bounds else tokens
    for name, grad in of_parameters.items():
        if name.startswith("compress_value"):
            assert bool(grad.any()) == (longest >= 32), name
