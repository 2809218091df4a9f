"""`column-bounds-ring` against one device, and its counted bytes against the pattern; one spawn per number of ranks."""

import numpy as np
import pytest

from dilabench.distributed.column_deal import ColumnDeal
from dilabench.distributed.shardings import COLUMNS
from dilabench.patterns.pattern import SequenceShape

pytestmark = pytest.mark.distributed


def rows_to_move(one, ranks):
    """[holder, reader] keys that some query of the reader sees, pair by pair."""
    (shape,) = one.shapes
    seen = np.zeros((one.seq_len, one.seq_len), bool)
    for group in one.pattern.counts(shape, 0, np.arange(one.seq_len)):
        seen[group.rows[:, None], group.keys()] = True
    row, key = np.indices(seen.shape)
    seen &= (key <= row) | (not one.causal)
    seen &= (key >= row - one.window[0]) | (one.window[0] < 0)
    held = [ColumnDeal.of(one, ranks).own(rank) for rank in range(ranks)]
    assert sorted(np.concatenate(held).tolist()) == list(range(one.seq_len))
    moved = [[seen[np.ix_(reader, holder)].any(0).sum() for reader in held] for holder in held]
    return np.array(moved) * (1 - np.eye(ranks, dtype=int))


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_one_device_is_equalled_and_only_what_is_seen_travels(ranks, launch):
    import column_ring_cases

    cases = column_ring_cases.CASES
    found = launch(column_ring_cases.exact, ranks, [cases])
    assert [wrong for wrong, _ in found] == [[]] * ranks
    for case, one in cases.items():
        rows = rows_to_move(one, ranks)
        vector = 2 * one.batch_size * one.num_kv_heads * one.head_dim * 8
        keys, gradients = np.array([received[case] for _, received in found]).T
        assert keys.tolist() == (vector * rows.sum(0)).tolist(), case
        assert gradients.tolist() == (vector * rows.sum(1)).tolist(), case
        assert COLUMNS.received_bytes(one, ranks) == (keys + gradients).max(), case


def test_windows_stay_in_order_where_even_work_would_send_everything():
    import column_ring_cases

    pattern = {"kind": "window_sink", "sinks": 3, "window_size": 64}
    window = column_ring_cases.workload(pattern, seq_len=4096, num_heads=2)
    deal = ColumnDeal.of(window, 4)
    assert [len(runs) for runs in deal.held] == [1] * 4
    assert deal.sent(1, 2).tolist() == [*range(2048 - 63, 2048)]
    assert deal.sent(0, 3).tolist() == [0, 1, 2]
    assert COLUMNS.load_balance(window, 4) < 0.995
    half = column_ring_cases.workload({**pattern, "window_size": 2048}, seq_len=4096)
    assert COLUMNS.load_balance(half, 4) > 0.99


def test_windows_send_their_edges_and_documents_that_nothing_cuts_nothing():
    import column_ring_cases

    window = column_ring_cases.workload(column_ring_cases.WINDOW, seq_len=400)
    deal = ColumnDeal.of(window.replace(causal=False), 2)
    assert deal.sent(0, 1).tolist() == [0, 1, 2, *range(192, 200)]
    assert deal.sent(1, 0).tolist() == []
    documents = column_ring_cases.workload({"kind": "column_bounds", "document_lengths": (100,)}, seq_len=400)
    assert COLUMNS.received_bytes(documents, 2) == 0
    assert documents.shapes == (SequenceShape(400, 4, 2, True, (-1, -1)),)
