"""What a block mask makes ranks hold, send and compute, counted by hand and pair by pair. No rank is started."""

import numpy as np
import pytest
import torch

from dilabench.contracts import BuildContext
from dilabench.distributed.block_assignment import BlockAssignment
from dilabench.distributed.shardings import BLOCKS
from dilabench.impls.ring import block_sparse
from dilabench.patterns.block_sparse import block_mask
from dilabench.workload.spec import Workload


def workload(pattern=None, **fields):
    shape = {"batch_size": 1, "seq_len": 93, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": "bfloat16"}
    asked = {"kind": "block_sparse", "block_size": 8, **(pattern or {})}
    return Workload.model_validate({**shape, "mode": "forward", **fields, "pattern": asked})


def from_file(folder, mask, **fields):
    np.save(folder / "mask.npy", mask)
    pattern = {"mask": "custom", "mask_file": str(folder / "mask.npy"), "sparsity": 0.0}
    return workload(pattern, causal=False, **fields)


def test_a_band_moves_its_reach_and_a_full_mask_everything(tmp_path):
    # 12 blocks of 8 rows, in order on 4 ranks, for all have the same work. K and V: 2·2·8·2 bytes a row.
    beside = from_file(tmp_path, np.eye(12, dtype=bool) | np.roll(np.eye(12, dtype=bool), 1, axis=1), seq_len=96)
    assert BLOCKS.received_bytes(beside, 4) == 8 * 64
    assignment = BlockAssignment.of(from_file(tmp_path, np.roll(np.eye(12, dtype=bool), 3, axis=1), seq_len=96), 4)
    assert [assignment.rows_of(assignment.sent((r + 1) % 4, r)) for r in range(4)] == [24] * 4
    # The last of 5 rows: 24, 24, 24 and 21 rows.
    full = workload({"sparsity": 0.0}, causal=False)
    assert BLOCKS.received_bytes(full, 4) == 72 * 64
    assert BLOCKS.received_bytes(full.replace(mode="backward"), 4) == 72 * 64
    assert BLOCKS.received_bytes(full.replace(mode="both"), 4) == (69 + 72) * 64
    assert BLOCKS.received_bytes(full, 1) == 0


def test_nothing_moves_where_nothing_is_seen_elsewhere(tmp_path):
    assert BLOCKS.received_bytes(from_file(tmp_path, np.eye(12, dtype=bool)), 4) == 0
    empty = from_file(tmp_path, np.zeros((12, 12), dtype=bool))
    assert BLOCKS.received_bytes(empty, 4) == 0
    assert BLOCKS.load_balance(empty, 4) is None
    assert BLOCKS.overlapping_share(empty, 4) is None


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("per_head", [True, False])
def test_work_is_counted_pair_by_pair(ranks, causal, per_head):
    one = workload({"mask": "random", "sparsity": 0.5, "per_head": per_head}, causal=causal)
    assignment = BlockAssignment.of(one, ranks)
    at = np.arange(one.seq_len)
    mask = block_mask(one.pattern, one.seq_len, causal, one.num_heads)
    pairs = mask[:, (at // 8)[:, None], at // 8] & ((at[None] <= at[:, None]) | (not causal))
    rows = [np.flatnonzero(np.isin(at // 8, assignment.own(rank))) for rank in range(ranks)]
    times = one.num_heads // mask.shape[0]
    wanted = [
        [times * int(pairs[:, rows[rank]][:, :, rows[(rank - step) % ranks]].sum()) for step in range(ranks)]
        for rank in range(ranks)
    ]
    assert assignment.step_pairs() == tuple(map(tuple, wanted))
    work = [sum(steps) for steps in wanted]
    assert BLOCKS.load_balance(one, ranks) == pytest.approx(sum(work) / ranks / max(work))
    slowest = work.index(max(work))
    assert BLOCKS.overlapping_share(one, ranks) == pytest.approx(wanted[slowest][0] / work[slowest])


def test_causal_work_is_balanced_to_within_a_block():
    one = workload({"mask": "local_window", "sparsity": 0.9, "block_size": 16}, seq_len=16384)
    assert BLOCKS.load_balance(one, 4) > 0.99


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"window": (9, 0)}, r"window \(9, 0\) on a block mask over ranks.*use a local_window mask"),
        (
            {"pattern": {"branches": {"kind": "dilated", "segment_lengths": [64], "dilation_rates": [2]}}},
            "a block mask over dilated branches.*use block-sparse on one device",
        ),
    ],
)
def test_what_ranks_cannot_compute_is_refused_with_a_way_out(fields, why):
    with pytest.raises(ValueError, match=why):
        block_sparse.build(workload(**fields), BuildContext(device=torch.device("cpu")))
