"""Traces of a rank among several against its measured peak: alone, where nothing arrives, and among real ranks."""

import pytest

from tests.conftest import slow, slow_but_every

WITHIN = 0.01
BRANCHES = {
    "inside": {"segment_lengths": (64, 128, 256), "dilation_rates": (1, 2, 4)},
    "one_across": {"segment_lengths": (256, 2048), "dilation_rates": (1, 4)},
    "all_across": {"segment_lengths": (512, 1024, 2048), "dilation_rates": (1, 2, 4)},
}
SHAPES = {
    "causal": {},
    "full": {"causal": False},
    "grouped_batch_in_float64": {"num_kv_heads": 2, "dtype": "float64", "batch_size": 2},
}
# Sequences of equal length go through one call; of unequal ones each has its own.
PACKED = [(0, 256, 640, 1408, 2048), (0, 512, 1024, 1536, 2048), (0, 2048)]
OVER_RANKS = ["ring", "ring-overlap", "ring-allgather", "ulysses", "ring-multihead"]
BOTH_MODES = pytest.mark.parametrize("mode", ["forward", "both"])


MOSTLY_BOTH = pytest.mark.parametrize("mode", [slow("forward"), "both"])


@pytest.fixture
def check(peaks):
    """The plan of the fullest rank against its peak."""

    def checked(implementation, ranks, backend="sdpa-flash", **fields):
        case = peaks.case_of(implementation, backend, **{"seq_len": 2048, **fields})
        case = case.model_copy(update={"world_size": ranks})
        assert peaks.plan(case, "cpu").peak_bytes == pytest.approx(peaks.fullest_rank_peak(case), rel=WITHIN)

    return checked


# What key heads, batch and dtype change, they change in the backward pass, too; a causal mask decides what is sent.
@pytest.mark.parametrize(
    ("implementation", "shape", "mode"),
    [
        *slow_but_every(2, ((name, "causal", "both") for name in (*OVER_RANKS, "zigzag-ring", "zigzag-allgather"))),
        ("ring", "grouped_batch_in_float64", "both"),
        *(slow(name, "grouped_batch_in_float64", "both") for name in ("ulysses", "zigzag-allgather")),
        ("ring-overlap", "full", "both"),
        *(slow(name, "full", "both") for name in ("ring-allgather", "zigzag-ring")),
        *((name, "causal", "forward") for name in ("ring", "zigzag-allgather")),
        slow("ring", "full", "forward"),
    ],
)
def test_dense_attention(implementation, shape, mode, peaks, check):
    check(implementation, 4, pattern=peaks.DENSE, mode=mode, seq_len=1024, **SHAPES[shape])


@pytest.mark.parametrize(
    ("implementation", "branches", "mode"),
    [
        *slow_but_every(2, ((name, "one_across", "both") for name in OVER_RANKS)),
        ("ulysses", "inside", "both"),
        ("ring", "all_across", "both"),
        slow("ring", "inside", "both"),
        slow("ulysses", "all_across", "both"),
        *(slow(name, "one_across", "forward") for name in OVER_RANKS),
    ],
)
def test_branches_inside_and_across_ranks(implementation, branches, mode, check):
    check(implementation, 4, pattern={"kind": "dilated", **BRANCHES[branches]}, mode=mode)


@pytest.mark.parametrize(
    ("implementation", "mode"),
    [
        slow("ring", "forward"),
        ("ring", "both"),
        *(slow(name, "both") for name in ("zigzag-allgather", "ulysses")),
    ],
)
def test_through_the_math_backend_in_half_precision(implementation, mode, peaks, check):
    check(implementation, 2, "math", pattern=peaks.DENSE, mode=mode, seq_len=1024, dtype="bfloat16")


@MOSTLY_BOTH
@pytest.mark.parametrize(
    ("backend", "causal", "num_kv_heads", "batch_size", "ranks"),
    # Each value beside each other of another parameter, once at least; by default each value.
    [
        slow("math", True, 2, 1, 3),
        ("math", False, 4, 2, 2),
        ("sdpa-flash", True, 4, 2, 3),
        slow("sdpa-flash", False, 2, 1, 2),
    ],
)
def test_all_keys_in_one_exchange(backend, causal, num_kv_heads, batch_size, ranks, mode, peaks, check):
    """`math` aligns ends, so that a chunk of queries is one call; over `sdpa-flash` it is two."""
    fields = {"causal": causal, "num_kv_heads": num_kv_heads, "batch_size": batch_size, "seq_len": 512 * ranks}
    check("zigzag-allgather", ranks, backend, pattern=peaks.DENSE, mode=mode, **fields)


@pytest.mark.parametrize(
    ("bounds", "shape", "mode"),
    [
        *slow_but_every(2, ((bounds, "causal", "both") for bounds in PACKED)),
        slow(PACKED[0], "full", "both"),
        slow(PACKED[0], "causal", "forward"),
    ],
    ids=str,
)
def test_packed_sequences(bounds, shape, mode, peaks, check):
    fields = {**SHAPES[shape], "layout": "packed", "cu_seqlens": bounds}
    check("ring-varlen", 4, pattern=peaks.DENSE, mode=mode, **fields)


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_blocks_that_heads_select(num_kv_heads, check):
    pattern = {"kind": "topk_blocks", "block_size": 64, "top_k": 4}
    check("block-sparse-ring", 2, None, pattern=pattern, mode="both", seq_len=1024, num_kv_heads=num_kv_heads)


@BOTH_MODES
@pytest.mark.parametrize("implementation", ["ring", "ulysses"])
def test_one_rank_is_one_device(implementation, mode, check):
    check(implementation, 1, mode=mode)


@pytest.mark.parametrize("implementation", ["ring", "zigzag-allgather"])
def test_ranks_without_rows_need_nothing_impossible(implementation, peaks):
    case = peaks.case_of(implementation, "sdpa-flash", peaks.DENSE, seq_len=2).model_copy(update={"world_size": 4})
    assert peaks.plan(case, "cpu").peak_bytes > 0


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["ring", "ring-overlap", "ring-allgather", "ulysses", "ring-multihead"])
def test_a_lone_rank_allocates_what_a_real_one_does(implementation, peaks, launch):
    pattern = {"kind": "dilated", **BRANCHES["all_across"]}
    case = peaks.case_of(implementation, "sdpa-flash", pattern, seq_len=2048, mode="both")
    case = case.model_copy(update={"world_size": 2})
    alone = [peaks.rank_peak(case, peaks.SingleRank.of(rank, 2)) for rank in range(2)]
    # gloo's own thread lets go of what it sent between two ranks when it gets to it, at once or a step later: a real
    # rank was seen to hold 5 % more. Only the least of some runs is certain.
    assert [min(of_rank) for of_rank in launch(peaks.real_rank_peaks, 2, [case, 3])] == pytest.approx(alone, rel=WITHIN)
