"""Counts of work against a brute force over the definition of C (semantics.md §1 and §2)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilabench.patterns.answers import windowed_pairs
from dilabench.patterns.dense import DENSE
from dilabench.patterns.dilated import DilatedPattern, rows_kept
from dilabench.workload.lower_bounds import least_bytes
from dilabench.workload.spec import Workload, attended_pairs, flops, tensor_bytes
from tests.conftest import random_examples


def brute_offset(pattern, head, rate, num_heads, num_kv_heads):
    if pattern.offset_by == "kv_head":
        head, num_heads = head // (num_heads // num_kv_heads), num_kv_heads
    if pattern.offset == "modulo":
        return head % rate
    return head // -(-num_heads // rate)


def brute_branches(pattern, head, num_heads):
    """Heads dealt out to the branches in order, sizes differing by at most one, larger groups first."""
    if pattern.heads == "all":
        return pattern.branches
    sizes = [0] * len(pattern.branches)
    for index in range(num_heads):
        sizes[index % len(sizes)] += 1
    owners = [branch for branch, size in enumerate(sizes) for _ in range(size)]
    return (pattern.branches[owners[head]],)


def brute_multiplicity(workload, head, i, j):
    """C[h, i, j] for positions of one sequence."""
    left, right = workload.window
    if workload.causal and j > i:
        return 0
    if (left >= 0 and j < i - left) or (right >= 0 and j > i + right):
        return 0
    pattern = workload.pattern
    if not isinstance(pattern, DilatedPattern):
        return 1
    count = 0
    for w, r in brute_branches(pattern, head, workload.num_heads):
        offset = brute_offset(pattern, head, r, workload.num_heads, workload.num_kv_heads)
        count += i // w == j // w and (i % w) % r == offset and (j % w) % r == offset
    return count


def brute_pairs(workload):
    return workload.batch_size * sum(
        brute_multiplicity(workload, head, i, j)
        for start, end in workload.sequences
        for head in range(workload.num_heads)
        for i in range(end - start)
        for j in range(end - start)
    )


@st.composite
def small_workloads(draw):
    branches = draw(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 7)), min_size=1, max_size=3))
    pattern = {
        "kind": "dilated",
        "segment_lengths": [w for w, _ in branches],
        "dilation_rates": [r for _, r in branches],
        "heads": draw(st.sampled_from(["all", "grouped"])),
        "offset": draw(st.sampled_from(["modulo", "blocked"])),
        "offset_by": draw(st.sampled_from(["head", "kv_head"])),
    }
    causal, kv_heads, length = draw(st.booleans()), draw(st.integers(1, 3)), draw(st.integers(1, 23))
    packed = draw(st.booleans())
    cuts = sorted(draw(st.sets(st.integers(1, length - 1), max_size=3))) if packed and length > 1 else []
    right = draw(st.integers(-1, 0 if causal else 9))
    return Workload(
        pattern=draw(st.sampled_from([pattern, {"kind": "dense"}])),
        batch_size=1 if packed else draw(st.integers(1, 2)),
        seq_len=length,
        num_heads=kv_heads * draw(st.integers(1, 2)),
        num_kv_heads=kv_heads,
        head_dim=24,
        causal=causal,
        window=(draw(st.integers(-1, 12)), right),
        layout="packed" if packed else "padded",
        cu_seqlens=(0, *cuts, length) if packed else None,
    )


@random_examples(60, 200, workload=small_workloads())
def test_attended_pairs_equal_the_definition(workload):
    assert attended_pairs(workload) == brute_pairs(workload)


@random_examples(60, 200, workload=small_workloads(), rows=st.integers(1, 23))
def test_pairs_of_the_last_rows_equal_the_definition(workload, rows):
    workload = workload.replace(layout="padded", cu_seqlens=None)
    last = workload.replace(query_len=min(rows, workload.seq_len))
    in_all = workload.batch_size * sum(
        brute_multiplicity(workload, head, i, j)
        for head in range(workload.num_heads)
        for i in range(last.first_row, workload.seq_len)
        for j in range(workload.seq_len)
    )
    assert attended_pairs(last) == in_all
    assert flops(last) == 4 * 24 * in_all


def test_the_work_of_one_query_over_a_cache():
    cache = {"batch_size": 64, "seq_len": 32768, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    workload = Workload(pattern=DENSE, dtype="bfloat16", query_len=1, **cache)
    keys = 64 * 32768 * 8 * 128 * 2
    assert tensor_bytes(workload) == {
        "q": 64 * 32 * 128 * 2,
        "k": keys,
        "v": keys,
        "out": 64 * 32 * 128 * 2,
        "lse": 64 * 32 * 4,
    }
    assert least_bytes(workload) == 2 * keys + 2 * 64 * 32 * 128 * 2
    assert least_bytes(workload.replace(window=(127, 0))) == 2 * keys // 256 + 2 * 64 * 32 * 128 * 2
    assert workload.density == 1
    segments = DilatedPattern(segment_lengths=(2048,), dilation_rates=(1,))
    assert workload.replace(pattern=segments).density == 2048 / 32768


@given(st.integers(1, 40), st.integers(1, 6))
def test_grouped_heads_are_dealt_out_in_order(num_heads, num_branches):
    pattern = DilatedPattern(
        segment_lengths=tuple(range(1, num_branches + 1)), dilation_rates=(1,) * num_branches, heads="grouped"
    )
    owners = [pattern.head_branches(head, num_heads) for head in range(num_heads)]
    assert all(len(owner) == 1 for owner in owners)
    order = [pattern.branches.index(owner[0]) for owner in owners]
    assert order == sorted(order)
    sizes = [order.count(branch) for branch in range(num_branches)]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_twelve_heads_over_longnets_five_branches():
    pattern = DilatedPattern(segment_lengths=(1, 2, 3, 4, 5), dilation_rates=(1, 1, 1, 1, 1), heads="grouped")
    owners = [pattern.head_branches(head, 12)[0][0] for head in range(12)]
    assert owners == [1, 1, 1, 2, 2, 2, 3, 3, 4, 4, 5, 5]


def test_a_head_that_does_not_exist_is_refused():
    pattern = DilatedPattern(segment_lengths=(4,), dilation_rates=(1,), heads="grouped")
    with pytest.raises(ValueError, match="head 5 is not below num_heads 5"):
        pattern.head_branches(5, 5)


@given(st.integers(1, 200), st.integers(1, 20), st.integers(0, 19))
def test_rows_kept_counts_residues(length, rate, offset):
    assert rows_kept(length, rate, offset % rate) == sum(i % rate == offset % rate for i in range(length))


@given(st.integers(0, 25), st.booleans(), st.integers(-1, 30), st.integers(-1, 30))
def test_windowed_pairs_counts_a_band(rows, causal, left, right):
    seen = sum(
        not (causal and j > i) and (left < 0 or j >= i - left) and (right < 0 or j <= i + right)
        for i in range(rows)
        for j in range(rows)
    )
    assert windowed_pairs(rows, causal, left, right) == seen


@pytest.mark.parametrize(("offset", "expected"), [("modulo", [0, 1, 2, 0, 1]), ("blocked", [0, 0, 1, 1, 2])])
def test_offsets_of_five_heads_at_rate_three(offset, expected):
    pattern = DilatedPattern(segment_lengths=(9,), dilation_rates=(3,), offset=offset)
    assert [pattern.head_offset(head, 3, 5, 5) for head in range(5)] == expected


def test_offset_by_kv_head_keeps_one_residue_per_group():
    pattern = DilatedPattern(segment_lengths=(9,), dilation_rates=(3,), offset_by="kv_head")
    assert [pattern.head_offset(head, 3, 6, 3) for head in range(6)] == [0, 0, 1, 1, 2, 2]


def test_flops_and_bytes_of_a_known_shape():
    workload = Workload(
        pattern={"kind": "dense"}, batch_size=2, seq_len=10, num_heads=6, num_kv_heads=3, head_dim=24, dtype="float16"
    )
    pairs = 2 * 6 * 55
    assert flops(workload) == 4 * 24 * pairs
    assert flops(workload.replace(mode="backward")) == 2.5 * 4 * 24 * pairs
    assert flops(workload.replace(mode="both")) == 3.5 * 4 * 24 * pairs
    query, key = 2 * 10 * 6 * 24 * 2, 2 * 10 * 3 * 24 * 2
    assert tensor_bytes(workload) == {"q": query, "k": key, "v": key, "out": query, "lse": 2 * 10 * 6 * 4}
    assert tensor_bytes(workload.replace(dtype="float64"))["lse"] == 2 * 10 * 6 * 8
