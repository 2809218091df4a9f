"""Queries that are the last rows of their keys: a call equals the last rows of the square, for every pattern."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dilabench.attention import attention, call, dilated_attention, native_sparse_attention
from dilabench.impls.last_rows import aligned
from dilabench.patterns import DilatedPattern, TopKBlocksPattern
from dilabench.workload.spec import Window
from tests.attention.every_pattern import BLOCK, BOUNDS, CASES, Case, N
from tests.conftest import half_are_slow, slow

BATCHES = {name: case for name, case in CASES.items() if not case.packed}
PACKED = {name: case for name, case in CASES.items() if case.packed}
OF_QUERIES = ("query", "gates", "indices")
# float64: what remains is the order of sums.
TOLERANCE = 1e-12


@pytest.fixture(params=["eager", "operator"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls run by the autograd function, or by the operator that compilers see."""
    if request.param == "operator":
        monkeypatch.setattr(call, "is_plain_eager_call", lambda *_: False)


def leaves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.requires_grad_() for name, x in tensors.items() if x.is_floating_point()}


def rows_of(bounds: Sequence[int], rows: Sequence[int]) -> Tensor:
    """The places of the last rows of each sequence along the axis of tokens."""
    return torch.cat([torch.arange(stop - last, stop) for stop, last in zip(bounds[1:], rows, strict=True)])


