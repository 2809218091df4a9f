"""Cases with a plan and without, what only a GPU runs, the cache of answers, and the longest sequence that fits."""

import subprocess
import sys
import threading
import time

import pytest

from dilabench.patterns.selected_blocks import SelectedBlocksPattern
from dilabench.plugins.catalogue import Catalogue
from dilabench.plugins.descriptors import Capabilities, Implementation
from dilabench.predict.memory import each_traced, longest, longest_that_fits, plan, plan_memory, tracer, why_no_plan
from dilabench.predict.memory.plan import TraceCache
from dilabench.record import Case, Optimizations
from dilabench.workload.spec import WorkloadRequest
from tests.conftest import slow


def test_what_cannot_run_has_no_plan_and_a_reason(peaks):
    strided = peaks.case_of("strided", "sdpa-flash")
    for case, device, reason in (
        (strided.model_copy(update={"backend": "unknown"}), "cpu", "no backend 'unknown'"),
        (strided.model_copy(update={"world_size": 2}), "cpu", "runs on 1 device"),
        (peaks.case_of("flex"), "cpu", "device cpu is not supported"),
        (peaks.case_of("theirs"), "cpu", "no implementation 'theirs'"),
        (strided.model_copy(update={"backend": None}), "cpu", "no backend is named"),
    ):
        assert plan_memory(case, device, peaks.catalogue()) is None
        assert reason in why_no_plan(case, device, peaks.catalogue())
    assert "device cpu" in longest_that_fits(peaks.case_of("flex"), "cpu", 2**40, peaks.catalogue())


# Rounded lengths and odd ones, below and above the answers.
STARTS = (1000, 4096, 6996, 65536, 100_000)


@pytest.mark.parametrize(
    ("kind", "ranks", "step"),
    [slow("strided", 1, 256), ("dense", 1, 32), ("block-sparse", 1, 32), slow("gather", 1, 256), slow("ring", 4, 1024)],
)
def test_the_longest_that_fits_is_the_same_from_any_start(kind, ranks, step, peaks, monkeypatch):
    pattern = {"dense": peaks.DENSE, "block-sparse": peaks.sparse()}.get(kind, peaks.BRANCHES)
    case = peaks.case_of(kind, None if kind == "block-sparse" else "sdpa-flash", pattern, mode="both")
    case, capacity, traced = case.model_copy(update={"world_size": ranks}), 100 * 2**20, []

    def at(length):
        return case.model_copy(update={"workload": case.workload.replace(seq_len=length)})

    def counted(case, device, catalogue):
        traced.append(case.workload.seq_len)
        return plan_memory(case, device, catalogue)

    monkeypatch.setattr(longest, "plan_memory", counted)
    found = {start: longest_that_fits(at(start), "cpu", capacity, peaks.catalogue()) for start in STARTS}
    assert len(set(found.values())) == 1, found
    assert len(traced) <= 4 * len(STARTS)
    (length,) = set(found.values())
    assert length % step == 0
    assert peaks.plan(at(length), "cpu").peak_bytes <= capacity < peaks.plan(at(length + step), "cpu").peak_bytes
    assert longest_that_fits(case, "cpu", 1, peaks.catalogue()) == 0


def test_the_longest_may_cut_segments_if_few_lengths_without_a_cut_fit(peaks):
    case, capacity = peaks.case_of("strided", "sdpa-flash", peaks.LONG_BRANCHES, mode="both"), 30 * 2**20

    def at(length):
        return case.model_copy(update={"workload": case.workload.replace(seq_len=length)})

    (length,) = {longest_that_fits(at(start), "cpu", capacity, peaks.catalogue()) for start in STARTS}
    assert 2048 < length < 4096
    assert peaks.plan(at(length), "cpu").peak_bytes <= capacity < peaks.plan(at(length + 8), "cpu").peak_bytes


def test_a_length_that_is_given_has_no_longest(peaks):
    packed = {"layout": "packed", "cu_seqlens": (0, 1024, 4096)}
    case = peaks.case_of("ring-varlen", "sdpa-flash", peaks.DENSE, **packed)
    assert peaks.plan(case, "cpu") is not None
    assert longest_that_fits(case, "cpu", 2**40, peaks.catalogue()) == "its sequences have a fixed length"


def test_the_longest_is_one_that_the_pattern_takes(peaks):
    zero_keys = {"segment_lengths": (8, 12), "dilation_rates": (1, 8), "padding": "zero_key"}
    case = peaks.case_of("strided", "sdpa-flash", {"kind": "dilated", **zero_keys}, seq_len=10)
    assert longest_that_fits(case, "cpu", 2**40, peaks.catalogue()) == 12


