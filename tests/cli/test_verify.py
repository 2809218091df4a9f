"""`dilabench verify`: what it plans; the checks themselves are tested where they are made."""

import json
import re
from time import sleep

import psutil
import pytest

from dilabench.cli.verify import command as verify
from dilabench.engine import outcomes as verify_outcomes
from dilabench.machine import GpuInfo, Machine
from dilabench.plugins.manager import discover
from dilabench.record import Check, Skipped, Verification
from dilabench.request import RunRequest, run_request
from dilabench.runs import verification
from dilabench.suites.planner import Planner, cases_of

CPU = Machine(device="cpu", no_cuda="test")


def planned(**fields):
    request = RunRequest(suite="verify", **fields)
    return verification.verified_cases(Planner(discover().catalogue, CPU, request))


def suite_cases(suite, **fields):
    planner = Planner(discover().catalogue, CPU, RunRequest(suite=suite, **fields))
    return cases_of(planner.catalogue.suites.get(suite), planner)


def test_block_sparse_implementations_have_workloads_of_their_own():
    cases = planned(implementations=("block-sparse", "strided"))
    assert {(one.case.implementation, one.case.workload.pattern.kind, one.skip) for one in cases} == {
        ("block-sparse", "block_sparse", None),
        ("strided", "dilated", None),
    }
    assert {one.case.workload.causal for one in cases} == {True, False}


def test_a_pattern_that_the_user_named_is_everybodys():
    cases = planned(implementations=("block-sparse", "strided"), overrides={"pattern": "dense"})
    skipped = {one.case.implementation: one.skip and one.skip.why for one in cases}
    assert skipped["block-sparse"] == (
        "pattern dense is not supported (has block_sparse, column_bounds, topk_blocks, window_sink)"
    )


DESCRIBED = [
    {"pattern": "block_sparse"},
    {"pattern": "block_sparse", "density": 0.3, "per_head": True},
    {"pattern": "dilated", "offset": "blocked", "num_heads": 3},
    {"segment_lengths": (16, 64), "dilation_rates": (1, 2), "scale": 0.3},
    {"pattern": "window_sink", "sinks": 3, "causal": False},
    {"pattern": "topk_blocks", "block_size": 32, "top_k": 2},
    {"pattern": "native_sparse", "head_dim": 32},
    {"pattern": "column_bounds", "document_lengths": (70, 3)},
    {"pattern": "dense", "cu_seqlens": (0, 3, 700), "layout": "packed", "seq_len": 700},
]


@pytest.mark.parametrize("overrides", DESCRIBED, ids=lambda fields: " ".join(f"{k}={v}" for k, v in fields.items()))
def test_what_is_verified_is_what_run_would_run(overrides):
    asked = {"implementations": ("reference",), "overrides": overrides}
    run, cases = suite_cases("implementations", **asked)[0].case.workload, planned(**asked)
    (verified,) = {one.case.workload for one in cases}
    assert verified == run.replace(mode="both", seq_len=overrides.get("seq_len", 771))
    heading = verify._names(cases[0])[2]
    for name, value in overrides.items():
        if name not in {"pattern", "cu_seqlens", "layout", "seq_len", "causal"}:
            assert str(value if not isinstance(value, tuple) else value[-1]) in heading, (name, heading)


def test_each_failed_check_has_a_line_and_the_cause_comes_first(monkeypatch, cli):
    checks = (
        Check(name="out", passed=False, error=0.25, tolerance=1e-6, where="batch 0, position 160"),
        Check(name="lse", passed=True),
        Check(
            name="dependency", passed=False, detail="the row misses key 150, which it must see", where="position 160"
        ),
    )
    wrong = Verification(checks=checks, diagnosis="out is that of window 8,0 (off by one)")
    monkeypatch.setattr(verify, "outcomes_of", lambda planned, *_: [wrong for _ in planned])
    lines = cli("verify", "dense", "--lengths", "64", "-b", "math", "--device", "cpu").stdout.splitlines()
    at = next(number for number, line in enumerate(lines) if "✗" in line)
    assert lines[at].endswith("out is that of window 8,0 (off by one)")
    assert lines[at + 1 : at + 3] == [
        "    dependency: the row misses key 150, which it must see; at position 160",
        "    out: error 0.25, allowed 1e-06; at batch 0, position 160",
    ]


