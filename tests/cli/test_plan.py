"""`dilabench plan`, `run --plan`, `verify --all` and the budget that would suffice, as a user meets them."""

import json
import os
import sys

import pytest

from dilabench.predict.memory import longest
from dilabench.record import MemoryPlan


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Install a plug-in of one module, `theirs`, for this process and those that it starts."""

    def installed(source):
        info = tmp_path / "site" / "theirs-1.0.dist-info"
        info.mkdir(parents=True)
        (info.parent / "theirs.py").write_text(source)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[dilabench]\ntheirs = theirs\n")
        monkeypatch.delenv("DILABENCH_DISABLE_PLUGINS")
        monkeypatch.setenv("PYTHONPATH", str(info.parent))
        monkeypatch.syspath_prepend(str(info.parent))
        monkeypatch.delitem(sys.modules, "theirs", raising=False)

    return installed


@pytest.mark.slow
def test_plan_predicts_by_length_batch_and_implementation(cli):
    result = cli(
        "plan", "-i", "strided,gather", "--lengths", "4K,64K", "--batch-size", "1,2", "--device", "cpu", "--json"
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert len(rows) == 2 * 2 * 2 * 2
    found = {(r["implementation"], r["mode"], r["batch_size"], r["seq_len"]): r["predicted_peak_bytes"] for r in rows}
    # Tensors are twice as large; calls in turns are cut along the batch too, into as small ones or smaller.
    one, two = (found["strided", "forward", batch, 2**16] for batch in (1, 2))
    assert 1.8 * one < two <= 2 * one
    assert (
        found["gather", "both", 1, 2**16] > found["strided", "both", 1, 2**16] > found["strided", "forward", 1, 2**16]
    )


def test_plan_says_what_fits_and_how_long_it_could_get(cli):
    # Dense attention over flash is traced in one call.
    one_call = ("-i", "dense", "-b", "sdpa-flash", "--set", "pattern=dense")
    options = ("--lengths", "4K,128K", "--memory", "128M", "--mode", "forward", "--device", "cpu")
    result = cli("plan", *one_call, *options)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    (small,) = [line for line in lines if line[4:5] == ["4K"]]
    (large,) = [line for line in lines if line[4:5] == ["128K"]]
    assert (small[-1], large[-1]) == ("yes", "NO")
    assert "The longest sequence that fits into 128.0 MiB" in result.stdout
    assert "not measured" in result.stdout


def test_the_table_of_longest_sequences_says_why_one_is_unknown(cli, monkeypatch):
    peak = MemoryPlan(inputs_bytes=2**20, workspace_bytes=0)

    def plan_of(case, device, catalogue):
        return None if case.implementation == "strided" and case.workload.seq_len != 4096 else peak

    monkeypatch.setattr(longest, "plan_memory", plan_of)
    monkeypatch.setattr(longest, "why_no_plan", lambda *_: "its trace took more than 60 s")
    options = ("--lengths", "4K", "--memory", "128M", "--mode", "forward", "--device", "cpu")
    result = cli("plan", "-i", "dense,strided", "-b", "sdpa-flash", *options)
    table = result.stdout.partition("The longest sequence that fits")[2]
    (row,) = [line for line in table.splitlines() if line.startswith("strided")]
    assert row.endswith("unknown: its trace took more than 60 s")


def test_plan_says_where_it_knows_nothing(cli):
    result = cli("plan", "-i", "flex", "--lengths", "4K", "--device", "cpu")
    assert result.exit_code == 8
    assert "no trace" in result.stdout


@pytest.mark.slow
def test_plan_of_several_ranks_is_what_the_fullest_one_needs(cli):
    # Shorter than most segments, so that there are few to trace.
    options = ("--lengths", "4K", "--mode", "both", "--device", "cpu", "--json")
    (alone,) = json.loads(cli("plan", "-i", "strided", *options).stdout)
    over_ranks = {row["implementation"]: row for row in json.loads(cli("plan", "--nproc", "4", *options).stdout)}
    assert set(over_ranks) == {"ring", "ring-overlap", "ring-allgather", "ulysses", "zigzag-ring"}
    for row in over_ranks.values():
        assert row["ranks"] == 4
        assert row["inputs_bytes"] * 4 == alone["inputs_bytes"]
        assert alone["predicted_peak_bytes"] / 4 < row["predicted_peak_bytes"] < alone["predicted_peak_bytes"]
    few = ("-i", "ring", "--set", "pattern=dense", "--mode", "forward", "--lengths", "4K", "--memory", "64M")
    result = cli("plan", "--nproc", "4", *few, "--device", "cpu")
    assert "The longest sequence that fits into 64.0 MiB on each of 4 ranks" in result.stdout


@pytest.mark.slow
def test_check_holds_each_trace_to_a_measured_peak(cli, warm_server):
    shape = ("--num-heads", "2", "--lengths", "512", "--device", "cpu")
    result = cli("plan", "--check", "-i", "strided,fused", *shape, "--json")
    assert result.exit_code == 0, result.output
    found = {(row["implementation"], row["mode"]): row for row in json.loads(result.stdout)}
    for mode in ("forward", "both"):
        assert found["strided", mode]["traced_over_measured"] == pytest.approx(1.0, abs=0.1)
        assert found["fused", mode]["measured_peak_bytes"] is None
        assert "needs a CUDA GPU" in found["fused", mode]["why_not_measured"]


MORE_THAN_ITS_TRACE = """
import torch
from torch._subclasses.fake_tensor import FakeTensor
from dilabench.plugins import Implementation, hookimpl

