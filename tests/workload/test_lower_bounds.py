"""Lower bounds of the work: they must not exceed what the formula's own multiset of pairs needs."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilabench.engine.plausibility import suspicions
from dilabench.impls.visible_keys import multiplicity
from dilabench.metadata import COPY_KEY, READ_KEY
from dilabench.patterns import dilated as dilated_pattern
from dilabench.record import Case, Check, Measured, PlannedCase, Row, Slot, Timing, Verification
from dilabench.workload.lower_bounds import least_bytes, reached_rows
from dilabench.workload.spec import Workload, tensor_bytes


def workload(pattern, **changes) -> Workload:
    shape = {"batch_size": 2, "seq_len": 97, "num_heads": 6, "num_kv_heads": 3, "head_dim": 8, **changes}
    return Workload.model_validate({"pattern": pattern, **shape})


def dilated(segments, rates, **changes):
    return {"kind": "dilated", "segment_lengths": segments, "dilation_rates": rates, **changes}


def rows_by_the_formula(one: Workload) -> tuple[int, int]:
    """Rows of C[h, i, j] with any pair, and columns with any pair in some head of a key/value head."""
    positions = torch.arange(one.seq_len)
    seen = torch.stack([multiplicity(one, head, positions) > 0 for head in range(one.num_heads)])
    queries = seen.any(2).sum()
    keys = seen.any(1).view(one.num_kv_heads, -1, one.seq_len).any(1).sum()
    return int(queries) * one.batch_size, int(keys) * one.batch_size


@given(
    branches=st.lists(st.tuples(st.integers(1, 60), st.integers(2, 9)), min_size=1, max_size=3, unique=True),
    choice=st.fixed_dictionaries(
        {
            "offset": st.sampled_from(["modulo", "blocked"]),
            "offset_by": st.sampled_from(["head", "kv_head"]),
            "heads": st.sampled_from(["all", "grouped"]),
        }
    ),
    causal=st.booleans(),
)
def test_reached_rows_are_those_of_the_formula(branches, choice, causal):
    segments, rates = zip(*branches, strict=True)
    one = workload(dilated(segments, rates, **choice), causal=causal, seq_len=41)
    assert reached_rows(one) == rows_by_the_formula(one)


@pytest.mark.parametrize(
    "pattern",
    [
        {"kind": "dense"},
        dilated((32, 64), (1, 2)),
        {"kind": "block_sparse", "mask": "random", "block_size": 16, "sparsity": 0.8},
    ],
)
def test_a_pattern_that_reaches_everything_reads_everything(pattern):
    one = workload(pattern)
    assert reached_rows(one) == (2 * 97 * 6, 2 * 97 * 3)
    once = sum(size for name, size in tensor_bytes(one).items() if name != "lse")
    forward, backward, both = (least_bytes(one.replace(mode=mode)) for mode in ("forward", "backward", "both"))
    assert (forward, backward, both) == (once, 2 * once, 3 * once)


def test_a_pattern_too_long_to_count_has_a_lower_bound(monkeypatch):
    one = workload(dilated((25, 33), (2, 3)))
    exact = reached_rows(one)
    dilated_pattern.rows_on.cache_clear()
    monkeypatch.setattr(dilated_pattern, "MAX_COUNTED_POSITIONS", 10)
    bound = reached_rows(one)
    dilated_pattern.rows_on.cache_clear()
    assert bound < exact
    assert bound[0] >= one.batch_size * one.num_heads * (one.seq_len // 2 - 2)


def test_a_mask_from_a_file_may_leave_out_any_row(tmp_path):
    one = workload({"kind": "block_sparse", "mask": "custom", "mask_file": str(tmp_path / "m.npy"), "block_size": 16})
    assert reached_rows(one) == (0, 0)


def test_reading_a_quarter_of_the_rows_is_not_suspicious_at_three_quarters_of_the_bandwidth():
    """dilation 4 alone: q, k and v are read at every fourth row, which takes little of the time that all rows would."""
    one = workload(dilated((4096,), (4,)), seq_len=4096, num_heads=8, num_kv_heads=8)
    row_bytes = prod((one.batch_size, one.seq_len, one.num_heads, one.head_dim, 4))
    assert least_bytes(one) == row_bytes * 3 // 4 + row_bytes
    copied_per_s = 1e12
    seconds = least_bytes(one) / copied_per_s / 0.75
    timing = Timing(timer="cold", proves="p", slots=(Slot(samples_ns=(round(seconds * 1e9),)),))
    outcome = Measured(verification=Verification(checks=(Check(name="out", passed=True),)), timings=(timing,))
    row = Row(planned=PlannedCase(case=Case(implementation="gather", workload=one)), outcome=outcome)
    assert suspicions(row, {COPY_KEY: copied_per_s}, "cuda") == ()


@pytest.mark.parametrize(
    ("read_per_s", "share", "is_impossible"),
    [(None, 1.05, False), (None, 1.2, True), (1.2e12, 1.2, False), (1.2e12, 1.5, True), (0.5e12, 1.2, True)],
)
def test_reading_may_be_faster_than_a_copy(read_per_s, share, is_impossible):
    """Decoding only reads: its limit is the larger of the two rates. Old records have that of a copy alone."""
    one = workload({"kind": "dense"}, seq_len=4096, query_len=1, num_heads=8, num_kv_heads=8)
    seconds = least_bytes(one) / (share * 1e12)
    timing = Timing(timer="cold", proves="p", slots=(Slot(samples_ns=(round(seconds * 1e9),)),))
    outcome = Measured(verification=Verification(checks=(Check(name="out", passed=True),)), timings=(timing,))
    row = Row(planned=PlannedCase(case=Case(implementation="dense", workload=one)), outcome=outcome)
    ceilings = {COPY_KEY: 1e12} | ({} if read_per_s is None else {READ_KEY: read_per_s})
    assert [note.code for note in suspicions(row, ceilings, "cuda")] == ["above_peak_bandwidth"] * is_impossible
