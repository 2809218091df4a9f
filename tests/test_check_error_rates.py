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


def check(share, relative, **codes):
    return {"share": share, "relative": relative, "verdicts": {name: {"code": code} for name, code in codes.items()}}


def test_identical_code_is_counted_apart_from_planted_slow_downs(harness):
    checks = [
        check(0.0, False, slowed="SAME", gather="SLOWER"),
        check(0.1, False, slowed="SLOWER", gather="SAME"),
        check(0.0, True, slowed="FASTER"),
        check(0.2, False),
    ]
    found = {one["case"]: one for one in harness.rates(checks)}
    identical = found["identical"]
    assert (identical["verdicts"], identical["SLOWER"]["hits"], identical["SAME"]["hits"]) == (3, 1, 2)
    assert identical["SLOWER"]["interval"] == [pytest.approx(0.0084, abs=1e-4), pytest.approx(0.9057, abs=1e-4)]
    assert found["slowed, +10%"]["SLOWER"]["rate"] == 1.0
    assert found["identical, relative to gather"]["FASTER"]["hits"] == 1
    assert found["slowed, +20%"]["verdicts"] == 0


@pytest.mark.parametrize(("share", "calls"), [("0", 1), ("0.1", 2), ("0.2", 2)])
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
