"""verify accepts what is right, in every dtype and form, and says what it looked at."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.engine.verify import Oracle, call, summary, verify
from dilabench.engine.verify.call import digest, form_checks
from dilabench.engine.verify.oracle.reference import build
from dilabench.record import Check, Verification
from dilabench.workload.spec import Workload
from tests.conftest import half_are_slow, slow

FORM = ["shape", "dtype", "device", "finite"]
MakeWorkload = Callable[..., Workload]
SPARSE = {"kind": "dilated", "segment_lengths": (7, 30), "dilation_rates": (2, 4)}


RIGHT: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {"causal": False, "seq_len": 96, "head_dim": 80},
    "uncovered rows": {"pattern": SPARSE, "causal": False, "num_heads": 6, "num_kv_heads": 3},
    "dense": {"pattern": {"kind": "dense"}, "window": (9, -1)},
    "packed": {"batch_size": 1, "layout": "packed", "cu_seqlens": (0, 1, 40, 61)},
    "one dim": {"head_dim": 1},
    "one token": {"seq_len": 1},
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *half_are_slow(RIGHT, ["float32", "bfloat16"]),
        *itertools.starmap(slow, itertools.product(RIGHT, ["float64", "float16"])),
    ],
)
def test_a_right_implementation_passes(make_workload: MakeWorkload, right: type, name: str, dtype: str) -> None:
    workload = make_workload(mode="both", dtype=dtype, **RIGHT[name])
    verification = verify(right(workload), workload, deterministic=True)
    assert verification.passed, summary(verification)
    assert verification.sampled_rows is None
    assert verification.duration_ns > 0


def test_the_reference_passes_under_both_gradients(make_workload: MakeWorkload) -> None:
    for merge_grad in ("exact", "detached"):
        workload = make_workload(mode="both", pattern={**SPARSE, "merge_grad": merge_grad})
        function = build(workload, BuildContext(device=torch.device("cpu")))
        verification = verify(function, workload, deterministic=True)
        assert verification.passed, summary(verification)
        assert "lse" in [check.name for check in verification.checks]


def test_the_checks_of_a_forward_and_of_a_backward_workload(make_workload: MakeWorkload, right: type) -> None:
    workload = make_workload()
    names = [check.name for check in verify(right(workload), workload).checks]
    calls = ["second_call", "ones", "dependency", "large_scores", "result_kept", "repeat", "inputs"]
    assert names == [*FORM, "out", "out_slope", *calls]
    workload = make_workload(mode="backward")
    names = [check.name for check in verify(right(workload), workload).checks]
    gradients = ["dk_from_every_row", "dv_from_every_row"]
    compared = [name for tensor in ("out", "dq", "dk", "dv") for name in (tensor, f"{tensor}_slope")]
    assert names == [*FORM, *compared, *calls[:3], *gradients, *calls[3:]]


def test_rows_are_sampled_at_length(make_workload: MakeWorkload) -> None:
    workload = make_workload(seq_len=4096, num_heads=4, num_kv_heads=4, batch_size=1, pattern={"kind": "dense"})

    def chunked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        ).transpose(1, 2)

    verification = verify(chunked, workload)
    assert verification.passed, summary(verification)
    assert verification.sampled_rows is not None
    assert verification.sampled_rows < 200


def test_an_oracle_is_shared_and_survives_a_function_that_changes_its_inputs(
    make_workload: MakeWorkload, right: type
) -> None:
    workload = make_workload()
    oracle = Oracle(workload, seed=5)

    def scales_q_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = right(workload)(q, k, v)
        q.mul_(2)
        return out

    assert not verify(scales_q_in_place, workload, oracle=oracle).passed
    verification = verify(right(workload), workload, oracle=oracle)
    assert verification.passed, summary(verification)


def test_an_oracle_of_another_workload_is_refused(make_workload: MakeWorkload, right: type) -> None:
    workload = make_workload()
    with pytest.raises(ValueError, match="make one for this case"):
        verify(right(workload), workload, oracle=Oracle(make_workload(seq_len=96)))


def test_what_the_function_raises_comes_out(make_workload: MakeWorkload) -> None:
    def raises(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel"):
        verify(raises, make_workload())


def test_summary_names_the_first_failure_and_the_others() -> None:
    checks = (
        Check(name="shape", passed=True),
        Check(name="out", passed=False, error=0.31, tolerance=2e-6, where="batch 0, position 1024, head 3, dim 5"),
        Check(name="ones", passed=False, detail="all wrong"),
    )
    text = summary(Verification(checks=checks))
    assert text == "out: error 3.1e-01 > tolerance 2.0e-06 at batch 0, position 1024, head 3, dim 5 (and ones)"
    assert summary(Verification(checks=checks[2:])) == "ones: all wrong"
    assert summary(Verification(checks=checks[:1])) == "1 checks passed"


def test_a_checksum_is_the_same_in_pieces(monkeypatch):
    x = torch.randn(3, 7, 5, 8).bfloat16()
    whole = digest(x)
    monkeypatch.setattr(call, "PIECE", 24)
    assert torch.equal(digest(x), whole)
    assert whole.shape == (3, 7, 5)
    x[2, 6, 4, 7] += 1
    assert torch.nonzero(digest(x) != whole).tolist() == [[2, 6, 4]]


@pytest.mark.parametrize("shape", [(3, 7, 5, 8), (7, 5, 8), (9,), (0, 4)])
def test_values_that_are_not_finite_are_counted_in_pieces(monkeypatch, shape):
    monkeypatch.setattr(call, "PIECE", 24)
    out = torch.zeros(shape)
    if out.numel():
        out.view(-1)[[0, -1]] = torch.tensor([torch.nan, -torch.inf])
    check = form_checks(out, shape, torch.float32, out.device)[-1]
    assert (check.name, check.passed) == ("finite", not out.numel())
    assert out.numel() == 0 or check.detail.startswith(f"2 of {out.numel()} values")


def test_what_is_sampled_of_every_batch_is_no_copy():
    workload = Workload.model_validate(
        {"pattern": {"kind": "dense"}, "batch_size": 2, "seq_len": 9, "num_heads": 1, "num_kv_heads": 1, "head_dim": 4}
    )
    oracle = Oracle(workload)
    q = oracle.inputs[0]
    assert oracle.chosen(q).data_ptr() == q.data_ptr()
