"""Which oracles a worker keeps, and on which inputs the next case is verified."""

from collections.abc import Callable
from itertools import permutations
from typing import get_args

import pytest
import torch
from torch import Tensor

from dilabench.engine.call.inputs import InputStore
from dilabench.engine.call.prepared_call import PreparedCall
from dilabench.engine.call.specs import CaseSpec
from dilabench.engine.verify import case_verifier
from dilabench.engine.verify.case_verifier import CaseVerifier
from dilabench.engine.verify.oracle.oracle import Oracle
from dilabench.record import Case, CheckName
from dilabench.workload.spec import Mode, Workload

CPU = torch.device("cpu")
SEEN: list[Tensor] = []


def build(workload: Workload, context: object) -> Callable[..., Tensor]:
    """The formula, which remembers the inputs that it was given."""
    from dilabench.engine.verify.oracle.reference import build as reference

    function = reference(workload, context)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        SEEN.extend((q, k, v))
        return function(q, k, v)

    return attend


def prepared(length: int, **fields: str) -> PreparedCall:
    shape = {"batch_size": 1, "seq_len": length, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8}
    workload = Workload.model_validate({"pattern": {"kind": "dense"}, **shape, **fields})
    spec = CaseSpec(case=Case(implementation="own", workload=workload), target=f"{__name__}:build", seed=3)
    return PreparedCall(spec, CPU, InputStore(CPU))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the oracles that were made."""
    lengths: list[int] = []

    class Counted(Oracle):
        def __init__(self, workload: Workload, **options: object) -> None:
            lengths.append(workload.seq_len)
            super().__init__(workload, **options)

    monkeypatch.setattr(case_verifier, "Oracle", Counted)
    return lengths


@pytest.mark.parametrize(("kept_bytes", "lengths"), [(2**20, [33, 65]), (0, [33, 65, 33])])
def test_small_oracles_outlive_other_workloads(
    made: list[int], monkeypatch: pytest.MonkeyPatch, kept_bytes: int, lengths: list[int]
) -> None:
    monkeypatch.setattr(case_verifier, "KEPT_BYTES", kept_bytes)
    verifier = CaseVerifier(CPU)
    for length in (33, 65, 33):
        verification, why = verifier.verify(prepared(length))
        assert verification.passed, why
        verifier.forget()
    assert made == lengths


def test_inputs_that_earlier_code_may_have_kept_are_drawn_again() -> None:
    verifier = CaseVerifier(CPU)
    verifier.verify(prepared(33))
    verifier.forget()
    for tensor in SEEN:
        tensor.detach().zero_()
    verification, why = verifier.verify(prepared(33))
    assert verification.passed, why


@pytest.mark.parametrize("modes", list(permutations(get_args(Mode))))
def test_one_oracle_serves_a_workload_in_every_mode(made: list[int], modes: tuple[str, ...]) -> None:
    verifier = CaseVerifier(CPU)
    for mode in modes:
        verification, why = verifier.verify(prepared(33, mode=mode))
        assert verification.passed, why
        assert (CheckName.DQ in {check.name for check in verification.checks}) is (mode != "forward")
    assert made == [33]


@pytest.mark.parametrize("mode", get_args(Mode))
def test_other_results_of_the_same_shape_have_their_own_oracle(made: list[int], mode: str) -> None:
    verifier = CaseVerifier(CPU)
    for fields in ({}, {"mode": mode, "causal": False}, {"mode": mode, "dtype": "bfloat16"}):
        verification, why = verifier.verify(prepared(33, **fields))
        assert verification.passed, why
    assert made == [33, 33, 33]
