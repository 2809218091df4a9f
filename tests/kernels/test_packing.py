"""Documents in one launch per pass, through Triton's interpreter: each as it comes out by itself, in float64."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its interpreter runs these kernels on the CPU")

from dilabench.kernels.fused.packing import ListRequest, Packing
from dilabench.kernels.fused.residue_plan import document_plan, residue_plan
from dilabench.kernels.fused.tile_tables import TileTables, tile_tables

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


def test_lists_of_documents_are_kept_apart_from_those_of_a_single_sequence() -> None:
    """Of the same tails, made at once for both."""
    branches, about, x = ((64,), (1,)), (1, 1, True), torch.empty(0)
    (alone,) = residue_plan(*branches, 200, *about).groups
    (group,) = document_plan(*branches, (0, 150, 200), *about).groups
    request = ListRequest(group, 16, 16)
    for _ in range(2):
        assert isinstance(tile_tables(alone, 16, 16, True, False, x.device), TileTables)
        (lists,) = Packing((0, 150, 200)).lists((request,), True, x).of_groups
        assert lists.spans[:4, :2].tolist() == [[0, 64], [64, 64], [128, 22], [150, 50]]


@pytest.mark.parametrize("causal", [False, True])
def test_launches_of_one_packing_serve_every_other(causal: bool) -> None:
    """What kernels are compiled for, and how many programs there are, do not hang on where documents end."""
    plans, shapes = set(), set()
    for seed in range(20):
        random = Random(seed)
        bounds = (0, 1200, *sorted(random.sample(range(1201, 4000), 33)), 4000)
        plan = document_plan((256, 1024), (1, 2), bounds, 4, 2, causal)
        plans.add(id(plan))
        requests = tuple(ListRequest(group, 64, 64, by_key) for group in plan.groups for by_key in (False, True))
        lists = Packing(bounds).lists(requests, causal, torch.empty(0))
        shapes.add((lists.spans.shape, *(each.visits.shape for each in lists.of_groups)))
        for request, each in zip(requests, lists.of_groups, strict=True):
            listed = int(each.spans[0, 6])
            visited = each.visits[each.visits[:, 1] < listed - 1]
            # Each item of each super-segment once, no more than there is room for.
            assert len(visited) == len(visited.unique(dim=0)) <= request.most_visits
    assert len(plans) == len(shapes) == 1
