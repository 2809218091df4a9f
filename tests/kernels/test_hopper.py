"""Dilated and block-sparse attention through the Hopper kernels, whose own code runs on a CPU (`gluon_on_cpu`): results
and gradients against float64. Their machine code is looked at in `test_sm90_compile`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.conftest import slow

Errors = Callable[[str, bool], dict[str, float]]
# How many launches of each pass there are: forward of each group of branches; backward of each group that the kernel
# takes, for some heads after the other.
DILATED = {
    "one group": (1, 2),
    "two groups, one in two passes": (1, 2),
    "uncovered rows": (2, 8),
    "odd length": (1, 1),
    "tokens left over": (1, 1),
    "rates beside segments, left over": (2, 4),
    "rates beside segments, boxes, left over": (0, 1),
    "rates beside segments, boxes, padded": (0, 1),
    "batch, left over": (1, 1),
    "batch, padded": (1, 1),
    "batch, rates beside segments, left over": (2, 2),
    "batch, window, left over": (2, 2),
    "window": (1, 1),
    "window, left over": (2, 2),
    "window, causal, boxes, padded": (0, 2),
    "growing logits": (2, 2),
    "two tiles of columns": (2, 2),
    "columns of zeros": (0, 2),
    "grouped heads": (2, 2),
    "half tiles": (1, 1),
    "half tiles, tokens left over": (2, 2),
}
# Head dims up to 32 go backward in two passes.
NARROW = {
    "narrow, several steps": (1, 0),
    "narrow, merged": (2, 0),
    "narrow, tokens left over": (1, 0),
    "narrow, rates beside segments, left over": (2, 0),
    "narrow, growing logits": (2, 0),
    "narrow, columns added": (1, 0),
    "narrow, window": (1, 0),
    "narrow, window, left over": (2, 0),
    "narrow, summed apart": (2, 2),
    "narrow, columns added, tokens left over": (1, 1),
    "narrow, padded": (1, 0),
    "narrow, batch, left over": (1, 0),
    "narrow, grouped heads, tokens left over": (1, 0),
}
# Batches whose second item holds NaN, in every kind of descriptor; two runs each.
POISONED = {
    "batch, left over, poisoned": (2, 0, 2),
    "batch, window, left over, poisoned": (4, 0, 4),
    "rates beside segments, boxes, left over, poisoned": (0, 0, 2),
    "narrow, batch, left over, poisoned": (0, 2, 0),
}
# Branches by themselves, whose merge weights are detached.
APART = {
    "uncovered rows, apart": (2, 0, 8),
    "tokens left over, apart": (2, 0, 2),
    "batch, window, left over, apart": (2, 0, 2),
    "narrow, merged, apart": (0, 2, 0),
    "narrow, rates beside segments, left over, apart": (0, 2, 0),
}
# Documents in one launch of each pass, in a process of their own.
DOCUMENTS = {
    ("documents", True): (1, 0, 2),
    ("narrow, documents", False): (0, 1, 0),
    ("documents, window", False): (2, 0, 2),
    ("documents, boxes", True): (0, 0, 1),
    ("documents, apart", False): (2, 0, 4),
    ("narrow, documents, apart", True): (0, 2, 0),
}
BLOCKS = {"one mask": 1, "mask per head": 1, "shared tiles": 1, "one range": 0, "two ranges": 0}
RESULTS = {"out", "lse", "dq", "dk", "dv"}
CASES = [*DILATED, *NARROW, *POISONED, *APART, *BLOCKS]
# What others have as well, in another combination: slow, and under one mask.
COMBINED = {
    "odd length",
    "rates beside segments, boxes, padded",
    "batch, left over",
    "batch, padded",
    "batch, rates beside segments, left over",
    "window",
    "two tiles of columns",
    "narrow, several steps",
    "narrow, columns added",
    "narrow, window",
    "narrow, padded",
    "narrow, batch, left over",
    "narrow, columns added, tokens left over",
    "rates beside segments, boxes, left over, poisoned",
    "batch, window, left over, poisoned",
    "batch, window, left over, apart",
    "tokens left over, apart",
    "narrow, rates beside segments, left over, apart",
    "window, causal, boxes, padded",
    "one range",
}
# What others have with a further property, or two of these properties at once, whose kernels other cases launch as
# well: slow, too.
LATER = {
    "uncovered rows",
    "tokens left over",
    "one mask",
    "rates beside segments, left over",
    "batch, window, left over",
    "columns of zeros",
    "half tiles, tokens left over",
    "narrow, rates beside segments, left over",
    "narrow, growing logits",
    "narrow, window, left over",
    "narrow, summed apart",
    "narrow, grouped heads, tokens left over",
    "two ranges",
}
# Under one mask, in turns; the other is slow.
IN_TURNS = [(case, index % 2 == 1) for index, case in enumerate(CASES)]
FIRST = [each for each in IN_TURNS if each[0] not in COMBINED | LATER]
OTHERS = [each for each in IN_TURNS if each not in FIRST]
OTHERS += [(case, not causal) for case, causal in IN_TURNS if case not in COMBINED]


def both_masks(cases: Iterable[str]) -> list[object]:
    """Arguments of tests."""
    some = set(cases)
    others = (slow(*other) for other in OTHERS if other[0] in some)
    return [*(first for first in FIRST if first[0] in some), *others]


def run(interpreted: Callable[..., dict[str, dict[str, float]]], cases: list[tuple[str, bool]]) -> Any:
    pytest.importorskip("triton", reason="Triton is not installed: its interpreter makes what the launches are given")
    return interpreted("kernels/interpreted_hopper.py", arguments=map(json.dumps, cases))


@pytest.fixture(scope="module")
def first(interpreted: Callable[..., dict[str, dict[str, float]]]) -> object:
    return run(interpreted, [("null mass", False), *FIRST])


@pytest.fixture(scope="module")
def others(interpreted: Callable[..., dict[str, dict[str, float]]]) -> object:
    return run(interpreted, OTHERS)


@pytest.fixture
def errors(request: pytest.FixtureRequest) -> Errors:
    """Of a case and a mask."""

    def of(case: str, causal: bool) -> dict[str, float]:
        found = request.getfixturevalue("others" if (case, causal) in OTHERS else "first")
        return found[json.dumps((case, causal))]

    return of


def launches(got: dict[str, float]) -> tuple[float, ...]:
    """Forward, forward of narrow heads, and backward."""
    return tuple(got.pop(f"{kernel} launches") for kernel in ("forward", "narrow_forward", "backward"))


def assert_exact(got: dict[str, float]) -> None:
    """But for the rounding of float16 results, and of lse to float32."""
    assert max(error for name, error in got.items() if "lse" in name) < 2e-6, got
    assert max(got.values()) < 5e-4, got


@pytest.mark.parametrize(("case", "causal"), both_masks(DILATED | NARROW))
def test_dilated_attention(errors: Errors, case: str, causal: bool) -> None:
    got = errors(case, causal)
    forward, backward = (DILATED | NARROW)[case]
    assert launches(got) == ((0, forward) if case in NARROW else (forward, 0)) + (backward,)
    assert set(got) == RESULTS
    assert_exact(got)


@pytest.mark.parametrize(("case", "causal"), both_masks(POISONED))
def test_batch_items_do_not_reach_into_each_other(errors: Errors, case: str, causal: bool) -> None:
    got = errors(case, causal)
    assert launches(got) == POISONED[case]
    assert set(got) == RESULTS
    assert not any(got.values()), got


@pytest.mark.parametrize(("case", "causal"), both_masks(APART))
def test_detached_merge_weights(errors: Errors, case: str, causal: bool) -> None:
    got = errors(case, causal)
    assert launches(got) == APART[case]
    assert set(got) == RESULTS
    assert_exact(got)


@pytest.mark.parametrize("cases", [[*DOCUMENTS][:2], slow([*DOCUMENTS][2:])], ids=["first", "others"])
def test_documents(interpreted: Callable[..., dict[str, dict[str, float]]], cases: list[tuple[str, bool]]) -> None:
    for case, got in run(interpreted, cases).items():
        assert launches(got) == DOCUMENTS[tuple(json.loads(case))], case
        assert set(got) == RESULTS
        assert_exact(got)


def test_a_null_mass(errors: Errors) -> None:
    got = errors("null mass", False)
    assert launches(got) == (1, 0, 0)
    assert_exact(got)


@pytest.mark.parametrize(("case", "causal"), both_masks(BLOCKS))
def test_block_sparse_attention(errors: Errors, case: str, causal: bool) -> None:
    got = errors(case, causal)
    assert launches(got) == (1, 0, BLOCKS[case])
    assert set(got) == RESULTS
    assert_exact(got)