@pytest.mark.parametrize(
    ("implementation", "backend", "long"),
    [("dense", "math", 2**18), slow("reference", None, 2**17)],
)
def test_a_length_that_takes_too_long_to_trace_lies_on_the_line_through_shorter_ones(
    implementation, backend, long, peaks
):
    def peak(length):
        return peaks.plan(peaks.case_of(implementation, backend, peaks.DENSE, seq_len=length), "cpu").peak_bytes

    short, half = 2**14, long // 2
    per_token = (peak(half) - peak(short)) / (half - short)
    assert peak(long) - peak(half) == pytest.approx(per_token * half, rel=0.1)


def units(workload):
    return workload.tokens * workload.num_heads * workload.head_dim * 2, workload.tokens * workload.num_heads * 4


def test_fused_on_cuda_holds_the_minimum_and_offloading_only_a_chunk(peaks):
    case = peaks.case_of("fused", dtype="bfloat16")
    unit, lse = units(case.workload)

    def needed(case):
        plan = peaks.plan(case, "cuda")
        assert plan.tables_bytes < 0.05 * unit
        return plan.peak_bytes - plan.tables_bytes

    assert needed(case) == 4 * unit + lse
    # Two float32 per row, up to whole tiles of each residue class.
    both = case.model_copy(update={"workload": case.workload.replace(mode="both")})
    assert needed(both) == pytest.approx(8 * unit + lse + 2 * lse, rel=0.02)
    offloaded = case.model_copy(update={"optimizations": Optimizations(query_chunk=1024, offload_inputs=True)})
    assert needed(offloaded) == pytest.approx((4 * unit + lse) / 4, rel=0.3)


def test_packed_documents_with_zero_keys_have_a_plan_on_cuda(peaks):
    pattern = {"segment_lengths": (1024, 4096), "dilation_rates": (1, 2), "padding": "zero_key", "offset": "blocked"}
    packed = {"layout": "packed", "cu_seqlens": (0, 3000, 8192), "seq_len": 8192, "dtype": "float16"}
    for merge_grad in ("exact", "detached"):
        branches = {"kind": "dilated", **pattern, "merge_grad": merge_grad}
        plan = peaks.plan(peaks.case_of("fused", pattern=branches, causal=False, mode="both", **packed), "cuda")
        # lse and zero keys of 4 heads, in float32.
        assert plan.workspace_bytes + plan.saved_bytes > 2 * 8192 * 4 * 4


def test_block_lists_on_cuda_add_little_to_the_minimum(peaks):
    for mode, minimum in (("forward", (4, 1)), ("both", (8, 3))):
        case = peaks.case_of("block-sparse", pattern=peaks.sparse(), dtype="bfloat16", mode=mode)
        unit, lse = units(case.workload)
        plan = peaks.plan(case, "cuda")
        assert plan.peak_bytes - plan.tables_bytes == pytest.approx(minimum[0] * unit + minimum[1] * lse, rel=0.01)
        assert 0 < plan.tables_bytes < 0.02 * unit


def test_selected_blocks_on_cuda_hold_a_partial_result_of_each_block(peaks):
    pytest.importorskip("triton", reason="Triton is not installed: on CUDA nothing else runs them")
    # A group of one head is gathered: out and lse of each selected block of a token, which are then merged.
    pattern = SelectedBlocksPattern(selector="random", block_size=64, top_k=8)
    case = peaks.case_of("selected-blocks", pattern=pattern, dtype="bfloat16", mode="forward")
    unit, lse = units(case.workload)
    plan = peaks.plan(case, "cuda")
    assert plan.peak_bytes - plan.tables_bytes == pytest.approx((4 + 8) * unit + (1 + 8) * lse, rel=0.02)


@pytest.mark.parametrize("selector", ["mean_key", "compressed", "indexer"])
def test_selecting_on_a_cpu_has_a_plan_as_planning_has(selector, peaks):
    # What is selected depends on numbers, which a trace has not: as many ranges of keys are assumed as there can be.
    pattern = SelectedBlocksPattern(selector=selector, block_size=64, top_k=8)
    saved = []
    for name in ("selected-blocks-planned", "selected-blocks-selected"):
        plan = peaks.plan(peaks.case_of(name, pattern=pattern, dtype="float32", mode="both"), "cpu")
        saved.append(plan.saved_bytes)
    assert saved[0] <= saved[1] < 1.25 * saved[0]


# MiB, as measured on an H200 (torch 2.11; docs/figures/h200-memory.json).
@pytest.mark.parametrize(("kind", "peak_mib"), [("dilated", 147.0), ("block_sparse", 145.75)])
def test_a_compiled_backward_pass_copies_dout(kind, peak_mib, peaks):
    pattern = peaks.BRANCHES if kind == "dilated" else peaks.sparse(block_size=128)
    shape = {"seq_len": 16384, "num_heads": 8, "dtype": "bfloat16", "mode": "both"}
    plan = peaks.plan(peaks.case_of("flex", pattern=pattern, **shape), "cuda")
    assert plan.peak_bytes / 2**20 == pytest.approx(peak_mib, rel=0.01)
    one_head = peaks.plan(peaks.case_of("flex", pattern=pattern, **{**shape, "num_heads": 1}), "cuda")
    assert one_head.peak_bytes / 2**20 < peak_mib / 8


