"""The search of `extreme`: doubling, bisection, ways, and one real search in worker processes."""

import sys
from typing import get_args

import pytest

from dilabench import record as results
from dilabench.engine.device.environment import snapshot
from dilabench.engine.runner import run
from dilabench.errors import ConfigError
from dilabench.machine import GpuInfo, Machine
from dilabench.plugins.manager import discover
from dilabench.predict.memory import plan_memory
from dilabench.request import run_request
from dilabench.suites.extreme.cases import follow_up, searches
from dilabench.suites.extreme.findings import analyse
from dilabench.suites.planner import Planner, expand
from dilabench.workload.spec import WorkloadRequest
from tests.conftest import slow

CATALOGUE = discover().catalogue

CPU = Machine(device="cpu", no_cuda="test")
SHAPE = {"num_heads": 2, "head_dim": 32, "segment_lengths": (256, 512), "dilation_rates": (1, 2)}


def asked(catalogue, names=("strided",), mode="forward", **options):
    run_fields = {"implementations": list(names), "options": options, "device": "cpu"}
    workload = {**SHAPE, **({"mode": mode} if mode else {})}
    return run_request(catalogue, suite="extreme", workload=workload, run=run_fields)


def measured(planned, bytes_per_token=1000):
    tokens = planned.case.workload.tokens
    return results.Row(
        planned=planned,
        outcome=results.Measured(
            verification=results.Verification(checks=(results.Check(name="out", passed=True),), sampled_rows=24),
            timings=(results.Timing(timer="wall", proves="", slots=(results.Slot(samples_ns=(tokens * 10,) * 5),)),),
            memory=results.Memory(peak_bytes=5000 + tokens * bytes_per_token),
        ),
    )


def searched(catalogue, request, fits, machine=CPU):
    """All rows of a search in which `fits(length)` decides."""
    planner = Planner(catalogue, machine, request)
    rows, waiting = [], list(expand(catalogue, machine, request))
    while waiting:
        for one in waiting:
            length = one.case.workload.seq_len
            outcome = one.skip
            outcome = outcome or (None if fits(length) else results.Skipped(code="out_of_memory", why="in any words"))
            rows.append(results.Row(planned=one, outcome=outcome) if outcome else measured(one))
        known = {row.case.case_id for row in rows}
        waiting = [one for one in follow_up(rows, request, planner) if one.case.case_id not in known]
    return rows


