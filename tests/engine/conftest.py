import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dilabench.engine.device.environment import snapshot
from dilabench.engine.runner import run
from dilabench.machine import Machine
from dilabench.plugins import builtin
from dilabench.plugins.catalogue import Catalogue
from dilabench.plugins.descriptors import Backend, Capabilities, Implementation
from dilabench.record import Case, PlannedCase, RunHeader
from dilabench.request import RunRequest
from dilabench.workload.spec import Workload

HERE = Path(__file__).parent / "impls_under_test"
CPU = Machine(device="cpu", no_cuda="test")
DENSE = Capabilities(patterns=frozenset({"dense"}))


@pytest.fixture(autouse=True)
def lock_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("DILABENCH_LOCK_DIR", str(tmp_path))


@pytest.fixture(autouse=True)
def importable_impls(monkeypatch, warm_server, known_ceilings):
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setattr(sys, "path", [str(HERE), *sys.path])


class Keeper:
    """A sink in memory."""

    def __init__(self):
        self.header, self.kept, self.record = None, [], None

    def start(self, header):
        self.header = header

    def row(self, row):
        self.kept.append(row)

    def finish(self, record):
        self.record = record


@pytest.fixture
def catalogue():
    shelves = Catalogue()
    for timer in builtin.dilabench_register_timers():
        shelves.timers.add(timer, "builtin")
    return shelves


@pytest.fixture
def dense_case():
    def make(implementation, backend=None, **fields):
        shape = {"batch_size": 1, "seq_len": 129, "num_heads": 3, "num_kv_heads": 3, "head_dim": 24, **fields}
        workload = Workload.model_validate({"pattern": {"kind": "dense"}, **shape})
        return PlannedCase(case=Case(implementation=implementation, backend=backend, workload=workload))

    return make


@pytest.fixture
def engine(catalogue, dense_case):
    """Runs implementations of `misbehaving` by name; rows by implementation."""

    def register(name, origin="builtin"):
        if name not in catalogue.implementations:
            takes = "embeddings" if name == "Projection" else "heads"
            target = f"misbehaving:{name}"
            catalogue.implementations.add(Implementation(name, "", target, supports=DENSE, takes=takes), origin)

    def go(*names, planned=None, sink=None, timing="simple", progress=None, origin="builtin", seed=0, **options):
        budget_s = options.pop("budget_s", None)
        fields = options.pop("workload", {})
        runs = {name: options.pop(name, None) for name in ("warmup_runs", "timing_runs")}
        for name in names:
            register(name, origin)
        planned = planned or [dense_case(name, **fields) for name in names]
        request = RunRequest(suite="test", timing=timing, budget_s=budget_s, seed=seed, **runs)
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        environment = snapshot(CPU)
        header = RunHeader(tool_version="0", run_id="a", suite="test", started_at=started_at, environment=environment)
        options.setdefault("timeout_s", 60.0)
        machine = options.pop("machine", CPU)
        return run(planned, request, catalogue, machine, header, sink or Keeper(), progress, **options)

    go.register = register
    go.catalogue = catalogue
    return go


@pytest.fixture
def keeper():
    return Keeper()


@pytest.fixture
def named_backend(catalogue):
    def add(name, kernels, target="dilabench.backends.sdpa.flash:attend"):
        catalogue.backends.add(Backend(name, "", target, supports=DENSE, kernels=kernels), "builtin")

    return add
