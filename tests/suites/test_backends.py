"""Suite `backends`: full and dilated attention over every backend and dtype of the device."""

import pytest

from dilabench.machine import Machine
from dilabench.record import GpuInfo
from dilabench.request import run_request
from dilabench.suites.planner import expand

CPU = Machine(device="cpu", no_cuda="no NVIDIA GPU is visible")
HOPPER = Machine(device="cuda", gpus=(GpuInfo(name="H200", compute_capability="9.0"),))


def plan(catalogue, machine=CPU, **fields):
    return expand(catalogue, machine, run_request(catalogue, suite="backends", **fields))


@pytest.mark.parametrize("machine", [CPU, HOPPER], ids=["cpu", "h200"])
def test_every_backend_serves_both_in_every_dtype_or_says_why_not(catalogue, machine):
    planned = plan(catalogue, machine)
    kinds = {(p.case.implementation, p.case.workload.pattern.kind) for p in planned}
    assert kinds == {("dense", "dense"), ("strided", "dilated")}
    for implementation in ("dense", "strided"):
        for dtype in {p.case.workload.dtype for p in planned}:
            chosen = [p for p in planned if (p.case.implementation, p.case.workload.dtype) == (implementation, dtype)]
            assert [p.case.backend for p in chosen] == list(catalogue.backends.names)
            assert any(p.skip is None for p in chosen)
    assert all(p.requested_backend == p.case.backend for p in planned)


def test_dtypes_are_those_of_the_device(catalogue):
    assert {p.case.workload.dtype for p in plan(catalogue)} == {"float32", "bfloat16"}
    assert {p.case.workload.dtype for p in plan(catalogue, HOPPER)} == {"float32", "float16", "bfloat16"}


def test_what_is_named_is_all_that_runs(catalogue):
    planned = plan(
        catalogue,
        workload={"dtype": "fp32", "seq_len": "777"},
        run={"backends": ["math"], "implementations": ["gather"]},
    )
    (only,) = planned
    assert (only.case.backend, only.case.implementation) == ("math", "gather")
    assert (only.case.workload.dtype, only.case.workload.seq_len) == ("float32", 777)