def test_an_answer_is_cached_for_later_processes(peaks, tmp_path, monkeypatch):
    monkeypatch.setenv("DILABENCH_CACHE", str(tmp_path))
    first, later = TraceCache(), TraceCache()
    assert first.get("a") is None
    first.put("a", {"inputs_bytes": 0, "workspace_bytes": 1}, lasting=True)
    first.put("b", {"inputs_bytes": 0, "workspace_bytes": 2}, lasting=False)
    first.put("c", {"why": "it raises"}, lasting=True)
    (file,) = tmp_path.glob("memory/*.jsonl")
    with file.open("a") as torn:
        torn.write('["d", {"work')
    assert [later.get(key) for key in "abcd"] == [{"inputs_bytes": 0, "workspace_bytes": 1}, None, None, None]
    assert first.get("b") == {"inputs_bytes": 0, "workspace_bytes": 2}


@pytest.mark.slow
def test_a_trace_that_ends_its_process_costs_its_own_answer(monkeypatch, capsys):
    asked = tracer.Tracer()
    monkeypatch.setattr(tracer, "SILENT_S", 0.0)
    assert "why" in asked.ask({"device": "cpu"}, "a case without a spec", 60.0)
    assert "tracing a case without a spec, for at most 60 s" in capsys.readouterr().err
    monkeypatch.setattr(tracer, "MODULE", "this")
    asked.stop()
    assert "why" in asked.ask({}, "a process that answers nothing", 60.0)
    asked.stop()


@pytest.fixture
def waiting(tmp_path, monkeypatch):
    """A case of a plug-in that waits for ever when it is built, and its catalogue."""
    (tmp_path / "waiting_plugin.py").write_text("import time\ndef build(workload, context):\n    time.sleep(600)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plan, "_hung", {})
    monkeypatch.setattr(plan, "_cache", TraceCache())
    catalogue = Catalogue()
    dense = Capabilities(patterns=frozenset({"dense"}))
    catalogue.implementations.add(Implementation("waits", "", "waiting_plugin:build", supports=dense), "theirs")
    workload = WorkloadRequest(batch_size=1, seq_len=512, num_heads=2, pattern="dense").resolve("float32")
    return Case(implementation="waits", workload=workload), catalogue


@pytest.mark.slow
def test_a_trace_that_waits_is_given_up_and_no_other_length_is_tried(waiting, monkeypatch):
    case, catalogue = waiting
    monkeypatch.setattr(plan, "PLUGIN_TIMEOUT_S", 1.0)
    assert why_no_plan(case, "cpu", catalogue) == "its trace took more than 1 s"
    monkeypatch.setattr(tracer.Tracer, "ask", None)
    longer = case.model_copy(update={"workload": case.workload.replace(seq_len=1024)})
    assert why_no_plan(longer, "cpu", catalogue) == "its trace took more than 1 s"
    assert longest_that_fits(longer, "cpu", 2**40, catalogue) == "its trace took more than 1 s"


@pytest.mark.parametrize("started", [True, False], ids=["while it is traced", "before its process starts"])
def test_ctrl_c_ends_what_is_traced(waiting, started, monkeypatch):
    case, catalogue = waiting
    asked, interrupted = threading.Event(), threading.Event()
    # Other tests have left idle processes.
    for tracing in plan._ALL:
        tracing.stop()

    def start(self):
        asked.set()
        assert started or interrupted.wait(30)
        return running(self)

    running = tracer.Tracer._running
    monkeypatch.setattr(tracer.Tracer, "_running", start)

    def ask(case):
        if case is not None:
            return why_no_plan(case, "cpu", catalogue)
        assert asked.wait(30)
        deadline = time.monotonic() + 30
        while started and time.monotonic() < deadline and not any(tracing._process for tracing in plan._ALL):
            time.sleep(0.05)
        threading.Timer(0.2, interrupted.set).start()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        each_traced(ask, [None, case])
    assert plan._hung == {}, "the trace waited for its time limit"
    assert not any(tracing._process for tracing in plan._ALL)


@pytest.mark.slow
def test_a_plan_is_made_without_torch_in_the_process_that_asks():
    code = (
        "import sys\n"
        "from dilabench.plugins.manager import discover\n"
        "from dilabench.predict.memory import plan_memory\n"
        "from dilabench.record import Case\n"
        "from dilabench.workload.spec import WorkloadRequest\n"
        "workload = WorkloadRequest(batch_size=1, seq_len=512, num_heads=2).resolve('float32')\n"
        "case = Case(implementation='strided', backend='sdpa-flash', workload=workload)\n"
        "assert plan_memory(case, 'cpu', discover().catalogue).peak_bytes > 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
