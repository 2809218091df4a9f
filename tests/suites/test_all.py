"""`all`: everything, each case once, the telling ones first, what takes all the time last."""

import pytest

from dilabench.errors import ConfigError
from dilabench.machine import Machine
from dilabench.record import GpuInfo, Row, Skipped
from dilabench.request import run_request
from dilabench.suites.all import follow_up
from dilabench.suites.planner import Planner, expand

ORDER = ("quick", "implementations", "extreme", "backends", "range", "optimization")
LAST = {"choice", "billion"}
CPU = Machine(device="cpu", no_cuda="test")
H200 = Machine(device="cuda", gpus=(GpuInfo(name="H200", compute_capability="9.0", memory_bytes=143771 * 2**20),))


@pytest.mark.parametrize("machine", [CPU, H200], ids=["cpu", "cuda"])
def test_every_suite_is_there_in_order_and_every_case_once(catalogue, machine):
    planned = expand(catalogue, machine, run_request(catalogue, suite="all"))
    assert len({plan.case.case_id for plan in planned}) == len(planned)
    suites = list(dict.fromkeys(plan.labels["suite"] for plan in planned))
    assert suites[: len(ORDER)] == list(ORDER)
    by_name = {suite.name for suite in catalogue.suites if suite.by_name}
    assert set(suites) >= set(catalogue.suites.names) - {"all", *LAST, *by_name, "ring", "distributed"}
    assert LAST.isdisjoint(suites)


def test_follow_ups_go_to_their_own_suite_and_the_last_ones_wait(catalogue):
    request = run_request(catalogue, suite="all", run={"options": {"tokens": "64K", "memory_limit": "256M"}})
    planner = Planner(catalogue, CPU, request)
    planned = expand(catalogue, CPU, request)
    rows = [
        Row(planned=plan, outcome=plan.skip or Skipped(code="out_of_memory", why="out of memory")) for plan in planned
    ]
    more = follow_up(rows, request, planner)
    assert {plan.labels["suite"] for plan in more} == {"extreme"}
    assert {plan.case.workload.seq_len for plan in more} == {4096}
    late = [
        Row(planned=plan, outcome=Skipped(code="budget", why="budget of 1 s used up")) for plan in [*planned, *more]
    ]
    last = follow_up(late, request, planner)
    assert {plan.labels["suite"] for plan in last} == LAST
    (billion,) = (plan for plan in last if plan.labels["suite"] == "billion")
    assert (billion.case.workload.seq_len, billion.memory_limit_bytes) == (8192, 256 * 2**20)
    ended = [*late, *(Row(planned=plan, outcome=Skipped(code="budget", why="no time")) for plan in last)]
    known = {row.case.case_id for row in ended}
    assert {plan.case.case_id for plan in follow_up(ended, request, planner)} <= known


def test_options_of_no_suite_are_refused(catalogue):
    with pytest.raises(ConfigError, match="no option 'speed'"):
        expand(catalogue, CPU, run_request(catalogue, suite="all", run={"options": {"speed": 1}}))


def test_it_has_a_budget_of_its_own(catalogue):
    assert run_request(catalogue, suite="all").budget_s == 900


def test_an_option_of_no_suite_is_refused(catalogue):
    request = run_request(catalogue, suite="all", run={"options": {"bygone": 1}})
    with pytest.raises(ConfigError, match="has no option 'bygone'; it has batches, chunked, gradient_checkpointing, "):
        expand(catalogue, CPU, request)
