"""Counted bytes against the formulas of the ring notes, in closed form."""

import pytest

# By default, test_parts compares the bytes of every algorithm with its formula.
pytestmark = [pytest.mark.distributed, pytest.mark.slow]
B, N, D, ITEM = 1, 96, 6, 8


@pytest.fixture(scope="module")
def calls():
    """(ranks, algorithm, workload) of every test's call."""
    import ring_cases

    def call(ranks, algorithm, **fields):
        return ranks, algorithm, ring_cases.workload(batch_size=B, seq_len=N, head_dim=D, **fields)

    def over_branches(segments, rates, offset_by):
        pattern = ring_cases.dilated(segments, rates, offset_by=offset_by)
        return call(4, "ring-allgather", causal=False, pattern=pattern)

    return {
        "dense ring": call(4, "ring", causal=False),
        "causal ring": call(4, "ring"),
        "zigzag": call(4, "zigzag-ring"),
        "zigzag of two": call(2, "zigzag-ring"),
        "window": call(4, "ring-overlap", window=(5, 0)),
        # Segments of 8 and 24 rows stay on their rank (l = 24); the branch (96, 4) spans all ranks.
        "separate, head": over_branches([8, 24, 96], [1, 2, 4], "head"),
        "separate, kv_head": over_branches([8, 24, 96], [1, 2, 4], "kv_head"),
        "nested": over_branches([24, 48, 96], [1, 2, 4], "kv_head"),
        "heads": call(2, "ulysses"),
    }


@pytest.fixture(scope="module")
def counters(calls):
    """What each rank counts of each call, forward and backward; one start of ranks for each number of them."""
    import ring_cases
    from launching import launch

    found = {}
    for ranks in (2, 4):
        names = [name for name, call in calls.items() if call[0] == ranks]
        of_ranks = launch(ring_cases.counted, ranks, [[calls[name][1:] for name in names]])
        found |= dict(zip(names, zip(*of_ranks, strict=True), strict=True))
    return found


@pytest.fixture
def bytes_of(counters):
    """(forward, backward) bytes of a kind that each rank received; sent and received agree over all ranks."""

    def of(name, kind="keys"):
        found = counters[name]
        for step in (0, 1):
            sent = sum(rank[step].get(f"sent_{kind}_bytes", 0) for rank in found)
            assert sent == sum(rank[step].get(f"received_{kind}_bytes", 0) for rank in found)
        return [[rank[step].get(f"received_{kind}_bytes", 0) for rank in found] for step in (0, 1)]

    return of


def test_dense_ring_moves_every_other_shard_and_again_backward_with_every_partial_gradient(bytes_of):
    forward, keys = bytes_of("dense ring")
    _, gradients = bytes_of("dense ring", "gradients")
    assert forward == keys == gradients == [2 * 3 * (N // 4) * 2 * D * ITEM] * 4


def test_a_causal_ring_sends_nothing_ahead(bytes_of):
    forward, _ = bytes_of("causal ring")
    assert forward == [2 * rank * (N // 4) * 2 * D * ITEM for rank in range(4)]


def test_zigzag_needs_half_of_earlier_ranks_and_all_of_later_ones(bytes_of):
    forward, backward = bytes_of("zigzag")
    shard = 2 * (N // 4) * 2 * D * ITEM
    assert forward == [shard * rank // 2 + shard * (3 - rank) for rank in range(4)]
    # The last step's keys are there still: those of the next rank, and on the last one half of the first rank's.
    kept = [shard, shard, shard, shard // 2]
    assert backward == [keys - last for keys, last in zip(forward, kept, strict=True)]


def test_two_ranks_that_overlap_move_no_keys_in_the_backward_pass(bytes_of):
    forward, backward = bytes_of("zigzag of two")
    shard = 2 * (N // 2) * 2 * D * ITEM
    assert forward == [shard, shard // 2]
    assert backward == [0, 0]


def test_a_window_keeps_hops_out_of_reach_at_home(bytes_of):
    forward, _ = bytes_of("window")
    assert forward == [0, *[2 * 5 * 2 * D * ITEM] * 3]


@pytest.mark.parametrize("offset_by", ["head", "kv_head"])
def test_gathered_bytes_of_separate_branches(offset_by, bytes_of):
    """V = 2·K·D·b·max(0, w - l)/r; with offsets by query head, a key head goes out on both of its residues."""
    forward, backward = bytes_of(f"separate, {offset_by}")
    rows = (96 - 24) // 4 * (2 if offset_by == "head" else 1)
    assert forward == [2 * 2 * D * ITEM * rows] * 4
    assert backward == [0] * 4


def test_nested_branches_are_gathered_once(bytes_of):
    """rows = sum of (w_i - max(w_{i-1}, l)) / r_i when r_i divides r_{i+1}."""
    forward, _ = bytes_of("nested")
    _, backward = bytes_of("nested", "gradients")
    rows = (48 - 24) // 2 + (96 - 48) // 4
    assert forward == backward == [2 * 2 * D * ITEM * rows] * 4


def test_ulysses_moves_each_tensor_but_its_own_part(bytes_of):
    forward, backward = bytes_of("heads", "heads")
    lse = 4 * (N // 2) * ITEM // 2
    own = (2 * 4 + 2 * 2) * (N // 2) * D * ITEM // 2
    assert forward == [own + lse] * 2
    assert backward == [own] * 2
