"""Closed forms against the plan's own counts."""

import pytest

from dilabench.distributed.model import ideal_efficiency
from dilabench.distributed.sharding import contiguous, zigzag
from dilabench.distributed.shardings import RING, RING_ALLGATHER, RING_OVERLAP, RING_VARLEN, ULYSSES, ZIGZAG_RING
from dilabench.impls.ring.schedule.plan import pieces_between
from dilabench.impls.union.branches import branches_of
from dilabench.patterns.answers import windowed_pairs
from dilabench.plugins.manager import discover
from dilabench.workload.spec import UNBOUNDED, Workload


def workload(**fields):
    shape = {"batch_size": 1, "seq_len": 96, "num_heads": 4, "num_kv_heads": 4, "head_dim": 8, "dtype": "float64"}
    return Workload.model_validate({"pattern": {"kind": "dense"}, "mode": "both", **shape, **fields})


def planned_pairs(one, shards, rank, step):
    """(query, key) pairs of a rank's calls on the keys of the rank `step` before it, per batch entry."""
    pairs = 0
    for piece in pieces_between(one, shards, rank, (rank - step) % shards.size, branches_of(one)):
        masked = piece.causal or piece.window != UNBOUNDED
        full = piece.queries * piece.keys
        seen = windowed_pairs(piece.queries, piece.causal, *piece.window) if masked else full
        pairs += piece.stack.count * piece.run.heads.count * seen
    return pairs


DILATED = {"kind": "dilated", "segment_lengths": [64, 256, 1024], "dilation_rates": [1, 2, 4]}
# Where residues differ in rows, residue 0 stands for all.
COUNTED = {
    "dense": ({}, 1e-12),
    "window": ({"window": (100, 0)}, 1e-12),
    "dense, full": ({"causal": False}, 1e-12),
    "dilated": ({"pattern": DILATED}, 6e-3),
    "dilated, full": ({"pattern": DILATED, "causal": False}, 6e-3),
    "dilated, a segment that no rate divides": ({"pattern": {**DILATED, "dilation_rates": [1, 2, 6]}}, 8e-3),
    "dilated, a branch per group of heads": ({"pattern": {**DILATED, "heads": "grouped"}}, 6e-3),
}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("sharding", "cut"), [(RING, contiguous), (ZIGZAG_RING, zigzag)], ids=["ring", "zigzag-ring"])
@pytest.mark.parametrize(("fields", "tolerance"), COUNTED.values(), ids=COUNTED)
def test_pairs_hop_by_hop_are_those_of_the_plan(ranks, sharding, cut, fields, tolerance):
    one = workload(seq_len=1024, **fields)
    shards = cut(one.sequences, ranks)
    planned = [[planned_pairs(one, shards, rank, step) for step in range(ranks)] for rank in range(ranks)]
    work = [sum(steps) for steps in planned]
    for found, wanted in zip(sharding.pairs(one, ranks), planned, strict=True):
        assert found == pytest.approx(wanted, rel=0, abs=tolerance * max(work))
    assert sharding.load_balance(one, ranks) == pytest.approx(sum(work) / ranks / max(work), rel=tolerance)


def test_packed_sequences_are_cut_one_by_one():
    one = workload(seq_len=240, layout="packed", cu_seqlens=(0, 48, 240))
    shards = zigzag(one.sequences, 3)
    planned = [[planned_pairs(one, shards, rank, step) for step in range(3)] for rank in range(3)]
    assert [list(steps) for steps in RING_VARLEN.pairs(one, 3)] == planned


def test_a_causal_ring_in_order_is_balanced_as_p_over_2p_minus_1():
    for ranks in (2, 4, 8):
        one = workload(seq_len=2**14)
        assert RING.load_balance(one, ranks) == pytest.approx(ranks / (2 * ranks - 1), rel=1e-3)
        assert ZIGZAG_RING.load_balance(one, ranks) == 1.0


def test_whole_heads_are_uneven_where_they_do_not_divide():
    assert ULYSSES.load_balance(workload(num_heads=6, num_kv_heads=6), 4) == 6 / 4 / 2


def test_nothing_is_said_of_an_implementation_that_names_no_sharding():
    catalogue = discover().catalogue
    for name in ("strided", "torchscale", "somebody-elses-ring"):
        assert catalogue.sharding_of(name) is None


def test_every_sharding_that_a_descriptor_names_answers():
    catalogue = discover().catalogue
    named = [one for one in catalogue.implementations if one.sharding]
    assert {one.name for one in named} >= {"ring", "ulysses", "block-sparse-ring-multihead"}
    patterns = {
        "dense": {"kind": "dense"},
        "block_sparse": {"kind": "block_sparse", "block_size": 8, "sparsity": 0.5},
        "window_sink": {"kind": "window_sink", "window_size": 16},
        "dilated": {"kind": "dilated", "segment_lengths": (24, 96), "dilation_rates": (1, 4)},
    }
    for one in named:
        kind = next(kind for kind in patterns if one.supports.computes(kind))
        asked = workload(pattern=patterns[kind])
        sharding = catalogue.sharding_of(one.name)
        assert 0 < sharding.load_balance(asked, 4) <= 1
        assert 0 <= sharding.overlapping_share(asked, 4) < 1
        assert sharding.received_bytes(asked, 4) > 0


def test_what_can_go_on_while_keys_are_under_way():
    # Zigzag steps are equal: all but the last one. A gather has only its own keys meanwhile, Ulysses nothing.
    assert ZIGZAG_RING.overlapping_share(workload(seq_len=768), 4) == pytest.approx(3 / 4, rel=5e-3)
    assert RING_ALLGATHER.overlapping_share(workload(causal=False), 4) == 1 / 4
    assert ULYSSES.overlapping_share(workload(), 4) == 0.0
    # A window that reaches one rank back has its last step there.
    near = workload(seq_len=1024, window=(255, 0), causal=True)
    last, whole = RING.pairs(near, 4)[3][1], sum(RING.pairs(near, 4)[3])
    assert RING.overlapping_share(near, 4) == 1 - last / whole


def test_ideal_efficiency_is_the_balance_less_what_communication_adds():
    assert ideal_efficiency(0.8, 10.0, 5.0, 5.0) == 0.8
    assert ideal_efficiency(1.0, 10.0, 15.0, 5.0) == 0.5


# Shards that the rank with most receives. Forward K of three others, backward K of three (of two where the last step's
# was kept) and three dK; behind a causal mask what a rank does not receive as K comes back to it as dK.
@pytest.mark.parametrize(
    ("sharding", "backward", "both", "causal_backward", "causal_both"),
    [(RING, 6, 9, 3, 6), (RING_OVERLAP, 5, 8, 3, 5), (ZIGZAG_RING, 5, 8, 4, 6.5)],
    ids=["ring", "ring-overlap", "zigzag-ring"],
)
def test_a_ring_brings_so_many_shards(sharding, backward, both, causal_backward, causal_both):
    wanted = {False: {"forward": 3, "backward": backward, "both": both}}
    wanted[True] = {"forward": 3, "backward": causal_backward, "both": causal_both}
    shard = 2 * 24 * 4 * 8 * 8
    for causal, shards in wanted.items():
        found = {mode: sharding.received_bytes(workload(causal=causal, mode=mode), 4) for mode in shards}
        assert found == {mode: count * shard for mode, count in shards.items()}


def test_one_rank_receives_nothing_and_a_window_has_no_formula():
    assert RING.received_bytes(workload(), 1) == 0
    assert RING.received_bytes(workload(window=(5, 0)), 4) is None
