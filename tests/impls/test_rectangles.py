"""Rectangles equal the oracle however branches nest, compute shared pairs once, and run in threads unseen."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilabench.impls import strided
from dilabench.impls.union import rectangle_union as module
from dilabench.impls.union.rectangle_union import RectangleUnion
from dilabench.impls.union.rectangles import DIAGONAL_ROWS, rectangles
from dilabench.workload.spec import UNBOUNDED, Workload
from tests.conftest import slow
from tests.impls.test_against_oracle import CONTEXT, assert_equals_oracle, results, workloads


@st.composite
def nested(draw: st.DrawFn) -> Workload:
    """Branches that nest: doubling or not, longer than the sequence, as long as each other."""
    asked = draw(workloads(merge_grad=draw(st.sampled_from(("exact", "detached")))))
    base, longer, sparser = draw(st.sampled_from((4, 8, 12, 16))), draw(st.integers(1, 3)), draw(st.integers(2, 3))
    levels = range(draw(st.integers(2, 4)))
    padding = draw(st.sampled_from(("masked", "zero_key")))
    segments, rates = [base * longer**level for level in levels], [sparser**level for level in levels]
    if padding == "zero_key":
        # Refused where a rate does not divide a segment inside the sequence.
        segments = [-(-w // r) * r for w, r in zip(segments, rates, strict=True)]
    pattern = {
        **asked.pattern.model_dump(),
        "segment_lengths": [max(pair) for pair in zip(segments, rates, strict=True)],
        "dilation_rates": rates,
        "padding": padding,
    }
    return asked.replace(pattern=pattern, window=UNBOUNDED)


detached = workloads(merge_grad="detached"), workloads(merge_grad="detached", padding="zero_key")


@pytest.mark.parametrize(("least_rows", "diagonal_rows"), [(1, 2), slow(3, 1), slow(256, 256)])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(workload=st.one_of(nested(), workloads(), workloads(padding="zero_key"), *detached))
def test_equals_oracle(least_rows: int, diagonal_rows: int, workload: Workload) -> None:
    with pytest.MonkeyPatch.context() as patch:
        sizes = {"least_rows": least_rows, "diagonal_rows": diagonal_rows}
        patch.setattr(module, "rectangles", lambda *asked: rectangles(*asked, **sizes))
        assert_equals_oracle(SimpleNamespace(build=module.rectangle_union), workload.replace(window=UNBOUNDED))


def longnet(**fields: Any) -> Workload:
    """Four branches that nest, scaled down."""
    defaults = {
        "pattern": {"kind": "dilated", "segment_lengths": (16, 32, 64, 128), "dilation_rates": (1, 2, 4, 8)},
        "batch_size": 1,
        "seq_len": 256,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 4,
        "causal": False,
    }
    return Workload.model_validate({**defaults, **fields})


def pairs_of(workload: Workload, heads: range, **sizes: int) -> Counter[tuple[int, int, int]]:
    """How many calls compute each (query head, query, key) of a workload."""
    at = torch.arange(workload.seq_len, dtype=torch.float32)[None, :, None, None]
    head = torch.arange(workload.num_heads, dtype=torch.float32)[None, None, :, None]
    found: Counter[tuple[int, int, int]] = Counter()
    for call in rectangles(workload, heads, **sizes):
        query_heads = call.queries(head.expand(1, workload.seq_len, -1, 1).contiguous())[:, 0, :, 0]
        queries, keys = (
            of(at.expand(1, -1, count, 1).contiguous())[..., 0]
            for of, count in ((call.queries, workload.num_heads), (call.keys, workload.num_kv_heads))
        )
        shared = queries.shape[2] // max(1, keys.shape[2])
        for batch, line in ((b, a) for b in range(queries.shape[0]) for a in range(queries.shape[2])):
            of_head = int(query_heads[batch, line])
            for i in queries[batch, :, line].tolist():
                seen = keys[batch, :, line // shared].tolist()
                found.update((of_head, int(i), int(j)) for j in seen if not call.diagonal or j <= i)
    return found


@pytest.mark.parametrize("causal", [False, True])
def test_no_pair_comes_twice_where_branches_nest(causal: bool) -> None:
    """But along the short diagonals, which every branch goes through by itself."""
    asked = longnet(causal=causal)
    found = pairs_of(asked, range(8), least_rows=1, diagonal_rows=8)
    shape = asked.shapes[0]
    distinct = {
        (head, i, int(j))
        for head in range(8)
        for i in range(256)
        for group in asked.pattern.counts(shape, head, torch.tensor([i]).numpy())
        for j in group.keys()  # noqa: SIM118 (no dict)
        if j <= i or not causal
    }
    assert set(found) == distinct
    twice = [pair for pair, count in found.items() if count > 1]
    assert all(causal and i // 8 == j // 8 for _, i, j in twice)


def test_shares_of_the_heads_are_all_heads() -> None:
    asked = longnet()
    of_shares = pairs_of(asked, range(4)) + pairs_of(asked, range(4, 8))
    assert of_shares == pairs_of(asked, range(8))


def test_threads_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same results as in one thread, and as many threads for torch as before."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    asked = longnet(dtype="float64")
    attention = module.rectangle_union(asked, CONTEXT)
    assert len(attention.shares()) == 2
    set_to: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    in_threads = results(attention, asked)
    assert set(set_to) == {1, 2}
    assert set_to[-1] == 2
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    alone = results(attention, asked)
    assert all(torch.equal(in_threads[name], alone[name]) for name in alone)


def test_long_causal_diagonals_are_cut() -> None:
    asked = longnet(
        pattern={"kind": "dilated", "segment_lengths": (2048,), "dilation_rates": (1,)}, seq_len=2048, causal=True
    )
    diagonals = [call for call in rectangles(asked, range(8)) if call.diagonal]
    assert {call.length for call in diagonals} == {DIAGONAL_ROWS}


def test_strided_takes_rectangles_where_they_save_pairs() -> None:
    pattern = {"kind": "dilated", "segment_lengths": (1024, 2048), "dilation_rates": (1, 2)}
    large = longnet(pattern=pattern, seq_len=8192, head_dim=64)
    assert isinstance(strided.build(large, CONTEXT), RectangleUnion)
    detached = large.replace(pattern={**pattern, "merge_grad": "detached"})
    alone = large.replace(pattern={**pattern, "dilation_rates": (2, 3)})
    dense = large.replace(pattern={"kind": "dense"}, causal=True)
    assert isinstance(strided.build(detached, CONTEXT), RectangleUnion)
    for other in (longnet(), dense, alone, large.replace(dtype="bfloat16"), large.replace(window=(64, 64))):
        assert not isinstance(strided.build(other, CONTEXT), RectangleUnion)
