"""The Python API: the page that documents it runs as it stands, from a script without a guard."""

import inspect
import json
import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import dilabench
from dilabench.errors import ConfigError, EnvironmentNotReady
from dilabench.plugins.manager import discover
from dilabench.report.content import headline
from dilabench.report.findings import sections_of
from dilabench.request import BY_SET, run_request
from dilabench.workload.spec import WorkloadRequest
from tests.conftest import slow

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "how-to" / "use-from-python.md"


@pytest.mark.slow
@pytest.mark.needs_extra("data", "pandas")
def test_the_documented_page_runs_as_a_script_without_a_guard(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    script = tmp_path / "notebook.py"
    script.write_text("open('started', 'a').write('once ')\n" + "\n".join(blocks))
    variables = {"PYTHONPATH": str(ROOT), "DILABENCH_STORE": str(tmp_path / "store"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    # Workers do not run the script again.
    assert (tmp_path / "started").read_text() == "once "
    assert "did you mean gather" in done.stdout
    compared = re.findall(r"^(?:SAME|UNDECIDED|SLOWER|FASTER) (\w+) ", done.stdout, re.MULTILINE)
    assert sorted(compared) == ["gather", "gather", "strided", "strided"]
    assert "verdict: ok" in done.stderr
    folder, _ = sorted((tmp_path / "benchmark_results").iterdir())
    argv = json.loads((folder / "run.json").read_text())["argv"]
    assert argv[:6] == ["run", "range", "-i", "gather", "-i", "strided"]


def test_importing_dilabench_loads_nothing():
    code = "import sys; before = set(sys.modules); import dilabench; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "pydantic" not in done.stdout
    assert "dilabench.record" not in done.stdout


def test_the_three_functions_are_listed_and_their_arguments_have_types():
    assert {"run", "load", "compare", "__version__"} <= set(dir(dilabench))
    parameters = inspect.signature(dilabench.run).parameters
    assert all(parameter.annotation is not parameter.empty for parameter in parameters.values())
    workload = WorkloadRequest.model_fields.keys() & parameters.keys()
    assert {"seq_len", "num_heads", "dtype", "causal", "window", "pattern", "mode"} <= workload
    assert BY_SET - parameters.keys() == {"budget_s", "pattern_cache_entries", "buffer_pool_bytes"}


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({"seq_len": "1K", "window": (5, 0)}, {"overrides": {"seq_len": 1024, "window": (5, 0)}}),
        ({"segment_lengths": [64, 128], "num_kv_heads": None}, {"overrides": {"segment_lengths": (64, 128)}}),
        ({"lengths": "1K,2K", "shard": "1/2"}, {"lengths": (1024, 2048), "shard": (1, 2)}),
        ({"implementations": "gather", "backends": ["all"]}, {"implementations": ("gather",), "backends": ("all",)}),
        (
            {"budget": 5, "buffer_pool_bytes": 7, "causal": False},
            {"budget_s": 5, "buffer_pool_bytes": 7, "overrides": {"causal": False}},
        ),
        ({"budget_s": 5, "chunked": True}, {"budget_s": 5, "options": {"chunked": True}}),
        ({"options": {"max_seq_length": "4K"}}, {"options": {"max_seq_length": 4096}}),
    ],
    ids=str,
)
def test_arguments_become_the_request(tmp_path, monkeypatch, settings, fields):
    from dilabench import api

    requests = []
    monkeypatch.setattr(api, "execute", lambda run, output, keep: requests.append(run.plan.request))
    monkeypatch.setattr(api, "read_record", lambda path: None)
    suite = "quick" if fields.keys() & {"lengths"} else "extreme"
    dilabench.run(suite, output=tmp_path, device="cpu", **settings)
    usual = run_request(discover().catalogue, suite=suite, run={"device": "cpu"})
    assert requests == [usual.model_copy(update=fields)]


def test_compare_is_the_function_whatever_was_imported_before(make_row, make_record):
    import dilabench.comparison.view

    found = dilabench.compare(make_record([make_row()]), make_record([make_row(ns=2e7)], run_id="bbbb"))
    assert len(found.pairs) == 1


def test_a_notebook_shows_records_and_comparisons_as_html(make_row, make_record, monkeypatch):
    from dilabench import api

    shown = {}
    formatter = SimpleNamespace(for_type=shown.__setitem__)
    shell = SimpleNamespace(display_formatter=SimpleNamespace(formatters={"text/html": formatter}))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    api._show_in_notebooks()
    record = make_record([make_row()])
    comparison = dilabench.compare(record, record)
    assert all("<table>" in shown[type(value)](value) for value in (record, comparison))


def test_load_reads_a_file_and_refuses_what_is_none(make_row, make_record, tmp_path, monkeypatch):
    monkeypatch.setenv("DILABENCH_STORE", str(tmp_path / "store"))
    record = make_record([make_row()])
    (tmp_path / "run.json").write_text(record.model_dump_json())
    assert dilabench.load(tmp_path / "run.json") == record
    assert dilabench.load(tmp_path) == record
    with pytest.raises(ConfigError, match="is no file, and no run is stored in"):
        dilabench.load("nowhere")


def test_a_wrong_setting_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(ConfigError, match="batch_sise"):
        dilabench.run("range", batch_sise=1, output=tmp_path)
    with pytest.raises(ConfigError, match="'rnage'"):
        dilabench.run("rnage", output=tmp_path)
    with pytest.raises(AttributeError, match="has no attribute 'rum'"):
        _ = dilabench.rum
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "keyword",
    [name for name, given in inspect.signature(dilabench.run).parameters.items() if given.kind is given.KEYWORD_ONLY],
)
def test_a_misspelt_keyword_names_the_nearest(keyword):
    misspelt = keyword[:-1] + "_" + keyword[-1:]
    with pytest.raises(ConfigError, match=rf"^{misspelt}: unknown key; did you mean {keyword}\?$"):
        dilabench.run("quick", **{misspelt: 1})


