"""Suite `tiles`: tile shapes beside those that an implementation has."""

import pytest

from dilabench.errors import ConfigError
from dilabench.machine import Machine
from dilabench.plugins.manager import discover
from dilabench.record import GpuInfo
from dilabench.request import run_request
from dilabench.suites.planner import expand

HOPPER = Machine(device="cuda", gpus=(GpuInfo(name="H200", compute_capability="9.0"),))


@pytest.fixture(scope="module")
def catalogue():
    return discover().catalogue


def plan(catalogue, suite="tiles", mode="forward", **run):
    workload = {"seq_len": 4096, "head_dim": 64, "mode": mode}
    return expand(catalogue, HOPPER, run_request(catalogue, suite=suite, workload=workload, run=run))


def test_every_shape_is_timed_in_the_rounds_of_the_kernels_own(catalogue):
    own, *others = plan(catalogue)
    assert (own.case.implementation, own.case.optimizations.tiles, own.labels["variant"]) == ("fused", "", "nothing")
    assert "forward=64x128x4x2" in {one.case.optimizations.tiles for one in others}
    assert all(one.labels["variant"] == one.case.optimizations.tiles for one in others)
    assert len({one.case.group_id for one in (own, *others)}) == 1
    assert len({one.case.case_id for one in (own, *others)}) == len(others) + 1


def test_a_backward_pass_tries_both_of_its_kernels(catalogue):
    tried = {one.case.optimizations.tiles.partition("=")[0] for one in plan(catalogue, mode="backward")}
    assert tried == {"", "backward_query", "backward_key"}


def test_shapes_that_are_named_are_the_only_ones(catalogue):
    named = ["forward=64x64x4x2", "forward=128x64x4x2"]
    assert [one.case.optimizations.tiles for one in plan(catalogue, options={"tiles": named})] == ["", *named]
    one = plan(catalogue, options={"tiles": named[0]})[1]
    assert one.case.optimizations.tiles == named[0]


def test_what_has_no_shapes_to_try_is_refused(catalogue):
    with pytest.raises(ConfigError, match="strided has no tile shapes"):
        plan(catalogue, implementations=["strided"])


def test_suite_all_leaves_it_out(catalogue):
    assert not any(one.case.optimizations.tiles for one in plan(catalogue, suite="all"))
