"""Documents in one launch per pass, through Triton's interpreter: each as it comes out by itself, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("triton", reason="Triton is not installed: its interpreter runs these kernels on the CPU")

PARTS = {"out", "lse", "dq", "dk", "dv", "empty rows"}
AT_ONCE = 50


@pytest.mark.parametrize(
    ("first", "last"),
    [
        (0, 6),
        *(pytest.param(first, first + AT_ONCE, marks=pytest.mark.slow) for first in range(0, 300, AT_ONCE)),
    ],
)
def test_random_packings(interpreted: Callable[..., dict[str, dict[str, float]]], first: int, last: int) -> None:
    """Lengths from 1 up; masks, windows, offsets, groups of heads, detached merges and tiles as they fall."""
    found = interpreted("kernels/interpreted_packings.py", arguments=(str(first), str(last)))
    assert len(found) == last - first
    for number, errors in found.items():
        assert set(errors) == PARTS
        assert errors["empty rows"] == 0.0, number
        assert max(errors.values()) < 5e-6, (number, errors)
