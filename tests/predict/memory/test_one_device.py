"""Traces of one device's implementations against what torch's own allocator saw at the fullest moment of a call."""

import pytest

from dilabench.engine.call.inputs import InputStore
from dilabench.engine.call.peak_memory import measure_memory
from dilabench.engine.call.prepared_call import PreparedCall
from dilabench.engine.case_spec import case_spec
from dilabench.record import Optimizations
from tests.conftest import slow, slow_but_every

# Of blocks in a loop those are traced that are at least 2 % larger than all before (engine/trace/loop_forms.py).
WITHIN = 0.025
SHAPES = {
    "plain": {},
    "grouped_queries": {"num_kv_heads": 2},
    "one_key_head": {"num_heads": 6, "num_kv_heads": 1},
    "short_tail": {"seq_len": 4100},
    "odd": {"num_heads": 5, "num_kv_heads": 5, "head_dim": 24, "seq_len": 8191},
    "batch": {"batch_size": 3, "seq_len": 1536},
    "float64": {"dtype": "float64"},
}
# A forward pass is part of the other; by itself it is slow but for the first shape.
BOTH_MODES = pytest.mark.parametrize("mode", [slow("forward"), "both"])


@pytest.fixture
def check(peaks):
    """The plan of a case against its peak."""

    def checked(case):
        assert peaks.plan(case, "cpu").peak_bytes == pytest.approx(peaks.peak_of(case), rel=WITHIN)

    return checked


# What a shape changes, it changes in the backward pass, too.
@pytest.mark.parametrize(
    ("implementation", "shape", "mode"),
    [
        *slow_but_every(2, (("strided", shape, "both") for shape in SHAPES)),
        *((name, shape, "both") for name, shape in (("dense", "short_tail"), ("gather", "plain"))),
        slow("gather", "odd", "both"),
        *((name, "plain", "forward") for name in ("dense", "gather")),
    ],
)
def test_traces_hold_against_measured_peaks(implementation, shape, mode, peaks, check):
    fields = SHAPES[shape]
    if implementation == "dense":
        fields = {**fields, "pattern": peaks.DENSE, "batch_size": 8, "seq_len": 512}
    check(peaks.case_of(implementation, "sdpa-flash", mode=mode, **fields))


@BOTH_MODES
@pytest.mark.parametrize("implementation", ["dense", "gather", "strided", "block-sparse", slow("reference")])
def test_the_peak_of_a_record_is_the_same_each_time_and_as_traced(implementation, mode, peaks):
    pattern = {"dense": peaks.DENSE, "block-sparse": peaks.sparse()}.get(implementation, peaks.BRANCHES)
    backend = "sdpa-flash" if implementation in ("dense", "gather", "strided") else None
    case = peaks.case_of(implementation, backend, pattern, mode=mode, seq_len=500)

    def measured(seed):
        call = PreparedCall(case_spec(case, peaks.catalogue(), seed), peaks.CPU, InputStore(peaks.CPU))
        return [measure_memory(call) for _ in range(2)]

    first, *others = [one.peak_bytes for seed in range(2) for one in measured(seed)]
    assert others == [first] * 3
    assert peaks.plan(case, "cpu").peak_bytes == pytest.approx(first, rel=0.001)


@BOTH_MODES
@pytest.mark.parametrize("implementation", ["gather-multihead", "strided-multihead"])
def test_modules_with_projections(implementation, mode, peaks, check):
    check(peaks.case_of(implementation, "sdpa-flash", mode=mode))


@BOTH_MODES
@pytest.mark.parametrize("pattern", [{"heads": "grouped"}, {"merge_grad": "detached"}], ids=str)
def test_grouped_heads_and_detached_weights_of_gather(pattern, mode, peaks, check):
    check(peaks.case_of("gather", "sdpa-flash", mode=mode, pattern={**peaks.BRANCHES, **pattern}))


@BOTH_MODES
def test_zero_keys(mode, peaks, check):
    pattern = {**peaks.BRANCHES, "padding": "zero_key"}
    check(peaks.case_of("strided", "sdpa-flash", mode=mode, pattern=pattern, seq_len=2001, causal=False))


@BOTH_MODES
def test_packed_sequences(mode, peaks, check):
    packed = {"layout": "packed", "cu_seqlens": (0, 700, 2048), "batch_size": 1, "seq_len": 2048}
    check(peaks.case_of("strided", "sdpa-flash", mode=mode, **packed))


@BOTH_MODES
def test_chunked_queries(mode, peaks, check):
    case = peaks.case_of("gather", "sdpa-flash", mode=mode)
    check(case.model_copy(update={"optimizations": Optimizations(query_chunk=1024)}))


def test_checkpointing_does_not_lower_the_peak_of_one_call(peaks, check):
    case = peaks.case_of("strided", "sdpa-flash", mode="both")
    check(case.model_copy(update={"optimizations": Optimizations(gradient_checkpointing=True)}))


