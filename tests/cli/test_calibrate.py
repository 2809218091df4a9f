"""`dilabench calibrate`: from sessions to a noise floor and a power curve, and back into verdicts."""

import random
from dataclasses import replace
from math import exp

import pytest

from dilabench.comparison.fingerprint import machine_key
from dilabench.engine import calibration, method
from dilabench.machine import device_named
from dilabench.plugins.manager import discover
from dilabench.record import Slot, Timing
from dilabench.runs.calibration import summary
from dilabench.store.lookup import Store

NAMES = [calibration.BASELINE, *calibration.EFFECTS]


def session(seed, *, noise, between):
    """Timings of all implementations; every one of them is off by its own constant in this session."""
    rng = random.Random(seed)
    timings = {}
    for position, name in enumerate(NAMES):
        level = 1e7 * (1 + calibration.EFFECTS.get(name, 0.0)) * exp(rng.gauss(0, between))
        slots = tuple(
            Slot(round=i, position=position, samples_ns=tuple(int(level * exp(rng.gauss(0, noise))) for _ in range(5)))
            for i in range(20)
        )
        timings[name] = Timing(timer="wall", proves="elapsed time", slots=slots)
    return timings


def test_a_quiet_machine_finds_what_is_there(make_record):
    found = summary([session(i, noise=0.01, between=0.001) for i in range(10)], make_record([]), "shape")
    assert found.sigma_aa == pytest.approx(0.002, abs=0.002)
    rates = {one.effect: one.rate for one in found.power}
    assert rates[0.0] == 0
    assert rates[0.05] == rates[0.10] == 1
    assert found.mde < 0.05


def test_a_machine_that_wanders_between_sessions_knows_it(make_record):
    found = summary([session(i, noise=0.01, between=0.03) for i in range(10)], make_record([]), "shape")
    assert found.sigma_aa == pytest.approx(0.03 * 2**0.5, rel=0.5)
    assert {one.effect: one.hits for one in found.power}[0.0] == 0
    assert found.mde > 0.1


def test_compare_uses_it(cli, tmp_path, make_row, make_record):
    record = make_record([make_row("gather", position=0), make_row("strided", position=1, ns=1.06e7)])
    path = tmp_path / "run.json"
    path.write_text(record.model_dump_json())
    before = cli("compare", str(path), "--by", "implementation")
    assert "noise between sessions is unknown" in before.stdout
    assert "SLOWER" in before.stdout
    noisy = summary([session(i, noise=0.01, between=0.04) for i in range(10)], record, "shape")
    assert noisy.machine == machine_key(record)
    Store().calibrations.save(noisy)
    after = cli("compare", str(path), "--by", "implementation")
    assert "noise between sessions " in after.stdout
    assert "twice the noise floor" in after.stdout
    assert "1 SLOWER" not in after.stdout


def test_the_copies_are_one_implementation_under_several_names():
    shelf = discover(extra=[calibration]).catalogue.implementations
    first = shelf.get(NAMES[0])
    for name in NAMES:
        copy = shelf.get(name)
        assert (copy.supports, copy.requires, copy.uses_backend) == (first.supports, first.requires, True)
        assert shelf.origin(name) == shelf.origin(NAMES[0])


@pytest.mark.parametrize("sessions", ["0", "2"])
def test_too_few_sessions_are_refused(cli, sessions):
    assert cli("calibrate", "--sessions", sessions).exit_code == 2


@pytest.mark.slow
def test_on_this_machine(cli, monkeypatch, tmp_path):
    """Real workers and timers, as short as can be; what it finds is this machine's own affair."""
    monkeypatch.setenv("DILABENCH_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("DILABENCH_LOCK_DIR", str(tmp_path))
    monkeypatch.setattr(method, "device_named", lambda name: replace(device_named(name), sampling_s=0.2))
    result = cli("calibrate", "--sessions", "3", "--seq-length", "64")
    assert result.exit_code == 0, result.output
    assert "noise between sessions" in result.stdout
    assert len(list((tmp_path / "store" / "calibrations").iterdir())) == 1
