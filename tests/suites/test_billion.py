"""`billion`: the form that fits, pieces of whole segments, what was really computed, and projections apart from it."""

import pytest

from dilabench.engine.device.environment import snapshot
from dilabench.engine.runner import run
from dilabench.errors import ConfigError
from dilabench.machine import Machine
from dilabench.plugins.manager import discover
from dilabench.predict.memory import plan_memory
from dilabench.predict.time import plan_time
from dilabench.record import GpuInfo, RunHeader
from dilabench.request import run_request
from dilabench.suites.billion.cases import BILLION
from dilabench.suites.billion.findings import analyse, computed_tokens, project
from dilabench.suites.planner import expand
from dilabench.workload.spec import WorkloadRequest

CPU = Machine(device="cpu", no_cuda="test")
H200 = Machine(
    device="cuda", gpus=(GpuInfo(name="NVIDIA H200", compute_capability="9.0", memory_bytes=143771 * 2**20),)
)
FOUR_H200 = Machine(device="cuda", gpus=4 * H200.gpus)
SMALL = {"segment_lengths": (256, 512), "dilation_rates": (1, 2), "head_dim": 32}


@pytest.fixture(scope="module")
def catalogue():
    return discover().catalogue


def asked(catalogue, names=("strided",), budget_s=None, workload=SMALL, nproc=1, **options):
    fields = {"implementations": list(names), "options": options, "timing": "simple", "budget_s": budget_s}
    fields["nproc"] = nproc
    return run_request(
        catalogue,
        suite="billion",
        workload=workload,
        run={name: value for name, value in fields.items() if value is not None},
    )


def test_a_billion_is_streamed_on_one_gpu_and_a_quarter_of_it_is_resident(catalogue):
    (whole,) = expand(catalogue, H200, asked(catalogue, ("fused",), workload={}))
    assert whole.labels["form"] == "streamed, 1G tokens processed"
    assert whole.case.optimizations.stream_tokens == BILLION == 2**30
    assert whole.case.workload.seq_len % 32768 == 0
    assert BILLION % whole.case.workload.seq_len == 0
    (part,) = expand(catalogue, H200, asked(catalogue, ("fused",), workload={}, tokens="256M"))
    assert part.labels["form"].startswith("resident")
    assert part.labels["part"] == "256M tokens, 0.25 of 2^30"
    assert (part.case.workload.seq_len, part.case.optimizations.stream_tokens) == (2**28, 0)


def test_four_gpus_hold_a_billion_as_one_sequence_and_one_of_them_a_quarter(catalogue):
    (whole,) = expand(catalogue, FOUR_H200, asked(catalogue, (), workload={}))
    assert whole.labels["form"] == "resident over 4 ranks: one sequence"
    assert (whole.case.implementation, whole.case.world_size, whole.skip) == ("fused-sharded", 4, None)
    assert (whole.case.workload.seq_len, whole.case.optimizations.stream_tokens) == (2**30, 0)
    # q, k, v and out of 64 bfloat16 values and one float32 lse for a quarter of the tokens, and nothing else.
    found = plan_memory(whole.case, "cuda", discover().catalogue)
    assert found.peak_bytes - found.tables_bytes == 2**28 * (4 * 64 * 2 + 4)
    assert plan_time(whole.case, FOUR_H200, 1).seconds == pytest.approx(
        plan_time(whole.case.model_copy(update={"world_size": 1}), FOUR_H200, 1).seconds / 4
    )
    (part,) = expand(catalogue, FOUR_H200, asked(catalogue, (), workload={}, tokens="256M"))
    assert (part.case.implementation, part.case.world_size) == ("fused", 1)
    (more,) = expand(catalogue, FOUR_H200, asked(catalogue, (), workload={}, tokens="2G"))
    assert more.labels["form"].startswith("streamed")


def test_ranks_that_were_asked_for_are_taken_even_where_one_device_would_do(catalogue):
    (one,) = expand(catalogue, CPU, asked(catalogue, (), nproc=3, tokens="12K"))
    assert one.labels["form"] == "resident over 3 ranks: one sequence"
    assert (one.case.implementation, one.case.world_size) == ("ring-allgather", 3)
    window = {**SMALL, "window": (64, 0)}
    (within,) = expand(catalogue, CPU, asked(catalogue, (), workload=window, nproc=3, tokens="12K"))
    assert within.labels["form"] == "resident over 3 ranks: one sequence"
    (forced,) = expand(catalogue, CPU, asked(catalogue, (), workload=window, nproc=3, tokens="12K", form="ranks"))
    assert forced.case.world_size == 3


def test_branches_that_cross_ranks_are_nothing_for_fused_sharded(catalogue):
    long = {"segment_lengths": (2**16, 2**28), "dilation_rates": (1, 16)}
    (one,) = expand(catalogue, FOUR_H200, asked(catalogue, (), workload=long, tokens="512M", form="ranks"))
    assert "cannot be cut into 4 parts that need nothing of each other, only into 2" in one.skip.why
    assert "ring-allgather" in one.skip.why