PRINTED = sorted([*(ROOT / "docs" / "results").glob("h200-*.json.xz"), *(ROOT / "tests" / "golden").glob("run*")])


@pytest.mark.parametrize("path", [slow(path) if at % 6 else path for at, path in enumerate(PRINTED)])
def test_a_printed_record_is_its_answer_in_ten_lines(path):
    record = dilabench.load(path)
    answers = [section for section in sections_of(record, discover().catalogue) if section.answers]
    lines = str(record).splitlines()
    assert len(lines) <= 10
    # The first words of the decision, which may be folded.
    assert answers[0].sentence.startswith(lines[0][:40])
    assert lines[-1] in " ".join(headline(record).split())


SCRIPT = """
import dilabench
import torch
from mine import attention, build, wrong

def here(q, k, v):
    return attention(q, k, v)

{guard}
    asked = [attention, build, wrong, here]
    small = {{"pattern": "dense", "lengths": [64], "timing": "simple", "device": "cpu"}}
    record = dilabench.run("quick", implementations=asked, **small)
    for row in record.rows:
        print(row.case.implementation, row.outcome.status, getattr(row.outcome, "why", ""))
"""
MODULE = """
def attention(q, k, v):
    scores = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)) * q.shape[-1] ** -0.5
    hidden = scores.new_ones(scores.shape[-2:], dtype=bool).triu(1)
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)

def build(workload, context):
    assert workload.seq_len == 64
    return attention

def wrong(q, k, v):
    return v
"""


