"""Every way to die ends one case, with its reason; the others are measured all the same."""

import pytest

from dilabench.record import Failed, Measured

pytestmark = pytest.mark.faults


def outcomes(record):
    return {row.case.implementation: row.outcome for row in record.rows}


@pytest.mark.parametrize(
    ("name", "stage", "why"),
    [
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
    ],
)
def test_a_fault_ends_one_case_with_its_reason(engine, name, stage, why):
    found = outcomes(engine("honest", name, "noisy"))
    assert isinstance(found[name], Failed)
    assert found[name].stage == stage
    assert why in found[name].why
    assert "\n" not in found[name].why
    for neighbour in ("honest", "noisy"):
        assert isinstance(found[neighbour], Measured)
        assert len(found[neighbour].timings[0].samples_ns) >= 5
        assert found[neighbour].memory is not None


def test_a_hang_ends_one_case(engine):
    found = outcomes(engine("late_hang", "honest", timeout_s=3.0))
    assert isinstance(found["late_hang"], Failed)
    assert "hang" in found["late_hang"].why
    assert isinstance(found["honest"], Measured)


def test_the_last_output_of_a_dead_worker_stands_in_its_row(engine):
    found = outcomes(engine("noisy_then_dead"))
    assert "my last words" in found["noisy_then_dead"].traceback


def test_the_traceback_of_an_exception_stands_in_its_row(engine):
    found = outcomes(engine("late_error"))
    assert "misbehaving.py" in found["late_error"].traceback


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
