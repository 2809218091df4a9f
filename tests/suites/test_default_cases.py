"""What each suite measures when nobody names anything: the same rows as ever, on a CPU and on four H200."""

import hashlib
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from dilabench.choice import descriptors, measured
from dilabench.machine import Machine
from dilabench.plugins.manager import discover
from dilabench.record import GpuInfo
from dilabench.request import run_request
from dilabench.suites import planner
from dilabench.suites.planner import expand

GOLDEN = Path(__file__).parents[1] / "golden" / "default_cases.json"
H200 = GpuInfo(name="H200", compute_capability="9.0", memory_bytes=143771 * 2**20)
MACHINES = {"cpu": Machine(device="cpu"), "h200": Machine(device="cuda", gpus=(H200,) * 4)}
RANKS = {"cpu": 2, "h200": 4}
# What a suite is asked for besides nothing at all.
ASKED = {
    "": {},
    "over ranks": {},
    "dense": {"workload": {"pattern": "dense"}},
    "block-sparse": {"workload": {"pattern": "block_sparse"}},
    "packed": {"workload": {"pattern": "dense", "layout": "packed", "batch_size": 1, "seq_len": 4096}},
}
ONLY = {"dense": {"ring"}, "block-sparse": {"ring"}, "packed": {"ring"}}


@pytest.fixture
def everything_installed(monkeypatch, tmp_path):
    """Every library is there, nothing was tuned, and a host has 64 GiB."""
    monkeypatch.setattr(descriptors, "_unmet_package", lambda *_: None)
    monkeypatch.setattr(descriptors, "_unmet_compiler", lambda _machine: None)
    monkeypatch.setenv("DILABENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(measured, "SHIPPED", tmp_path)
    monkeypatch.setattr(planner, "cxx_compiler", lambda: None)
    monkeypatch.setattr("dilabench.machine.GROUPS", tmp_path / "no limit")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=2**36, available=2**36))


def found_here():
    """By machine and suite: how often each implementation and backend, and a hash of all cases."""
    catalogue = discover().catalogue
    found = {}
    for machine_name, machine in MACHINES.items():
        for suite in (one.name for one in catalogue.suites):
            for asked, fields in ASKED.items():
                if suite not in ONLY.get(asked, {suite}):
                    continue
                run = {"nproc": RANKS[machine_name]} if asked == "over ranks" else {}
                planned = expand(catalogue, machine, run_request(catalogue, suite=suite, run=run, **fields))
                lines = sorted(f"{one.case.case_id} {one.skip is None}" for one in planned)
                rows = Counter(
                    f"{one.case.implementation}:{one.case.backend or '-'} x{one.case.world_size}"
                    + ("" if one.skip is None else " skipped")
                    for one in planned
                )
                digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
                key = " ".join(filter(None, (machine_name, suite, asked)))
                found[key] = {"cases": digest, **dict(sorted(rows.items()))}
    return found


def test_the_default_rows_of_every_suite(everything_installed):
    found, golden = found_here(), json.loads(GOLDEN.read_text())
    for name, rows in golden.items():
        assert found[name] == rows, name
    assert found.keys() == golden.keys()
