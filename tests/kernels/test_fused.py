"""Fused and merge kernels through Triton's interpreter, against one float64 softmax over the multiset of keys."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("triton", reason="Triton is not installed: its interpreter runs these kernels on the CPU")

# The interpreter takes most of a minute for all cases at once.
pytestmark = pytest.mark.slow
PARTS = {"out", "lse", "dq", "dk", "dv", "empty rows", "out with a null mass", "lse with a null mass"}
FUSED = [
    "plain",
    "causal",
    "causal groups",
    "wide query tile",
    "wide key tile",
    "short last segment",
    "segment beyond N",
    "uncovered rows",
    "gqa head",
    "gqa blocked",
    "gqa blocked kv",
    "equal segments",
    "grouped heads",
    "grouped heads, causal, apart",
    "window",
    "window, causal",
    "window of branches together",
    "window of branches together, causal",
    "window, rates beside segments",
    "window, grouped heads",
    "softcap",
    "softcap, causal",
    "softcap, window",
    "softcap, grouped heads",
]


@pytest.fixture(scope="module")
def errors(interpreted: Callable[..., dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    return interpreted("kernels/interpreted_cases.py")


@pytest.mark.parametrize("case", FUSED)
def test_float32_matches_the_union_softmax(errors: dict[str, dict[str, float]], case: str) -> None:
    assert set(errors[case]) == PARTS
    assert errors[case]["empty rows"] == 0.0
    assert max(errors[case].values()) < 5e-6, errors[case]


@pytest.mark.parametrize("case", ["half", "two tiles of columns", "softcap, half"])
def test_half_precision_stays_within_twice_its_rounding(errors: dict[str, dict[str, float]], case: str) -> None:
    got = errors[case]
    assert max(got["out"], got["lse"]) < 1e-3, got
    assert max(got["dq"], got["dk"], got["dv"]) < 2e-3, got


@pytest.mark.parametrize("case", ["merge one group", "merge all groups"])
def test_merge_kernel_equals_the_plain_merge(errors: dict[str, dict[str, float]], case: str) -> None:
    assert errors[case]["empty"] > 0, "the case must hold rows that are empty on both sides"
    assert max(errors[case]["out"], errors[case]["lse"]) < 1e-6, errors[case]
