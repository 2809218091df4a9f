"""float32 in three bfloat16 parts, as kernels read it on a GPU, against float64: what they add up to, kernels in
Triton's interpreter, and the Hopper kernel, whose own code runs on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytestmark = pytest.mark.slow
Errors = dict[str, dict[str, float]]
# How many launches there are: one for each group of branches.
HOPPER = {
    "several steps": 1,
    "merged": 2,
    "one step": 1,
    "odd length, columns added": 1,
    "window, left over": 2,
    "two products of columns": 1,
    "128 columns": 2,
}


@pytest.fixture(scope="module")
def errors(interpreted: Callable[..., Errors]) -> Errors:
    pytest.importorskip("triton", reason="Triton is not installed: its interpreter runs these kernels on the CPU")
    return interpreted("kernels/interpreted_parts.py")


def test_parts_add_up_to_the_number(errors: Errors) -> None:
    """Of a largest number too, whose first part would round to infinity; infinity and NaN stay what they are."""
    assert errors["split"]["relative"] < 2**-24, "less than its last bit"
    assert errors["split"] | {"relative": 0.0} == {"relative": 0.0, "special": 0.0, "padding": 0.0}


@pytest.mark.parametrize(
    "case",
    ["causal", "two groups", "uncovered rows", "columns added", "two tiles of columns", "window, uncovered rows"],
)
def test_kernels_are_as_exact_as_float32(errors: Errors, case: str) -> None:
    got = errors[case]
    assert {"out", "dq", "dk", "dv", "lse with a null mass"} < set(got)
    assert got["empty rows"] == 0.0
    assert max(got.values()) < 1e-6, got


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", HOPPER)
def test_the_hopper_kernel_is_as_exact_as_float32(errors: Errors, case: str, causal: bool) -> None:
    got = errors[f"{case}, {causal}"]
    assert got.pop("launches") == HOPPER[case]
    assert max(got.values()) < 1e-6, got
