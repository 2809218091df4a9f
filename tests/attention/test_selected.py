"""`attention` over key blocks that are selected per token: against whole matrices, compiled, packed; its refusals."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dilabench.attention import attention
from dilabench.patterns import BlockSparsePattern, SelectedBlocksPattern
from dilabench.patterns.answers import SequenceShape
from dilabench.patterns.pattern import Pattern
from dilabench.patterns.registry import OWN_KINDS, load

N, H, K, D = 70, 6, 2, 24
PATTERN = SelectedBlocksPattern(block_size=16)


def inputs(dtype: torch.dtype = torch.float64, batch: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and indices [B, N, K, 3] with repeated and absent blocks."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, N, n, D, generator=generator, dtype=dtype).requires_grad_() for n in (H, K, K))
    return q, k, v, torch.randint(-1, 5, (batch, N, K, 3), generator=generator)


def by_matrices(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, causal: bool = True, sink: Tensor | None = None, block: int = 16
) -> Tensor:
    """The definition, with masks of all pairs."""
    length, kv_heads = k.shape[1:3]
    i, j = torch.arange(length)[:, None], torch.arange(length)
    seen = (indices[:, :, :, None] == (j // block)[:, None]).any(-1) & ((j <= i) | (not causal))[:, None]
    scores = torch.einsum("bikgd,bjkd->bikgj", q.unflatten(2, (kv_heads, -1)), k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen[:, :, :, None], -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.view(kv_heads, -1, 1).expand(*scores.shape[:-1], 1)], -1)
    shares = scores.softmax(-1).nan_to_num(0.0)[..., :length]
    return torch.einsum("bikgj,bjkd->bikgd", shares, v).flatten(2, 3)


@pytest.mark.parametrize("has_sink", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_out_and_gradients_are_those_of_the_definition(dtype: torch.dtype, has_sink: bool) -> None:
    q, k, v, indices = inputs(dtype)
    sink = torch.linspace(-1, 1, H, dtype=dtype).requires_grad_() if has_sink else None
    given = (q, k, v, sink) if sink is not None else (q, k, v)
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    out = attention(q, k, v, pattern=PATTERN, indices=indices, causal=True, sink=sink)
    wanted = by_matrices(q, k, v, indices, sink=sink)
    found = out, *torch.autograd.grad(out, given, dout)
    for mine, other in zip(found, (wanted, *torch.autograd.grad(wanted, given, dout)), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4 if dtype == torch.float32 else 1e-10, atol=1e-5)


@pytest.mark.parametrize("has_sink", [False, True])
def test_a_compiler_sees_one_graph_with_the_same_results(has_sink: bool) -> None:
    q, k, v, indices = inputs(torch.float32)
    sink = torch.linspace(-1, 1, H).requires_grad_() if has_sink else None
    given = (q, k, v, sink) if sink is not None else (q, k, v)
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))

    def call(*tensors: Tensor) -> Tensor:
        q, k, v, indices, *sinks = tensors
        return attention(q * 1.5, k, v, pattern=PATTERN, indices=indices, causal=True, sink=sinks[0] if sinks else None)

    arguments = (q, k, v, indices, *([] if sink is None else [sink]))
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for mine, other in zip(
        *(
            (out, *torch.autograd.grad(out, given, dout))
            for out in (function(*arguments) for function in (compiled, call))
        ),
        strict=True,
    ):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_blocks_of_packed_sequences_count_in_each_from_the_first(as_tensor: bool) -> None:
    q, k, v, _ = (x.detach()[0] for x in inputs(torch.float32))
    bounds = (0, 1, 30, 30, 66)
    indices = torch.randint(-1, 3, (N, K, 2), generator=torch.Generator().manual_seed(2))
    # The first sequence has one block, and the second two.
    indices[:1].clamp_(max=0)
    indices[1:30].clamp_(max=1)
    cu_seqlens: Any = torch.tensor(bounds) if as_tensor else bounds
    options = {"pattern": PATTERN, "causal": True}
    out, lse = attention(q, k, v, indices=indices, cu_seqlens=cu_seqlens, return_lse=True, **options)
    for first, last in ((0, 1), (1, 30), (30, 66)):
        alone = attention(*(x[None, first:last] for x in (q, k, v)), indices=indices[first:last], **options)
        assert torch.equal(out[first:last], alone[0])
    assert not out[66:].any()
    assert torch.isneginf(lse[:, 66:]).all()
    call = torch.compile(
        lambda q, bounds: attention(q, k, v, indices=indices, cu_seqlens=bounds, **options),
        fullgraph=True,
        backend="aot_eager",
    )
    assert torch.equal(call(q, cu_seqlens), out)


def test_indices_without_a_batch_axis_are_for_all_items() -> None:
    q, k, v, indices = inputs()
    shared = attention(q, k, v, pattern=PATTERN, indices=indices[0], causal=True)
    repeated = attention(q, k, v, pattern=PATTERN, indices=indices[:1].expand(2, -1, -1, -1), causal=True)
    torch.testing.assert_close(shared, repeated)


def test_tokens_that_select_nothing_give_zeros_and_get_no_gradient() -> None:
    q, k, v, indices = inputs(torch.float32)
    out, lse = attention(q, k, v, pattern=PATTERN, indices=torch.full_like(indices, -1), return_lse=True)
    assert not out.any()
    assert torch.isneginf(lse).all()
    assert not any(gradient.any() for gradient in torch.autograd.grad(out.sum(), (q, k, v)))


def test_there_may_be_no_tokens_and_no_data() -> None:
    q, k, v, indices = (x.detach() for x in inputs(torch.float32))
    options = {"pattern": PATTERN, "causal": True}
    assert attention(q[:, :0], k[:, :0], v[:, :0], indices=indices[:, :0], **options).shape == (2, 0, H, D)
    assert attention(*(x.to("meta") for x in (q, k, v)), indices=indices.to("meta"), **options).shape == q.shape


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("own_indices", [True, False])
def test_vmap_gives_what_each_sample_gives(own_indices: bool) -> None:
    *tensors, indices = inputs(batch=6)
    q, k, v = (x.detach().unflatten(0, (3, 2)) for x in tensors)
    indices = indices.unflatten(0, (3, 2)) if own_indices else indices[0]

    def of_one(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Tensor:
        return attention(q, k, v, pattern=PATTERN, indices=indices, causal=True).sin()

    gradient = torch.func.grad(lambda *given: of_one(*given).sum(), (0, 1, 2))
    each = [(*x, indices[at] if own_indices else indices) for at, x in enumerate(zip(q, k, v, strict=True))]
    where = (0, 0, 0, 0 if own_indices else None)
    assert torch.equal(torch.vmap(of_one, where)(q, k, v, indices), torch.stack([of_one(*x) for x in each]))
    for found, wanted in zip(
        torch.vmap(gradient, where)(q, k, v, indices),
        zip(*map(gradient, *zip(*each, strict=True)), strict=True),
        strict=True,
    ):
        assert torch.equal(found, torch.stack(wanted))


def test_functional_gradients_and_window() -> None:
    q, k, v, indices = inputs()
    options = {"pattern": PATTERN, "indices": indices, "causal": True, "window": (20, 0)}
    (wanted,) = torch.autograd.grad(attention(q, k, v, **options).square().sum(), q)
    found = torch.func.grad(lambda q: attention(q, k.detach(), v.detach(), **options).square().sum())(q.detach())
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indices": torch.zeros(2, N, K, 3)}, "must be integers"),
        ({"indices": torch.zeros(N, 3, dtype=torch.long)}, "must be integers"),
        ({"indices": torch.zeros(2, N, H, 3, dtype=torch.long)}, "heads of keys"),
        ({"indices": torch.zeros(2, N, K, 0, dtype=torch.long)}, "heads of keys"),
        ({"indices": torch.zeros(2, N, K, 3, dtype=torch.long, device="meta")}, "move one of them"),
        ({"indices": [[0]]}, "give a tensor"),
        ({"window": (3, 2)}, "looks 2 positions ahead"),
        ({"window": (-2, 0)}, "-1 for unbounded"),
        ({"window": (3.5, 0)}, "must be two integers"),
        ({"scale": 0.0}, "scale 0.0 should be a finite number greater than 0"),
        ({"scale": float("nan")}, "scale nan should be a finite number"),
        ({"backend": "math"}, "leave it out"),
        ({"pattern": BlockSparsePattern(mask="random", block_size=16)}, "SelectedBlocksPattern"),
        ({"pattern": None}, "SelectedBlocksPattern"),
        ({"indices": None}, "selectors read stand-ins, not query and key; give the blocks that your model selects"),
        ({"indices": torch.full((N, K, 1), 5)}, r"indices\[0, 0, 0, 0\] is block 5, not one of 0 to 4; -1 means no"),
        ({"indices": torch.full((2, N, K, 1), -2)}, "is block -2, not one of 0 to 4"),
        ({"cu_seqlens": (0, 5)}, "leave out the batch axis"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    q, k, v, indices = inputs()
    with pytest.raises(ValueError, match=message):
        attention(q, k, v, **{"pattern": PATTERN, "indices": indices, "causal": True, **changes})


READING = [
    pattern
    for kind in OWN_KINDS
    for pattern in load(kind).examples()
    if pattern.reads_queries or pattern.summands(SequenceShape(N, 1, 1, causal=True, window=(-1, -1)))
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("pattern", READING, ids=lambda pattern: pattern.label().replace(" ", "-"))
def test_stand_ins_of_benchmarks_are_refused(pattern: Pattern, packed: bool) -> None:
    q, k, v, _ = inputs()
    tensors, bounds = ([x[0] for x in (q, k, v)], {"cu_seqlens": (0, N)}) if packed else ([q, k, v], {})
    with pytest.raises(ValueError, match=f"pattern {pattern.kind} .* stand-ins, not .* native_sparse_attention"):
        attention(*tensors, pattern=pattern, causal=True, **bounds)


@pytest.mark.parametrize("compiled", [False, True])
def test_blocks_that_a_packed_sequence_does_not_have_are_refused(compiled: bool) -> None:
    q, k, v, _ = (x.detach()[0] for x in inputs(torch.float32))
    indices = torch.zeros(N, K, 2, dtype=torch.long)
    indices[35, 1, 0] = 3

    def call(indices: Tensor) -> Tensor:
        return attention(q, k, v, pattern=PATTERN, indices=indices, causal=True, cu_seqlens=(0, 30, 66))

    function = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    assert torch.isfinite(function(indices.clamp(max=2))).all()
    with pytest.raises(ValueError, match=r"indices\[0, 35, 1, 0\] is block 3, not one of 0 to 2"):
        function(indices)


@pytest.mark.parametrize("selector", ["random", "neighbours"])
def test_drawn_blocks_need_no_indices(selector: str) -> None:
    pattern = SelectedBlocksPattern(block_size=16, top_k=2, selector=selector)
    q, k, v, _ = inputs()
    indices = torch.from_numpy(pattern.selection(SequenceShape(N, H, K, causal=True, window=(-1, -1))))
    found, wanted = (attention(q, k, v, pattern=pattern, causal=True, indices=x) for x in (None, indices))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64], ids=str)
def test_refuses_dtypes_that_no_kernel_computes(dtype: torch.dtype) -> None:
    q, k, v, indices = inputs()
    q, k, v = (x.detach().to(dtype) for x in (q, k, v))
    with pytest.raises(ValueError, match=r"dtype '.*' should be 'float64'"):
        attention(q, k, v, pattern=PATTERN, indices=indices)
