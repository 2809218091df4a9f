"""The harness of `check`'s error rates: what it counts, and that what it slows down still computes the same."""

import importlib.util
from pathlib import Path

import pytest
import torch

from dilabench.contracts import BuildContext, LoadedBackend
from dilabench.impls import strided
from dilabench.workload.spec import Workload

ROOT = Path(__file__).parents[1]


@pytest.fixture
def harness():
    path = ROOT / "scripts" / "check_error_rates.py"
    spec = importlib.util.spec_from_file_location("check_error_rates", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def dealt(share, **codes):
    verdicts = {name: {"code": code, "within": None} for name, code in codes.items()}
    return {"machine": "idle", "share": share, "verdicts": verdicts}


def test_a_check_of_identical_code_counts_by_its_gravest_verdict(harness):
    found = [
        dealt(0.0, slowed="SAME", gather="SLOWER"),
        dealt(0.0, slowed="SAME", gather="SAME"),
        dealt(0.0, slowed="UNDECIDED", gather="SAME"),
        dealt(0.5, slowed="SLOWER", gather="SAME"),
    ]
    entries = {entry["case"]: entry for entry in harness.rates(found)}
    identical = entries["identical"]
    assert [identical[code]["hits"] for code in ("SLOWER", "FASTER", "SAME", "UNDECIDED")] == [1, 0, 1, 1]
    assert identical["SLOWER"]["interval"] == [pytest.approx(0.0084, abs=1e-4), pytest.approx(0.9057, abs=1e-4)]
    assert entries["+50%"]["SLOWER"]["rate"] == 1.0
    assert entries["+25%"]["checks"] == 0


@pytest.mark.parametrize(("slowdown", "code"), [(1.0, "SAME"), (1.5, "SLOWER"), (0.5, "FASTER")])
def test_sessions_are_dealt_to_looks_and_to_the_second_measurement(harness, make_row, make_record, slowdown, code):
    def session(seed, ns):
        return make_record([make_row("strided", seed=seed, ns=ns, spread=0.01)], run_id=f"run{seed}")

    new = [session(seed, 1e7 * slowdown) for seed in range(1, 20)]
    (pair,) = harness.check([session(0, 1e7)], new, 12).pairs
    assert pair.verdict.code == code
    # The spread of six sessions shows that nothing changed; a change is confirmed by three others.
    assert pair.verdict.numbers.sessions == (6 if code == "SAME" else 3)
    assert bool(pair.first_look) is (code != "SAME")


@pytest.mark.parametrize(("share", "calls"), [("0", 1), ("0.25", 2), ("0.5", 2)])
def test_what_is_slowed_down_repeats_a_share_of_its_batch_and_computes_the_same(monkeypatch, share, calls):
    from dilabench.backends import math

    monkeypatch.syspath_prepend(ROOT / "tests" / "slowed_plugin")
    from dilabench_slowed import slowed

    batches = []

    def attend(q, k, v, **options):
        batches.append(len(q))
        return math.attend(q, k, v, **options)

    monkeypatch.setenv(slowed.SHARE_VARIABLE, share)
    pattern = {"kind": "dilated", "segment_lengths": (48,), "dilation_rates": (1,)}
    workload = Workload(pattern=pattern, batch_size=10, seq_len=96, num_heads=5, num_kv_heads=5, head_dim=24)
    context = BuildContext(device=torch.device("cpu"), backend=LoadedBackend("math", attend))
    inputs = torch.randn(3, 10, 96, 5, 24, generator=torch.Generator().manual_seed(0)).unbind()
    assert torch.equal(slowed.build(workload, context)(*inputs), strided.build(workload, context)(*inputs))
    assert len(batches) == calls + 1
