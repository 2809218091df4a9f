"""Suite `decode`: its presets by keys and batch, what a user sets, and the answer: time per token, share of a copy."""

import pytest

from dilabench.choice import descriptors
from dilabench.errors import ConfigError
from dilabench.machine import Machine
from dilabench.metadata import COPY_KEY, matmul_key
from dilabench.plugins.builtin.workloads import DECODE
from dilabench.record import GpuInfo
from dilabench.report.columns import COLUMNS, chosen_columns
from dilabench.report.content import workload_tables
from dilabench.report.markdown import to_text
from dilabench.request import run_request
from dilabench.suites.decode import ON_CPU, ON_GPU, analyse
from dilabench.suites.planner import expand
from dilabench.units import format_latency
from dilabench.workload.lower_bounds import least_bytes
from dilabench.workload.spec import Workload

CPU = Machine(device="cpu", no_cuda="no NVIDIA GPU is visible")
HOPPER = Machine(device="cuda", gpus=(GpuInfo(name="H200", compute_capability="9.0", memory_bytes=150 * 10**9),))


def plan(catalogue, machine=CPU, **fields):
    return expand(catalogue, machine, run_request(catalogue, suite="decode", **fields))


def workloads(planned):
    return list(dict.fromkeys(case.case.workload for case in planned))


def test_every_preset_of_decoding_is_measured_on_a_gpu(catalogue, monkeypatch):
    monkeypatch.setattr(descriptors, "_unmet_package", lambda *_: None)
    assert list(ON_GPU) == [preset.name for preset in DECODE]
    assert ON_CPU.keys() <= ON_GPU.keys()
    found = workloads(plan(catalogue, HOPPER))
    assert len([one for one in found if one.query_len is not None]) == len(found) >= sum(map(len, ON_GPU.values()))
    assert {one.dtype for one in found} == {"bfloat16"}
    assert {(one.query_len, one.seq_len) for one in found} >= {(1, 2**12), (1, 2**20), (4, 2**15), (2048, 2**17)}
    assert {one.window for one in found} == {(-1, -1), (127, 0)}


def test_backends_that_no_choice_tries_are_planned_only_by_name(catalogue):
    assert "math" not in {case.case.backend for case in plan(catalogue, HOPPER)}
    named = plan(catalogue, HOPPER, run={"backends": ["math"]}, configs=["speculative_4"])
    assert "math" in {case.case.backend for case in named}


def test_batches_alone_are_multiplied_with_the_usual_keys(catalogue):
    found = workloads(plan(catalogue, HOPPER, run={"options": {"batches": [2]}}))
    sizes = {(one.batch_size, one.seq_len) for one in found if one.num_heads == 32 and one.query_len == 1}
    assert sizes == {(2, 2**12), (2, 2**15), (2, 2**17)}


def test_on_a_cpu_caches_are_small_and_in_its_own_precision(catalogue):
    found = workloads(plan(catalogue))
    assert {one.dtype for one in found} == {"float32"}
    assert max(map(least_bytes, (one.replace(pattern={"kind": "dense"}) for one in found))) <= 2**29 + 2**20
    planned = plan(catalogue)
    assert all(case.skip is None for case in planned)
    by_pattern = {case.case.workload.pattern.kind for case in planned if case.role != "yardstick"}
    assert by_pattern == {"dense", "dilated"}
    assert {case.case.backend for case in planned if case.case.implementation == "dense"} >= {"math", "sdpa-flash"}


def test_keys_and_batches_are_multiplied(catalogue):
    planned = plan(
        catalogue,
        configs=["llama3_8b_decode"],
        run={"lengths": [512, 1024], "options": {"batches": ["1,3"]}},
    )
    sizes = {(one.batch_size, one.query_len, one.seq_len) for one in workloads(planned)}
    assert sizes == {(1, 1, 512), (3, 1, 512), (1, 1, 1024), (3, 1, 1024)}


