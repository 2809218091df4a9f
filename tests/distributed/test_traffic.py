"""Counted bytes against the formulas of the ring notes, in closed form."""

import pytest

pytestmark = pytest.mark.distributed
B, N, D, ITEM = 1, 96, 6, 8


@pytest.fixture
def bytes_of(launch):
    """(forward, backward) bytes of a kind that each rank received; sent and received agree over all ranks."""
    import ring_cases

    def of(ranks, name, kind="keys", **fields):
        one = ring_cases.workload(batch_size=B, seq_len=N, head_dim=D, **fields)
        found = launch(ring_cases.counted, ranks, [name, one])
        for step in (0, 1):
            sent = sum(rank[step].get(f"sent_{kind}_bytes", 0) for rank in found)
            assert sent == sum(rank[step].get(f"received_{kind}_bytes", 0) for rank in found)
        return [[rank[step].get(f"received_{kind}_bytes", 0) for rank in found] for step in (0, 1)]

    return of


def test_dense_ring_moves_every_other_shard_and_again_backward_with_every_partial_gradient(bytes_of):
    forward, keys = bytes_of(4, "ring", causal=False)
    _, gradients = bytes_of(4, "ring", "gradients", causal=False)
    assert forward == keys == gradients == [2 * 3 * (N // 4) * 2 * D * ITEM] * 4


def test_a_causal_ring_sends_nothing_ahead(bytes_of):
    forward, _ = bytes_of(4, "ring")
    assert forward == [2 * rank * (N // 4) * 2 * D * ITEM for rank in range(4)]


def test_zigzag_needs_half_of_earlier_ranks_and_all_of_later_ones(bytes_of):
    forward, backward = bytes_of(4, "zigzag-ring")
    shard = 2 * (N // 4) * 2 * D * ITEM
    assert forward == [shard * rank // 2 + shard * (3 - rank) for rank in range(4)]
    # The last step's keys are there still: those of the next rank, and on the last one half of the first rank's.
    kept = [shard, shard, shard, shard // 2]
    assert backward == [keys - last for keys, last in zip(forward, kept, strict=True)]


def test_two_ranks_that_overlap_move_no_keys_in_the_backward_pass(bytes_of):
    forward, backward = bytes_of(2, "zigzag-ring")
    shard = 2 * (N // 2) * 2 * D * ITEM
    assert forward == [shard, shard // 2]
    assert backward == [0, 0]


def test_a_window_keeps_hops_out_of_reach_at_home(bytes_of):
    forward, _ = bytes_of(4, "ring-overlap", window=(5, 0))
    assert forward == [0, *[2 * 5 * 2 * D * ITEM] * 3]


@pytest.mark.parametrize("offset_by", ["head", "kv_head"])
def test_gathered_bytes_of_separate_branches(offset_by, bytes_of):
    """V = 2·K·D·b·max(0, w - l)/r; with offsets by query head, a key head goes out on both of its residues."""
    import ring_cases

    # Segments of 8 and 24 rows stay on their rank (l = 24); the branch (96, 4) spans all ranks.
    pattern = ring_cases.dilated([8, 24, 96], [1, 2, 4], offset_by=offset_by)
    forward, backward = bytes_of(4, "ring-allgather", causal=False, pattern=pattern)
    rows = (96 - 24) // 4 * (2 if offset_by == "head" else 1)
    assert forward == [2 * 2 * D * ITEM * rows] * 4
    assert backward == [0] * 4


def test_nested_branches_are_gathered_once(bytes_of):
    """rows = sum of (w_i - max(w_{i-1}, l)) / r_i when r_i divides r_{i+1}."""
    import ring_cases

    pattern = ring_cases.dilated([24, 48, 96], [1, 2, 4], offset_by="kv_head")
    forward, _ = bytes_of(4, "ring-allgather", causal=False, pattern=pattern)
    _, backward = bytes_of(4, "ring-allgather", "gradients", causal=False, pattern=pattern)
    rows = (48 - 24) // 2 + (96 - 48) // 4
    assert forward == backward == [2 * 2 * D * ITEM * rows] * 4


def test_ulysses_moves_each_tensor_but_its_own_part(bytes_of):
    forward, backward = bytes_of(2, "ulysses", "heads")
    lse = 4 * (N // 2) * ITEM // 2
    own = (2 * 4 + 2 * 2) * (N // 2) * D * ITEM // 2
    assert forward == [own + lse] * 2
    assert backward == [own] * 2
