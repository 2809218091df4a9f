"""Rows of all kept calls, compared together: a wrong one is found in any call, and the host reads once for all."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dilabench.engine.call.inputs import InputStore
from dilabench.engine.call.kept_call import KeptCall
from dilabench.engine.call.prepared_call import PreparedCall
from dilabench.engine.call.specs import CaseSpec
from dilabench.engine.verify import kept_rows
from dilabench.engine.verify.timed_outputs import TimedOutputs
from dilabench.record import Case, Check, CheckName, Verification
from dilabench.workload.spec import Workload

CPU = torch.device("cpu")
SHAPE = {"batch_size": 2, "seq_len": 65, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
DILATED = {"kind": "dilated", "segment_lengths": (16, 64), "dilation_rates": (1, 4)}
WORKLOADS: dict[str, dict[str, Any]] = {
    "decoding": {"pattern": {"kind": "dense"}, "causal": True, "query_len": 1},
    "dilated": {"pattern": DILATED, "causal": True, "mode": "both"},
    "detached, zero keys": {
        "pattern": {**DILATED, "merge_grad": "detached", "padding": "zero_key"},
        "causal": False,
        "mode": "both",
    },
    "packed": {"pattern": DILATED, "layout": "packed", "cu_seqlens": (0, 30, 65), "batch_size": 1, "mode": "both"},
}
# Operators whose result the host reads.
READS = {"_local_scalar_dense", "nonzero", "equal"}


class Reads(TorchDispatchMode):
    """Counts the values that the host reads."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in READS
        return func(*args, **kwargs or {})


def called(workload: str, calls: int) -> tuple[PreparedCall, TimedOutputs]:
    """A right function after some timed calls, all of them kept, with known tolerances."""
    target = "dilabench.engine.verify.oracle.reference:build"
    case = Case(implementation="own", workload=Workload.model_validate({**SHAPE, **WORKLOADS[workload]}))
    call = PreparedCall(CaseSpec(case=case, target=target, seed=3), CPU, InputStore(CPU))
    outputs = TimedOutputs(call)
    known = (Check(name=name, passed=True, error=0.0, tolerance=1e-6) for name in (CheckName.OUT, CheckName.DQ))
    outputs.know(Verification(checks=tuple(known)))
    call.timed_calls.begin(count=calls)
    for _ in range(calls):
        call.fresh()()
    call.timed_calls.end()
    return call, outputs


def kept_calls(call: PreparedCall) -> list[KeptCall]:
    return [kept for kept in call.timed_calls._kept if kept.drawn]


@pytest.mark.parametrize("together", [1, 2**24], ids=["one by one", "together"])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_right_rows_pass(workload: str, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_rows, "values_together", lambda _: together)
    _, outputs = called(workload, 7)
    verification = outputs.check(None)
    assert verification.passed, [check for check in verification.checks if not check.passed]
    assert verification.timed_calls == 7
    assert len(verification.timed_rows) == 14


@pytest.mark.parametrize(("number", "wrong"), [(0, "off"), (3, "nan"), (6, "far off")])
@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize(
    ("workload", "index"),
    [(name, index) for name, changes in WORKLOADS.items() for index in range(1 + ("mode" in changes))],
)
def test_a_wrong_row_of_any_call_is_found_and_named(
    workload: str, index: int, row: int, number: int, wrong: str
) -> None:
    call, outputs = called(workload, 7)
    kept = kept_calls(call)[number]
    copy = kept.rows[row].copies[index]
    assert copy is not None
    copy += {"off": 0.01, "far off": 1e3, "nan": torch.nan}[wrong]
    if index == 0:
        kept.rows[row].later[:] = [copy]
    failed = [check for check in outputs.check(None).checks if not check.passed]
    assert [check.name for check in failed] == [("timed_out", "timed_dq")[index]]
    if wrong != "nan":
        assert f"of timed call {number + 1}" in (failed[0].detail or "")
    assert f"head {kept.rows[row].head}" in (failed[0].where or "")


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_row_that_changes_after_the_call_is_found(workload: str) -> None:
    call, outputs = called(workload, 7)
    kept_calls(call)[4].rows[1].later[0].add_(1.0)
    failed = [check for check in outputs.check(None).checks if not check.passed]
    assert [check.name for check in failed] == [CheckName.TIMED_KEPT]
    assert "of timed call 5" in (failed[0].detail or "")


@pytest.mark.parametrize("number", [0, 5])
@pytest.mark.parametrize("tensor", [0, 1, 2])
def test_an_input_that_changes_in_a_call_is_found(tensor: int, number: int) -> None:
    call, outputs = called("decoding", 7)
    kept = [kept for kept in call.timed_calls._kept if kept.digests][number]
    kept.digests[1][tensor] = kept.digests[1][tensor] + 1
    failed = [check for check in outputs.check(None).checks if not check.passed]
    assert [check.name for check in failed] == [CheckName.TIMED_INPUTS]
    assert f"of timed call {kept.number + 1}: {'qkv'[tensor]} held" in (failed[0].detail or "")


def test_the_host_reads_as_often_for_many_calls_as_for_few() -> None:
    counts = []
    for calls in (4, 12):
        _, outputs = called("decoding", calls)
        with Reads() as reads:
            assert outputs.check(None).timed_calls == calls
        counts.append(reads.count)
    assert counts[0] == counts[1] > 0