@pytest.mark.parametrize("heads", [{"num_heads": 3}, {"num_kv_heads": 8}, {"num_heads": 6, "num_kv_heads": 1}])
def test_heads_that_are_given_are_the_only_ones(heads):
    for one in planned(implementations=("block-sparse", "strided", "dense"), overrides=heads):
        workload = one.case.workload
        assert one.skip is None
        assert workload.num_heads == heads.get("num_heads", 8)
        assert workload.num_kv_heads == heads.get("num_kv_heads", workload.num_heads)


def test_bounds_alone_mean_the_packed_layout():
    request = run_request(discover().catalogue, suite="verify", assignments=["cu_seqlens=0,5,9"])
    for one in planned(implementations=("dense",), overrides=request.overrides):
        workload = one.case.workload
        assert (workload.layout, workload.seq_len, workload.cu_seqlens) == ("packed", 9, (0, 5, 9))
        assert " packed" in verify._names(one)[2]


@pytest.mark.parametrize(
    "asked",
    [
        {"overrides": {"pattern": "dilated"}},
        {"overrides": {"segment_lengths": (16, 64), "dilation_rates": (1, 2)}},
        {"presets": ("longnet_32k",)},
    ],
    ids=["pattern", "field", "preset"],
)
@pytest.mark.parametrize("suite", ["verify", "implementations", "quick", "range", "backends", "extreme"])
def test_a_pattern_that_was_asked_for_is_never_replaced(suite, asked):
    asked = {"implementations": ("dense",), **asked}
    cases = planned(**asked) if suite == "verify" else suite_cases(suite, **asked)
    assert cases
    for one in cases:
        assert one.case.workload.pattern.kind == "dilated"
        assert "pattern dilated is not supported (has dense)" in one.skip.why


@pytest.mark.parametrize("suite", ["implementations", "quick", "range", "extreme"])
def test_another_function_stays_as_a_reference_beside_what_was_asked(suite):
    asked = {"implementations": ("strided", "dense"), "overrides": {"pattern": "dilated"}}
    roles = {(one.case.implementation, one.case.workload.pattern.kind, one.role) for one in suite_cases(suite, **asked)}
    assert roles == {("strided", "dilated", "method"), ("dense", "dense", "yardstick")}
    assert {one.case.implementation: one.skip is None for one in planned(**asked)} == {"strided": True, "dense": False}


def test_a_line_per_case_stands_under_its_workload_and_skips_are_told_by_reason(monkeypatch, capsys):
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    cases = planned(implementations=("gather", "dense", "strided", "fused", "flex"))
    right = Verification(checks=(Check(name="out", passed=True),))
    outcomes = [right if one.skip is None else one.skip for one in cases]
    verify._lines(cases, outcomes)
    lines = capsys.readouterr().out.splitlines()
    headings = [line for line in lines if line.endswith("forward and backward")]
    assert len(headings) == len(set(headings)) == 4
    assert all(line.startswith(("  ✓", "1x771", "skipped fused, flex: needs a CUDA GPU", "  ", "* ")) for line in lines)
    assert sum("gather" in line for line in lines) == 2
    assert max(map(len, lines)) <= 80


@pytest.mark.distributed
@pytest.mark.slow
def test_ranks_verify_together(cli):
    result = cli("verify", "-i", "block-sparse-ring", "-i", "block-sparse", "--nproc", "2", "--set", "causal=true")
    assert result.exit_code == 0, result.stdout
    assert re.search(r"✓ +block-sparse-ring .*all rows", result.stdout)
    assert re.search(r"skipped block-sparse: .*runs on 1 device, not on 2", result.stdout)
    assert result.stdout.splitlines()[-1] == "1 right, 0 wrong, 1 skipped"


def machine_with(*gpus):
    """A machine with GPUs of these names; without any, a CPU."""
    several = tuple(GpuInfo(name=name, compute_capability="9.0") for name in gpus)
    return Machine(device="cuda", gpus=several) if gpus else CPU


@pytest.mark.parametrize(
    ("gpus", "cores", "ranks", "num_workers"),
    [
        ("", 64, 1, 1),
        ("", 64, 2, 1),
        ("a", 2, 1, 1),
        ("a", 16, 1, 4),
        ("a", 128, 1, 8),
        ("aa", 128, 1, 16),
        ("ab", 128, 1, 8),
        ("aaaa", 64, 1, 16),
        ("aaaa", 64, 4, 4),
        ("aaaa", 64, 2, 8),
        ("aa", 32, 2, 4),
        ("aa", 4, 2, 1),
        ("aaaa", 512, 4, 8),
    ],
)
def test_gpus_check_as_many_cases_at_once_as_cores_and_gpus_serve(gpus, cores, ranks, num_workers):
    cases = [one.model_copy(update={"case": one.case.model_copy(update={"world_size": ranks})}) for one in planned()]
    cases = [one.model_copy(update={"skip": None}) for one in cases]
    assert verify_outcomes.num_workers_for(cases, machine_with(*gpus), cores) == num_workers


