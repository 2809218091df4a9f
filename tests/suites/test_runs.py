"""Whole runs of the suites on a CPU at small sizes: what they find, write and redraw, and too small a budget."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dilabench.cli import spread
from dilabench.cli.app import app
from dilabench.engine.worker.process import end_server
from dilabench.store.run_files import read_record

pytestmark = pytest.mark.slow

SMALL = (
    *("--num-heads", "2", "--head-dim", "16", "--device", "cpu", "--timing", "simple"),
    *("--set", "segment_lengths=64,128", "--set", "dilation_rates=1,2"),
)


@pytest.fixture(scope="module")
def no_compiler(tmp_path_factory):
    """No compiler is on the path of this process and of the workers that it starts: compiling takes minutes."""
    end_server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tmp_path_factory.mktemp("path")))
        yield
    end_server()


@pytest.fixture
def run(tmp_path, monkeypatch, no_compiler, known_ceilings):
    """A command in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DILABENCH_DISABLE_PLUGINS", "1")
    monkeypatch.setenv("DILABENCH_LOCK_DIR", str(tmp_path))
    monkeypatch.setenv("TERMINAL_WIDTH", "160")
    return lambda *arguments: CliRunner().invoke(app, spread(arguments))


def folder_of(tmp_path, suite):
    (folder,) = (tmp_path / "benchmark_results").glob(f"*-{suite}-*")
    return folder


def stems(folder):
    return {path.name for path in (folder / "plots").iterdir()}


def test_range_leaves_plots_that_can_be_redrawn(run, tmp_path):
    done = run("run", "range", "--lengths", "97,256,1024", "-i", "dense,gather,strided", *SMALL)
    assert done.exit_code == 0, done.output
    # On a busy machine the times of some runs fit no power law.
    plots = ["latency", "throughput", "memory"] + ["scaling"] * ("Time per sequence grows as N^" in done.stdout)
    assert "Crossover lengths" in done.stdout
    folder = folder_of(tmp_path, "range")
    assert [row.case.workload.batch_size for row in read_record(folder).rows[::3]] == [1, 1, 1]
    names = {f"{name}.{form}" for name in plots for form in ("png", "svg")}
    assert stems(folder) == names
    report = (folder / "report.md").read_text()
    assert report.index("9 of 9 rows verified and measured") < report.index("![") < report.index("## Results")
    for path in (folder / "plots").iterdir():
        path.unlink()
    redrawn = run("report", str(folder), "-f", "plots")
    assert (redrawn.exit_code, redrawn.stdout) == (0, "")
    assert stems(folder) == names


def test_backends_recommends_from_what_it_measured(run, tmp_path):
    done = run("run", "backends", "--seq-length", "130", "-b", "math,sdpa-flash", "-i", "strided", *SMALL)
    assert done.exit_code == 0, done.output
    assert "Recommendation for this device" in done.stdout
    assert "scaled_dot_product_flash_attention_for_cpu" in done.stdout
    assert stems(folder_of(tmp_path, "backends")) == {"backends.png", "backends.svg"}


def test_optimization_counts_real_hits_and_requests(run, tmp_path):
    done = run("run", "optimization", "--lengths", "130", "-i", "gather", *SMALL)
    assert done.exit_code == 0, done.output
    rows = {row.planned.labels["variant"]: row for row in read_record(folder_of(tmp_path, "optimization")).rows}
    assert {name for name, row in rows.items() if row.outcome.status == "skipped"} == {"CUDA graph", "torch.compile"}
    counted = {name: row.outcome.counters for name, row in rows.items() if row.outcome.status == "measured"}
    assert counted["nothing"]["pattern_cache_hits"] == 0
    assert counted["nothing"]["pattern_cache_misses"] > 5
    assert counted["pattern cache"]["pattern_cache_misses"] == 1
    assert counted["pattern cache"]["pattern_cache_bytes"] > 0
    pool = counted["buffer pool"]
    assert pool["buffer_pool_requests"] > pool["buffer_pool_reuses"] > 0
    assert pool["buffer_pool_held_bytes"] <= pool["buffer_pool_peak_bytes"]
    held = pool["buffer_pool_held_bytes"] + pool["pattern_cache_bytes"]
    assert rows["buffer pool"].outcome.memory.workspace_bytes >= held
    assert "Use of the buffer pool" in done.stdout