@pytest.mark.parametrize(
    ("configs", "workload", "expected"),
    [
        (["speculative_4"], {}, [(1, 4, 2**15)]),
        (["small"], {}, [(4, 1, 4096)]),
        (["small"], {"query_len": "8"}, [(4, 8, 4096)]),
        (["longnet_decode"], {"seq_len": "256K", "batch_size": "2"}, [(2, 1, 2**18)]),
        (["chunked_prefill_2k"], {"seq_len": 2048}, [(1, None, 2048)]),
    ],
)
def test_what_is_set_is_what_runs(catalogue, configs, workload, expected):
    found = workloads(plan(catalogue, configs=configs, workload=workload))
    assert sorted({(one.batch_size, one.query_len, one.seq_len) for one in found}) == expected


def test_the_batch_is_set_once(catalogue):
    with pytest.raises(ConfigError, match="--batches 1,2 and batch_size=3 both set the batch; leave one out"):
        plan(catalogue, workload={"batch_size": "3"}, run={"options": {"batches": [1, 2]}})


def test_a_chunk_longer_than_its_keys_is_refused(catalogue):
    with pytest.raises(ConfigError, match="query_len 2048 is more than seq_len 1024: the queries are the last rows"):
        plan(catalogue, configs=["chunked_prefill_2k"], run={"lengths": [1024]})


def test_what_computes_every_row_says_so_if_it_is_named(catalogue):
    planned = plan(catalogue, configs=["longnet_decode"], run={"implementations": ["gather"], "lengths": [4096]})
    assert [case.skip.code for case in planned] == ["unsupported"]
    assert "query_len 1 below seq_len 4096 is not supported" in planned[0].skip.why
    assert "gather" not in {case.case.implementation for case in plan(catalogue)}


COPY = 10**10
CEILINGS = {COPY_KEY: COPY, matmul_key("float32"): 1e11}


def workload_over(keys, batch=1, queries=1):
    shape = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "float32"}
    return Workload(pattern={"kind": "dense"}, batch_size=batch, seq_len=keys, query_len=queries, **shape)


@pytest.fixture
def record(make_row, make_record):
    """Rows that take twice as long as a copy of their bytes, and a chunk that computing bounds."""

    def row(implementation, workload, times):
        ns = round(least_bytes(workload) / COPY * 1e9 * times)
        return make_row(implementation, ns=ns, spread=0.0, **dict(workload))

    rows = [
        row("dense", workload_over(4096), 2),
        row("reference", workload_over(4096), 8),
        row("dense", workload_over(4096, batch=16), 4),
        row("dense", workload_over(4096, queries=2048), 100),
    ]
    return make_record(rows, suite="decode", ceilings=CEILINGS)


def test_the_answer_is_time_per_token_and_share_of_a_copy(record):
    (section,) = analyse(record)
    assert section.answers
    assert "25 % to 50 % of the 10.0 GB/s that a copy reaches here" in section.sentence
    by_size = {(keys, batch, queries): cells for _, keys, batch, queries, *cells in section.rows}
    call_ns = round(2 * least_bytes(workload_over(4096)) / COPY * 1e9)
    fastest, call, per_token, rate, share, bound = by_size["4K", "1", "1"]
    assert (fastest, call) == ("probably dense over math", format_latency(call_ns))
    assert (per_token, rate, share, bound) == (call, "5.00", "50 %", "memory")
    call, per_token = (float(text.split()[0]) for text in by_size["4K", "16", "1"][1:3])
    assert per_token == pytest.approx(call / 16, rel=1e-3)
    assert by_size["4K", "1", "2K"][-1] == "compute"


def test_tables_show_the_rate_and_the_nearer_bound_of_such_rows_only(record, make_row, make_record):
    assert {"GB/s", "bound"} <= {column.name for column in chosen_columns((), record.rows)}
    square = make_record([make_row("dense", **dict(workload_over(4096).replace(query_len=None)))])
    assert {"GB/s", "bound"}.isdisjoint(column.name for column in chosen_columns((), square.rows))
    lines = [line for table in workload_tables(record) for line in table.rows]
    bounds = [COLUMNS["bound"].text(line) for line in lines]
    assert bounds[:3] == ["memory 50 %", "memory 12 %", "memory 25 %"]
    assert bounds[3].startswith("compute ")
    assert "1x1 of 4K H32/8 D128 fp32 causal" in to_text(record, [])
