import pytest

from dilabench.errors import ConfigError
from dilabench.machine import Machine
from dilabench.record import GpuInfo
from dilabench.request import RunRequest
from dilabench.suites.planner import Planner
from dilabench.suites.ring import cases as ring

CPU = Machine(device="cpu", no_cuda="test")
ONE_GPU = Machine(device="cuda", gpus=(GpuInfo(name="a", compute_capability="9.0"),))


DENSE = ("zigzag-ring", "zigzag-allgather", "ring-overlap", "ring", "ulysses")
LIBRARY = "library-over-ranks"
DILATED = ("fused-allgather", "ring-allgather", "zigzag-ring", "ring-overlap", "ring", "ulysses")


def cases_of(catalogue, machine=CPU, **fields):
    request = RunRequest(suite="ring", **fields)
    return ring.expand(request, Planner(catalogue, machine, request))


def test_single_and_parallel_rows_stand_side_by_side_in_every_mode(catalogue):
    cases = cases_of(catalogue, presets=("qwen3_32b",), nproc=4)
    single = [one for one in cases if one.case.world_size == 1]
    parallel = [one for one in cases if one.case.world_size > 1]
    assert [one.case.workload.mode for one in single] == ["both", "forward", "backward"]
    assert {one.case.world_size for one in single} == {1}
    assert {one.case.world_size for one in parallel} == {4}
    assert {one.case.implementation for one in parallel} == {*DENSE, LIBRARY}
    # Grouped heads stay grouped.
    assert {one.case.workload.num_kv_heads for one in cases} == {8}


@pytest.mark.parametrize(
    ("mode", "timed"),
    [("both", ["both", "forward", "backward"]), ("forward", ["forward"]), ("backward", ["backward"])],
)
def test_mode_both_also_times_its_parts_so_that_no_column_is_empty(catalogue, mode, timed):
    cases = cases_of(catalogue, presets=("tiny",), overrides={"mode": mode}, implementations=("zigzag",))
    assert [(planned.case.implementation, planned.case.workload.mode) for planned in cases] == [
        (name, part) for part in timed for name in ("dense", "zigzag-ring")
    ]


def test_packed_presets_run_the_packed_ring(catalogue):
    overrides = {"layout": "packed", "batch_size": 1, "mode": "forward"}
    cases = cases_of(catalogue, presets=("tiny",), overrides=overrides)
    packed = ["dense", "balanced-allgather", "ring-varlen", "ulysses", LIBRARY]
    assert [one.case.implementation for one in cases] == packed
    assert all(one.skip is None for one in cases)


def test_more_ranks_than_gpus_is_a_skipped_row_that_says_so(catalogue):
    cases = cases_of(catalogue, ONE_GPU, presets=("tiny",), nproc=4)
    skips = {one.case.world_size: one.skip and one.skip.why for one in cases}
    assert skips[1] is None
    assert "4 ranks need as many GPUs, have 1" in skips[4]


def test_dilated_presets_compare_the_gather_with_the_rings(catalogue):
    cases = cases_of(catalogue, presets=("longnet_32k",), overrides={"mode": "forward"})
    assert [one.case.implementation for one in cases] == ["strided", *DILATED, LIBRARY]


def test_fused_is_timed_on_one_device_where_it_runs(catalogue):
    pytest.importorskip("triton")
    gpus = Machine(device="cuda", gpus=ONE_GPU.gpus * 2)
    cases = cases_of(catalogue, gpus, presets=("longnet_32k",), overrides={"mode": "forward"}, nproc=2)
    assert [planned.case.implementation for planned in cases if planned.case.world_size == 1] == ["strided", "fused"]
    on_cpu = cases_of(catalogue, presets=("longnet_32k",), overrides={"mode": "forward"})
    assert [planned.case.implementation for planned in on_cpu if planned.case.world_size == 1] == ["strided"]


def test_block_masks_compare_the_ring_with_the_kernels_of_one_device(catalogue):
    overrides = {"pattern": "block_sparse", "mode": "forward", "seq_len": 1024}
    cases = cases_of(catalogue, presets=("tiny",), overrides=overrides)
    assert [(one.case.implementation, one.case.world_size) for one in cases] == [
        ("block-sparse", 1),
        ("block-sparse-ring", 2),
    ]
    assert all(one.skip is None for one in cases)


def test_sharding_is_outside_unless_asked_for(catalogue):
    fields = {"presets": ("tiny",), "overrides": {"mode": "forward"}, "implementations": ("zigzag",)}
    single, outside = cases_of(catalogue, **fields)
    _, inside = cases_of(catalogue, **fields, options={"sharding": "inside"})
    assert not outside.case.optimizations.sharding_inside
    assert inside.case.optimizations.sharding_inside
    assert single.case.optimizations == outside.case.optimizations
    assert inside.case.case_id != outside.case.case_id
    with pytest.raises(ConfigError, match="sharding 'insid' should be 'inside' or 'outside'"):
        cases_of(catalogue, **fields, options={"sharding": "insid"})


def test_a_projected_ring_stands_beside_itself_on_one_device(catalogue):
    cases = cases_of(
        catalogue, presets=("tiny",), overrides={"mode": "forward"}, implementations=("ring", "ring-multihead")
    )
    found = [(one.case.implementation, one.case.world_size) for one in cases]
    assert found == [
        ("dense", 1),
        ("ring-multihead", 1),
        ("ring", 2),
        ("ring-multihead", 2),
    ]


def test_the_library_has_a_row_unless_implementations_are_named(catalogue):
    """A row without a backend of its own: `ring_attention` takes one, whatever `-b` names for the others."""
    fields = {"presets": ("tiny",), "overrides": {"mode": "forward"}}
    cases = cases_of(catalogue, **fields, backends=("math",))
    assert [(one.case.implementation, one.case.backend) for one in cases][-1] == (LIBRARY, None)
    named = cases_of(catalogue, **fields, implementations=("zigzag",))
    assert LIBRARY not in {one.case.implementation for one in named}
    overrides = {"pattern": "dilated", "offset_by": "kv_head", "mode": "forward"}
    (skipped,) = (
        one
        for one in cases_of(catalogue, presets=("longnet_32k",), overrides=overrides)
        if one.case.implementation == LIBRARY
    )
    assert skipped.skip.why == "ring_attention does not take offset_by"