@pytest.mark.parametrize("guard", [slow('if __name__ == "__main__":'), "if True:"])
def test_functions_are_implementations(tmp_path, guard):
    """Also of the script itself, which the workers import; without a guard its rows say what to do."""
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "script.py").write_text(SCRIPT.format(guard=guard))
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ended = {name: (status, why) for name, status, why in (line.split(" ", 2) for line in done.stdout.splitlines())}
    statuses = {name: status for name, (status, _) in ended.items()}
    here = "measured" if "main" in guard else "failed"
    assert statuses == {"attention": "measured", "build": "measured", "wrong": "failed", "here": here}
    assert "error" in ended["wrong"][1]
    assert ("`if __name__ == '__main__':`" in ended["here"][1]) == (here == "failed")


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda q, k, v: q, "is not defined at the top of its module"),
        (json.dumps, "needs 1 arguments; write an attention function of \\(q, k, v\\), or"),
        (type("Kernels", (), {"attend": staticmethod(lambda q, k, v: q)}).attend, "is not defined at the top"),
    ],
    ids=["lambda", "another signature", "inside a class"],
)
def test_a_function_that_workers_cannot_call_is_refused(tmp_path, function, why):
    with pytest.raises(ConfigError, match=why):
        dilabench.run("quick", implementations=function, output=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["dense", "improved", "auto"])
def test_a_function_does_not_stand_for_an_implementation_of_its_name(tmp_path, name):
    def function(q, k, v):
        return q

    function.__qualname__ = name
    with pytest.raises(ConfigError, match=f"there is an implementation '{name}' already .*; rename the function"):
        dilabench.run("quick", implementations=function, output=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_function_of_an_interactive_session_is_refused(tmp_path):
    text = "import dilabench\ndef mine(q, k, v): return q\ndilabench.run('quick', implementations=mine)"
    done = subprocess.run([sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "write it into a file, and import it from there" in done.stderr
    assert not list(tmp_path.iterdir())


def test_budgets_are_those_of_the_command(tmp_path, monkeypatch):
    from dilabench import api

    requests = []
    monkeypatch.setattr(api, "execute", lambda run, output, keep: requests.append(run.plan.request))
    monkeypatch.setattr(api, "read_record", lambda path: None)
    for settings in ({}, {"budget": "none"}, {"budget": "60s"}):
        dilabench.run("quick", output=tmp_path, device="cpu", **settings)
    usual = run_request(discover().catalogue, suite="quick").budget_s
    assert usual is not None
    assert [one.budget_s for one in requests] == [usual, None, 60]
    assert [one.command_line()[-1] for one in requests] == [f"{usual:g}s", "none", "60s"]


def test_runs_of_different_machines_are_not_compared(make_row, make_record):
    other = make_record([make_row()], hard={"device": "cpu", "cpu": "another"})
    with pytest.raises(ConfigError, match="another"):
        dilabench.compare(make_record([make_row()]), other)


RUN = """
import json, os, sys
import dilabench

def measured():
    record = dilabench.run("implementations", implementations="dense", lengths=128, device="cpu", timing_runs=2)
    return [row.outcome.status for row in record.rows]

"""


def results_of(code: str, folder: Path) -> list[list[str]]:
    """What a program writes into its file `results`, a line of JSON each."""
    variables = {"PYTHONPATH": str(ROOT), "DILABENCH_STORE": str(folder / "store"), "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **variables}
    # As it is outside of tests: the width is asked of the stream.
    environment.pop("TERMINAL_WIDTH", None)
    done = subprocess.run(
        [sys.executable, "-c", RUN + code], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "results").read_text().splitlines()]


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_process_that_may_start_none_is_told_so(tmp_path, method):
    refusal = r"daemonic process, .*; call dilabench\.run from a process that is not"
    with multiprocessing.get_context(method).Pool(1) as pool, pytest.raises(EnvironmentNotReady, match=refusal):
        pool.apply(dilabench.run, ("quick",), {"output": str(tmp_path)})
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_a_program_without_standard_streams_measures(tmp_path):
    code = "sys.stdout = sys.stderr = None\nopen('results', 'w').write(json.dumps(measured()))"
    assert results_of(code, tmp_path) == [["measured"]]


@pytest.mark.slow
def test_a_fork_measures_beside_its_parent(tmp_path):
    """Before and after the other has: neither ends the other's server of workers."""
    code = """
def write(): open('results', 'a').write(json.dumps(measured()) + "\\n")
write()
child = os.fork()
if not child:
    write()
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
write()
"""
    assert results_of(code, tmp_path) == [["measured"]] * 3