def last_rows(case: Case, tensors: dict[str, Tensor], bounds: Sequence[int], rows: Sequence[int]) -> dict[str, Tensor]:
    """The tensors of the call over the last rows of each sequence."""
    places, axis, changed = rows_of(bounds, rows), 0 if case.packed else 1, dict(tensors)
    for name in OF_QUERIES:
        if name not in tensors:
            continue
        if name == "indices" and isinstance(case.options.get("pattern"), TopKBlocksPattern):
            blocks = [-(-(stop - start) // BLOCK) for start, stop in pairwise(bounds)]
            there = [
                torch.arange(before + (stop - start - last) // BLOCK if last else before + count, before + count)
                for before, count, (start, stop), last in zip(
                    [0, *torch.tensor(blocks).cumsum(0).tolist()], blocks, pairwise(bounds), rows, strict=False
                )
            ]
            changed[name] = tensors[name][torch.cat(there)]
        else:
            changed[name] = tensors[name].index_select(axis, places)
    if case.packed:
        ends = torch.tensor([0, *rows]).cumsum(0)
        changed |= {"cu_seqlens": ends, "cu_seqlens_k": tensors["cu_seqlens"]}
    return changed


def compare(case: Case, bounds: Sequence[int], rows: Sequence[int], **options: Any) -> None:
    """Results and gradients of the last rows are those of the square."""
    tensors = case.tensors()
    inputs = leaves(tensors)
    whole = case(tensors, **options).index_select(0 if case.packed else 1, rows_of(bounds, rows))
    dout = torch.randn_like(whole)
    wanted = torch.autograd.grad(whole, inputs.values(), dout)
    out = case(last_rows(case, tensors, bounds, rows), **options)
    gradients = torch.autograd.grad(out, inputs.values(), dout)
    for name, result, expected in zip(("out", *inputs), (out, *gradients), (whole, *wanted), strict=True):
        assert (result - expected).abs().max() <= TOLERANCE, name


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("rows", [1, 5, slow(17), N - 1, N])
@pytest.mark.parametrize("case", BATCHES.values(), ids=BATCHES)
def test_a_batch_is_the_last_rows_of_the_square(case: Case, rows: int) -> None:
    compare(case, (0, N), (rows,))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("rows", [(1, 1), (3, 28), (20, 0), (20, 28)], ids=str)
@pytest.mark.parametrize("case", PACKED.values(), ids=PACKED)
def test_packed_sequences_are_the_last_rows_of_theirs(case: Case, rows: tuple[int, int]) -> None:
    compare(case, BOUNDS, rows)


MASKS: list[tuple[bool, Window]] = [
    (True, (-1, -1)),
    (True, (7, 0)),
    (False, (-1, -1)),
    (False, (7, 3)),
    (False, (-1, 2)),
]


@pytest.mark.parametrize(
    ("name", "mask", "rows"),
    half_are_slow(
        ["dense", "dilated", "window_sink", "column_bounds", "block_sparse", "selected_blocks"], MASKS, [1, 6, 33]
    ),
    ids=str,
)
def test_every_mask(name: str, mask: tuple[bool, Window], rows: int) -> None:
    case, (causal, window) = BATCHES[name], mask
    case = case._replace(options={**case.options, "causal": causal, "window": window})
    compare(case, (0, N), (rows,))


DILATED: dict[str, dict[str, Any]] = {
    "zero keys": {"padding": "zero_key", "merge_grad": "detached", "offset": "blocked"},
    "zero keys, exact": {"padding": "zero_key"},
    "grouped": {"heads": "grouped"},
    "detached": {"merge_grad": "detached"},
    "by key head": {"offset_by": "kv_head"},
}


@pytest.mark.parametrize("rows", [1, 9, 30])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("fields", DILATED.values(), ids=DILATED)
def test_every_form_of_dilated_attention(fields: dict[str, Any], causal: bool, rows: int) -> None:
    pattern = DilatedPattern(segment_lengths=(12, 24, 64), dilation_rates=(1, 2, 4), **fields)
    compare(Case(attention, {"pattern": pattern, "causal": causal}), (0, N), (rows,))


def caches(case: Case, lengths: Sequence[int], rows: int) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Tensors of a call over a cache, NaN behind its keys, and of one call over the keys of each item."""
    items = []
    for seed, length in enumerate(lengths):
        tensors = case.tensors(seed=seed)
        there = {name: x if x.ndim == 1 else x[:, :length] for name, x in tensors.items()}
        if isinstance(case.options.get("pattern"), TopKBlocksPattern):
            there["indices"] = tensors["indices"][: -(-length // BLOCK)]
        if "indices" in there:
            there["indices"] = there["indices"].clone().clamp_max(-(-length // BLOCK) - 1)
        items.append(last_rows(case, there, (0, length), (rows,)))
    joined = {}
    for name, first in items[0].items():
        if first.ndim == 1:
            joined[name] = first
            for item in items:
                item[name] = first
        elif (name == "indices" and isinstance(case.options.get("pattern"), TopKBlocksPattern)) or name in OF_QUERIES:
            joined[name] = torch.cat([item[name] for item in items])
        else:
            behind = [first.new_full((1, N - length, *first.shape[2:]), torch.nan) for length in lengths]
            pairs = zip((item[name] for item in items), behind, strict=True)
            joined[name] = torch.cat([torch.cat(pair, 1) for pair in pairs])
    return joined, items


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("name", "over", "as_tensor"),
    half_are_slow(BATCHES, [((48, 20, 20), 1), ((17, 33), 5), ((30,), 30)], [True, False]),
    ids=str,
)
def test_the_keys_that_are_there(name: str, over: tuple[tuple[int, ...], int], as_tensor: bool) -> None:
    """NaN behind the keys of an item changes no result and no gradient, which is 0 there."""
    case, (lengths, rows) = BATCHES[name], over
    tensors, items = caches(case, lengths, rows)
    inputs = leaves(tensors)
    given: Any = torch.tensor(lengths) if as_tensor else lengths
    out = case(tensors, key_lengths=given)
    dout = torch.randn_like(out)
    gradients = dict(zip(inputs, torch.autograd.grad(out, inputs.values(), dout), strict=True))
    of_vectors: dict[str, Tensor] = {}
    for at, (item, length) in enumerate(zip(items, lengths, strict=True)):
        own = leaves({name: x.detach().clone() if x.is_floating_point() else x for name, x in item.items()})
        wanted = case({**item, **own})
        torch.testing.assert_close(out[at : at + 1], wanted, atol=TOLERANCE, rtol=TOLERANCE)
        expected = torch.autograd.grad(wanted, own.values(), dout[at : at + 1])
        for name, gradient in zip(own, expected, strict=True):
            if gradient.ndim == 1:
                of_vectors[name] = of_vectors.get(name, torch.zeros_like(gradient)) + gradient
                continue
            there = gradient.shape[1]
            torch.testing.assert_close(gradients[name][at : at + 1, :there], gradient, atol=TOLERANCE, rtol=TOLERANCE)
            assert not gradients[name][at, there:].any(), (name, length)
    for name, gradient in of_vectors.items():
        torch.testing.assert_close(gradients[name], gradient, atol=TOLERANCE, rtol=TOLERANCE)


WITHOUT_BLOCKS = {name: case for name, case in BATCHES.items() if not {"indices", "gates"} & {*case.takes}}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("kind", "lengths", "rows", "behind"),
    [
        (torch.tensor, (17, 33), 5, 6),
        slow(list, (17, 33), 5, 6),
        slow(torch.tensor, (48, 20, 20), 1, 0),
        slow(list, (48, 20, 20), 1, 0),
    ],
)
@pytest.mark.parametrize("case", WITHOUT_BLOCKS.values(), ids=WITHOUT_BLOCKS)
def test_keys_with_padding_before_them(
    case: Case, kind: Callable[[Any], Any], lengths: tuple[int, ...], rows: int, behind: int
) -> None:
    """NaN before and behind the keys of an item changes no result and no gradient, and places count from the first."""
    tensors, items = caches(case, lengths, rows)
    spans = [(N - length, N) for length in lengths]
    for name in ("key", "value"):
        moved = [x.roll(first, 0) for x, (first, _) in zip(tensors[name], spans, strict=True)]
        tensors[name] = torch.nn.functional.pad(torch.stack(moved), (0, 0, 0, 0, 0, behind), value=torch.nan)
    inputs = leaves(tensors)
    out = case(tensors, key_lengths=kind(spans))
    dout = torch.randn_like(out)
    gradients = dict(zip(inputs, torch.autograd.grad(out, inputs.values(), dout), strict=True))
    for at, (item, (first, end)) in enumerate(zip(items, spans, strict=True)):
        own = leaves({name: x.detach().clone() for name, x in item.items()})
        wanted = case(own)
        torch.testing.assert_close(out[at : at + 1], wanted, atol=TOLERANCE, rtol=TOLERANCE)
        expected = dict(zip(own, torch.autograd.grad(wanted, own.values(), dout[at : at + 1]), strict=True))
        for name in ("key", "value"):
            whole = torch.zeros_like(gradients[name][at : at + 1])
            whole[:, first:end] = expected[name]
            torch.testing.assert_close(gradients[name][at : at + 1], whole, atol=TOLERANCE, rtol=TOLERANCE)


def tensors(rows: int, keys: int, batch: int = 2, dim: int = 16) -> list[Tensor]:
    shapes = ((batch, rows, 4, dim), (batch, keys, 2, dim), (batch, keys, 2, dim))
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize(("rows", "keys"), [(9, 4), (4, 9), (3, 1)])
def test_cross_attention(rows: int, keys: int) -> None:
    q, k, v = (x.requires_grad_() for x in tensors(rows, keys))
    out = attention(q, k, v)
    of_heads = [x.transpose(1, 2) for x in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2))]
    expected = torch.nn.functional.scaled_dot_product_attention(*of_heads).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    results = (torch.autograd.grad(x, (q, k, v), dout) for x in (out, expected))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"window": (4, 4)}, {"pattern": DilatedPattern(segment_lengths=(64,), dilation_rates=(1,))}],
    ids=["causal", "window", "pattern"],
)
def test_more_queries_than_keys_are_refused_where_places_matter(options: dict[str, Any]) -> None:
    message = "queries are the last rows of their keys, so at most as many"
    with pytest.raises(ValueError, match=f"9 queries over 4 keys.*{message}"):
        attention(*tensors(9, 4), **options)
    with pytest.raises(ValueError, match=f"3 queries over 2 keys.*{message}"):
        attention(*tensors(3, 8), key_lengths=(8, 2), **options)
    q, k, v = (x[0] for x in tensors(9, 9))
    with pytest.raises(ValueError, match=f"5 queries over 3 keys.*{message}"):
        attention(q, k, v, cu_seqlens=(0, 4, 9), cu_seqlens_k=(0, 6, 9), **options)


def test_a_sequence_without_keys_is_seen_by_none() -> None:
    q, k, v = tensors(3, 8)
    out, lse = attention(q, k, v, key_lengths=(8, 0), return_lse=True)
    assert not out[1].any()
    assert (lse[1] == -torch.inf).all()
    torch.testing.assert_close(out[:1], attention(q[:1], k[:1], v[:1]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key_lengths": (8,)}, r"key_lengths \[8\] must be 2 numbers of 0 to 8"),
        ({"key_lengths": (8, 9)}, r"key_lengths \[8, 9\] must be 2 numbers of 0 to 8"),
        ({"key_lengths": (8, -1)}, "must be 2 numbers of 0 to 8"),
        (
            {"key_lengths": torch.tensor([8.0, 8.0])},
            "key_lengths has dtype torch.float32 and must be the number of keys",
        ),
        ({"key_lengths": torch.tensor([[8, 8]])}, r"key_lengths \[8, 8\] must be 2 numbers"),
        ({"key_lengths": (0, 8, 0, 8)}, r"key_lengths \[0, 8, 0, 8\] must be 2 numbers"),
        ({"key_lengths": ((0, 8), (5, 4))}, r"key_lengths \[0, 8, 5, 4\] must be 2 numbers of 0 to 8"),
        ({"key_lengths": ((0, 8), (5, 9))}, "must be 2 numbers of 0 to 8"),
        ({"key_lengths": torch.tensor([[0, 1, 2], [3, 4, 5]])}, "must be the number of keys of each item"),
        ({"key_lengths": ((0, 8, 3), (1, 2, 4))}, "must be the number of keys of each item"),
        ({"key_lengths": 8}, "key_lengths 8 must be the number of keys of each item"),
        ({"cu_seqlens_k": (0, 8)}, "cu_seqlens_k goes with cu_seqlens"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(*tensors(3, 8), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "query has 3 tokens and key 8.*give cu_seqlens_k"),
        ({"cu_seqlens_k": (0, 4, 8)}, "cu_seqlens has 2 bounds and cu_seqlens_k 3"),
        ({"cu_seqlens_k": (0, 9)}, r"cu_seqlens \[0, 9\] must rise from 0 to 8"),
        ({"cu_seqlens_k": (0, 8), "key_lengths": (8,)}, "key_lengths with a batch"),
        ({"key_lengths": (8,)}, "key_lengths with a batch"),
    ],
)
def test_bounds_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    q, k, v = (x[0] for x in tensors(3, 8))
    with pytest.raises(ValueError, match=message):
        attention(q, k, v, cu_seqlens=(0, 3), causal=True, **options)


@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize(("causal", "window"), MASKS)
def test_a_backend_that_aligns_no_ends(causal: bool, window: Window, rows: int) -> None:
    """It is called without a mask, or over squares, and the results are merged."""
    from dilabench.choice.computation import load_backend, own_ways

    backends = own_ways().backends
    aligning, unaligned = (load_backend(backends.get(name)) for name in ("math", "sdpa-flash"))
    assert aligning.aligns_ends > unaligned.aligns_ends
    q, k, v = tensors(rows, 16)
    mask: Any = {"causal": causal, "window": window, "scale": 0.3}
    out, lse = aligning.attend(q, k, v, **mask)
    dout = torch.randn_like(out)
    over = aligned(unaligned)
    for found, wanted in zip(over.attend(q, k, v, **mask), (out, lse), strict=True):
        torch.testing.assert_close(found, wanted)
    gradients = (x.require_backward()(dout, q, k, v, out, lse, **mask) for x in (over, aligning))
    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("causal", [True, False])
def test_a_function_of_the_caller_as_backend(causal: bool) -> None:
    from dilabench.backends import math

    def own(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        assert q.shape[1] == k.shape[1] or not (options["causal"] or max(options.get("window", (-1, -1))) >= 0)
        return math.attend(q, k, v, **options)

    q, k, v = tensors(20, 20)
    for options in ({}, {"segment_lengths": (8, 32), "dilation_rates": (1, 2)}):
        function = dilated_attention if options else attention
        wanted = function(q, k, v, causal=causal, **options)[:, -6:]  # type: ignore[arg-type, operator]
        found = function(q[:, -6:], k, v, causal=causal, backend=own, **options)  # type: ignore[arg-type, operator]
        torch.testing.assert_close(found, wanted)


GROWING: dict[str, dict[str, Any]] = {
    "dense": {},
    "window": {"window": (9, 0)},
    "dilated": {"pattern": DilatedPattern(segment_lengths=(16, 64, 1024), dilation_rates=(1, 2, 8))},
}


@pytest.mark.parametrize("steps", [200, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options",
    [pytest.param(GROWING[name], id=name, marks=[pytest.mark.slow] * (name == "window")) for name in GROWING],
)
def test_no_graph_is_compiled_anew_as_a_cache_grows(options: dict[str, Any], steps: int) -> None:
    """The results of single tokens, whose items have unequal lengths, are those of the whole pass."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["stats"]
    q, k, v = (x[:, :, :2] for x in tensors(steps, steps, dim=4))
    keys, values = torch.full((2, *k.shape), torch.nan, dtype=k.dtype)
    # The second item begins later.
    late = torch.tensor([0, 3])

    def step(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
        items = torch.arange(2)
        keys[items, lengths] = key
        values[items, lengths] = value
        return attention(query[:, None], keys, values, causal=True, key_lengths=lengths + 1, **options)

    compiled, results, items = torch.compile(step, backend="aot_eager", fullgraph=True), [], torch.arange(2)
    for token in range(steps):
        lengths = (token - late).clamp(min=0)
        results.append(compiled(q[items, lengths], k[items, lengths], v[items, lengths], lengths))
        if token == 1:
            graphs = counters["unique_graphs"]
    assert counters["unique_graphs"] == graphs > 0
    whole = attention(q, k, v, causal=True, **options)
    found = torch.cat(results, 1)
    torch.testing.assert_close(found[:1], whole[:1])
    torch.testing.assert_close(found[1:, 3:], whole[1:, :-3])
    torch._dynamo.reset()


def test_one_graph_takes_any_bounds_of_queries_and_keys() -> None:
    torch._dynamo.reset()
    graphs = []

    def counted(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    def attend(q: Tensor, k: Tensor, v: Tensor, bounds: Any, of_keys: Any) -> Tensor:
        options = {"segment_lengths": (8, 32), "dilation_rates": (1, 2), "causal": True}
        return dilated_attention(q, k, v, cu_seqlens=bounds, cu_seqlens_k=of_keys, **options)

    compiled = torch.compile(attend, backend=counted, fullgraph=True)
    q, k, v = (x[0] for x in tensors(5, 30))
    for bounds in (((0, 2, 5), (0, 12, 30)), ((0, 1, 5), (0, 3, 30)), ((0, 5, 5), (0, 29, 30))):
        found = compiled(q, k, v, *map(torch.tensor, bounds))
        torch.testing.assert_close(found, attend(q, k, v, *bounds))
    assert len(graphs) == 1


@pytest.mark.parametrize("options", [{}, {"key_lengths": [9, 30]}], ids=["batch", "cache"])
def test_native_sparse_attention_compiles_without_a_graph_break(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    q, k, v = tensors(3, 30)
    gates = torch.rand(2, 3, 4, 3, dtype=torch.float64)

    def attend(*inputs: Tensor) -> Tensor:
        return native_sparse_attention(*inputs, block_size=16, top_k=2, window=9, **options)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, gates), attend(q, k, v, gates))


def test_vmap_over_caches() -> None:
    q, k, v = (torch.stack([x, x + 1]) for x in tensors(2, 8))
    lengths = torch.tensor([8, 3])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=True, key_lengths=lengths)

    expected = torch.stack([attend(*item) for item in zip(q, k, v, strict=True)])
    torch.testing.assert_close(torch.func.vmap(attend)(q, k, v), expected)


def test_tensors_without_numbers() -> None:
    q, k, v = (x.to("meta") for x in tensors(3, 8))
    assert attention(q, k, v, causal=True).shape == q.shape
    assert attention(q, k, v, causal=True, key_lengths=(8, 4)).shape == q.shape


def test_native_sparse_attention_with_compressed_keys_of_a_cache() -> None:
    """Compressed keys of an item are those of its tokens, whatever is behind them."""
    q, k, v = tensors(40, 40, batch=2)
    gates = torch.rand(2, 40, 4, 3, dtype=torch.float64)
    spans: Any = {"compression_length": 8, "compression_stride": 4, "block_size": 16, "top_k": 2, "window": 9}
    compressed = [torch.randn(2, 9, 2, 16, dtype=torch.float64) for _ in range(2)]
    named = dict(zip(("compressed_key", "compressed_value"), compressed, strict=True))
    wanted = native_sparse_attention(q[:1], k[:1], v[:1], gates[:1], **{n: x[:1] for n, x in named.items()}, **spans)
    short = {name: x[1:, :4] for name, x in named.items()}
    of_second = native_sparse_attention(q[1:, :20], k[1:, :20], v[1:, :20], gates[1:, :20], **short, **spans)
    queries = torch.cat([q[:1, 37:], q[1:, 17:20]])
    of_queries = torch.cat([gates[:1, 37:], gates[1:, 17:20]])
    out = native_sparse_attention(queries, k, v, of_queries, key_lengths=(40, 20), **named, **spans)
    torch.testing.assert_close(out, torch.cat([wanted[:, 37:], of_second[:, 17:]]))


def test_flops_count_the_rows_that_are_there() -> None:
    q, k, v = tensors(3, 8)

    def pairs(function: Any, *inputs: Tensor, **options: Any) -> float:
        with FlopCounterMode(display=False) as counter:
            function(*inputs, **options)
        return counter.get_total_flops() / (4 * 16 * 4)

    assert pairs(attention, q, k, v) == 2 * 3 * 8
    assert pairs(attention, k.repeat(1, 1, 2, 1), q[:, :, :2], q[:, :, 2:]) == 2 * 8 * 3
    assert pairs(attention, q, k, v, causal=True) == 2 * (6 + 7 + 8)
    assert pairs(attention, q, k, v, causal=True, key_lengths=(8, 3)) == (6 + 7 + 8) + (1 + 2 + 3)
    packed = {"cu_seqlens": (0, 1, 3), "cu_seqlens_k": (0, 5, 8)}
    assert pairs(attention, q[0], k[0], v[0], causal=True, **packed) == 5 + (2 + 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_dtype_and_autocast(dtype: torch.dtype) -> None:
    q, k, v = (x.float() for x in tensors(2, 40))
    exact = attention(q, k, v, causal=True, window=(20, 0))
    out = attention(*(x.to(dtype) for x in (q, k, v)), causal=True, window=(20, 0))
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), exact, rtol=0, atol=8 * torch.finfo(dtype).eps)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(q, k, v, causal=True, key_lengths=(40, 20)).dtype == torch.bfloat16
