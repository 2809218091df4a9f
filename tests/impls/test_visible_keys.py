"""C against its definition in semantics.md, written as loops."""

import pytest
import torch

from dilabench.impls.visible_keys import multiplicity
from dilabench.patterns.dilated import DilatedPattern
from dilabench.workload.spec import Workload, attended_pairs
from dilabench.workload.visibility import alike_heads, covered, seen_by

BRANCHES = {"kind": "dilated", "segment_lengths": (7, 20, 300), "dilation_rates": (2, 3, 6)}
BASE = {"batch_size": 1, "seq_len": 61, "num_heads": 6, "num_kv_heads": 3, "head_dim": 4, "pattern": BRANCHES}
CHANGES = {
    "causal": {"causal": True},
    "full": {"causal": False},
    "window": {"causal": False, "window": (9, 4)},
    "blocked": {"pattern": {**BRANCHES, "offset": "blocked"}},
    "kv_head": {"pattern": {**BRANCHES, "offset_by": "kv_head"}},
    "blocked by kv_head": {"pattern": {**BRANCHES, "offset": "blocked", "offset_by": "kv_head"}},
    "grouped": {"pattern": {**BRANCHES, "heads": "grouped"}, "num_heads": 5, "num_kv_heads": 5},
    "packed": {"layout": "packed", "cu_seqlens": (0, 1, 30, 61), "causal": False},
    "dense": {"pattern": {"kind": "dense"}, "window": (5, -1)},
    "dense packed": {"pattern": {"kind": "dense"}, "layout": "packed", "cu_seqlens": (0, 17, 61), "causal": False},
}


def workload(change: dict[str, object]) -> Workload:
    return Workload.model_validate({**BASE, **change})


def offset(pattern: DilatedPattern, head: int, rate: int, heads: int, kv_heads: int) -> int:
    if pattern.offset_by == "kv_head":
        head, heads = head // (heads // kv_heads), kv_heads
    return head % rate if pattern.offset == "modulo" else head // ((heads + rate - 1) // rate)


def count(w: Workload, head: int, i: int, j: int) -> int:
    """C[head, i, j], term by term."""
    left, right = w.window
    if (w.causal and j > i) or (left >= 0 and j < i - left) or (right >= 0 and j > i + right):
        return 0
    sequence = [(start, end) for start, end in w.sequences if start <= i < end]
    start, end = sequence[0]
    if not start <= j < end:
        return 0
    if not isinstance(w.pattern, DilatedPattern):
        return 1
    i, j = i - start, j - start
    total = 0
    groups = [len(part) for part in torch.arange(w.num_heads).tensor_split(len(w.pattern.branches))]
    for index, (length, rate) in enumerate(w.pattern.branches):
        first = sum(groups[:index])
        if w.pattern.heads == "grouped" and not first <= head < first + groups[index]:
            continue
        s = offset(w.pattern, head, rate, w.num_heads, w.num_kv_heads)
        total += i // length == j // length and (i % length) % rate == s and (j % length) % rate == s
    return total


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_every_entry_is_the_definition(change: dict[str, object]) -> None:
    w = workload(change)
    for head in range(w.num_heads):
        actual = multiplicity(w, head, torch.arange(w.seq_len)).tolist()
        assert actual == [[count(w, head, i, j) for j in range(w.seq_len)] for i in range(w.seq_len)]


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_columns_and_coverage_follow_from_c(change: dict[str, object]) -> None:
    w = workload(change)
    for head in range(w.num_heads):
        c = multiplicity(w, head, torch.arange(w.seq_len))
        assert torch.equal(torch.from_numpy(covered(w, head)), c.sum(1) > 0)
        for key in range(0, w.seq_len, 7):
            assert torch.equal(torch.from_numpy(seen_by(w, head, key)), c[:, key].nonzero()[:, 0])


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_heads_are_alike_when_all_their_entries_are(change: dict[str, object]) -> None:
    w = workload(change)
    entries = [multiplicity(w, head, torch.arange(w.seq_len)) for head in range(w.num_heads)]
    groups = alike_heads(w)
    assert sorted(head for group in groups for head in group) == list(range(w.num_heads))
    assert all(torch.equal(entries[group[0]], entries[head]) for group in groups for head in group)
    firsts = [entries[group[0]] for group in groups]
    assert not any(torch.equal(a, b) for index, a in enumerate(firsts) for b in firsts[:index])


def test_some_rows_of_a_long_sequence_cost_only_their_keys() -> None:
    w = workload({"seq_len": 2**30, "causal": True})
    rows = torch.tensor([0, 299, 2**30 - 1])
    assert len(seen_by(w, 0, 2**30 - 1)) == 1
    from dilabench.impls.visible_keys import key_groups

    assert max(len(group.keys) for group in key_groups(w, 0, rows)) <= 300


def test_the_sum_is_the_number_of_attended_pairs() -> None:
    w = workload({"causal": True})
    total = sum(int(multiplicity(w, head, torch.arange(w.seq_len)).sum()) for head in range(w.num_heads))
    assert total == attended_pairs(w)
