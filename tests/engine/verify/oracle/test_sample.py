"""Which rows are looked at."""

import torch

from dilabench.engine.verify.oracle.sample import choose_sample
from dilabench.workload.spec import Workload
from dilabench.workload.visibility import edges as edges_of

LONG = {
    "pattern": {"kind": "dilated", "segment_lengths": (2048, 30000), "dilation_rates": (1, 6)},
    "batch_size": 1,
    "seq_len": 2**20,
    "num_heads": 8,
    "num_kv_heads": 8,
    "head_dim": 64,
}


def workload(**changes: object) -> Workload:
    return Workload.model_validate({**LONG, **changes})


def test_everything_where_it_is_cheap() -> None:
    sample = choose_sample(workload(seq_len=97, batch_size=3), seed=0)
    assert sample.complete
    assert sample.row_count is None
    assert sample.rows.tolist() == list(range(97))
    assert sample.batches.tolist() == [0, 1, 2]


def test_first_last_and_both_sides_of_edges_where_it_is_not() -> None:
    w = workload()
    sample = choose_sample(w, seed=0)
    rows = set(sample.rows.tolist())
    assert {0, w.seq_len - 1} <= rows
    edges = [edge for edge in edges_of(w).tolist() if edge in rows and edge - 1 in rows]
    assert {2048, max(edges_of(w).tolist())} <= set(edges)
    assert any(edge % 30000 == 0 and edge % 2048 for edge in edges_of(w).tolist())
    assert len(rows) <= 64
    assert sample.row_count == len(rows)


def test_the_seed_decides() -> None:
    assert torch.equal(choose_sample(workload(), 1).rows, choose_sample(workload(), 1).rows)
    assert not torch.equal(choose_sample(workload(), 1).rows, choose_sample(workload(), 2).rows)


def test_edges_are_those_of_every_branch_and_sequence() -> None:
    w = workload(
        pattern={"kind": "dilated", "segment_lengths": (8, 20), "dilation_rates": (1, 2)},
        seq_len=50,
        layout="packed",
        cu_seqlens=(0, 23, 50),
    )
    assert edges_of(w).tolist() == [8, 16, 20, 23, 31, 39, 43, 47]


def test_a_large_batch_is_sampled_too() -> None:
    sample = choose_sample(workload(batch_size=4096, seq_len=4096), seed=0)
    assert {0, 4095} <= set(sample.batches.tolist())
    assert len(sample.batches) < 50


def test_keys_are_sampled_where_their_gradients_would_not_fit() -> None:
    sample = choose_sample(workload(), seed=0)
    assert sample.keys is not None
    assert set(sample.rows.tolist()) <= set(sample.keys.tolist())
    assert choose_sample(workload(seq_len=2**15), seed=0).keys is None
