"""The kernels of split keys through Triton's interpreter, against the formula in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its interpreter runs these kernels on the CPU")

from dilabench.kernels.split_keys import KeyBranches, split_for
from dilabench.patterns.answers import StridedSegments

DTYPES = ("float32", "float16", "bfloat16")
KINDS = ("dense", "causal", "window", "band", "dilated", "dilated causal", "dilated window")


@pytest.fixture(scope="module", params=DTYPES)
def errors(
    request: pytest.FixtureRequest, interpreted: Callable[..., dict[str, list[float]]]
) -> dict[str, list[float]]:
    return interpreted("kernels/interpreted_split_keys.py", [request.param, "3"])


@pytest.mark.parametrize("held", ["batch", "lengths", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_the_formula(errors: dict[str, list[float]], kind: str, held: str) -> None:
    """The interpreter cuts bfloat16 off where a GPU rounds."""
    found = errors[f"{kind}, {held}"]
    assert len(found) == 3
    assert max(found) <= 1, found


def segments(*branches: tuple[int, int, tuple[int, ...]]) -> list[list[StridedSegments]]:
    """Of each head, by length, rate and the residue of each head."""
    heads = len(branches[0][2])
    return [[StridedSegments(length, rate, of[head]) for length, rate, of in branches] for head in range(heads)]


def test_heads_of_a_group_are_one_tile_only_with_the_same_keys() -> None:
    cpu = torch.device("cpu")
    assert KeyBranches.of(segments((64, 1, (0, 0, 0, 0))), 2, cpu).heads == 2
    assert KeyBranches.of(segments((64, 2, (0, 0, 1, 1))), 2, cpu).heads == 2
    assert KeyBranches.of(segments((64, 1, (0,) * 4), (64, 2, (0, 1, 0, 1))), 2, cpu).heads == 1


def test_keys_that_a_row_reads_at_most() -> None:
    branches = KeyBranches.of(segments((64, 1, (0, 0)), (512, 4, (0, 1))), 1, torch.device("cpu"))
    assert branches.most_keys(4096, None) == 128
    assert branches.most_keys(40, None) == 40
    assert branches.most_keys(4096, 16) == 16


@pytest.mark.parametrize("programs", [1, 8, 512, 10_000])
def test_keys_are_split_until_the_gpu_is_full(programs: int) -> None:
    _, splits, items = split_for(programs, 4, 2**17, 128, 2, 132)
    assert items == 1
    assert splits == 1 or programs * (splits - 1) < 4 * 264
    assert programs * splits >= 132