@pytest.mark.parametrize("form", ["resident", "streamed"])
def test_a_form_for_one_device_refuses_ranks(catalogue, form):
    with pytest.raises(ConfigError, match="--nproc 4 asks for ranks"):
        expand(catalogue, CPU, asked(catalogue, nproc=4, form=form))


def test_pieces_are_whole_segments_that_fit_into_the_limit(catalogue):
    (one,) = expand(catalogue, CPU, asked(catalogue, tokens="1M", form="streamed", memory_limit="4M"))
    assert one.case.workload.seq_len == 1024
    (one,) = expand(catalogue, CPU, asked(catalogue, tokens="1M", form="streamed", memory_limit="64M"))
    assert one.case.workload.seq_len == 16384


def test_what_cannot_be_cut_is_skipped_with_the_reason(catalogue):
    dense = {name: value for name, value in SMALL.items() if name in WorkloadRequest.model_fields} | {
        "pattern": "dense"
    }
    (one,) = expand(catalogue, CPU, asked(catalogue, workload=dense, names=["dense"], tokens="64K", form="streamed"))
    assert "has no cut" in one.skip.why


@pytest.mark.parametrize(("option", "value"), [("tokens", "0"), ("tokens", "-5"), ("tokens", "abc"), ("form", "both")])
def test_bad_options_are_refused(catalogue, option, value):
    with pytest.raises(ConfigError, match=option):
        expand(catalogue, CPU, asked(catalogue, **{option: value}))


class Sink:
    def start(self, header): ...
    def row(self, row): ...
    def finish(self, record): ...


def recorded(catalogue, request, tmp_path, monkeypatch):
    monkeypatch.setenv("DILABENCH_LOCK_DIR", str(tmp_path))
    header = RunHeader(tool_version="0", run_id="t", suite="billion", started_at="now", environment=snapshot(CPU))
    return run(expand(catalogue, CPU, request), request, catalogue, CPU, header, Sink())


def test_a_small_stream_processes_every_token_and_verifies_some_pieces(catalogue, tmp_path, monkeypatch):
    request = asked(catalogue, tokens="15K", form="streamed", memory_limit="8M")
    record = recorded(catalogue, request, tmp_path, monkeypatch)
    (row,) = record.rows
    assert row.outcome.status == "measured", row.outcome
    piece = row.case.workload.seq_len
    pieces = -(-15 * 1024 // piece)
    assert pieces > 3
    assert row.outcome.counters["stream_pieces"] == pieces == len(row.outcome.timings[0].samples_ns)
    assert computed_tokens(row) == pieces * piece == row.outcome.counters["stream_tokens"]
    places = {check.where.partition(",")[0] for check in row.outcome.verification.checks if check.where}
    assert {"piece 0", f"piece {pieces - 1}"} <= places
    assert row.outcome.memory.peak_bytes > 4 * piece * 32 * 4
    (section,) = analyse(record)
    assert section.sentence.startswith("Streamed, ")
    assert "tokens processed" in section.sentence
    assert "sequence" not in section.sentence
    (projection,) = project(record)
    assert projection["kind"] == "projection"
    calls_s = sum(row.outcome.timings[0].samples_ns) * 1e-9
    assert projection["seconds"] == pytest.approx(calls_s * BILLION / computed_tokens(row))


def test_a_small_resident_sequence_is_one_sequence_and_has_no_projection(catalogue, tmp_path, monkeypatch):
    record = recorded(catalogue, asked(catalogue, tokens="4000", form="resident"), tmp_path, monkeypatch)
    (row,) = record.rows
    assert row.outcome.verification.passed
    (section,) = analyse(record)
    assert section.sentence.startswith("Resident, 4000 tokens as one sequence")
    assert project(record) == ()


@pytest.mark.distributed
def test_a_sequence_over_two_ranks_is_measured_weighed_by_formula_and_verified(catalogue, tmp_path, monkeypatch):
    request = asked(catalogue, (), tokens="50K", nproc=2)
    record = recorded(catalogue, request, tmp_path, monkeypatch)
    (row,) = record.rows
    assert row.outcome.status == "measured", row.outcome
    assert row.outcome.verification.sampled_rows >= 24
    assert computed_tokens(row) == 50 * 1024
    plan = plan_memory(row.case, "cpu", discover().catalogue)
    assert plan.inputs_bytes == row.outcome.memory.inputs_bytes == 3 * 25 * 1024 * 32 * 4
    assert row.outcome.memory.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.25)
    (section,) = analyse(record)
    assert section.sentence.startswith("Resident over 2 ranks, 50K tokens as one sequence")
    assert project(record) == ()


@pytest.mark.distributed
def test_a_sequence_that_fits_on_no_rank_is_skipped_with_what_each_needs(catalogue, tmp_path, monkeypatch):
    request = asked(catalogue, (), tokens="64K", nproc=2, form="ranks", memory_limit="4M")
    (row,) = recorded(catalogue, request, tmp_path, monkeypatch).rows
    assert row.outcome.status == "skipped"
    assert row.outcome.why.startswith("does not fit into memory: each rank needs 1")
    assert "out of memory" in row.outcome.why
