"""From a request to cases: presets, lengths, backends, yardsticks, skips."""

import pytest

from dilabench.choice import backends
from dilabench.errors import ConfigError
from dilabench.machine import Machine
from dilabench.plugins.catalogue import Catalogue
from dilabench.plugins.descriptors import Backend, Implementation
from dilabench.record import GpuInfo
from dilabench.request import RunRequest, run_request
from dilabench.suites.planner import Planner, expand

CPU = Machine(device="cpu", no_cuda="no NVIDIA GPU is visible")
HOPPER = Machine(device="cuda", gpus=(GpuInfo(name="H200", compute_capability="9.0"),))


def plan(catalogue, suite="implementations", machine=CPU, **fields):
    request = run_request(catalogue, suite=suite, **fields)
    return expand(catalogue, machine, request)


def test_presets_multiply_with_lengths_and_keep_overrides(catalogue):
    planned = plan(
        catalogue,
        configs=["multi_gpu", "small"],
        workload={"head_dim": "80"},
        run={"lengths": [777, 50000], "implementations": ["dense"]},
    )
    shapes = [(p.case.workload.num_heads, p.case.workload.head_dim, p.case.workload.seq_len) for p in planned]
    assert shapes == [(12, 80, 777), (12, 80, 50000), (24, 80, 777), (24, 80, 50000)]
    assert all(p.requested_workload.seq_len == p.case.workload.seq_len for p in planned)


@pytest.mark.usefixtures("with_a_compiler")
def test_auto_backend_is_recorded_as_asked_and_as_chosen(catalogue):
    (planned,) = plan(catalogue, run={"implementations": ["gather"]})
    assert (planned.requested_backend, planned.case.backend, planned.skip) == ("auto", "flash-cpu", None)


def test_a_backend_by_name_is_never_replaced(catalogue):
    (planned,) = plan(catalogue, run={"implementations": ["gather"], "backends": ["sdpa-cudnn"]})
    assert planned.case.backend == "sdpa-cudnn"
    assert "backend sdpa-cudnn: needs a CUDA GPU (no NVIDIA GPU is visible)" in planned.skip.why


def test_all_backends_and_aliases(catalogue):
    planned = plan(catalogue, run={"implementations": ["gather"], "backends": ["all"]})
    assert [p.case.backend for p in planned] == list(catalogue.backends.names)
    (one,) = plan(catalogue, run={"implementations": ["gather"], "backends": ["standard", "math"]})
    assert one.case.backend == "math"


def test_an_implementation_without_backend_runs_once(catalogue):
    (planned,) = plan(catalogue, run={"implementations": ["reference"], "backends": ["math", "sdpa-flash"]})
    assert planned.case.backend is None


def test_dense_runs_the_same_shape_as_a_labelled_yardstick(catalogue):
    yardstick, gather = plan(catalogue, run={"implementations": ["dense", "gather"]})
    assert (yardstick.role, yardstick.labels) == ("yardstick", {})
    assert yardstick.case.workload.pattern.kind == "dense"
    assert yardstick.case.workload == gather.case.workload.replace(pattern={"kind": "dense"})
    assert (gather.role, gather.labels) == ("plain", {})
    assert yardstick.case.group_id != gather.case.group_id


def test_on_a_dense_workload_dense_is_no_yardstick(catalogue):
    dense, gather = plan(catalogue, configs=["tiny"], run={"implementations": ["dense", "gather"]})
    assert (dense.role, dense.skip) == ("method", None)
    assert gather.skip.why.startswith("pattern dense is not supported (has dilated)")


def test_modules_with_projections_are_labelled(catalogue):
    (planned,) = plan(catalogue, run={"implementations": ["multihead"]})
    assert (planned.takes, planned.labels) == ("embeddings", {})


def test_what_cannot_run_is_a_skip_with_its_reason(catalogue):
    (planned,) = plan(catalogue, run={"implementations": ["gather"], "nproc": 2})
    assert planned.skip.why == "runs on 1 device, not on 2"


def test_auto_dtype_follows_the_machine(catalogue):
    (here,) = plan(catalogue, run={"implementations": ["reference"]})
    (there,) = plan(catalogue, machine=HOPPER, run={"implementations": ["reference"]})
    assert (here.case.workload.dtype, there.case.workload.dtype) == ("float32", "bfloat16")
    assert here.requested_workload.dtype == "auto"


def test_optimizations_of_the_request_are_those_of_the_cases(catalogue):
    (planned,) = plan(
        catalogue, run={"implementations": ["gather"], "pattern_cache_entries": 0, "buffer_pool_bytes": 2**20}
    )
    assert (planned.case.optimizations.pattern_cache_entries, planned.case.optimizations.buffer_pool_bytes) == (
        0,
        2**20,
    )


def test_no_backend_at_all_says_what_was_tried():
    lonely = Catalogue()
    lonely.implementations.add(Implementation("plain", "for a test", "x:build", uses_backend=True), "test")
    lonely.backends.add(Backend("math", "on a GPU", "x:attend", requires=("cuda",), priority={"cpu": 1}), "test")
    planner = Planner(lonely, CPU, RunRequest(suite="any"))
    (planned,) = planner.compare(planner.workload_requests([{}]), planner.implementations(["plain"]))
    assert planned.case.backend is None
    assert planned.skip.why == "no backend can serve it here (math: needs a CUDA GPU (no NVIDIA GPU is visible))"


