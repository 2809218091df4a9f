"""The kernel calls of `strided`: every row once, fewest launches, small results."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilabench.impls.union import strided_rows as rows_module
from dilabench.impls.union.strided_rows import StridedRows, copied_rows, strided_rows
from dilabench.patterns.dilated import DilatedPattern
from dilabench.workload.spec import Workload


def workload(rate: int, num_heads: int, segments: int = 2, batch_size: int = 2, **fields: object) -> Workload:
    """One branch with segments of 8·r positions."""
    length = 8 * rate
    shape = {
        "batch_size": batch_size,
        "seq_len": segments * length,
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": 4,
    }
    pattern = {"kind": "dilated", "segment_lengths": (length,), "dilation_rates": (rate,)}
    return Workload.model_validate({"pattern": pattern, **shape, **fields})


def rows_of(call: StridedRows, queries: bool) -> list[tuple[int, int, int]]:
    """The (batch item, position, head) of every row that the call's view reaches."""
    line = call.heads if queries else call.key_heads
    rows = []
    for batch in range(call.first_batch, call.first_batch + call.batches):
        for level in range(call.stack.count):
            for index in range(line.count):
                place = call.start.after(call.stack.step, level).after(line.step, index)
                head = place.head if queries else place.kv_head
                rows += [(batch, place.position + row * call.rate, head) for row in range(call.length)]
    return rows


@pytest.mark.parametrize(("num_heads", "rate"), [(8, 1), (8, 2), (8, 4), (8, 8), (12, 4), (12, 6), (32, 8), (4, 12)])
def test_at_most_min_of_rate_and_heads_per_residue_calls(num_heads: int, rate: int) -> None:
    calls = strided_rows(workload(rate, num_heads))
    assert len(calls) == min(rate, max(1, num_heads // rate))


@pytest.mark.parametrize("offset", ["modulo", "blocked"])
@pytest.mark.parametrize("rate", [2, 4, 8, 16])
def test_one_call_where_there_is_one_segment(rate: int, offset: str) -> None:
    asked = workload(rate, 16, segments=1, batch_size=1)
    asked = asked.replace(pattern=asked.pattern.model_copy(update={"offset": offset}))
    assert len(strided_rows(asked)) == 1


def test_calls_of_the_papers_branches() -> None:
    """kernels.md: 9 calls instead of 25 for r = 1 2 4 6 12 at 12 heads."""
    counts = [len(strided_rows(workload(rate, 12))) for rate in (1, 2, 4, 6, 12)]
    assert counts == [1, 2, 3, 2, 1]


def test_grouped_query_heads_share_keys_in_one_call() -> None:
    """With g = 4 and r = 2 every key head serves two query heads of a residue: keys are never repeated."""
    calls = strided_rows(workload(2, 16, num_kv_heads=4))
    assert [(call.heads.count, call.key_heads.count) for call in calls] == [(8, 4), (8, 4)]


def test_batch_items_are_in_one_call_where_copies_are_small() -> None:
    """In 37 positions those of segments of 8 do not follow each other from item to item."""
    asked = workload(1, 4, batch_size=3, seq_len=37)
    whole, remainder = (3 * 4 * rows for rows in (32, 5))
    assert [call.query_rows for call in strided_rows(asked)] == [whole // 3] * 3 + [remainder]
    assert [call.query_rows for call in strided_rows(asked, copied=whole)] == [whole, remainder]
    assert copied_rows(asked, torch.device("cpu")) == 0
    assert copied_rows(asked, torch.device("cuda")) == (16 << 20) // 16


@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_row_is_in_one_call_of_its_branch(data: st.DataObject) -> None:
    kv_heads = data.draw(st.integers(1, 6))
    num_heads = kv_heads * data.draw(st.integers(1, 4))
    pattern = DilatedPattern(
        segment_lengths=(data.draw(st.integers(1, 40)),),
        dilation_rates=(data.draw(st.integers(1, 9)),),
        offset=data.draw(st.sampled_from(("modulo", "blocked"))),
        offset_by=data.draw(st.sampled_from(("head", "kv_head"))),
    )
    asked = Workload(
        pattern=pattern,
        batch_size=data.draw(st.integers(1, 3)),
        seq_len=data.draw(st.integers(1, 60)),
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=4,
    )
    calls = strided_rows(asked, copied=data.draw(st.sampled_from((0, 40, 1 << 20))))
    reached = Counter(row for call in calls for row in rows_of(call, queries=True))
    assert reached == Counter(expected_rows(asked))
    for call in calls:
        keys = rows_of(call, queries=False)
        assert len(set(keys)) == len(keys), "a key row twice in one call would lose a gradient"
        assert call.heads.count % call.key_heads.count == 0


def expected_rows(asked: Workload) -> list[tuple[int, int, int]]:
    """By the definition: positions on the head's residue, counted from the start of their segment."""
    assert isinstance(asked.pattern, DilatedPattern)
    ((length, rate),) = asked.pattern.branches
    length = min(length, asked.seq_len)
    return [
        (batch, position, head)
        for batch in range(asked.batch_size)
        for head in range(asked.num_heads)
        for position in range(asked.seq_len)
        if position % length % rate == asked.pattern.head_offset(head, rate, asked.num_heads, asked.num_kv_heads)
    ]


@pytest.mark.parametrize(
    ("segments", "batch_size", "num_heads"), [((7,), 1, 4), ((16,), 3, 4), ((20, 24), 1, 6), ((24, 24, 24), 2, 5)]
)
def test_no_result_but_the_output_is_larger_than_half_of_it(
    segments: tuple[int, ...], batch_size: int, num_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for small ones, of which all that can be are in one call."""
    pattern = DilatedPattern(segment_lengths=segments, dilation_rates=(1,) * len(segments))
    asked = Workload(
        pattern=pattern, batch_size=batch_size, seq_len=24, num_heads=num_heads, num_kv_heads=num_heads, head_dim=4
    )
    whole = 24 * batch_size * num_heads
    few = list(strided_rows(asked))
    monkeypatch.setattr(rows_module, "FEW_ROWS", 0)
    first, *others = (call.query_rows for call in strided_rows(asked))
    assert first == whole or 2 * first <= whole
    assert max(others, default=0) * 2 <= whole
    assert len(few) <= 1 + len(others)
    assert sum(call.query_rows for call in few) == first + sum(others)
