"""`attention` computes every pattern as the reference does, with lse, sinks, selected blocks and a caller's backend."""

from __future__ import annotations

import doctest
import inspect
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dilabench.attention import attention, block_sparse_attention, dilated_attention, function
from dilabench.choice.computation import machine_of
from dilabench.choice.rules import by_priority
from dilabench.choice.ways import Way, own_ways
from dilabench.contracts import BuildContext
from dilabench.engine.verify.oracle import reference
from dilabench.impls.call import name_of_function
from dilabench.patterns.block_sparse import BlockSparsePattern
from dilabench.patterns.column_bounds import ColumnBoundsPattern
from dilabench.patterns.dense import DENSE
from dilabench.patterns.dilated import DilatedPattern
from dilabench.patterns.pattern import Pattern, SelectedKeys, SequenceShape
from dilabench.patterns.registry import OWN_KINDS, pattern_type
from dilabench.patterns.selected_blocks import SelectedBlocksPattern
from dilabench.patterns.topk_blocks import TopKBlocksPattern
from dilabench.patterns.window_sink import WindowSinkPattern
from dilabench.workload.spec import Workload
from tests.conftest import slow

N, H, K, D, BLOCK = 96, 4, 2, 16, 16
DILATED = DilatedPattern(segment_lengths=(24, 96), dilation_rates=(1, 4))
SELECTION = TopKBlocksPattern(selector="random", block_size=BLOCK, top_k=1)
SPARSE = (
    WindowSinkPattern(sinks=2, window_size=9),
    BlockSparsePattern(mask="random", block_size=BLOCK, sparsity=0.5),
    TopKBlocksPattern(selector="random", block_size=8, top_k=2),
    ColumnBoundsPattern(document_lengths=(7, 4)),
)
# Of each block of queries: itself, the first one twice, and none.
INDICES = torch.tensor([[block, 0, 0, -1] for block in range(N // BLOCK)])


def workloads() -> list[Workload]:
    """Of each kind of ours that has an implementation and no gates, the examples without a file, causal and not."""
    fields = {"seq_len": N, "batch_size": 2, "num_heads": H, "num_kv_heads": K, "head_dim": D, "dtype": "float64"}
    found = [
        Workload(pattern=pattern, causal=shape.causal, mode="both", **fields)
        for kind in OWN_KINDS
        for pattern in pattern_type(kind.name).examples()
        if not pattern.is_detached and not pattern.has_fixed_length
        for shape in (SequenceShape(N, H, K, causal=causal, window=(-1, -1)) for causal in (True, False))
        if pattern.why_not_over(shape) is None and not pattern.summands(shape)
    ]
    ways, machine = own_ways(), machine_of("cpu")
    return [
        workload
        for workload in found
        if any(not ways.reasons_against(Way(name, None, workload), machine) for name in by_priority(ways, workload))
    ]


def operands(dtype: torch.dtype = torch.float64, **shape: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = shape.get("heads", H), shape.get("kv_heads", K), shape.get("kv_heads", K)
    q, k, v = (torch.randn(2, N, one, D, dtype=dtype, generator=generator) for one in heads)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def masked(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """out and lse by torch's softmax over the keys that `seen` [N, N] has."""
    k, v = (x.repeat_interleave(H // K, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / D**0.5
    scores = scores.masked_fill(~seen, float("-inf"))
    if sink is not None:
        scores = torch.cat([scores, sink[None, :, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(-1)[..., :N]
    return torch.einsum("bhij,bjhd->bihd", weights, v), scores.logsumexp(-1)


def plain(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: tuple[int, int], scale: float) -> Any:
    """A caller's own dense attention, without GQA."""
    assert window == (-1, -1)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v), scores.logsumexp(-1)


CAUSAL = torch.ones(N, N, dtype=torch.bool).tril()
IN_BLOCKS = CAUSAL & torch.block_diag(*[torch.ones(BLOCK, BLOCK, dtype=torch.bool)] * (N // BLOCK)).bool()
SELECTED = IN_BLOCKS | (CAUSAL & (torch.arange(N) < BLOCK))


@pytest.mark.parametrize(
    "workload", workloads(), ids=lambda one: f"{one.pattern.label()} {one.causal}".replace(" ", "-")
)
def test_every_pattern_is_computed_as_by_the_reference(workload: Workload) -> None:
    inputs, indices = operands(), None
    if workload.pattern.reads_queries:
        selection: Any = workload.pattern
        indices = torch.from_numpy(selection.selection(workload.shapes[0]).copy())
    out = attention(*inputs, pattern=workload.pattern, causal=workload.causal, indices=indices)
    expected = reference.build(workload, BuildContext(device=torch.device("cpu")))(*inputs)
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, inputs, dout), torch.autograd.grad(expected, inputs, dout))


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({}, CAUSAL),
        ({"pattern": DENSE, "window": (15, 0)}, CAUSAL & ~CAUSAL.tril(-16)),
        ({"pattern": DilatedPattern(segment_lengths=(N,), dilation_rates=(1,))}, CAUSAL),
        (
            {"pattern": WindowSinkPattern(sinks=BLOCK, window_size=1)},
            torch.eye(N).bool() | (CAUSAL & (torch.arange(N) < BLOCK)),
        ),
        ({"pattern": SELECTION, "indices": INDICES}, SELECTED),
        ({"pattern": SELECTION, "indices": INDICES.expand(K, -1, -1)}, SELECTED),
    ],
    ids=["dense", "window", "dilated", "window_sink", "indices", "indices-by-head"],
)
@pytest.mark.parametrize("with_sink", [True, False])
def test_lse_and_sinks_are_those_of_one_softmax(options: dict[str, Any], seen: Tensor, with_sink: bool) -> None:
    inputs = operands()
    sink = torch.linspace(-1, 2, H, dtype=torch.float64).requires_grad_() if with_sink else None
    out, lse = attention(*inputs, causal=True, sink=sink, return_lse=True, **options)
    expected, expected_lse = masked(*inputs, seen, sink)
    torch.testing.assert_close((out, lse), (expected, expected_lse))
    leaves, given = (*inputs, *([] if sink is None else [sink])), (torch.randn_like(out), torch.randn_like(lse))
    for found, right, douts in (
        (out, expected, given[0]),
        ((out, lse), (expected, expected_lse), given),
    ):
        gradients = torch.autograd.grad(found, leaves, douts, retain_graph=True)
        torch.testing.assert_close(gradients, torch.autograd.grad(right, leaves, douts, retain_graph=True))


def test_shorthands_are_calls_of_it() -> None:
    inputs = operands()
    fields = {"segment_lengths": (24, 96), "dilation_rates": (1, 4)}
    assert torch.equal(dilated_attention(*inputs, **fields), attention(*inputs, pattern=DilatedPattern(**fields)))
    pattern = BlockSparsePattern.from_request({"mask": "random", "block_size": BLOCK, "density": 0.5, "mask_seed": 3})
    drawn = block_sparse_attention(*inputs, mask="random", block_size=BLOCK, density=0.5, seed=3, causal=True)
    assert torch.equal(drawn, attention(*inputs, pattern=pattern, causal=True))
    selected = block_sparse_attention(*inputs, indices=INDICES, block_size=BLOCK, causal=True)
    assert torch.equal(selected, attention(*inputs, pattern=SELECTION, indices=INDICES, causal=True))


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("pattern", SPARSE, ids=lambda pattern: pattern.kind)
def test_patterns_begin_anew_in_packed_sequences(pattern: Pattern, with_sink: bool) -> None:
    """Out, lse and gradients of each sequence alone; an empty one, one of a single token, tokens behind the last."""
    bounds, last, tokens = (0, 20, 20, 21, 55), 55, 60
    sinks = [torch.randn(4, dtype=torch.float64, requires_grad=True)] if with_sink else []
    options: dict[str, Any] = {"pattern": pattern, "causal": True, "sink": sinks[0] if sinks else None}
    q, k, v = (torch.randn(tokens, n, 8, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2))
    out, lse = attention(q, k, v, cu_seqlens=bounds, return_lse=True, **options)
    parts = [slice(start, stop) for start, stop in pairwise(bounds) if stop > start]
    alone = [attention(q[None, at], k[None, at], v[None, at], return_lse=True, **options) for at in parts]
    expected = torch.cat([result[0] for result, _ in alone])
    torch.testing.assert_close(out[:last], expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(lse[:, :last], torch.cat([result[0] for _, result in alone], 1), rtol=0, atol=1e-14)
    assert not out[last:].any()
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (q, k, v, *sinks), dout)
    wanted = torch.autograd.grad(expected, (q, k, v, *sinks), dout[:last])
    torch.testing.assert_close(gradients, wanted, rtol=0, atol=1e-13)
    with pytest.raises(ValueError, match=r"with cu_seqlens must be \[T, H, D\]"):
        attention(q[None], k[None], v[None], cu_seqlens=bounds, **options)
    with pytest.raises(ValueError, match="must rise from 0 to 60"):
        attention(q, k, v, cu_seqlens=(0, 61), **options)
    assert not attention(q, k, v, cu_seqlens=(0, 0), **options).any()
    assert attention(*(x.to("meta") for x in (q, k, v)), pattern=pattern, cu_seqlens=bounds).shape == out.shape


def test_packed_sequences_have_an_lse_for_each_token() -> None:
    q, k, v = (x[0] for x in operands())
    out, lse = attention(q, k, v, cu_seqlens=(0, 40, N), causal=True, return_lse=True)
    first, first_lse = attention(q[None, :40], k[None, :40], v[None, :40], causal=True, return_lse=True)
    assert (out.shape, lse.shape) == ((N, H, D), (H, N))
    torch.testing.assert_close((out[:40], lse[:, :40]), (first[0], first_lse[0]))


@pytest.mark.parametrize("pattern", [None, DILATED], ids=["dense", "dilated"])
def test_a_function_of_the_caller_is_a_backend(pattern: Pattern | None) -> None:
    inputs = operands(kv_heads=H)
    sink = torch.zeros(H, dtype=torch.float64, requires_grad=True)
    for options in ({}, {"sink": sink}):
        own = attention(*inputs, pattern=pattern, causal=True, backend=plain, **options)
        ours = attention(*inputs, pattern=pattern, causal=True, backend="math", **options)
        torch.testing.assert_close(own, ours)
        leaves, dout = (*inputs, *options.values()), torch.randn_like(own)
        torch.testing.assert_close(torch.autograd.grad(own, leaves, dout), torch.autograd.grad(ours, leaves, dout))


class Scaled:
    """Calls of it, and its bound methods, compute `plain` times a factor."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, *operands: Tensor, **options: Any) -> Any:
        out, lse = plain(*operands, **options)
        return self.factor * out, lse

    def attend(self, *operands: Tensor, **options: Any) -> Any:
        return self(*operands, **options)


def closure(factor: float) -> Any:
    return lambda *operands, **options: Scaled(factor)(*operands, **options)


def with_a_default(factor: float) -> Any:
    return lambda *operands, factor=factor, **options: Scaled(factor)(*operands, **options)


OWN = {
    "closure": closure,
    "default": with_a_default,
    "object": Scaled,
    "method": lambda factor: Scaled(factor).attend,
    "partial": lambda factor: partial(Scaled.attend, Scaled(factor)),
}


@pytest.mark.parametrize("pattern", [None, DILATED], ids=["dense", "dilated"])
@pytest.mark.parametrize("kind", ["closure", *map(slow, ("default", "object", "method", "partial"))])
def test_a_compiled_call_takes_the_function_that_it_is_given(kind: str, pattern: Pattern | None) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, backend: Any) -> Tensor:
        return attention(q, k, v, pattern=pattern, causal=True, backend=backend)

    inputs = operands(torch.float32, kv_heads=H)
    expected = attention(*inputs, pattern=pattern, causal=True, backend="math")
    # Dynamo makes no constant of a partial, so that the graph breaks there.
    compiled = torch.compile(call, backend="aot_eager", fullgraph=kind != "partial")
    # Other tests compile the same code; and no call has seen these functions.
    torch.compiler.reset()
    once, twice = OWN[kind](1.0), OWN[kind](2.0)
    for own, factor in ((once, 1.0), (twice, 2.0)):
        torch.testing.assert_close(compiled(*inputs, own), factor * expected)
    with torch.compiler.set_stance("default" if kind == "partial" else "fail_on_recompile"):
        for own, factor in ((once, 1.0), (twice, 2.0)):
            torch.testing.assert_close(compiled(*inputs, own), factor * expected)


@pytest.mark.slow
def test_a_method_is_one_function_however_often_it_is_named() -> None:
    own, other = Scaled(1.0), Scaled(2.0)
    assert name_of_function(own.attend) == name_of_function(own.attend) != name_of_function(other.attend)

    def call(q: Tensor, k: Tensor, v: Tensor, holder: Scaled) -> Tensor:
        return attention(q, k, v, causal=True, backend=holder.attend)

    inputs = operands(torch.float32, kv_heads=H)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    results = [compiled(*inputs, holder) for holder in (own, other)]
    torch.testing.assert_close(results[1], 2.0 * results[0])
    with torch.compiler.set_stance("fail_on_recompile"):
        torch.testing.assert_close([compiled(*inputs, holder) for holder in (own, other)], results)


@pytest.mark.parametrize("backend", ["auto", slow(plain)], ids=["auto", "function"])
@pytest.mark.parametrize("pattern", [None, DILATED], ids=["dense", "dilated"])
def test_dense_and_dilated_compile_without_a_break(pattern: Pattern | None, backend: Any) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return attention(q, k, v, pattern=pattern, causal=True, backend=backend, return_lse=True)

    inputs = operands(torch.float32, kv_heads=H)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), call(*inputs))


def test_other_patterns_break_the_graph_and_are_right() -> None:
    inputs = operands(torch.float32)
    compiled = torch.compile(attention, backend="aot_eager")
    pattern = WindowSinkPattern(sinks=4)
    torch.testing.assert_close(
        compiled(*inputs, pattern=pattern, window=(7, 0)), attention(*inputs, pattern=pattern, window=(7, 0))
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"indices": INDICES}, "indices are blocks of pattern=SelectedBlocksPattern"),
        ({"indices": INDICES, "pattern": WindowSinkPattern(sinks=4)}, "indices with pattern window_sink"),
        ({"indices": INDICES[:3], "pattern": SELECTION}, r"must be integers \[6, k\] or \[2, 6, k\]"),
        ({"indices": INDICES.double(), "pattern": SELECTION}, "must be integers"),
        ({"indices": INDICES + 1, "pattern": SELECTION}, r"indices\[5, 0\] is block 6, not one of 0 to 5"),
        ({"pattern": WindowSinkPattern(sinks=4), "backend": "math"}, "whose kernels call none"),
        ({"backend": "mth"}, "did you mean"),
        ({"sink": torch.zeros(3)}, "must be one logit per query head"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_way_out(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(*operands(), **options)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("per_token", [False, True])
def test_indices_of_every_integer_type_are_the_same_blocks(per_token: bool, dtype: torch.dtype) -> None:
    """Also where there are more blocks than the type has numbers."""
    q, k, v = (torch.randn(1, 300, 2, 8) for _ in range(3))
    chosen = torch.arange(300)[:, None] % torch.tensor([100, 90])
    if per_token:
        pattern: Pattern = SelectedBlocksPattern(block_size=1)
        chosen = chosen[:, None].expand(300, 2, 2)
    else:
        pattern, q, k, v = TopKBlocksPattern(block_size=16), *(x.repeat(1, 16, 1, 1) for x in (q, k, v))
    found, expected = (attention(q, k, v, pattern=pattern, indices=chosen.to(one)) for one in (dtype, torch.int64))
    assert torch.equal(found, expected)


def test_batches_of_indices_of_query_blocks_are_computed_one_after_another() -> None:
    inputs = operands()
    batch = torch.stack([INDICES, INDICES.flip(-1), INDICES.clamp(max=0)])
    found = torch.func.vmap(lambda indices: attention(*inputs, pattern=SELECTION, indices=indices))(batch)
    assert torch.equal(found, torch.stack([attention(*inputs, pattern=SELECTION, indices=x) for x in batch]))


class TheirSelection(Pattern):
    """A third party's pattern that selects blocks of keys. Its definition is not read if a caller gives the blocks."""

    kind: str = "their_selection"
    per_token: bool

    def counts(self, shape: SequenceShape, head: int, rows: Any) -> Any:
        raise AssertionError("read for a caller's blocks")

    @property
    def selects(self) -> SelectedKeys:
        return SelectedKeys(BLOCK, self.per_token)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
def test_a_third_partys_selection_takes_indices_as_ours_do(per_token: bool, packed: bool) -> None:
    inputs, options = operands(), {"causal": True, "indices": INDICES}
    ours = SelectedBlocksPattern(block_size=BLOCK, top_k=1) if per_token else SELECTION
    if per_token:
        options["indices"] = INDICES.repeat_interleave(BLOCK, 0)[:, None].expand(-1, K, -1)
    if packed:
        inputs, options["cu_seqlens"] = tuple(x[0] for x in inputs), (0, N)
    found = attention(*inputs, pattern=TheirSelection(per_token=per_token), **options)
    torch.testing.assert_close(found, attention(*inputs, pattern=ours, **options))


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
def test_blocks_of_packed_queries_count_in_each_sequence_from_the_first(as_tensor: bool, per_head: bool) -> None:
    """Gradients included; sequences of one token, of none and of whole blocks, and tokens behind the last one."""
    bounds = (0, 1, 41, 41, 73, 90)
    q, k, v = (x[0].detach().requires_grad_() for x in operands())
    counts = [-(-(last - first) // BLOCK) for first, last in pairwise(bounds)]
    choose = torch.Generator().manual_seed(3)
    of_sequence = torch.tensor(counts).repeat_interleave(torch.tensor(counts))[None, :, None]
    indices = (torch.rand(K, sum(counts), 2, generator=choose) * (of_sequence + 1)).long() - 1
    if not per_head:
        indices = indices[0]
    sink = torch.linspace(-1, 1, H, dtype=torch.float64)
    options: dict[str, Any] = {"pattern": SELECTION, "causal": True, "window": (30, 0), "sink": sink}
    packed: Any = torch.tensor(bounds) if as_tensor else bounds
    out, lse = attention(q, k, v, indices=indices, cu_seqlens=packed, return_lse=True, **options)
    parts = [attention(q[90:], k[90:], v[90:], cu_seqlens=(0, 0))]
    for (first, last), own in zip(pairwise(bounds), indices.split(counts, -2), strict=True):
        if first < last:
            alone = (x[None, first:last] for x in (q, k, v))
            parts.insert(-1, attention(*alone, indices=own, **options)[0])
    expected, dout = torch.cat(parts), torch.randn_like(out)
    torch.testing.assert_close(out, expected)
    found, wanted = (torch.autograd.grad(each, (q, k, v), dout) for each in (out, expected))
    torch.testing.assert_close(found, wanted)
    assert torch.equal(lse[:, 90:], sink[:, None].expand(-1, 6)), "rows that see only the sink"
    with pytest.raises(ValueError, match=rf"must be integers \[{sum(counts)}, k\]"):
        attention(q, k, v, indices=indices[..., 1:, :], cu_seqlens=packed, **options)


def test_dilated_attention_without_a_branch_is_dense() -> None:
    inputs = operands()
    found = dilated_attention(*inputs, segment_lengths=(), dilation_rates=(), causal=True, return_lse=True)
    torch.testing.assert_close(found, masked(*inputs, CAUSAL))


def test_examples_of_the_docstrings_run() -> None:
    found = doctest.testmod(function)
    assert found.attempted >= 8
    assert not found.failed


def test_the_calls_of_the_page_for_models_run() -> None:
    """The page's shapes are those of a real model; here a short sequence stands for each."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "use-in-a-model.md").read_text()
    shown: list[tuple[int, ...]] = []
    module, code = (block.partition("```")[0] for block in page.split("```python\n")[1:3])
    exec(module, {"print": lambda shape: shown.append(tuple(shape))})
    assert shown == [(1, 8192, 256)]
    code = code.replace("15002", str(N)).replace("5001", "40")
    packed, batched = [], []
    for line in code.splitlines():
        (packed if "cu_seqlens" in line else batched).append(line)
    q, k, v = operands(torch.float32)
    names: dict[str, Any] = {"q": q, "k": k, "v": v, "sink": torch.zeros(H), "indices": torch.zeros(2, 1).int()}
    names["blocks"] = torch.zeros(*k.shape[:3], 1).int()
    exec("\n".join(batched), names)
    assert names["lse"].shape == (2, H, N)
    names |= {"q": q[0], "k": k[0], "v": v[0]}
    exec("\n".join(packed), names)
    assert names["out"].shape == (N, H, D)


def test_help_shows_every_option_with_its_default() -> None:
    options = inspect.signature(attention).parameters
    wanted = (
        "query key value pattern causal window scale softcap sink cu_seqlens max_seqlen cu_seqlens_k key_lengths "
        "key_padding query_padding indices return_lse backend"
    )
    assert list(options) == wanted.split()
    text = inspect.getdoc(attention) or ""
    assert all(f"{name}:" in text for name, one in options.items() if one.kind is inspect.Parameter.KEYWORD_ONLY)