def test_quick_is_three_lengths_of_five_implementations(catalogue):
    planned = plan(catalogue, suite="quick")
    assert [p.case.workload.seq_len for p in planned[::5]] == [1024, 4096, 16384]
    names = ["dense", "gather", "strided", "gather-multihead", "strided-multihead"]
    assert [p.case.implementation for p in planned] == names * 3
    assert all(p.skip is None for p in planned)
    assert {(p.case.workload.batch_size, p.case.workload.head_dim) for p in planned} == {(1, 64)}


def test_quick_shows_what_auto_takes_on_a_gpu(catalogue):
    names = [p.case.implementation for p in plan(catalogue, suite="quick", machine=HOPPER)]
    assert names.count("fused") == 3
    assert names.count("strided") == 3


def test_quick_with_a_length_or_preset_runs_just_that(catalogue):
    assert len(plan(catalogue, suite="quick", workload={"seq_len": "777"})) == 5
    assert {p.case.workload.seq_len for p in plan(catalogue, suite="quick", configs=["seed_small"])} == {2048}


def test_implementations_leaves_out_the_oracle_unless_asked(catalogue):
    names = {p.case.implementation for p in plan(catalogue)}
    over_ranks = {one.name for one in catalogue.implementations if one.supports.max_world_size is None}
    assert {"ring", "ulysses"} <= over_ranks
    others = {
        one.name
        for one in catalogue.implementations
        if one.project or one.chooses or one.takes == "model" or not one.supports.square
    }
    assert names == set(catalogue.implementations.names) - {"reference"} - over_ranks - others
    everything = {p.case.implementation for p in plan(catalogue, run={"implementations": ["all"]})}
    assert everything == set(catalogue.implementations.names)


def test_an_option_that_the_suite_lacks_is_refused(catalogue):
    with pytest.raises(ConfigError, match=r"no option 'speed' \(given as 5\); it has no such options"):
        plan(catalogue, suite="quick", run={"options": {"speed": 5}})
    with pytest.raises(ConfigError, match=r"no option 'speed' \(given as 5\); it has shapes"):
        plan(catalogue, suite="choice", run={"options": {"speed": 5}})


def test_an_unknown_suite_is_refused(catalogue):
    with pytest.raises(ConfigError, match="unknown suite 'quik'; did you mean quick"):
        plan(catalogue, suite="quik")


@pytest.mark.parametrize(
    ("suite", "assignments", "why"),
    [
        (
            "quick",
            ["sinks=5"],
            "sinks=5 has no effect: .* window_sink, .* dense and dilated; add --set pattern=",
        ),
        ("quick", ["pattern=window_sink", "dilation_rates=1,2"], "dilation_rates=.* has no effect"),
        ("quick", ["kind=dense"], "kind: unknown key"),
    ],
)
def test_a_field_that_would_change_nothing_is_refused(catalogue, suite, assignments, why):
    with pytest.raises(ConfigError, match=why):
        plan(catalogue, suite, assignments=assignments)


@pytest.mark.parametrize(
    ("suite", "assignments", "run"),
    [
        ("quick", ["pattern=window_sink", "sinks=5"], {}),
        ("block-sparse", ["sinks=5"], {}),
        # A yardstick alone, in the words of what it stands beside.
        ("quick", ["segment_lengths=64"], {"implementations": ["dense"]}),
    ],
)
def test_a_field_waits_for_a_pattern_of_the_suite(catalogue, suite, assignments, run):
    assert plan(catalogue, suite, assignments=assignments, run=run)


@pytest.mark.usefixtures("with_a_compiler")
@pytest.mark.parametrize(
    ("fields", "tiles", "expected"),
    [
        ({"dtype": "bfloat16"}, True, "sdpa-flash"),
        ({"dtype": "bfloat16"}, False, "flash-cpu"),
        ({"dtype": "float16"}, True, "flash-cpu"),
        ({"dtype": "bfloat16", "window": "64,0", "causal": "true"}, True, "flash-cpu"),
        ({"dtype": "bfloat16", "mode": "both"}, True, "flash-cpu"),
    ],
)
def test_auto_leaves_products_of_bfloat16_to_tile_registers(catalogue, monkeypatch, fields, tiles, expected):
    monkeypatch.setattr(backends, "multiplies_bfloat16_tiles", lambda: tiles)
    (planned,) = plan(catalogue, run={"implementations": ["gather"]}, workload=fields)
    assert planned.case.backend == expected
    (asked,) = plan(catalogue, run={"implementations": ["gather"], "backends": ["flash-cpu"]}, workload=fields)
    assert (asked.case.backend, asked.skip) == ("flash-cpu", None)


def test_a_suite_that_misspells_an_optimization_gets_the_nearest_one(catalogue):
    planner = Planner(catalogue, CPU, run_request(catalogue, suite="implementations"))
    gather, (asked, *_) = catalogue.implementations.get("gather"), planner.workload_requests([{}])
    with pytest.raises(ConfigError, match=r"cuda_grap: unknown key; did you mean cuda_graph\?"):
        planner.plan(gather, asked, cuda_grap=True)
