"""Closed forms against the plan's own counts."""

import pytest

from dilabench.distributed.model import load_balance, received_bytes
from dilabench.distributed.sharding import contiguous, zigzag
from dilabench.impls.branches import branches_of
from dilabench.impls.ring.plan import pieces_between
from dilabench.spec import Workload
from dilabench.work import windowed_pairs


def workload(**fields):
    shape = {"batch_size": 1, "seq_len": 96, "num_heads": 4, "num_kv_heads": 4, "head_dim": 8, "dtype": "float64"}
    return Workload.model_validate({"pattern": {"kind": "dense"}, "mode": "both", **shape, **fields})


def work_of(one, shards, rank):
    """(query, key) pairs of a rank over all its calls."""
    pairs = 0
    for holder in range(shards.size):
        for piece in pieces_between(one, shards, rank, holder, branches_of(one)):
            full = piece.queries * piece.keys
            seen = windowed_pairs(piece.queries, True, -1, -1) if piece.causal else full
            pairs += piece.stack.count * piece.run.heads.count * seen
    return pairs


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("name", "sharding"), [("ring", contiguous), ("zigzag-ring", zigzag)])
def test_dense_balance(ranks, name, sharding):
    one = workload(seq_len=768)
    work = [work_of(one, sharding(one.sequences, ranks), rank) for rank in range(ranks)]
    assert load_balance(one, name, ranks) == pytest.approx(sum(work) / ranks / max(work), rel=5e-3)


def test_dilated_balance_in_order():
    pattern = {"kind": "dilated", "segment_lengths": [64, 256, 1024], "dilation_rates": [1, 2, 4]}
    one = workload(seq_len=1024, pattern=pattern)
    work = [work_of(one, contiguous(one.sequences, 4), rank) for rank in range(4)]
    assert load_balance(one, "ring-allgather", 4) == pytest.approx(sum(work) / 4 / max(work), rel=2e-2)


@pytest.mark.parametrize("name", ["ring", "zigzag-ring"])
def test_a_causal_ring_brings_every_rank_the_same_number_of_shards(name):
    # What a rank does not receive as keys it receives as returned gradients; keys come again in the backward pass.
    shard = 2 * 24 * 4 * 8 * 8
    forward = received_bytes(workload(mode="forward"), name, 4)
    assert forward == 3 * shard
    assert received_bytes(workload(causal=False, mode="forward"), name, 4) == 3 * shard
    assert received_bytes(workload(causal=False), name, 4) == 9 * shard


def test_one_rank_receives_nothing_and_a_window_has_no_formula():
    assert received_bytes(workload(), "ring", 1) == 0
    assert received_bytes(workload(window=(5, 0)), "ring", 4) is None
    assert load_balance(workload(window=(5, 0)), "ring", 4) is None
    assert load_balance(workload(causal=False), "ring", 4) == 1.0
