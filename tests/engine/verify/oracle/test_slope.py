"""The bias rule: rounding has slope 1, a factor has not, in every dtype."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dilabench.engine.verify import Oracle, summary, verify
from dilabench.engine.verify.oracle.slope import MIN_ROWS, NO_SLOPE, Slope, slope, slope_limit
from dilabench.workload.spec import Workload
from tests.conftest import slow
from tests.engine.verify.conftest import failing

MakeWorkload = Callable[..., Workload]


@pytest.mark.parametrize(
    ("dtype", "factor"), [("bfloat16", 1.01), slow("bfloat16", 0.99), slow("float16", 1.002), ("float32", 1 + 3e-6)]
)
def test_a_factor_below_the_tolerance_of_single_values_is_found(
    make_workload: MakeWorkload, right: type, dtype: str, factor: float
) -> None:
    workload = make_workload(dtype=dtype)
    function = right(workload)
    assert verify(function, workload).passed
    wrong = verify(lambda q, k, v: (function(q, k, v).double() * factor).to(q.dtype), workload)
    assert "out_slope" in failing(wrong) or "out" in failing(wrong)


@pytest.mark.parametrize("dtype", [*map(slow, ("float64", "float32", "float16")), "bfloat16"])
def test_right_ones_pass_with_every_seed(make_workload: MakeWorkload, right: type, dtype: str) -> None:
    workload = make_workload(mode="both", dtype=dtype, seq_len=64, batch_size=1)
    for seed in range(4):
        verification = verify(right(workload), workload, oracle=Oracle(workload, seed=seed))
        assert verification.passed, summary(verification)


def test_the_slope_of_noise_is_no_finding() -> None:
    value = torch.randn(4, 200, 2, 8, dtype=torch.float64) * 1e-17
    found = slope(torch.zeros_like(value), value, torch.ones_like(value))
    assert found.deviation == pytest.approx(-1)
    assert slope_limit(found, NO_SLOPE, 0.0) == float("inf")


def test_few_rows_say_nothing() -> None:
    assert slope_limit(Slope(0.5, 0.0, MIN_ROWS - 1), NO_SLOPE, 0.0) == float("inf")
    assert slope_limit(Slope(0.5, 0.01, MIN_ROWS), Slope(-0.1, 0.02, 100), 0.3) == pytest.approx(0.2 + 0.12 + 0.3)


def test_infinite_values_on_both_sides_do_not_count() -> None:
    value = torch.randn(1, 100, 1, 4, dtype=torch.float64)
    value[0, 3] = -torch.inf
    assert slope(value.clone(), value, torch.ones_like(value)).deviation == 0


def test_weights_of_ones_are_held_tighter_than_out(make_workload: MakeWorkload, right: type) -> None:
    workload = make_workload(dtype="bfloat16", pattern={"kind": "dense"})
    function = right(workload)

    def short_of_a_percent(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(q, k, v)
        return torch.where(v[..., :1].mean(1, keepdim=True) == 1, out * 0.985, out)

    assert failing(verify(short_of_a_percent, workload)) >= {"ones"}
