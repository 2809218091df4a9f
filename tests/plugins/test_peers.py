"""Public projects as peers: found like everything else, and skipped with the reason where they cannot be used."""

import pytest

from dilabench.machine import Machine
from dilabench.plugins.manager import discover
from dilabench.record import Case, GpuInfo
from dilabench.request import RunRequest
from dilabench.suites.planner import Planner
from dilabench.workload.spec import Workload, WorkloadRequest

CATALOGUE = discover().catalogue
PEERS = [one.name for one in CATALOGUE.implementations if CATALOGUE.implementations.origin(one.name) == "peers"]
CPU = Machine(device="cpu", no_cuda="no NVIDIA GPU is visible")
HOPPERS = Machine(device="cuda", gpus=(GpuInfo(name="H200", compute_capability="9.0"),) * 4)
SHAPE = {"batch_size": 1, "seq_len": 512, "num_heads": 8, "num_kv_heads": 4, "head_dim": 64, "dtype": "bfloat16"}


def reasons(name, machine=HOPPERS, ranks=4, backend="sdpa-flash", **fields):
    workload = Workload.model_validate({"pattern": {"kind": "dense"}, "mode": "both", **SHAPE, **fields})
    case = Case(implementation=name, backend=backend, workload=workload, world_size=ranks)
    return CATALOGUE.reasons_against(case, machine)


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr("dilabench.plugins.requirements._unmet_module", lambda name, version: None)


def test_torch_and_ring_flash_attn_are_there():
    assert PEERS == [
        "torch-context-parallel",
        "torch-context-parallel-alltoall",
        "ring-flash-attn-zigzag",
        "ring-flash-attn-ring",
    ]


@pytest.mark.parametrize("name", PEERS)
def test_a_causal_dense_workload_over_ranks_can_be_computed(installed, name):
    assert reasons(name) == ()


@pytest.mark.parametrize(
    ("name", "asked", "reason"),
    [
        ("torch-context-parallel", {"ranks": 1}, "needs at least 2 ranks, not 1 (--nproc)"),
        ("torch-context-parallel", {"seq_len": 500}, "seq_len 500 is not a multiple of 8, which 4 ranks need here"),
        ("ring-flash-attn-ring", {"seq_len": 510}, "seq_len 510 is not a multiple of 4, which 4 ranks need here"),
        ("ring-flash-attn-zigzag", {"causal": False}, "causal False is not supported (has True)"),
        ("ring-flash-attn-zigzag", {"window": (64, 0)}, "window (64, 0) is not supported"),
        ("ring-flash-attn-ring", {"dtype": "float16"}, "dtype float16 is not supported (has bfloat16)"),
        ("torch-context-parallel", {"machine": CPU}, "device cpu is not supported (has cuda)"),
        (
            "torch-context-parallel",
            {"backend": "sdpa-efficient"},
            "backend sdpa-efficient: torch-context-parallel calls only sdpa-cudnn or sdpa-flash",
        ),
    ],
)
def test_what_cannot_be_used_says_why(installed, name, asked, reason):
    assert reason in reasons(name, **asked)


def test_a_missing_package_is_a_reason(monkeypatch):
    monkeypatch.setattr("dilabench.plugins.requirements.importlib.util.find_spec", lambda name: None)
    assert reasons("ring-flash-attn-zigzag") == ("module ring_flash_attn is not installed",)


@pytest.mark.parametrize(
    ("name", "chosen"),
    [("zigzag-ring", "flash3"), ("torch-context-parallel", "sdpa-cudnn"), ("ring-flash-attn-zigzag", "sdpa-flash")],
)
def test_auto_takes_a_kernel_that_the_project_can_call(installed, name, chosen):
    planner = Planner(CATALOGUE, HOPPERS, RunRequest(suite="ring", nproc=4))
    request = WorkloadRequest.model_validate({"pattern": "dense", **SHAPE})
    (planned,) = planner.plan(CATALOGUE.implementations.get(name), request)
    assert (planned.case.backend, planned.skip) == (chosen, None)
