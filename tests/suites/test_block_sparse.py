"""Suite `block-sparse`: its cases, and the break-even density that it reports."""

import numpy as np
import pytest

from dilabench.errors import ConfigError
from dilabench.machine import Machine
from dilabench.patterns import block_masks, block_sparse
from dilabench.record import (
    CpuInfo,
    Environment,
    GpuInfo,
    Measured,
    Memory,
    PlannedCase,
    Row,
    RunRecord,
    Slot,
    Timing,
    Verification,
)
from dilabench.request import run_request
from dilabench.suites.block_sparse.findings import analyse, break_even, steps_of
from dilabench.suites.planner import expand

CPU = Machine(device="cpu", no_cuda="no NVIDIA GPU is visible")
HOPPER = Machine(device="cuda", gpus=(GpuInfo(name="H200", compute_capability="9.0"),))
SMALL = {"pattern": "block_sparse", "seq_len": 1024, "num_heads": 2}


def plan(catalogue, machine=CPU, workload=None, **run):
    run.setdefault("implementations", ["dense", "block-sparse"])
    request = run_request(catalogue, suite="block-sparse", workload=workload or {}, run=run)
    return expand(catalogue, machine, request)


def test_one_yardstick_and_every_density_and_block_size(catalogue):
    planned = plan(catalogue, HOPPER, workload={"pattern": "block_sparse"})
    assert [p.role for p in planned] == ["yardstick", *["method"] * 15]
    assert planned[0].case.workload.pattern.kind == "dense"
    points = [(p.case.workload.pattern.block_size, p.case.workload.pattern.sparsity) for p in planned[1:]]
    assert points == [(block, s) for block in (64, 128, 256) for s in (0.5, 0.75, 0.9, 0.95, 0.98)]


def test_over_ranks_the_ring_stands_beside_one_device(catalogue):
    alone = plan(catalogue, HOPPER, workload=SMALL, implementations=[])
    assert "block-sparse-ring" not in {p.case.implementation for p in alone}
    planned = plan(catalogue, workload={**SMALL, "density": 0.1}, implementations=[], nproc=2)
    ranks = {p.case.implementation: (p.case.world_size, p.skip is None) for p in planned}
    assert ranks["dense"] == ranks["block-sparse"] == (1, True)
    assert ranks["block-sparse-ring"] == (2, True)


def test_the_ring_is_held_against_dense_attention_on_one_device(catalogue):
    names = ["dense", "block-sparse-ring"]
    planned = plan(catalogue, workload={**SMALL, "density": 0.5}, implementations=names, nproc=2)
    (section,) = analyse(record(planned, [10.0, 4.0]))
    assert section.rows[0][0] == "block-sparse-ring on 2 ranks"
    assert section.rows[0][6] == "2.50x"


def test_what_ranks_cannot_do_says_why(catalogue):
    reasons = [
        plan(catalogue, workload={**SMALL, "density": 0.5, **fields}, implementations=["block-sparse-ring"], nproc=2)[
            0
        ].skip.why
        for fields in ({"window": (64, 0)}, {"segment_lengths": (512,), "dilation_rates": (2,)})
    ]
    assert reasons == [
        "window (64, 0) is not supported",
        "a block mask over dilated branches has blocks of scattered rows, which no single rank owns",
    ]


def test_sparsity_is_read_as_the_density_that_it_leaves(catalogue):
    by_name = [
        plan(catalogue, workload={name: share, **SMALL}) for name, share in (("density", 0.1), ("sparsity", 0.9))
    ]
    assert by_name[0] == by_name[1]
    with pytest.raises(ConfigError, match="leave sparsity out"):
        plan(catalogue, workload={"density": 0.1, "sparsity": 0.9})
    with pytest.raises(ConfigError, match="'sparse' is not a share"):
        plan(catalogue, workload={"sparsity": "sparse"})


def test_what_is_named_is_the_only_one(catalogue):
    planned = plan(catalogue, workload={"density": "0.2", "mask": "random", "block_size": "32", **SMALL})
    (point,) = [p for p in planned if p.role == "method"]
    pattern = point.case.workload.pattern
    assert (pattern.mask, pattern.density, pattern.block_size) == ("random", 0.2, 32)
    assert abs(float(point.labels["density_reached"]) - 0.2) < 0.05


