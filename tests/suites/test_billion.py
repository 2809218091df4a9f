"""`billion`: a search up to 2^30 tokens on one device, one sequence of them over ranks."""

import pytest

from dilabench.engine.device.environment import snapshot
from dilabench.engine.runner import run
from dilabench.errors import ConfigError
from dilabench.machine import Machine
from dilabench.plugins.builtin.suites import BillionOptions
from dilabench.plugins.manager import discover
from dilabench.predict.memory import plan_memory
from dilabench.predict.time import plan_time
from dilabench.record import GpuInfo, Row, RunHeader, Skipped
from dilabench.request import run_request
from dilabench.suites.billion import follow_up
from dilabench.suites.extreme.findings import analyse
from dilabench.suites.planner import Planner, expand

CPU = Machine(device="cpu", no_cuda="test")
H200 = Machine(
    device="cuda", gpus=(GpuInfo(name="NVIDIA H200", compute_capability="9.0", memory_bytes=143771 * 2**20),)
)
BILLION = BillionOptions().tokens
FOUR_H200 = Machine(device="cuda", gpus=4 * H200.gpus)
SMALL = {"segment_lengths": (256, 512), "dilation_rates": (1, 2), "head_dim": 32}


def asked(catalogue, names=("strided",), workload=SMALL, nproc=1, **options):
    fields = {"implementations": list(names), "options": options, "timing": "simple", "nproc": nproc}
    return run_request(catalogue, suite="billion", workload=workload, run=fields)


@pytest.mark.slow
def test_one_gpu_searches_for_the_longest_part_of_a_billion_that_fits(catalogue, make_row):
    request = asked(catalogue, (), workload={})
    (first,) = expand(catalogue, H200, request)
    assert (first.case.implementation, first.case.world_size, first.procedure) == ("fused", 1, "isolated")
    assert (first.case.workload.seq_len, first.case.workload.num_heads, first.case.workload.mode) == (
        8192,
        1,
        "forward",
    )
    ran = Row(planned=first, outcome=make_row().outcome)
    (then,) = follow_up([ran], request, Planner(catalogue, H200, request))
    assert BILLION // 8 < then.case.workload.seq_len < BILLION // 2
    few = asked(catalogue, (), workload={}, tokens="64M")
    (then,) = follow_up([ran], few, Planner(catalogue, H200, few))
    assert then.case.workload.seq_len == 2**26


def test_four_gpus_hold_a_billion_as_one_sequence(catalogue):
    request = asked(catalogue, (), workload={})
    (whole,) = expand(catalogue, FOUR_H200, request)
    assert whole.labels["way"] == "one sequence over 4 ranks"
    assert (whole.case.implementation, whole.case.world_size, whole.skip) == ("fused-sharded", 4, None)
    assert (whole.case.workload.seq_len, whole.procedure) == (BILLION, "isolated")
    # q, k, v and out of 64 bfloat16 values and one float32 lse for a quarter of the tokens, and nothing else.
    plan = plan_memory(whole.case, "cuda", catalogue)
    assert plan.peak_bytes - plan.tables_bytes == 2**28 * (4 * 64 * 2 + 4)
    assert plan_time(whole.case, FOUR_H200, 1).seconds == pytest.approx(
        plan_time(whole.case.model_copy(update={"world_size": 1}), FOUR_H200, 1).seconds / 4
    )
    row = Row(planned=whole, outcome=Skipped(code="out_of_memory", why="out of memory"))
    assert follow_up([row], request, Planner(catalogue, FOUR_H200, request)) == ()


def test_requested_ranks_are_taken_even_if_one_device_would_do(catalogue):
    (case,) = expand(catalogue, CPU, asked(catalogue, (), nproc=3, tokens="12K"))
    assert (case.case.implementation, case.case.world_size) == ("ring-allgather", 3)
    window = {**SMALL, "window": (64, 0)}
    (within,) = expand(catalogue, CPU, asked(catalogue, (), workload=window, nproc=3, tokens="12K"))
    assert within.case.world_size == 3


def test_branches_that_cross_ranks_are_nothing_for_fused_sharded(catalogue):
    long = {"segment_lengths": (2**16, 2**28), "dilation_rates": (1, 16)}
    (case,) = expand(catalogue, FOUR_H200, asked(catalogue, (), workload=long, tokens="512M"))
    assert "cannot be cut into 4 parts that need nothing of each other, only into 2" in case.skip.why
    assert "ring-allgather" in case.skip.why


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize(
    ("option", "value"), [("tokens", "0"), ("tokens", "-5"), ("tokens", "abc"), ("form", "streamed")]
)
def test_bad_options_are_refused(catalogue, option, value, nproc):
    with pytest.raises(ConfigError, match=option):
        expand(catalogue, CPU, asked(catalogue, nproc=nproc, **{option: value}))


class Sink:
    def start(self, header): ...
    def row(self, row): ...
    def finish(self, record): ...


def recorded(catalogue, request, tmp_path, monkeypatch):
    monkeypatch.setenv("DILABENCH_LOCK_DIR", str(tmp_path))
    header = RunHeader(tool_version="0", run_id="t", suite="billion", started_at="now", environment=snapshot(CPU))
    planner = Planner(catalogue, CPU, request)
    planned = expand(catalogue, CPU, request)
    return run(
        planned, request, catalogue, CPU, header, Sink(), follow_up=lambda rows: follow_up(rows, request, planner)
    )


# `extreme` has such searches, too.
@pytest.mark.slow
def test_a_small_search_ends_at_the_tokens_requested(catalogue, tmp_path, monkeypatch):
    record = recorded(catalogue, asked(catalogue, tokens="20000"), tmp_path, monkeypatch)
    assert [row.case.workload.seq_len for row in record.rows] == [8192, 20000]
    assert all(row.outcome.verification.passed for row in record.rows)
    (section,) = analyse(record, catalogue)
    assert section.sentence.startswith("Longest sequence that ran and was right on sampled rows: 20000 tokens")


@pytest.mark.slow
@pytest.mark.distributed
def test_a_sequence_over_two_ranks_is_measured_weighed_by_formula_and_verified(catalogue, tmp_path, monkeypatch):
    request = asked(catalogue, (), tokens="50K", nproc=2)
    record = recorded(catalogue, request, tmp_path, monkeypatch)
    (row,) = record.rows
    assert row.outcome.status == "measured", row.outcome
    assert row.outcome.verification.sampled_rows >= 24
    plan = plan_memory(row.case, "cpu", discover().catalogue)
    assert plan.inputs_bytes == row.outcome.memory.inputs_bytes == 3 * 25 * 1024 * 32 * 4
    assert row.outcome.memory.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.25)
    (section,) = analyse(record, catalogue)
    assert "50K tokens, ring-allgather (forward, one sequence over 2 ranks)" in section.sentence


@pytest.mark.distributed
def test_a_sequence_that_fits_on_no_rank_is_skipped_with_what_each_needs(catalogue, tmp_path, monkeypatch):
    request = asked(catalogue, (), tokens="64K", nproc=2, memory_limit="4M")
    (row,) = recorded(catalogue, request, tmp_path, monkeypatch).rows
    assert row.outcome.status == "skipped"
    assert row.outcome.why.startswith("does not fit into memory: each rank needs 1")
    assert "out of memory" in row.outcome.why
