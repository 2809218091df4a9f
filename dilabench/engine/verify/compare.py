"""One comparison: the largest error, its tolerance, and where it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from dilabench.engine.verify.oracle.slope import Slope, no_better_than, slope, slope_limit
from dilabench.engine.verify.oracle.tolerance import Expected, errors, rows_last
from dilabench.record import Check

# (name, positions) of each axis of a compared tensor; None: the index itself is the position. No name: the axis is not
# printed.
Axes = Sequence[tuple[str, Tensor | None]]


def compare(name: str, actual: Tensor, expected: Expected, axes: Axes, detail: str | None = None) -> Check:
    """The check that `actual` is `expected` within tolerance. NaN and infinities out of place fail it."""
    if actual.shape != expected.value.shape:
        text = f"shape {list(actual.shape)} where {list(expected.value.shape)} is expected"
        return Check(name=name, passed=False, detail=text)
    if not actual.numel():
        return Check(name=name, passed=True, error=0.0, tolerance=expected.tolerance, detail="nothing to compare")
    error = errors(actual, expected.value, expected.size)
    wrong = ~torch.isfinite(error)
    place = error.masked_fill(wrong, torch.inf).argmax()
    of_place = [x.flatten()[place].double() for x in (error, actual, expected.value)]
    # Read from the device together: each read waits for it.
    largest, value, right, not_finite, at = torch.stack([*of_place, wrong.sum().double(), place.double()]).tolist()
    worst = int(at)
    if not_finite:
        return Check(
            name=name,
            passed=False,
            tolerance=expected.tolerance,
            where=locate(worst, error.shape, axes),
            detail=f"{int(not_finite)} of {wrong.numel()} values are not finite as expected, here {value:g} instead of "
            f"{right:g}",
        )
    passed = largest <= expected.tolerance
    if not passed:
        detail = f"{value:g} instead of {right:g}" + (f"; {detail}" if detail else "")
    return Check(
        name=name,
        passed=passed,
        error=largest,
        tolerance=expected.tolerance,
        where=locate(worst, error.shape, axes),
        detail=detail,
    )


def compare_both_ways(
    name: str, actual: Tensor, expected: Expected, axes: Axes, detail: str | None = None, terms: Slope | None = None
) -> Iterator[Check]:
    """`compare`, and where that passes, the bias rule: `name`_slope (slope.py). Too few rows have no slope.

    terms: of what `actual` is a sum over positions.
    """
    check = compare(name, actual, expected, axes, detail)
    yield check
    if not check.passed or not actual.numel():
        return
    found = slope_on(actual, expected)
    if terms is not None:
        found = no_better_than(found, terms)
    limit = slope_limit(found, expected.plain, expected.slope_floor)
    if limit == float("inf"):
        return
    off = abs(found.deviation)
    text = f"the regression on the oracle has slope {1 + found.deviation:.6g}, not 1"
    yield Check(
        name=f"{name}_slope", passed=off <= limit, error=off, tolerance=limit, detail=None if off <= limit else text
    )


def slope_on(actual: Tensor, expected: Expected) -> Slope:
    """The regression of a result of out's, k's or lse's shape on what is expected."""
    return slope(*rows_last(actual, expected.value, expected.size))


def agreement(name: str, first: Tensor, second: Tensor, tolerance: float, detail: str) -> Check:
    """The check that two results of the same call agree: max |difference| over max |first|."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return Check(name=name, passed=False, detail=f"{detail}: {list(second.shape)} {second.dtype}")
    if torch.equal(first, second):
        return Check(name=name, passed=True, error=0.0, tolerance=tolerance, detail=detail)
    error = float((first - second).abs().max()) / max(float(first.abs().max()), torch.finfo(first.dtype).tiny)
    # NaN compares as false.
    passed = error <= tolerance
    return Check(name=name, passed=passed, error=error if error == error else None, tolerance=tolerance, detail=detail)


def locate(place: Tensor | int, shape: Sequence[int], axes: Axes) -> str:
    """'batch 0, position 1024, head 3, dim 5' for an index into the flattened tensor."""
    # torch's own unravel_index imports half a second of symbolic shapes.
    index = np.unravel_index(int(place), tuple(shape))
    texts = []
    for (axis, positions), at in zip(axes, index, strict=True):
        if axis:
            texts.append(f"{axis} {int(at) if positions is None else int(positions[int(at)])}")
    return ", ".join(texts)