@pytest.mark.parametrize("limit", [100_000, 9000, 8192, 8191, 300, 777_777])
def test_the_search_closes_in_on_the_longest_length(catalogue, limit):
    rows = searched(catalogue, asked(catalogue), lambda length: length <= limit)
    (search,) = searches(rows)
    assert search.longest <= limit < search.too_long
    assert search.too_long - search.longest <= max(1, limit // 16)
    lengths = [row.case.workload.seq_len for row in rows]
    assert len(lengths) == len(set(lengths)) < 20


@pytest.mark.parametrize("longest", [1 << 20, 3_000_000, 5000])
def test_doubling_ends_exactly_at_the_longest_length_asked_for(catalogue, longest):
    rows = searched(catalogue, asked(catalogue, max_seq_length=longest), lambda _: True)
    assert max(row.case.workload.seq_len for row in rows) == longest


def test_the_search_leaps_over_lengths_that_fit_easily(catalogue):
    def probed(**options):
        rows = searched(catalogue, asked(catalogue, **options), lambda length: length <= 1 << 20)
        return [row.case.workload.seq_len for row in rows]

    assert probed(max_seq_length="1M", memory_limit="64G") == [8192, 1 << 20]
    # Little memory: the formula sees its end coming, and from there on lengths are doubled.
    assert probed(max_seq_length="1M", memory_limit="1G")[-2:] == [1 << 19, 1 << 20]


def test_no_leap_goes_where_a_call_takes_minutes(catalogue):
    request = asked(catalogue, ("dense",), max_seq_length="64M", memory_limit="64G")
    more = follow_up(
        [measured(one) for one in expand(catalogue, CPU, request)], request, Planner(catalogue, CPU, request)
    )
    assert [one.case.workload.seq_len < 1 << 20 for one in more] == [True]


def lengths_on_a_gpu(catalogue, needed, memory=143771 * 2**20, **options):
    """Lengths tried in a search on a GPU where a length takes `needed(length)` bytes, and the search."""
    gpu = GpuInfo(name="H200", compute_capability="9.0", memory_bytes=memory)
    request = asked(catalogue, ("strided",), "both", max_seq_length="64M", **options).model_copy(
        update={"device": "cuda", "backends": ("sdpa-efficient",)}
    )
    machine = Machine(device="cuda", gpus=(gpu,))
    rows = searched(catalogue, request, lambda length: needed(length) <= memory, machine)
    (search,) = searches(rows)
    return [row.case.workload.seq_len for row in rows], search


def formula(length):
    workload = {**SHAPE, "batch_size": 1, "seq_len": length, "mode": "both"}
    case = results.Case(
        implementation="strided",
        backend="sdpa-efficient",
        workload=WorkloadRequest.model_validate(workload).resolve("bfloat16"),
    )
    return plan_memory(case, "cuda", discover().catalogue).peak_bytes


def test_on_a_gpu_a_right_formula_leaves_two_lengths_to_try(catalogue):
    lengths, search = lengths_on_a_gpu(catalogue, formula, memory=2**33)
    first, *tried = lengths
    assert (first, len(tried)) == (8192, 2)
    assert formula(search.longest) <= 2**33 < formula(search.too_long)
    assert search.too_long - search.longest == search.step(search.longest)


@pytest.mark.parametrize("factor", [0.7, *map(slow, (0.95, 1.05, 1.5)), 3.0])
def test_on_a_gpu_a_wrong_formula_costs_a_few_lengths(catalogue, factor):
    lengths, search = lengths_on_a_gpu(catalogue, lambda length: factor * formula(length), memory=2**33)
    assert factor * formula(search.longest) <= 2**33 < factor * formula(search.too_long)
    assert search.too_long - search.longest <= search.step(search.longest)
    assert len(lengths) == len(set(lengths)) < 14


def test_on_a_gpu_everything_wanted_may_fit(catalogue):
    lengths, search = lengths_on_a_gpu(catalogue, formula, memory=2**40)
    assert search.longest == 64 << 20
    assert search.too_long is None
    assert len(lengths) < 8


def test_a_search_ends_where_nothing_fits(catalogue):
    rows = searched(catalogue, asked(catalogue), lambda _: False)
    (search,) = searches(rows)
    assert search.longest == 0
    assert min(row.case.workload.seq_len for row in rows) == 256


def test_a_wrong_or_late_row_stops_its_search_only(catalogue):
    request = asked(catalogue, ("strided", "gather"))
    first, second = expand(catalogue, CPU, request)
    rows = [
        results.Row(planned=first, outcome=results.Failed(stage="verify", code="wrong_output", why="wrong")),
        measured(second),
    ]
    more = follow_up(rows, request, Planner(catalogue, CPU, request))
    assert [one.case.implementation for one in more] == ["gather"]
    assert [one.case.workload.seq_len > 8192 for one in more] == [True]


@pytest.mark.parametrize("code", get_args(results.SkipCode))
def test_a_search_decides_on_the_code_whatever_the_text_says(catalogue, code):
    request = asked(catalogue)
    (first,) = expand(catalogue, CPU, request)
    rows = [results.Row(planned=first, outcome=results.Skipped(code=code, why="does not fit into memory"))]
    (search,) = searches(rows)
    ran_out = code == "out_of_memory"
    assert (search.too_long, search.interrupted is None) == ((8192, True) if ran_out else (None, False))
    more = follow_up(rows, request, Planner(catalogue, CPU, request))
    assert [one.case.workload.seq_len for one in more] == ([4096] if ran_out else [])


def test_every_case_is_isolated(catalogue):
    planned = expand(catalogue, CPU, asked(catalogue))
    assert {one.procedure for one in planned} == {"isolated"}


def test_both_modes_and_every_way_are_rows_of_their_own(catalogue):
    request = asked(catalogue, mode=None, chunked=True, offload=True, gradient_checkpointing=True)
    planned = expand(catalogue, CPU, request)
    ways = [(one.case.workload.mode, one.labels["way"], one.skip and one.skip.code) for one in planned]
    on_the_host = "not_applicable"
    assert ways == [
        ("forward", "as it is", None),
        ("forward", "gradient checkpointing", "not_applicable"),
        ("forward", "chunked queries", None),
        ("forward", "chunked queries, inputs on the host", on_the_host),
        ("both", "as it is", None),
        ("both", "gradient checkpointing", None),
        ("both", "chunked queries", None),
        ("both", "chunked queries, inputs on the host", on_the_host),
    ]
    assert len({one.case.case_id for one in planned}) == len(planned)
    assert [one.case.optimizations.query_chunk for one in planned if "chunked" in one.labels["way"]] == [512] * 4


def test_chunks_need_a_cut_and_heads(catalogue):
    request = asked(catalogue, ("dense", "gather-multihead"), chunked=True)
    planned = expand(catalogue, CPU, request)
    reasons = {(one.case.implementation, one.labels["way"]): one.skip and one.skip.why for one in planned}
    assert "has no cut" in reasons["dense", "chunked queries"]
    assert reasons["dense", "as it is"] is None
    assert "takes embeddings" in reasons["gather-multihead", "as it is"]


def test_the_memory_limit_is_written_on_every_case(catalogue):
    request = asked(catalogue, memory_limit="256M")
    planned = expand(catalogue, CPU, request)
    assert {one.memory_limit_bytes for one in planned} == {256 * 2**20}
    more = follow_up([measured(one) for one in planned], request, Planner(catalogue, CPU, request))
    assert {one.memory_limit_bytes for one in more} == {256 * 2**20}


@pytest.mark.parametrize("value", ["0", "-5", "abc", "1.5"])
def test_lengths_that_are_none_are_refused(catalogue, value):
    with pytest.raises(ConfigError, match="max_seq_length"):
        expand(catalogue, CPU, asked(catalogue, max_seq_length=value))


@pytest.mark.parametrize(("value", "tokens"), [("16k", 16384), ("1M", 2**20), ("1_000_000", 10**6), ("1e6", 10**6)])
def test_lengths_are_read_as_people_write_them(catalogue, value, tokens):
    rows = searched(catalogue, asked(catalogue, max_seq_length=value), lambda _: True)
    assert max(row.case.workload.seq_len for row in rows) == tokens


def test_unknown_options_are_refused(catalogue):
    with pytest.raises(ConfigError, match="no option 'tokens'"):
        expand(catalogue, CPU, asked(catalogue, tokens=5))


def record_of(rows):
    header = results.RunHeader(
        tool_version="0", run_id="t", suite="extreme", started_at="now", environment=snapshot(CPU)
    )
    return results.RunRecord.model_validate({**header.model_dump(), "rows": [row.model_dump() for row in rows]})


def test_the_analysis_names_the_longest_and_its_slope(catalogue):
    rows = searched(catalogue, asked(catalogue), lambda length: length <= 20000)
    (section,) = analyse(record_of(rows), CATALOGUE)
    (line,) = section.rows
    cells = dict(zip(section.columns, line, strict=True))
    assert cells["longest that ran"] in {"19968", "19.5K"}
    assert cells["slope, bytes/token"] == "1000"
    assert cells["search ended"].startswith("between the two")
    assert section.sentence.startswith("Longest sequence that ran")
    assert len(section.plots[0].curves[0].points) == len(searches(rows)[0].fitting)


class Sink:
    def start(self, header): ...
    def row(self, row): ...
    def finish(self, record): ...


@pytest.mark.slow
def test_a_real_search_finds_the_end_of_a_small_memory(catalogue, tmp_path, monkeypatch):
    monkeypatch.setenv("DILABENCH_LOCK_DIR", str(tmp_path))
    if sys.platform != "linux":
        pytest.skip("needs Linux: RLIMIT_DATA, the memory limit of a CPU worker, counts mappings there only")
    request = asked(catalogue, memory_limit="64M").model_copy(update={"timing": "simple", "budget_s": 1800.0})
    header = results.RunHeader(
        tool_version="0", run_id="t", suite="extreme", started_at="now", environment=snapshot(CPU)
    )
    planner = Planner(catalogue, CPU, request)
    record = run(
        expand(catalogue, CPU, request),
        request,
        catalogue,
        CPU,
        header,
        Sink(),
        follow_up=lambda rows: follow_up(rows, request, planner),
    )
    (search,) = searches(record.rows)
    assert search.interrupted is None, search.interrupted
    # q, k, v and out of 1024 bytes a token in 64 MiB; what is kept of timed calls leaves no gaps between them.
    assert 57344 <= search.longest < search.too_long <= 65536
    longest = max(search.fitting, key=lambda row: row.case.workload.seq_len)
    assert longest.outcome.verification.passed
    assert {check.name for check in longest.outcome.verification.checks} >= {"finite", "out"}
    assert "64.0 MiB by --memory-limit" in "".join(note.message for note in longest.outcome.notes)