def test_field_sets_a_project_beside_ours_and_says_what_another_computes(run, tmp_path, monkeypatch):
    monkeypatch.setenv("DILABENCH_PEERS", str(Path(__file__).parents[1] / "impls" / "peers" / "recorded"))
    done = run("run", "field", "--seq-length", "100", "-i", "strided,torchscale,dilated-attention-pytorch", *SMALL)
    assert done.exit_code == 0, done.output
    rows = read_record(folder_of(tmp_path, "field")).rows
    by_function = [[(row.case.implementation, row.outcome.status) for row in part] for part in (rows[:3], rows[3:])]
    refused = ("dilated-attention-pytorch", "skipped")
    assert by_function == [
        [("strided", "measured"), ("torchscale", "skipped"), refused],
        [("strided", "measured"), ("torchscale", "measured"), refused],
    ]
    told = " ".join(done.stdout.split())
    assert re.search(r"torchscale over \S+ 1 \S+ [mµ]s strided over", told)
    assert "torchscale computes offset=blocked, not offset=modulo" in told
    assert "does not compute LongNet attention" in told
    assert re.search(r"ring-flash-attn .*computes over ranks.* pip install --no-deps ring-flash-attn", told)


def test_a_budget_that_measures_nothing_ends_with_its_code_and_says_what_would_do(run):
    done = run("run", "range", "--lengths", "97,192", "-i", "strided", "--budget", "10ms", *SMALL)
    assert done.exit_code == 8, done.output
    assert "budget of 10 ms used up before its turn" in done.stdout
    way_on = (
        r"cases were skipped by the budget. To continue .*:\n  dilabench run range --resume [0-9a-f]{8} --budget \d+s\n"
    )
    assert re.search(way_on, done.stdout)
    assert "NOTHING MEASURED" in done.stdout


def test_choice_says_what_the_library_took_and_what_that_costs(run, tmp_path, monkeypatch):
    monkeypatch.setenv("DILABENCH_CACHE", str(tmp_path))
    few = ("--set", "seq_len=300", "--set", "batch_size=1", "--set", "head_dim=16", "--set", "dtype=float32")
    started = ("run", "choice", *few, "--set", "shapes=2", "--seed", "3", "--device", "cpu", "--timing-runs", "6")
    done = run(*started)
    assert done.exit_code == 0, done.output
    record = read_record(folder_of(tmp_path, "choice"))
    assert {row.planned.labels["shape"] for row in record.rows} == {"1", "2"}
    # A way that is far slower than another is left out, the choice never.
    assert {getattr(row.outcome, "code", "measured") for row in record.rows} <= {"measured", "far_slower"}
    chosen = [row for row in record.rows if row.case.implementation == "library"]
    # A busy machine has notes of its own.
    assert len(chosen) == 2
    assert all("chosen" in {note.code for note in row.outcome.notes if note.observed} for row in chosen)
    assert re.search(r"Over 2 shapes the choice took \d\.\d\d times as long as the fastest other\s+way", done.stdout)
    assert "strided:sdpa-flash (rule)" in done.stdout


def test_choice_goes_on_with_the_shapes_that_there_was_no_time_for(run, tmp_path, monkeypatch):
    monkeypatch.setenv("DILABENCH_CACHE", str(tmp_path))
    few = ("--set", "seq_len=300", "--set", "batch_size=1", "--set", "head_dim=16", "--set", "dtype=float32")
    done = run("run", "choice", *few, "-i", "strided", "--set", "shapes=2", "--device", "cpu", "--budget", "1ms")
    assert "2 of 2 shapes are missing; continue with" in " ".join(done.stdout.split())
    assert "; more follow):" in done.stdout
    folder = folder_of(tmp_path, "choice")
    again = run("run", "choice", "--resume", str(folder), "--budget", "60s")
    assert again.exit_code == 0, again.output
    assert "Over 2 shapes the choice took" in again.stdout
    codes = {getattr(row.outcome, "code", "measured") for row in read_record(folder).rows}
    assert "measured" in codes
    assert codes <= {"measured", "far_slower"}