MATH_SHAPES = {
    "rows_in_blocks": {"seq_len": 2048},
    "batches_in_blocks": {"batch_size": 12, "seq_len": 512},
    "one_block": {"batch_size": 2, "seq_len": 256},
    "grouped_queries": {"batch_size": 8, "seq_len": 512, "num_kv_heads": 2},
    "one_key_head": {"seq_len": 2048, "num_heads": 6, "num_kv_heads": 1},
    "half": {"seq_len": 2048, "dtype": "bfloat16"},
    "half_batches": {"batch_size": 12, "seq_len": 512, "dtype": "bfloat16"},
    "float64": {"seq_len": 2048, "dtype": "float64"},
    "full": {"seq_len": 2048, "causal": False},
    "window": {"seq_len": 2048, "window": (100, 0)},
}


# Their blocks are those of another shape in another size.
SLOW_MATH = ("one_block", "half", "full", "float64", "half_batches", "one_key_head")


@pytest.mark.parametrize(
    ("shape", "mode"),
    [
        *(slow(shape, "forward") for shape in ("rows_in_blocks", "half_batches")),
        *(pytest.param(shape, "both", marks=[pytest.mark.slow] * (shape in SLOW_MATH)) for shape in MATH_SHAPES),
    ],
)
def test_blocks_of_the_math_backend(shape, mode, peaks, check):
    check(peaks.case_of("dense", "math", peaks.DENSE, mode=mode, **MATH_SHAPES[shape]))


@pytest.mark.parametrize(
    ("implementation", "shape", "mode"),
    [
        ("gather", "plain", "forward"),
        slow("gather", "odd", "both"),
        ("strided", "plain", "both"),
        slow("strided", "one_key_head", "both"),
    ],
)
def test_branches_through_the_math_backend(implementation, shape, mode, peaks, check):
    check(peaks.case_of(implementation, "math", mode=mode, **SHAPES[shape]))


BLOCKS = {
    "neighbours": {},
    "scattered": {"mask": "random"},
    "half_of_them": {"mask": "random", "sparsity": 0.5},
    "a_mask_per_head": {"mask": "random", "sparsity": 0.5, "per_head": True},
    "over_branches": {"mask": "random", "sparsity": 0.5, "block_size": 16, "branches": "long"},
}
# A trace takes as long as there are lists: of these each head and each class of rows has its own.
SHORTER = {"a_mask_per_head": 1024, "over_branches": 1536}
BLOCK_SHAPES = {
    "grouped_queries": {"num_kv_heads": 2},
    "half": {"dtype": "bfloat16"},
    "full": {"causal": False},
}


@BOTH_MODES
@pytest.mark.parametrize("blocks", BLOCKS)
def test_lists_of_blocks(blocks, mode, peaks, check):
    pattern = peaks.sparse(**BLOCKS[blocks])
    if "branches" in pattern:
        pattern["branches"] = peaks.LONG_BRANCHES
    check(peaks.case_of("block-sparse", pattern=pattern, mode=mode, seq_len=SHORTER.get(blocks, 2048)))


@pytest.mark.parametrize("shape", BLOCK_SHAPES)
def test_shapes_under_scattered_blocks(shape, peaks, check):
    pattern = peaks.sparse(mask="random", sparsity=0.5)
    check(peaks.case_of("block-sparse", pattern=pattern, mode="both", seq_len=2048, **BLOCK_SHAPES[shape]))


REFERENCE = {
    "rows_in_blocks": ("DENSE", {"seq_len": 2560, "num_heads": 1}),
    "heads": ("DENSE", {"seq_len": 512}),
    "batch": ("DENSE", {"seq_len": 512, "batch_size": 4}),
    "full_float64": ("DENSE", {"seq_len": 512, "dtype": "float64", "causal": False}),
    "half": ("DENSE", {"seq_len": 512, "dtype": "bfloat16", "num_kv_heads": 2}),
    "branches": ("BRANCHES", {"seq_len": 160}),
    "long_branches": ("LONG_BRANCHES", {"seq_len": 512, "num_heads": 2}),
}


@pytest.mark.parametrize(
    ("shape", "mode"),
    [
        ("branches", "forward"),
        *(pytest.param(shape, "both", marks=[pytest.mark.slow] * (shape == "batch")) for shape in REFERENCE),
    ],
)
def test_the_formula_itself(shape, mode, peaks, check):
    pattern, fields = REFERENCE[shape]
    check(peaks.case_of("reference", pattern=getattr(peaks, pattern), mode=mode, **fields))


@BOTH_MODES
def test_the_formula_on_blocks(mode, peaks, check):
    pattern = peaks.sparse(mask="random", sparsity=0.5)
    check(peaks.case_of("reference", pattern=pattern, mode=mode, seq_len=1024, num_heads=2))


@BOTH_MODES
def test_the_formula_with_detached_weights(mode, peaks, check):
    detached = {**peaks.LONG_BRANCHES, "merge_grad": "detached"}
    check(peaks.case_of("reference", pattern=detached, mode=mode, seq_len=2048, num_heads=1))