SKIP = Skipped(code="unsupported", why="test")


def test_skipped_cases_over_ranks_keep_no_worker_from_checking():
    (first, *_) = planned(implementations=("strided",))
    over = first.model_copy(update={"skip": SKIP, "case": first.case.model_copy(update={"world_size": 2})})
    assert verify_outcomes.num_workers_for([first, over], machine_with("a"), 16) == 4


def test_workers_are_spread_over_the_gpus_that_are_alike(monkeypatch):
    used = []
    monkeypatch.setattr(verify_outcomes.os, "cpu_count", lambda: 16)
    monkeypatch.setattr(
        verify_outcomes, "_checked", lambda _plan, pool, *_: (used.append(pool.settings), sleep(0.05), SKIP)[-1]
    )
    cases = planned(implementations=("strided",)) * 10
    assert len(list(verify_outcomes.outcomes_of(cases, discover().catalogue, machine_with(*"abaa"), 0))) == len(cases)
    assert [settings.gpu for settings in used[:4]] == [0, 2, 3, 0]
    assert {settings.num_workers for settings in used} == {4}


SMALL = {"seq_len": 40, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (1, ("gather", "strided", "fused", "dense")),
        pytest.param(
            2, ("ring", "strided", "ulysses", "zigzag-ring"), marks=[pytest.mark.distributed, pytest.mark.slow]
        ),
    ],
)
def test_several_at_once_give_the_outcomes_in_the_order_of_the_cases(ranks, names, monkeypatch):
    cases = planned(
        implementations=names,
        nproc=ranks,
        overrides={**SMALL, "segment_lengths": (16, 32), "dilation_rates": (1, 2), "causal": True},
    )
    broken = cases[0].model_copy(update={"case": cases[0].case.model_copy(update={"backend": "xformers"})})
    cases = (*cases[:3], broken, *cases[3:])
    monkeypatch.setattr(verify_outcomes, "num_workers_for", lambda *_: 2)
    found = list(verify_outcomes.outcomes_of(cases, discover().catalogue, CPU, 0))
    assert len(found) == len(cases)
    for one, outcome in zip(cases, found, strict=True):
        if one.skip:
            assert outcome == one.skip
        elif one is broken:
            assert "xformers" in outcome.why
        else:
            assert outcome.passed
    assert sum(one.skip is None for one in cases) > 2


@pytest.mark.distributed
@pytest.mark.slow
def test_groups_of_ranks_that_are_interrupted_leave_no_process(monkeypatch):
    monkeypatch.setattr(verify_outcomes, "num_workers_for", lambda *_: 2)
    cases = planned(implementations=("ring", "ulysses"), nproc=2, overrides=SMALL)
    outcomes = verify_outcomes.outcomes_of(cases * 50, discover().catalogue, CPU, 0)
    before = set(psutil.Process().children(recursive=True))
    next(outcomes)
    workers = set(psutil.Process().children(recursive=True)) - before
    assert len(workers) >= 4
    outcomes.close()
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_nobody_goes_on_when_the_outcomes_are_not_wanted_any_more(monkeypatch):
    started = []
    monkeypatch.setattr(verify_outcomes, "num_workers_for", lambda *_: 2)
    monkeypatch.setattr(verify_outcomes, "_checked", lambda plan, *_: (started.append(plan), sleep(0.05))[1])
    cases = planned(implementations=("strided",)) * 20
    outcomes = verify_outcomes.outcomes_of(cases, discover().catalogue, CPU, 0)
    next(outcomes)
    outcomes.close()
    assert len(started) < len(cases)


def test_json_holds_each_case_with_its_outcome(cli, monkeypatch):
    wrong = Verification(checks=(Check(name="out", passed=False, where="row 3"),))
    monkeypatch.setattr(verify, "outcomes_of", lambda planned, *_: [one.skip or wrong for one in planned])
    result = cli("verify", "strided", "fused", "--lengths", "64", "--device", "cpu", "--json")
    assert result.exit_code == 5
    document = json.loads(result.stdout)
    assert document["exit_code"] == 5
    told = {
        one["implementation"]: (one["result"], one["details"], one["workload"]["seq_len"]) for one in document["cases"]
    }
    assert told["strided"] == ("wrong", wrong.model_dump(mode="json"), 64)
    assert told["fused"][0] == "skipped"