def build(workload, context):
    def attention(q, k, v):
        if not isinstance(q, FakeTensor):
            torch.empty(2**22)
        return q + k.mean() + v.mean()
    return attention

@hookimpl
def dilabench_register_implementations():
    return [Implementation("greedy", "hides memory from its trace", "theirs:build")]
"""


@pytest.mark.slow
def test_check_ends_with_5_where_a_trace_is_off(cli, plugin, warm_server):
    plugin(MORE_THAN_ITS_TRACE)
    options = ("plan", "--check", "-i", "greedy", "--num-heads", "2", "--lengths", "512", "--mode", "forward")
    result = cli(*options, "--device", "cpu")
    assert result.exit_code == 5, result.stdout + result.stderr
    assert "OFF" in result.stdout
    assert "1 peaks traced and measured, 1 of them off by more than 10%" in result.stdout


def test_check_runs_nothing_that_does_not_fit(cli):
    options = ("--lengths", "4K", "--memory", "1M", "--mode", "forward", "--device", "cpu")
    result = cli("plan", "--check", "-i", "strided", *options)
    assert result.exit_code == 8, result.output
    assert "skipped: does not fit into 1.0 MiB" in result.stdout


def test_a_budget_is_refused_without_a_check(cli):
    result = cli("plan", "--budget", "5s")
    assert result.exit_code == 2
    assert "--budget 5s limits what --check runs; add --check, or leave --budget out" in result.stderr


@pytest.mark.parametrize(("implementation", "pattern"), [("reference", "dilated"), ("block-sparse", "block_sparse")])
def test_plan_has_numbers_for_the_oracle_and_for_block_masks(cli, implementation, pattern):
    options = ("--set", f"pattern={pattern}", "--lengths", "16K", "--device", "cpu", "--json")
    rows = json.loads(cli("plan", "-i", implementation, *options).stdout)
    assert [row["mode"] for row in rows] == ["both", "forward"]
    assert all(row["predicted_peak_bytes"] > row["inputs_bytes"] for row in rows)


@pytest.mark.parametrize("length", ["0", "-5", "abc", "1.5", "9" * 20])
def test_bad_lengths_are_refused_with_the_value(cli, length):
    result = cli("plan", f"--lengths={length}")
    assert result.exit_code == 2
    assert length in result.stderr


@pytest.mark.parametrize(("text", "tokens"), [("16k", 16384), ("1M", 2**20), ("1_000_000", 10**6), ("1e6", 10**6)])
def test_lengths_as_people_write_them(cli, text, tokens):
    result = cli("plan", "-i", "strided", "--mode", "forward", "--lengths", text, "--device", "cpu", "--json")
    assert [row["seq_len"] for row in json.loads(result.stdout)] == [tokens]


def test_plan_of_a_suite_is_that_of_its_run(cli):
    few = ("--lengths", "64", "-i", "gather,strided", "--device", "cpu")
    planned = cli("plan", "quick", *few)
    assert planned.exit_code == 0, planned.output
    assert planned.stdout == cli("run", "quick", "--plan", *few).stdout
    assert "each fits into" in " ".join(planned.stdout.split())
    refused = cli("plan", "quick", "--memory", "1G")
    assert refused.exit_code == 2
    assert "are for `plan` without a suite" in refused.stderr
    assert "did you mean quick?" in cli("plan", "qick").stderr


def test_run_plan_predicts_memory_and_time_and_runs_nothing(cli, tmp_path):
    result = cli("run", "billion", "--plan", "--tokens", "1M", "--nproc", "2", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "1x1M H1 D64" in result.stdout
    assert "Predicted, not measured" in result.stdout
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_budget_too_small_says_what_would_suffice(cli, tmp_path, monkeypatch, warm_server, known_ceilings):
    monkeypatch.setenv("DILABENCH_LOCK_DIR", str(tmp_path))
    result = cli("run", "extreme", "-i", "strided", "--budget", "1ms", "--device", "cpu")
    assert result.exit_code == 8, result.stdout + result.stderr
    assert "were skipped by the budget. To continue" in result.stdout
    assert "\n  dilabench run extreme --resume" in result.stdout
    assert "NOTHING MEASURED" in result.stdout


@pytest.mark.slow
def test_verify_all_marks_every_family(cli, monkeypatch, warm_server):
    monkeypatch.setenv("TERMINAL_WIDTH", "600")
    result = cli("verify", "strided", "--all", "--dtype", "float32", "-b", "sdpa-flash", "--device", "cpu")
    assert result.exit_code == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    marks = dict(zip(lines[0].split(), lines[1].split(), strict=True))
    assert (marks["implementation"], marks["backend"], marks["dtype"]) == ("strided", "sdpa-flash", "float32")
    assert {marks[family] for family in ("causal", "full", "window", "blocked", "grouped", "scale")} == {"✓"}
    assert (marks["detached"], marks["zero_key"], marks["dense"], marks["sparse"]) == ("✓", "✓", "-", "-")
    assert "skipped: pattern dense is not supported (has dilated)" in result.stdout
    assert lines[-1] == "8 right, 0 wrong, 23 skipped"


WRONG = """
import torch
from dilabench.plugins import Capabilities, Implementation, hookimpl

def build(workload, context):
    return lambda q, k, v: torch.zeros_like(q) + (q + k.sum() + v.sum()) * 0

@hookimpl
def dilabench_register_implementations():
    dense = Capabilities(patterns=frozenset({"dense"}))
    return [Implementation("zeros", "wrong on purpose", "theirs:build", supports=dense)]
"""


@pytest.mark.slow
def test_verify_all_ends_with_5_on_any_wrong_result(cli, plugin, warm_server):
    plugin(WRONG)
    result = cli("verify", "zeros", "--all", "--dtype", "float32", "--device", "cpu")
    assert result.exit_code == 5, result.stdout + result.stderr
    assert "✗" in result.stdout
    assert "WRONG: out" in result.stdout


def test_verify_all_brings_its_own_workloads(cli):
    result = cli("verify", "--all", "--config", "tiny")
    assert result.exit_code == 2
    assert "leave --config out" in result.stderr
    result = cli("verify", "--all", "--set", "causal=false")
    assert result.exit_code == 2
    assert "every value of causal" in result.stderr
