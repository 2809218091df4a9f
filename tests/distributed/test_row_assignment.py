"""What assigning rows by their work makes ranks hold, send and compute, counted row by row. No rank is started."""

import sys

import numpy as np
import pytest
import torch

from dilabench.contracts import BuildContext, LoadedBackend, PackedKernel
from dilabench.distributed.assignment import heaviest_first
from dilabench.distributed.row_assignment import TILE, RowAssignment, balanced_rows
from dilabench.distributed.sharding import zigzag
from dilabench.distributed.shardings import BALANCED_ALLGATHER, RING_VARLEN
from dilabench.distributed.single_rank import SingleRank
from dilabench.impls.ring import gathered
from dilabench.impls.ring.schedule.one_launch import InOneLaunch
from dilabench.plugins.manager import discover
from dilabench.workload.spec import Workload


def workload(*bounds, **fields):
    packed = {"layout": "packed", "cu_seqlens": bounds} if len(bounds) > 2 else {}
    shape = {"batch_size": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": "bfloat16", "mode": "both"}
    return Workload.model_validate({"pattern": {"kind": "dense"}, **shape, "seq_len": bounds[-1], **packed, **fields})


def visible(one):
    """[N, N] bool."""
    at = np.arange(one.seq_len)
    document = np.searchsorted(one.cu_seqlens or (0, one.seq_len), at, side="right")
    left, right = one.shapes[0].reach
    apart = at[None] - at[:, None]
    seen = document[None] == document[:, None]
    return seen & ((left is None) | (-apart <= (left or 0))) & ((right is None) | (apart <= (right or 0)))


DOCUMENTS = (0, 1, 3, 290, 300, 700, 701, 1100)
CASES = {
    "documents": workload(*DOCUMENTS),
    "windows": workload(*DOCUMENTS, window=(40, 0)),
    "windows both ways": workload(*DOCUMENTS, window=(40, 9), causal=False),
    "full": workload(*DOCUMENTS, causal=False),
    "one sequence": workload(0, 1023),
    "few rows": workload(0, 1, 3),
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("one", CASES.values(), ids=CASES)
@pytest.mark.parametrize("cut", [RowAssignment.of, RowAssignment.zigzag], ids=["balanced", "zigzag"])
def test_rows_pairs_and_messages_are_those_of_the_matrix(one, ranks, cut):
    assignment, seen = cut(one, ranks), visible(one)
    held = [np.array([at for run in runs for at in run], dtype=int) for runs in assignment.held]
    assert sorted(np.concatenate(held)) == list(range(one.seq_len))
    pairs = [[4 * seen[np.ix_(held[r], held[(r - step) % ranks])].sum() for step in range(ranks)] for r in range(ranks)]
    assert assignment.step_pairs() == tuple(map(tuple, pairs))
    if cut == RowAssignment.of:
        # Chunks differ by one row.
        assert max(map(len, held)) - min(map(len, held)) <= max(len(runs) for runs in assignment.held)
    else:
        wanted = zigzag(one.sequences, ranks).parts
        spans = [[(span.start, span.stop) for span in part] for part in wanted]
        assert [[(run.start, run.stop) for run in runs] for runs in assignment.held] == spans
    moved = [[seen[held[reader]].any(0)[held[owner]].sum() for reader in range(ranks)] for owner in range(ranks)]
    assert [[assignment.moved(owner, reader) for reader in range(ranks)] for owner in range(ranks)] == moved
    away = np.array(moved) - np.diag(np.diag(moved))
    # K and V, and their gradients back: 2·2·8·2 bytes a row.
    assert assignment.received_bytes(one) == 64 * (away.sum(0) + away.sum(1)).max()


def test_a_causal_sequence_is_assigned_zigzag():
    one = workload(0, 4096)
    for ranks in (2, 4, 8):
        parts = zigzag(one.sequences, ranks).parts
        held = [tuple(range(span.start, span.stop) for span in part) for part in parts]
        assert RowAssignment.of(one, ranks).held == tuple(held)


def test_each_rank_gets_as_many_chunks_the_heaviest_first():
    owners = heaviest_first([1, 8, 2, 7, 3, 6, 4, 5], 2)
    assert [owners.count(rank) for rank in range(2)] == [4, 4]
    assert owners[1] != owners[3]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_packed_documents_are_in_balance_and_send_less_than_a_ring(ranks):
    preset = discover().catalogue.workloads.get("packed_documents_128k")
    one = workload(*preset.fields["cu_seqlens"], num_heads=64, num_kv_heads=8, head_dim=128)
    assert BALANCED_ALLGATHER.load_balance(one, ranks) > 0.99
    assignment = RowAssignment.of(one, ranks)
    sent = sum(assignment.moved(owner, reader) for owner in range(ranks) for reader in range(ranks) if reader != owner)
    assert 0 < sent < 0.6 * one.seq_len * (ranks - 1)
    # A ring in documents' halves is as even, at the price of sending nearly everything.
    assert RING_VARLEN.load_balance(one, ranks) > 0.99


# Of one assignment over up to eight ranks.
MOST_CALLS = 1500


def packing(kind, total, seed):
    """Bounds of documents of lengths of a kind, `total` tokens together."""
    draw, bounds = np.random.default_rng(seed), [0]
    while bounds[-1] < total:
        length = {
            "short": lambda: draw.integers(50, 600),
            "log-uniform": lambda: 32 * (total / 32) ** draw.random(),
            "slides": lambda: draw.integers(5_000, 30_000),
            "halves": lambda: draw.integers(total // 10, total // 2),
        }[kind]()
        bounds.append(min(total, bounds[-1] + int(length)))
    return bounds


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("kind", ["short", "log-uniform", "slides", "halves", "packed_documents_128k"])
def test_pairs_and_tiles_of_ranks_differ_by_a_few_per_cent(kind, ranks):
    for seed in range(3):
        if kind == "packed_documents_128k":
            bounds = discover().catalogue.workloads.get(kind).fields["cu_seqlens"]
        else:
            bounds = packing(kind, 65536, seed)
        assignment = RowAssignment.of(workload(*bounds), ranks)
        pairs = [sum(steps) for steps in assignment.step_pairs()]
        tiles = [assignment.tiles(rank) for rank in range(ranks)]
        assert max(pairs) < 1.08 * np.mean(pairs)
        assert max(tiles) < 1.03 * np.mean(tiles)


@pytest.mark.parametrize("reach", [(None, 0), (100, 0), (None, None), (40, 9)])
def test_tiles_are_those_of_the_matrix(reach):
    left, right = reach
    window = (-1 if left is None else left, -1 if right is None else right)
    one = workload(*DOCUMENTS, causal=right == 0, window=window if right != 0 else (window[0], 0))
    assignment, seen, counted = RowAssignment.of(one, 2), visible(one), []
    for rank in range(2):
        counted.append(0)
        for rows, _ in zip(*assignment.pieces[rank], strict=True):
            for start in range(rows[0], rows[1], TILE):
                keys = np.flatnonzero(seen[start : min(rows[1], start + TILE)].any(0))
                counted[-1] += -(-(keys[-1] + 1 - keys[0]) // TILE)
    assert [assignment.tiles(rank) for rank in range(2)] == counted


def calls_of(function, *arguments):
    """Calls of Python and C functions: a cost that other work on the machine does not change."""
    calls = 0

    def count(_frame, event, _argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("kind", ["short", "log-uniform", "slides", "halves"])
def test_assigning_a_new_packing_costs_no_call_per_document(kind, ranks):
    """Several hundred calls per number of chunks, and one per chunk: about a millisecond, with 4 or 400 documents."""
    for seed in range(3):
        sequences = workload(*packing(kind, 131072, seed)).sequences
        assert calls_of(balanced_rows.__wrapped__, sequences, (None, 0), ranks) < MOST_CALLS


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_window_sends_its_reach_and_leaves_packed_documents_in_balance(ranks):
    single = RowAssignment.of(workload(0, 8192, window=(512, 0)), ranks)
    moved = [[single.moved(owner, reader) for reader in range(ranks)] for owner in range(ranks)]
    assert (np.array(moved) == np.diag([8192 // ranks] * ranks) + np.diag([512] * (ranks - 1), 1)).all()
    preset = discover().catalogue.workloads.get("packed_documents_128k")
    one = workload(*preset.fields["cu_seqlens"], window=(1024, 0))
    assert BALANCED_ALLGATHER.load_balance(one, ranks) > 0.98
    assert RowAssignment.of(one, ranks).received_bytes(one) < 0.1 * RowAssignment.zigzag(one, ranks).received_bytes(one)


def unused(*_tensors, **_options):
    raise AssertionError


@pytest.mark.parametrize(
    ("one", "ends", "algorithm"),
    [
        (CASES["documents"], True, InOneLaunch),
        (CASES["windows"], True, InOneLaunch),
        (CASES["full"], False, InOneLaunch),
        (CASES["documents"], False, gathered.Gathered),
        (CASES["windows both ways"], True, gathered.Gathered),
        (CASES["one sequence"], True, gathered.Gathered),
    ],
)
def test_packed_kernels_take_what_their_masks_can(one, ends, algorithm):
    kernel = PackedKernel(unused, unused, frozenset({"cpu"}), aligns_ends=ends)
    context = BuildContext(
        device=torch.device("cpu"),
        backend=LoadedBackend("made-up", unused, unused, packed=kernel),
        world=SingleRank.of(1, 2),
    )
    assert type(gathered.build_balanced(one, context)._algorithm) is algorithm