def test_branches_of_a_preset_get_the_mask_over_their_rows(catalogue):
    request = run_request(
        catalogue, suite="block-sparse", configs=["seed_small"], run={"implementations": ["block-sparse"]}
    )
    patterns = [p.case.workload.pattern for p in expand(catalogue, CPU, request)]
    assert {pattern.kind for pattern in patterns} == {"block_sparse"}
    assert {pattern.branches.segment_lengths for pattern in patterns} == {(1024, 2048)}


def test_a_mask_file_is_the_only_point_and_must_fit(catalogue, tmp_path):
    path = tmp_path / "mask.npy"
    np.save(path, np.eye(8, dtype=bool))
    (point,) = plan(catalogue, workload={"mask_file": str(path), **SMALL}, implementations=["block-sparse"])
    assert point.case.workload.pattern.mask == "custom"
    assert float(point.labels["density_reached"]) == pytest.approx(8 / 36, abs=1e-4)
    with pytest.raises(ConfigError, match="the workload needs 16x16 blocks of 128"):
        plan(catalogue, workload={"mask_file": str(path), **SMALL, "seq_len": 2048}, implementations=["block-sparse"])


def test_kernels_say_what_they_cannot_do(catalogue):
    reasons = {
        p.case.implementation: p.skip and p.skip.why
        for p in plan(
            catalogue,
            HOPPER,
            workload={"density": 0.1, "block_size": 40, **SMALL},
            implementations=["block-sparse"],
        )
    }
    assert "block_size 40 is not a multiple of 16" in reasons["block-sparse"]


def record(planned: tuple[PlannedCase, ...], times_ms: list[float]) -> RunRecord:
    rows = []
    for case, ms in zip(planned, times_ms, strict=True):
        slots = tuple(Slot(round=r, samples_ns=(int(ms * 1e6),) * 4) for r in range(4))
        timing = Timing(timer="wall", proves="", slots=slots)
        memory = Memory(peak_bytes=1 << 20)
        outcome = Measured(verification=Verification(checks=()), timings=(timing,), memory=memory)
        rows.append(Row(planned=case, outcome=outcome))
    environment = Environment(os="Linux", python="3.12", cpu=CpuInfo(model="a processor", cores=2, threads=2))
    header = {"tool_version": "1", "run_id": "r", "suite": "block-sparse", "started_at": "2026-01-01T00:00:00+00:00"}
    return RunRecord(**header, environment=environment, rows=tuple(rows))


def test_the_break_even_density_lies_between_the_points_beside_it(catalogue):
    planned = plan(catalogue, workload={**SMALL, "seq_len": 8192})
    found = record(planned, [10.0, 12.0, 6.0, 2.4, 1.2, 0.6])
    assert [round(step.speedup, 2) for step in steps_of(found)] == [0.83, 1.67, 4.17, 8.33, 16.67]
    (section,) = analyse(found)
    assert "block-sparse block 128 breaks even with dense attention at a density of about 42%" in section.sentence
    assert section.rows[2][2:7] == ("10.0%", "10.0%", "2.400 ms", "24.0%", "4.17x")
    (plot,) = section.plots
    assert [point.y for point in plot.curves[0].points] == pytest.approx(
        [10 / 0.6, 10 / 1.2, 10 / 2.4, 10 / 6, 10 / 12]
    )


def test_the_mask_file_of_many_rows_is_read_once(catalogue, tmp_path, monkeypatch):
    path = tmp_path / "mask.npy"
    np.save(path, np.tril(np.random.default_rng(0).random((8, 8)) < 0.7) | np.eye(8, dtype=bool))
    asked = {"mask_file": str(path), **SMALL}
    names = ["block-sparse", "flex"]
    forward, backward = (
        plan(catalogue, workload={**asked, "mode": mode}, implementations=names) for mode in ("forward", "both")
    )
    cases = tuple(one for one in (*forward, *backward) if one.case.workload.pattern.kind == "block_sparse")
    found = record(cases, [float(ms) for ms in range(1, len(cases) + 1)])
    reads = []
    real = block_masks.mask_of_digest
    monkeypatch.setattr(block_masks, "mask_of_digest", lambda *of: reads.append(of) or real(*of))
    block_sparse._pairs_of_masks.cache_clear()
    assert len(cases) > 3
    assert len({step.density for step in steps_of(found)}) == 1
    assert len(reads) == 1
    analyse(found)
    # Once more for the shares, and once for the work, whatever the number of rows and heads.
    assert len(reads) == 3


