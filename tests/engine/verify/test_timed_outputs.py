"""Rows of timed calls: which tolerance decides, and rows of modules."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.engine.call.inputs import InputStore
from dilabench.engine.call.prepared_call import PreparedCall
from dilabench.engine.call.specs import CaseSpec
from dilabench.engine.verify.oracle.formula import attend_rows
from dilabench.engine.verify.oracle.reference import build as build_reference
from dilabench.engine.verify.timed_outputs import TimedOutputs, _gradients_check
from dilabench.record import Case, Check, CheckName, Verification
from dilabench.workload.spec import Workload

CPU = torch.device("cpu")


def build(workload: Workload, context: object) -> Callable[..., Tensor]:
    """The plain computation in the inputs' dtype."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_rows(q, k, v, workload, torch.arange(workload.seq_len), q.dtype)[0]

    return attend


def build_too_large(workload: Workload, context: object) -> Callable[..., Tensor]:
    """The same times 1.1."""
    function = build(workload, context)
    return lambda q, k, v: function(q, k, v) * 1.1


@pytest.mark.parametrize("known", [None, 0.0, 1e-3])
@pytest.mark.parametrize(("target", "passed"), [("build", True), ("build_too_large", False)])
def test_a_row_beyond_what_verification_saw_is_compared_with_the_plain_computation(
    target: str, passed: bool, known: float | None
) -> None:
    """A tolerance that is known decides first; a row that it refuses may be as wrong as the plain one is there."""
    shape = {"batch_size": 2, "seq_len": 65, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "dtype": "bfloat16"}
    workload = Workload.model_validate({"pattern": {"kind": "dense"}, **shape})
    spec = CaseSpec(case=Case(implementation="own", workload=workload), target=f"{__name__}:{target}", seed=3)
    call = PreparedCall(spec, CPU, InputStore(CPU))
    outputs = TimedOutputs(call)
    if known is not None:
        outputs.know(Verification(checks=(Check(name=CheckName.OUT, passed=True, error=0.0, tolerance=known),)))
    call.timed_calls.begin(last=True)
    for _ in range(6):
        call.fresh()()
    verification = outputs.check(call.timed_calls.end())
    assert verification.timed_calls == 6
    assert verification.passed == passed


def build_uncapped(workload: Workload, context: BuildContext) -> Callable[..., Tensor]:
    """The right out, with the derivative of scores without a cap."""
    right, wrong = (build_reference(x, context) for x in (workload, workload.model_copy(update={"softcap": None})))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = wrong(q, k, v)
        return out + (right(q, k, v) - out).detach()

    return attend


@pytest.mark.parametrize(
    ("changes", "target", "passed"),
    [
        ({"value_dim": 12}, "dilabench.engine.verify.oracle.reference:build", True),
        ({"value_dim": 5, "query_len": 9}, "dilabench.engine.verify.oracle.reference:build", True),
        ({"softcap": 0.5}, "dilabench.engine.verify.oracle.reference:build", True),
        ({"softcap": 0.5}, f"{__name__}:build_uncapped", False),
    ],
    ids=str,
)
def test_values_of_another_width_and_softcaps(changes: dict[str, Any], target: str, passed: bool) -> None:
    shape = {"batch_size": 2, "seq_len": 65, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "mode": "both"}
    workload = Workload.model_validate({"pattern": {"kind": "dense"}, **shape, **changes})
    call = PreparedCall(
        CaseSpec(case=Case(implementation="own", workload=workload), target=target, seed=3), CPU, InputStore(CPU)
    )
    outputs = TimedOutputs(call)
    call.timed_calls.begin(last=True)
    for _ in range(6):
        call.fresh()()
    verification = outputs.check(call.timed_calls.end())
    assert verification.timed_calls == 6
    assert verification.passed == passed, verification


@pytest.mark.parametrize(("tokens", "passes"), [(3, True), (15, True), (16, False)])
def test_norms_of_gradients_are_compared_only_where_they_are_no_chance(tokens: int, passes: bool) -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projection = torch.nn.Linear(32, 32, bias=False)

        def forward(self, q: Tensor, _k: Tensor, _v: Tensor) -> Tensor:
            out: Tensor = self.projection(q)
            return out

    module, x, dout = Module(), torch.randn(1, tokens, 32), torch.randn(1, tokens, 32)
    given = x.clone().requires_grad_()
    gradients = torch.autograd.grad(module(given, given, given), [given, *module.parameters()], dout)
    sizes = [torch.linalg.vector_norm(gradient) * 0 for gradient in gradients]
    call: Any = SimpleNamespace(reference=module, workload=SimpleNamespace(tokens=tokens), output_gradient=lambda: dout)
    last: Any = SimpleNamespace(inputs=SimpleNamespace(q=x), gradients=gradients)
    kept: Any = SimpleNamespace(form=None, sizes=sizes, number=1)
    check = _gradients_check(call, last, [kept])
    assert check.passed == passes, check.detail
