"""`dilabench verify`: what it plans; the checks themselves are tested where they are made."""

import pytest

from dilabench.cli import verify
from dilabench.config import RunRequest
from dilabench.machine import Machine
from dilabench.plugins.manager import discover
from dilabench.suites.planner import Planner

CPU = Machine(device="cpu", no_cuda="test")


def planned(**fields):
    request = RunRequest(suite="verify", **fields)
    return verify._planned(Planner(discover().catalogue, CPU, request))


def test_block_sparse_implementations_have_workloads_of_their_own():
    cases = planned(implementations=("block-sparse", "strided"))
    assert {(one.case.implementation, one.case.workload.pattern.kind, one.skip) for one in cases} == {
        ("block-sparse", "block_sparse", None),
        ("strided", "dilated", None),
    }
    assert {one.case.workload.causal for one in cases} == {True, False}


def test_a_pattern_that_the_user_named_is_everybodys():
    cases = planned(implementations=("block-sparse", "strided"), overrides={"pattern": "dense"})
    skipped = {one.case.implementation: one.skip for one in cases}
    assert skipped["block-sparse"] == "pattern dense is not supported (has block_sparse)"


@pytest.mark.distributed
@pytest.mark.slow
def test_ranks_verify_together(cli):
    result = cli("verify", "-i", "block-sparse-ring", "-i", "block-sparse", "--nproc", "2", "--set", "causal=true")
    assert result.exit_code == 0, result.stdout
    lines = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert "all rows" in lines["block-sparse-ring"]
    assert "runs on 1 device, not on 2" in lines["block-sparse"]
    assert result.stdout.splitlines()[-1] == "1 right, 0 wrong, 1 skipped"
