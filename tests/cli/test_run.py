"""Whole runs, in fresh processes and in this one: files, reports, exit codes, interruption, resumption."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import dilabench
from dilabench.plugins.manager import discover
from dilabench.report.findings import sections_of
from dilabench.report.markdown import escaped
from dilabench.store.archive import Archive
from dilabench.store.run_files import read_record

SMALL = ("--seq-length", "96", "--set", "segment_lengths=40,96", "--timing", "simple", "--device", "cpu")
THEIRS = """
import torch
from dilabench.plugins import Capabilities, Implementation, hookimpl

def build_zeros(workload, context):
    return lambda q, k, v: torch.zeros_like(q) + (q + k.sum() + v.sum()) * 0

def build_raising(workload, context):
    raise RuntimeError("no luck today")

@hookimpl
def dilabench_register_implementations():
    return [
        Implementation("zeros", "wrong on purpose", "theirs:build_zeros"),
        Implementation("raising", "broken on purpose", "theirs:build_raising"),
        Implementation("nowhere", "cannot run", "theirs:build_zeros", requires=("no_such_module_at_all",)),
    ]
"""


@pytest.fixture
def with_plugin(tmp_path, monkeypatch):
    """A third-party distribution on the path, as an installer would leave it."""
    site = tmp_path / "site"
    info = site / "theirs-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "theirs.py").write_text(THEIRS)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dilabench]\ntheirs = theirs\n")
    monkeypatch.delenv("DILABENCH_DISABLE_PLUGINS")
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "theirs", raising=False)


@pytest.fixture(autouse=True)
def _own_lock(tmp_path, monkeypatch):
    monkeypatch.setenv("DILABENCH_LOCK_DIR", str(tmp_path))


@pytest.fixture
def run_here(cli, warm_server, known_ceilings):
    """`dilabench run` in this process: what is asked is the code, the words and the files, not what a start loads."""

    def call(*arguments):
        return cli("run", *arguments)

    return call


def run_folder(base):
    (folder,) = Path(base).glob("*-quick-*")
    return folder


def test_a_run_leaves_its_files_and_ends_with_a_verdict(fresh):
    result = fresh("-m", "dilabench", "run", "quick", "--implementations", "dense", "dilated", "improved", *SMALL)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "\x1b" not in result.stdout
    # Nothing but how far it is and, where other programs run, that they do.
    told = result.stderr.splitlines()
    assert all(line.startswith(("note: other programs", "  ")) or " rows; " in line for line in told), result.stderr
    assert any(line.startswith("0 of 3 rows; ") for line in told)
    lines = result.stdout.strip().splitlines()
    assert lines[0].startswith("dilabench quick on cpu (")
    assert lines[-1] == "verdict: ok (3 measured, 0 skipped, 0 failed; exit code 0)"
    folder = run_folder("benchmark_results")
    assert str(folder / "run.json") in result.stdout
    assert (folder / "report.md").read_text().startswith("# dilabench quick")
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    record = read_record(folder)
    assert (record.status, record.suite, record.seed) == ("complete", "quick", 0)
    assert [row.case.implementation for row in record.rows] == ["dense", "gather", "strided"]
    assert all(row.case.workload.seq_len == 96 for row in record.rows)
    assert all(row.outcome.verification.passed for row in record.rows)
    assert record.config["overrides"] == {"seq_len": 96, "segment_lengths": [40, 96]}


def test_a_wrong_output_is_exit_5_and_carries_no_time(run_here, with_plugin):
    result = run_here("quick", "-i", "zeros", "-i", "gather", *SMALL)
    assert result.exit_code == 5, result.output
    assert "verdict: WRONG OUTPUT (1 measured, 0 skipped, 1 failed; exit code 5)" in result.stdout
    wrong, right = read_record(run_folder("benchmark_results")).rows
    assert (wrong.outcome.status, wrong.outcome.stage, right.outcome.status) == ("failed", "verify", "measured")
    assert not hasattr(wrong.outcome, "timings")


def test_a_case_that_raises_is_exit_4_and_the_others_go_on(run_here, with_plugin):
    result = run_here("quick", "-i", "raising,gather", *SMALL)
    assert result.exit_code == 4, result.output
    assert "no luck today" in result.stdout
    assert [row.outcome.status for row in read_record(run_folder("benchmark_results")).rows] == ["failed", "measured"]


BROKEN_PARTS = """
import sys
from dilabench.plugins import Reporter, Suite, hookimpl
from dilabench.suites.overview import quick as expand