def test_without_a_crossing_the_sentence_says_which_side(catalogue):
    planned = plan(catalogue, workload=SMALL)
    (faster,) = analyse(record(planned, [10.0, 9.0, 5.0, 3.0, 2.0, 1.0]))
    assert "beats dense attention at every density measured" in faster.sentence
    (slower,) = analyse(record(planned, [1.0, 9.0, 5.0, 3.0, 2.0, 1.5]))
    assert "is slower than dense attention at every density measured" in slower.sentence
    (alone,) = analyse(record(planned[1:], [9.0, 5.0, 3.0, 2.0, 1.0]))
    assert "No dense row was measured" in alone.sentence
    assert analyse(record(planned[:1], [1.0])) == ()


def test_break_even_is_where_times_are_equal():
    assert break_even([(0.5, 0.8), (0.25, 1.6)]) == pytest.approx(0.4)
    assert break_even([(0.5, 1.2), (0.25, 2.0)]) is None
    assert break_even([]) is None


def test_unasked_every_sparse_pattern_has_densities_of_its_own(catalogue):
    planned = plan(catalogue, workload={"seq_len": 1024, "num_heads": 2}, implementations=[])
    kinds = [p.case.workload.pattern.kind for p in planned if p.role == "method"]
    per_token = {"selected_blocks", "native_sparse"}
    per_block = {"block_sparse", "window_sink", "column_bounds", "topk_blocks", "blockwise_native_sparse"}
    assert set(kinds) == per_token | per_block
    only = plan(catalogue, workload={"pattern": "window_sink", "window_size": 100, "seq_len": 1024}, implementations=[])
    points = {p.case.workload.pattern.label() for p in only if p.case.implementation == "block-sparse"}
    assert points == {"window-sink window_size=100"}
    assert catalogue.suites.get("sparse").name == "block-sparse"


@pytest.mark.parametrize(("kind", "method"), [("topk_blocks", "block-sparse"), ("selected_blocks", "selected-blocks")])
def test_selecting_planning_and_attending_are_told_apart(catalogue, kind, method):
    names = ["dense", method, f"{method}-planned", f"{method}-selected"]
    asked = {"pattern": kind, "top_k": 4, "seq_len": 1024, "num_heads": 2}
    planned = plan(catalogue, workload=asked, implementations=names)
    assert [p.labels.get("steps") for p in planned] == [None, "attend", "plan attend", "select plan attend"]
    found = record(planned, [10.0, 2.0, 2.5, 3.25])
    (section,) = analyse(found)
    assert "takes 3.250 ms: attend 2.000 ms, plan 500.0 µs, select 750.0 µs." in section.sentence
    pairs = planned[1].case.workload.pattern.pairs(planned[1].case.workload.shapes[0]).attended
    assert section.rows[0][3] == f"{pairs / (1024 * 1025):.1%}"
    assert steps_of(found)[0].who == method


def test_planning_of_each_method_is_told_by_itself(catalogue):
    names = ["dense", "block-sparse", "block-sparse-planned", "flex"]
    asked = {"pattern": "column_bounds", "document_lengths": (100, 400), "seq_len": 1024, "num_heads": 2}
    planned = plan(catalogue, HOPPER, workload=asked, implementations=names)
    times = {"block-sparse": 2.0, "block-sparse-planned": 5.0, "flex": 3.0}
    found = record(planned, [times.get(one.case.implementation, 10.0) for one in planned])
    (section,) = analyse(found)
    assert section.sentence.count("does all of it") == 1
    assert "a call of block-sparse that does all of it takes 5.000 ms: attend 2.000 ms, plan 3.000 ms" in (
        section.sentence
    )


def test_a_density_above_all_says_what_is_counted(catalogue):
    few, many = (
        {"pattern": "blockwise_native_sparse", "top_k": 2, "window_size": size, "seq_len": 512, "num_heads": 2}
        for size in (64, 512)
    )
    for asked, more in ((few, False), (many, True)):
        planned = plan(catalogue, workload=asked, implementations=["dense", "native-sparse"])
        (section,) = analyse(record(planned, [10.0] * len(planned)))
        assert ("more pairs are computed than in full attention" in section.sentence) == more
