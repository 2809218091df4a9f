"""Every way to die ends one case, with its reason; the others are measured all the same."""

import pytest

from dilabench.record import Failed, Measured

pytestmark = pytest.mark.faults


def outcomes(record):
    return {row.case.implementation: row.outcome for row in record.rows}


FAULTS = [
    ("cannot_build", "build", "RuntimeError: no kernel for head_dim 24"),
    ("late_error", "warmup", "ValueError: tile of 7 rows"),
    ("late_segfault", "warmup", "killed by SIGSEGV (segmentation fault)"),
    ("late_exit", "warmup", "exit code 7"),
    ("late_sys_exit", "warmup", "SystemExit: I am done"),
    ("late_kill", "warmup", "killed by SIGKILL"),
    ("late_out_of_memory", "warmup", "out of memory: CUDA out of memory. Tried to allocate 80 GiB"),
    ("late_memory_error", "warmup", "out of memory: MemoryError"),
    ("first_call_segfault", "build", "killed by SIGSEGV"),
    ("noisy_then_dead", "build", "exit code 3"),
    ("dead_of_an_error", "build", "exit code 3 (ImportError: cannot import name 'kernel' from 'theirs')"),
    ("half_a_letter", "build", r"ValueError: \ud800 is no letter"),
]


@pytest.fixture(scope="module")
def runs():
    return {}


@pytest.fixture
def among_all(engine, runs):
    """The outcomes of one run of all faults, among neighbours."""
    if not runs:
        runs.update(outcomes(engine("honest", *(name for name, _, _ in FAULTS), "noisy")))
    return runs


@pytest.mark.parametrize(("name", "stage", "why"), FAULTS)
def test_a_fault_ends_one_case_with_its_reason(among_all, name, stage, why):
    found = among_all[name]
    assert isinstance(found, Failed)
    assert found.stage == stage
    assert why in found.why
    assert "\n" not in found.why


@pytest.mark.parametrize("name", ["honest", "noisy"])
def test_neighbours_of_faults_are_measured(among_all, name):
    found = among_all[name]
    assert isinstance(found, Measured)
    assert len(found.timings[0].samples_ns) >= 5
    assert found.memory is not None


def test_a_hang_ends_one_case(engine):
    found = outcomes(engine("late_hang", "honest", timeout_s=3.0))
    assert isinstance(found["late_hang"], Failed)
    assert "hang" in found["late_hang"].why
    assert isinstance(found["honest"], Measured)


def test_the_last_output_of_a_dead_worker_stands_in_its_row(among_all):
    assert "my last words" in among_all["noisy_then_dead"].traceback


def test_the_traceback_of_an_exception_stands_in_its_row(among_all):
    assert "misbehaving.py" in among_all["late_error"].traceback


def test_workers_print_nothing(engine, capfd):
    assert isinstance(outcomes(engine("noisy"))["noisy"], Measured)
    captured = capfd.readouterr()
    assert "chatter" not in captured.out + captured.err


def test_a_missing_module_fails_the_build(engine, catalogue):
    from dilabench.plugins.descriptors import Capabilities, Implementation

    dense = Capabilities(patterns=frozenset({"dense"}))
    catalogue.implementations.add(Implementation("gone", "", "no_such_module:build", supports=dense), "builtin")
    found = outcomes(engine("gone", "honest"))
    assert found["gone"].stage == "build"
    assert "no_such_module" in found["gone"].why
    assert isinstance(found["honest"], Measured)