def raises(*facts):
    raise KeyError("lost")

def exits(*facts):
    print("I leave")
    sys.exit(9)

def nothing(*facts):
    return None

@hookimpl
def dilabench_register_suites():
    return [Suite("broken", "", "parts:expand", follow_up="parts:raises", analysis="parts:exits",
                  projections="parts:nothing")]

@hookimpl
def dilabench_register_reporters():
    return [Reporter("mine", "", "parts:exits", filename="mine.txt")]
"""


@pytest.mark.slow
def test_a_suite_whose_every_part_fails_keeps_its_run(run_here, with_plugin, tmp_path, monkeypatch):
    site = tmp_path / "site"
    monkeypatch.delitem(sys.modules, "parts", raising=False)
    (site / "parts.py").write_text(BROKEN_PARTS)
    (site / "theirs-1.0.dist-info" / "entry_points.txt").write_text(
        "[dilabench]\nparts = parts\ngone = no_such_module\n"
    )
    command = ("broken", "-i", "gather", "-f", "table", "-f", "json", "-f", "mine", *SMALL)
    result = run_here(*command)
    assert result.exit_code == 3, result.stdout + result.stderr
    assert "I leave" not in result.stdout
    (folder,) = Path("benchmark_results").glob("*-broken-*")
    record = read_record(folder / "run.json")
    assert (record.status, [row.outcome.status for row in record.rows]) == ("complete", ["measured"])
    assert "Analysis failed" in (folder / "report.md").read_text()
    assert "verdict: A PLUG-IN OR A REPORT FAILED (1 measured, 0 skipped, 0 failed; exit code 3)" in result.stderr
    for reason in (
        "problem in plug-in 'gone': ModuleNotFoundError: No module named 'no_such_module'",
        "problem in plug-in 'parts': follow-up of suite 'broken': KeyError: 'lost' (",
        "problem in plug-in 'parts': analysis parts:exits: SystemExit: 9 (",
        "problem in plug-in 'parts': projections of suite 'broken': nothing (",
        "problem in plug-in 'parts': reporter 'mine': SystemExit: 9 (",
        f"{site}/parts.py:",
    ):
        assert reason in result.stderr
    strict = run_here(*command, "--strict-plugins")
    assert strict.exit_code == 3
    assert "error: plug-in 'gone'" in strict.stderr


IDLE = {
    "a module that is not installed": (("-i", "nowhere"), "nowhere: module no_such_module_at_all is not installed"),
    "a GPU": (("-i", "fused", "--device", "cpu"), "fused: needs a CUDA GPU"),
    "a dtype": (
        ("-i", "gather", "-b", "sdpa-cudnn", "--dtype", "float64"),
        "backend sdpa-cudnn: dtype float64 is not supported (has bfloat16, float16)",
    ),
    "an optimization": (("-i", "gather", "--cuda-graph", "--device", "cpu"), "gather: cuda_graph needs a CUDA GPU"),
}


@pytest.mark.parametrize("form", [(), ("--plan",)], ids=["run", "plan"])
@pytest.mark.parametrize("case", IDLE)
def test_a_run_without_a_row_that_can_run_says_what_is_needed_and_leaves_nothing(run_here, with_plugin, case, form):
    options, reason = IDLE[case]
    result = run_here("quick", *options, "-o", "elsewhere", *form, *SMALL)
    assert result.exit_code == 8, result.output
    text = " ".join(result.stderr.split())
    assert text.startswith("error: the only row cannot run on this cpu: ")
    assert reason in text
    assert text.count(f"{options[1]}:") == 1, "all reasons of an implementation together"
    assert "; `dilabench list implementations --why` shows what each needs" in text
    assert not result.stdout
    assert not Path("elsewhere").exists()


def test_rows_that_cannot_run_are_not_expected(run_here, with_plugin):
    """Neither by the prediction, nor by the progress, nor by the headline."""
    planned = run_here("quick", "-i", "gather,nowhere", "--plan", *SMALL)
    alone = run_here("quick", "-i", "gather", "--plan", *SMALL)
    assert "not run: nowhere: module no_such_module_at_all is not installed" in planned.stdout
    assert [line for line in planned.stdout.splitlines() if "not run" not in line] == alone.stdout.splitlines()
    ran = run_here("quick", "-i", "gather,nowhere", "-o", "elsewhere", *SMALL)
    assert "0 of 1 rows" in ran.stderr
    assert "1 of 1 row verified and measured, 1 more could not run." in ran.stdout
    assert "verdict: ok (1 measured, 0 skipped, 0 failed, 1 could not run; exit code 0)" in ran.stdout


@pytest.mark.slow
def test_json_goes_to_stdout_alone(fresh):
    result = fresh("-m", "dilabench", "run", "quick", "-i", "gather", "-f", "json", "-o", "mine/record.json", *SMALL)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["suite"] == "quick"
    assert "verdict: ok" in result.stderr
    assert read_record(Path("mine/record.json")) == read_record(run_folder("mine"))


CLOSED_PIPE = """
import subprocess, sys
command = [sys.executable, "-m", "dilabench", *sys.argv[1:]]
process = subprocess.Popen(command, stdout=subprocess.PIPE)
process.stdout.close()
print(process.wait())
"""


@pytest.mark.slow
def test_a_run_whose_output_nobody_reads_is_measured_and_kept_all_the_same(fresh):
    result = fresh("-c", CLOSED_PIPE, "run", "quick", "-i", "gather", *SMALL)
    assert result.stdout == "0\n"
    assert not any(word in result.stderr.lower() for word in ("traceback", "error", "pipe"))
    assert len(read_record(run_folder("benchmark_results")).rows) == 1
    assert len(Archive().names()) == 1


@pytest.mark.slow
def test_report_renders_without_torch(fresh, run_here):
    assert run_here("quick", "-i", "gather", *SMALL).exit_code == 0
    folder = str(run_folder("benchmark_results"))
    script = f"import sys; from dilabench.cli import main\ntry: main(['report', {folder!r}, '-f', 'markdown'])\n"
    result = fresh("-c", script + "except SystemExit as end: assert not end.code\nassert 'torch' not in sys.modules")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("# dilabench quick")
    written = fresh("-m", "dilabench", "report", folder + "/run.json", "-f", "markdown", "-o", "copies")
    assert (written.returncode, written.stdout) == (0, "")
    assert Path("copies/report.md").read_text() == result.stdout.rstrip("\n") + "\n"


@pytest.mark.slow
def test_an_output_folder_that_cannot_be_written_is_exit_3_before_anything_runs(fresh):
    Path("file").write_text("in the way")
    result = fresh("-m", "dilabench", "run", "quick", "-o", "file/below", *SMALL)
    assert (result.returncode, result.stdout) == (3, "")
    assert "cannot be written: Not a directory; choose another folder with -o" in result.stderr
    assert "Traceback" not in result.stderr


def interrupted_run(arguments):
    """Start a run, wait for its first row, press Ctrl-C; returns the exit code and what it said."""
    environment = {**os.environ, "PYTHONPATH": str(Path(dilabench.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "dilabench", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        # A shell without job control has what it starts in the background ignore Ctrl-C, and so do its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 100
    while not any('"row"' in path.read_text() for path in Path.cwd().glob("benchmark_results/*/rows.jsonl")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no row came"
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    return process.returncode, stdout + stderr


@pytest.mark.slow
def test_ctrl_c_saves_the_results_and_resume_goes_on(run_here):
    lengths = ["--lengths", "40,60,80,96", "-i", "gather", "--set", "segment_lengths=40", "--device", "cpu"]
    code, said = interrupted_run(["run", "quick", *lengths])
    assert code == 130, said
    assert "verdict: INTERRUPTED, results so far are saved" in said
    assert "Traceback" not in said
    folder = run_folder("benchmark_results")
    before = read_record(folder)
    assert before.status == "interrupted"
    assert 1 <= len(before.rows) <= 4
    complete = [row for row in before.rows if not any(note.code == "cut_short" for note in row.outcome.notes)]
    assert len(complete) < 4
    again = run_here("quick", "--resume", str(folder), "-i", "strided")
    assert again.exit_code == 2
    assert "--resume continues the run as it was requested; omit implementations" in again.stderr
    other = run_here("implementations", "--resume", str(folder))
    assert "is of suite 'quick', not 'implementations'" in other.stderr
    (hint,) = [line for line in said.splitlines() if line.startswith("  dilabench run")]
    assert len(hint) < 80
    result = run_here(*hint.split()[2:], "--budget", "100s")
    assert result.exit_code == 0, result.output
    after = read_record(folder)
    assert (after.status, after.run_id, len(after.rows)) == ("complete", before.run_id, 4)
    # What was cut short is measured again.
    assert [row in after.rows for row in before.rows] == [row in complete for row in before.rows]
    assert run_folder("benchmark_results") == folder


@pytest.mark.slow
def test_verify_says_what_is_right_and_what_is_wrong(cli, with_plugin, warm_server):
    small = ("--seq-length", "96", "--set", "segment_lengths=40,96", "--set", "dilation_rates=1,3", "--device", "cpu")
    result = cli("verify", "gather", "zeros", "nowhere", "raising", *small)
    assert result.exit_code == 5, result.output
    assert re.search(r"  ✓ +gather ", result.stdout)
    assert re.search(r"  ✗ +zeros ", result.stdout)
    assert re.search(r"  failed +raising .*RuntimeError: no luck today", result.stdout)
    assert "skipped nowhere: module no_such_module_at_all is not installed" in result.stdout
    assert "1 right, 1 wrong, 1 failed, 1 skipped" in result.stdout
    assert [cli("verify", name, *small).exit_code for name in ("raising", "gather", "nowhere")] == [4, 0, 8]


def test_the_answer_of_a_resumed_run_is_of_all_its_rows(run_here):
    """The first part has one row a length at most, which is no comparison; the second has the others."""
    shape = ("--lengths", "96,192", "--set", "segment_lengths=40,96", "--timing", "simple", "--device", "cpu")
    first = run_here("quick", "-i", "gather,strided", "--budget", "0.001", "-o", "here", *shape)
    folder = run_folder("here")
    decision = first.stdout.split("\nAnswer\n")[1].splitlines()[0]
    assert decision.startswith(("Only ", "Not measured at "))
    second = run_here("quick", "--resume", str(folder), "--budget", "60s")
    answer = second.stdout.split("\nAnswer\n")[1].split("\n\n")[0]
    assert not {"Only", "only", "Not", "used"}.intersection(answer.split()), answer
    assert answer.startswith(("Fastest at 96 and 192: ", "Fastest at ", "No difference proven at "))
    record = read_record(folder)
    (section,) = [section for section in sections_of(record, discover().catalogue) if section.answers]
    assert " ".join(answer.split()).startswith(" ".join(section.sentence.split()))
    assert escaped(section.sentence.splitlines()[0]) in (folder / "report.md").read_text()
