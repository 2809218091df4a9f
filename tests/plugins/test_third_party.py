"""A third party's things are chosen, counted, planned and ranked by their descriptors, as ours are."""

import sys
from pathlib import Path

import pytest

from dilabench.choice.over_ranks import expected_seconds
from dilabench.choice.rules import choose
from dilabench.engine.case_spec import worker_key
from dilabench.engine.method import choose_method
from dilabench.engine.plausibility import unproven_backend
from dilabench.errors import ConfigError
from dilabench.machine import Machine
from dilabench.plugins.manager import discover
from dilabench.predict.memory import plan_memory
from dilabench.record import Case, KernelUse
from dilabench.request import run_request
from dilabench.suites.all import suites
from dilabench.suites.planner import Planner, expand
from dilabench.workload.spec import WorkloadRequest

CPU = Machine(device="cpu")


@pytest.fixture
def catalogue(monkeypatch, tmp_path):
    """Ours, and theirs beside them."""
    monkeypatch.setenv("DILABENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    import third_party_package

    found = discover(strict=True, extra=[third_party_package])
    return found.catalogue


def workload(**fields):
    return WorkloadRequest.model_validate({"batch_size": 1, "seq_len": 4096, **fields}).resolve("float32")


@pytest.mark.usefixtures("with_a_compiler")
def test_auto_takes_their_backend_and_it_has_a_process_of_its_own(catalogue):
    (planned,) = expand(
        catalogue, CPU, run_request(catalogue, suite="implementations", run={"implementations": ["strided"]})
    )
    assert (planned.case.backend, planned.requested_backend) == ("their-kernel", "auto")
    assert worker_key(planned.case, catalogue).endswith("+their-kernel")
    assert catalogue.preferred_backends(CPU)[:2] == ("their-kernel", "flash-cpu")


def test_their_kernels_are_held_against_the_profile(catalogue):
    backend = catalogue.backends.get("their-kernel")
    assert unproven_backend(backend, [KernelUse(name="their_flash_fwd<128>", count=1, duration_ns=1)]) is None
    assert "claims their-kernel" in unproven_backend(backend, [KernelUse(name="gemm", count=1, duration_ns=1)])


def test_auto_takes_their_implementation_where_nothing_was_measured(catalogue):
    choice = choose(catalogue, CPU, workload())
    assert (choice.implementation, choice.source) == ("their-best", "rule")


def test_auto_over_ranks_goes_by_their_sharding_as_by_ours(catalogue):
    dense = workload(pattern="dense")
    names = ("zigzag-ring", "their-ring", "their-halves")
    ours, theirs, halves = (
        expected_seconds(Case(implementation=name, workload=dense, world_size=2), "cpu", catalogue) for name in names
    )
    assert ours == theirs < halves
    choice = choose(catalogue, CPU, dense, ranks=2)
    assert "expected" in choice.source
    assert choice.implementation != "their-halves"


def test_their_role_is_that_of_their_rows(catalogue):
    request = run_request(catalogue, suite="implementations", run={"implementations": ["their-plain", "their-best"]})
    assert [one.role for one in expand(catalogue, CPU, request)] == ["plain", "method"]


@pytest.mark.slow
def test_their_memory_is_planned_with_that_of_the_backend(catalogue):
    asked = workload()
    unit, lse = asked.tokens * asked.num_heads * asked.head_dim * 4, asked.tokens * asked.num_heads * 4
    for device in ("cpu", "cuda"):
        case = Case(implementation="their-plain", backend="their-kernel", workload=asked)
        plan = plan_memory(case, device, catalogue)
        assert (plan.inputs_bytes, plan.workspace_bytes) == (3 * unit, 2 * unit + lse)
        alone = plan_memory(Case(implementation="their-best", workload=asked), device, catalogue)
        assert (alone.inputs_bytes, alone.workspace_bytes) == (3 * unit, unit)


def test_their_sharding_may_be_one_of_ours_or_their_own(catalogue):
    dense = workload(pattern="dense")
    for name, balance in (("their-ring", 1.0), ("their-halves", 2 / 3)):
        sharding = catalogue.sharding_of(name)
        assert sharding.load_balance(dense, 4) == balance
        assert sharding.received_bytes(dense, 4) > 0
    request = run_request(catalogue, suite="ring", workload={"pattern": "dense", "mode": "forward"})
    parallel = [one.case.implementation for one in expand(catalogue, CPU, request) if one.case.world_size > 1]
    assert parallel[0] == "their-halves", "of the highest priority"
    assert {"their-ring", "zigzag-ring", "ulysses"} <= set(parallel)


def test_their_suite_states_its_options_and_its_place(catalogue):
    request = run_request(catalogue, suite="their-suite", run={"options": {"speed": 3}})
    assert [one.labels["theirs:speed"] for one in expand(catalogue, CPU, request)] == ["3"]
    with pytest.raises(ConfigError, match=r"no option 'pace' \(given as 3\); it has loud, speed, steps"):
        expand(catalogue, CPU, run_request(catalogue, suite="their-suite", run={"options": {"pace": 3}}))
    everything = Planner(catalogue, CPU, run_request(catalogue, suite="all"))
    assert next(one.name for one in suites(everything)) == "their-suite"


def test_their_timer_is_timed_as_it_says(catalogue):
    assert choose_method("warmup", "cpu", catalogue).timer.name == "wall", "the first registered is the default"
    method = choose_method("their-timer", "cpu", catalogue)
    assert (method.timer.name, method.recheck, method.max_slot_samples) == ("their-timer", False, 1)
