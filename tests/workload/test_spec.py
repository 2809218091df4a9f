"""Workloads and their requests: refusals, round trips, what `auto` comes to."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dilabench.errors import ConfigError
from dilabench.patterns.dense import DensePattern
from dilabench.patterns.dilated import DilatedPattern
from dilabench.record import Case, Optimizations
from dilabench.validation import validated
from dilabench.workload.spec import Workload, WorkloadRequest

SHAPE = {"batch_size": 2, "seq_len": 96, "num_heads": 6, "num_kv_heads": 3, "head_dim": 24}

patterns = st.one_of(
    st.just({"kind": "dense"}),
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 20)), min_size=1, max_size=4).flatmap(
        lambda branches: st.fixed_dictionaries(
            {
                "kind": st.just("dilated"),
                "segment_lengths": st.just([w for w, _ in branches]),
                "dilation_rates": st.just([r for _, r in branches]),
                "heads": st.sampled_from(["all", "grouped"]),
                "offset": st.sampled_from(["modulo", "blocked"]),
                "offset_by": st.sampled_from(["head", "kv_head"]),
                "merge_grad": st.sampled_from(["exact", "detached"]),
            }
        )
    ),
    st.fixed_dictionaries(
        {
            "kind": st.just("block_sparse"),
            "block_size": st.integers(1, 128),
            "sparsity": st.sampled_from([0.0, 0.5, 0.9]),
        }
    ),
)
groups = st.integers(1, 4)
workload_fields = st.fixed_dictionaries(
    {
        "pattern": patterns,
        "batch_size": st.integers(1, 3),
        "seq_len": st.integers(1, 200),
        "num_kv_heads": st.integers(1, 4),
        "group": groups,
        "head_dim": st.sampled_from([1, 24, 80]),
        "dtype": st.sampled_from(["float64", "float32", "float16", "bfloat16"]),
        "causal": st.booleans(),
        "left": st.integers(-1, 50),
        "scale": st.none() | st.floats(1e-3, 10.0),
        "mode": st.sampled_from(["forward", "backward", "both"]),
    }
)


def workload_of(fields):
    fields = dict(fields)
    group, left = fields.pop("group"), fields.pop("left")
    return Workload(**fields, num_heads=group * fields["num_kv_heads"], window=(left, 0 if left >= 0 else -1))


workloads = workload_fields.map(workload_of)
cases = st.builds(
    Case,
    implementation=st.sampled_from(["gather", "strided"]),
    backend=st.sampled_from([None, "math", "sdpa-flash"]),
    workload=workloads,
    optimizations=st.builds(Optimizations, pattern_cache_entries=st.integers(0, 2), cuda_graph=st.booleans()),
    world_size=st.integers(1, 4),
)


@given(workloads)
def test_workload_survives_json(workload):
    assert Workload.model_validate_json(workload.model_dump_json()) == workload
    assert Workload.model_validate(json.loads(json.dumps(workload.model_dump(mode="json")))) == workload


@given(cases)
def test_case_survives_json_with_its_id(case):
    again = Case.model_validate_json(case.model_dump_json())
    assert again == case
    assert again.case_id == case.case_id


@given(cases, cases)
def test_case_id_changes_exactly_with_the_content(one, other):
    assert (one.case_id == other.case_id) == (one == other)


@pytest.mark.parametrize(
    "change",
    [
        {"seq_len": 97},
        {"causal": False},
        {"window": (5, 0)},
        {"scale": 0.5},
        {"mode": "both"},
        {"query_len": 1},
        {"dtype": "float64"},
        {"pattern": {"kind": "block_sparse"}},
        {"pattern": {"kind": "dilated", "segment_lengths": [8], "dilation_rates": [1]}},
    ],
)
def test_every_field_counts_in_the_case_id(change):
    workload = Workload(pattern=DensePattern(), **SHAPE)
    case = Case(implementation="x", workload=workload)
    assert case.model_copy(update={"workload": workload.replace(**change)}).case_id != case.case_id
    assert case.model_copy(update={"backend": "math"}).case_id != case.case_id
    assert case.model_copy(update={"world_size": 2}).case_id != case.case_id


def test_case_id_is_pinned():
    """Stored records are joined on it, so it may not change from version to version."""
    dilated = DilatedPattern(segment_lengths=(32, 64), dilation_rates=(1, 2))
    case = Case(implementation="gather", backend="math", workload=Workload(pattern=dilated, **SHAPE))
    assert case.case_id == PINNED_CASE_ID


PINNED_CASE_ID = "86b007204844902f"


def test_models_are_frozen_and_refuse_unknown_keys():
    workload = Workload(pattern=DensePattern(), **SHAPE)
    with pytest.raises(ValidationError):
        workload.seq_len = 5
    with pytest.raises(ValidationError):
        Workload(pattern=DensePattern(), **SHAPE, sequence=5)


REFUSALS = [
    ({"seq_len": 0}, "seq_len 0 must be at least 1"),
    ({"seq_len": "-5"}, "seq_len '-5' must be at least 1"),
    ({"seq_len": "abc"}, "seq_len 'abc' is not a number; write a whole number such as 4096"),
    ({"seq_len": 2.5}, "seq_len '2.5' is not a whole number"),
    ({"seq_len": True}, "seq_len True is not a number"),
    ({"head_dim": 10**20}, "above 2^48"),
    ({"batch_size": "many"}, "batch_size 'many' is not a number"),
    ({"dtype": "int8"}, "dtype 'int8' should be 'float64', 'float32', 'float16', 'bfloat16' or 'auto'"),
    ({"mode": "fwd"}, "mode 'fwd' should be 'forward', 'backward' or 'both'"),
    ({"pattern": "sparse"}, "unknown pattern 'sparse'; did you mean block_sparse or native_sparse?"),
    ({"window": 512}, "window 512 must be two numbers, left and right; write for example 512,0"),
    ({"window": (1, 2, 3)}, "must be two numbers"),
    ({"segment_lengths": [1024, 0]}, "segment_lengths 0 must be at least 1"),
    ({"dilation_rates": "1,x"}, "dilation_rates 'x' is not a number"),
    ({"seq_lenn": 5}, "seq_lenn: unknown key; did you mean seq_len?"),
    ({"zzz": 5}, "zzz: unknown key; known: "),
    ({"selector": "best", "zzz": 5}, "zzz: unknown key"),
    ({"pattern": "selected_blocks", "selector": "pooled"}, "selector 'pooled' should be 'mean_key', 'compressed'"),
    ({"selector": "best"}, "'random' or 'given' (pattern topk_blocks); selector 'best' should be"),
    ({"top_k": 0}, "top_k 0 must be at least 1"),
    *(({"pattern": other}, "should be a valid string") for other in ([], {}, [1], 1, None)),
]


@pytest.mark.parametrize("selector", ["mean_key", "pooled", "compressed", "indexer", "random", "neighbours"])
def test_a_field_may_come_before_its_pattern(selector):
    """`--set` is read before the preset that has the pattern, so one kind with such a field must take the value."""
    fields = {"selector": selector, "block_size": "1K", "top_k": 3}
    request = validated(WorkloadRequest, fields)
    assert request.model_extra == {"selector": selector, "block_size": 1024, "top_k": 3}


@pytest.mark.parametrize(("fields", "text"), REFUSALS)
def test_requests_refuse_with_value_and_rule(fields, text):
    with pytest.raises(ConfigError) as refusal:
        validated(WorkloadRequest, fields)
    assert text in str(refusal.value)
    assert "\n" not in str(refusal.value)


IMPOSSIBLE = [
    (
        {"segment_lengths": [1024, 2048], "dilation_rates": [1]},
        "2 segment lengths [1024, 2048] but 1 dilation rates [1]; they pair up",
    ),
    ({"segment_lengths": []}, "needs at least one branch"),
    (
        {"num_heads": 12, "num_kv_heads": 5},
        "num_heads=12 is not a multiple of num_kv_heads=5; num_kv_heads may be 1, 2, 3, 4, 6, 12",
    ),
    ({"window": (-3, 0)}, "window [-3, 0] must be"),
    ({"window": (4, 4), "causal": True}, "looks 4 positions ahead but causal=true forbids it"),
    ({"scale": -1.0}, "scale -1.0 should be greater than 0"),
    ({"scale": float("inf")}, "scale inf should be a finite number"),
    ({"layout": "padded", "cu_seqlens": (0, 8192)}, "cu_seqlens is given but layout is 'padded'"),
    ({"layout": "packed", "cu_seqlens": (0, 5), "seq_len": 8, "batch_size": 1}, "must rise from 0 to seq_len=8 "),
    ({"layout": "packed", "cu_seqlens": (0, 9, 5, 8192), "batch_size": 1}, "must rise from 0"),
    (
        {"layout": "packed", "cu_seqlens": (5, 3), "seq_len": 8, "batch_size": 1},
        "if these are lengths, their bounds are [0, *lengths.cumsum(0)]",
    ),
    ({"layout": "packed", "batch_size": 3}, "batch_size is 3, use 1"),
    ({"query_len": 9000}, "query_len 9000 is more than seq_len 8192: the queries are the last rows of their keys"),
    ({"query_len": 1, "layout": "packed"}, "query_len 1 with layout 'packed': packed sequences have a query at every"),
    ({"batch_size": 2**25}, "batch_size 33554432 should be less than or equal to 16777216"),
]


@pytest.mark.parametrize(("fields", "text"), IMPOSSIBLE)
def test_impossible_shapes_are_refused(fields, text):
    with pytest.raises(ConfigError) as refusal:
        validated(WorkloadRequest, fields).resolve("float32")
    assert text in str(refusal.value)
    assert "pattern.dilated" not in str(refusal.value)


def test_sizes_read_suffixes_and_single_values():
    asked = WorkloadRequest(seq_len="16K", segment_lengths="2K,4K", dilation_rates=[1, "2"])
    assert (asked.seq_len, asked.segment_lengths, asked.dilation_rates) == (16384, (2048, 4096), (1, 2))
    assert WorkloadRequest(segment_lengths=2048).segment_lengths == (2048,)
    assert WorkloadRequest(dtype="bf16").dtype == "bfloat16"
    assert WorkloadRequest(window="512,0").window == (512, 0)


@pytest.mark.parametrize(("length", "batch"), [(1024, 16), (12288, 1), (16384, 1), (50000, 1), (5000, 3)])
def test_auto_batch_keeps_tokens_constant(length, batch):
    workload = WorkloadRequest(seq_len=length).resolve("float32")
    assert (workload.seq_len, workload.batch_size) == (length, batch)


def test_auto_branches_are_the_same_at_any_length():
    for length in (512, 50000, 1 << 20):
        pattern = WorkloadRequest(seq_len=length).resolve("float32").pattern
        assert pattern.segment_lengths == (2048, 4096, 8192, 16384, 32768)
        assert pattern.dilation_rates == (1, 2, 4, 8, 16)


def test_auto_rates_follow_given_segments():
    pattern = WorkloadRequest(segment_lengths="100,200,300").resolve("float32").pattern
    assert pattern.branches == ((100, 1), (200, 2), (300, 4))
    pattern = WorkloadRequest(dilation_rates="1,3").resolve("float32").pattern
    assert pattern.branches == ((2048, 1), (4096, 3))


def test_resolving_changes_nothing_but_auto():
    asked = WorkloadRequest(batch_size=3, seq_len=777, num_heads=5, head_dim=24, dtype="float16", causal=False)
    workload = asked.resolve("bfloat16")
    for name in ("batch_size", "seq_len", "num_heads", "head_dim", "dtype", "causal"):
        assert getattr(workload, name) == getattr(asked, name)
    assert workload.num_kv_heads == 5


def test_packed_without_bounds_gets_the_catalogue_split():
    workload = WorkloadRequest(layout="packed", seq_len=1024).resolve("float32")
    assert workload.cu_seqlens == (0, 128, 384, 896, 1024)
    assert workload.batch_size == 1
    assert workload.sequences == ((0, 128), (128, 384), (384, 896), (896, 1024))


def test_family_ignores_shape_but_not_the_function():
    workload = Workload(pattern=DilatedPattern(segment_lengths=(8,), dilation_rates=(2,)), **SHAPE)
    assert workload.replace(seq_len=10, head_dim=5, dtype="float16").family_id() == workload.family_id()
    for change in ({"causal": False}, {"window": (3, 0)}, {"scale": 2.0}, {"pattern": {"kind": "dense"}}):
        assert workload.replace(**change).family_id() != workload.family_id()


def test_zero_keys_are_a_field_of_the_pattern():
    fields = {"segment_lengths": "12,200", "dilation_rates": "4,3"}
    asked = WorkloadRequest(**fields, padding="zero_key", seq_len=97, causal=False).resolve("float32")
    masked = WorkloadRequest(**fields, seq_len=97, causal=False).resolve("float32")
    assert asked.pattern.label() == "dilated w 12,200 r 4,3 padding=zero_key"
    assert asked.family_id() != masked.family_id()
    # Records from before the field name the same case.
    before = masked.pattern.model_dump(exclude={"padding"})
    assert Case(implementation="gather", workload=masked.replace(pattern=before)).case_id == (
        Case(implementation="gather", workload=masked).case_id
    )
    assert "padding" not in masked.pattern.model_dump(exclude_defaults=True)


def test_zero_keys_where_torchscale_shifts_its_output_are_refused():
    fields = {"segment_lengths": (10, 64), "dilation_rates": (4, 3), "padding": "zero_key"}
    with pytest.raises(ConfigError, match=r"over 97 positions in segments of 10 at rate 4: 4 does not divide 10.*use"):
        WorkloadRequest(**fields, seq_len=97).resolve("float32")
    assert WorkloadRequest(**fields, seq_len=10).resolve("float32").seq_len == 10
    with pytest.raises(ConfigError, match="a block mask over branches has no zero keys; use padding=masked"):
        WorkloadRequest(**fields, pattern="block_sparse").resolve("float32")


@pytest.mark.parametrize("model", [Workload, WorkloadRequest])
def test_queries_are_written_only_if_they_are_not_all_rows(model):
    fields = {**SHAPE, "pattern": {"kind": "dense"} if model is Workload else "dense"}
    whole, last = model(**fields), model(**fields, query_len=5)
    for dump in (whole.model_dump(), whole.model_dump(mode="json"), json.loads(whole.model_dump_json())):
        assert "query_len" not in dump
    assert last.model_dump()["query_len"] == 5
    assert model.model_validate_json(last.model_dump_json()) == last
    assert model.model_validate_json(whole.model_dump_json()) == whole


def test_all_rows_are_the_same_case_however_they_are_written():
    whole = Workload(pattern=DensePattern(), **SHAPE)
    cases = [Case(implementation="dense", workload=whole.replace(query_len=rows)) for rows in (None, 96, 95)]
    assert len({case.case_id for case in cases}) == len({case.group_id for case in cases}) == 2
    assert cases[0] == cases[1]


def test_queries_are_the_last_rows():
    workload = Workload(pattern=DensePattern(), **SHAPE, query_len=5)
    assert (workload.rows, workload.first_row, workload.tokens) == (5, 91, 10)
    assert workload.label() == "2x5 of 96 H6/3 D24 fp32 causal"


def test_label_names_what_is_unusual():
    workload = Workload(pattern=DensePattern(), **SHAPE)
    assert workload.label() == "2x96 H6/3 D24 fp32 causal"
    assert (
        workload.replace(window=(5, 0), dtype="bfloat16", seq_len=2048).label()
        == "2x2K H6/3 D24 bf16 causal window 5,0"
    )
