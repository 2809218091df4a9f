"""Suite `field`: who is planned beside whom, on one device and over ranks."""

import pytest

from dilabench.choice import descriptors
from dilabench.machine import Machine
from dilabench.plugins.manager import discover
from dilabench.record import GpuInfo
from dilabench.request import RunRequest
from dilabench.suites.field import cases as field
from dilabench.suites.planner import Planner

CPU = Machine(device="cpu", no_cuda="test")
GPUS = Machine(device="cuda", gpus=(GpuInfo(name="a", compute_capability="9.0"),) * 2)


@pytest.fixture
def planned(monkeypatch):
    monkeypatch.setattr(descriptors, "_unmet_package", lambda *_: None)

    def call(machine, **fields):
        request = RunRequest(suite="field", **fields)
        found = field.expand(request, Planner(discover().catalogue, machine, request))
        return [(one.case.implementation, one.case.world_size, one.skip is None) for one in found]

    return call


def test_one_device_has_each_function_by_ours_and_by_whom_it_is_right(planned):
    found = planned(CPU)
    assert found == [
        *[(name, 1, True) for name in ("gather", "strided")],
        *[(name, 1, False) for name in ("fused", "torchscale", "dilated-attention-pytorch")],
        *[(name, 1, True) for name in ("gather", "strided")],
        *[("fused", 1, False), ("torchscale", 1, True), ("dilated-attention-pytorch", 1, False)],
    ]


def test_several_gpus_have_dense_attention_over_them_as_well(planned):
    over_ranks = [one for one in planned(GPUS) if one[1] == 2]
    assert over_ranks == [
        (name, 2, True)
        for name in (
            *("zigzag-ring", "zigzag-allgather", "ring-overlap", "ring", "ulysses"),
            *("torch-context-parallel", "torch-context-parallel-alltoall"),
            *("ring-flash-attn-zigzag", "ring-flash-attn-ring", "yunchang-ulysses", "yunchang-usp"),
        )
    ]


def test_a_pattern_that_is_named_takes_the_place_of_dilated_ones(planned):
    assert planned(CPU, overrides={"pattern": "dense"}) == [("dense", 1, True)]
    assert ("block-sparse", 1, True) in planned(CPU, overrides={"pattern": "block_sparse"})


def test_what_is_named_is_all_there_is(planned):
    assert {name for name, *_ in planned(CPU, implementations=("torchscale", "strided"), nproc=2)} == {
        "strided",
        "torchscale",
    }
    asked = {"implementations": ("zigzag-ring", "ring-flash-attn-zigzag"), "presets": ("tiny",), "nproc": 2}
    assert planned(CPU, **asked) == [("dense", 1, True), ("zigzag-ring", 2, True), ("ring-flash-attn-zigzag", 2, True)]
