"""Documents in one launch per pass, through Triton's interpreter: each as it comes out by itself, in float64."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from random import Random

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its interpreter runs these kernels on the CPU")

from dilabench.contracts import BuildContext
from dilabench.impls.fused import Packings
from dilabench.kernels.fused.packing import ListRequest, Packing
from dilabench.kernels.fused.residue_plan import document_plan, residue_plan
from dilabench.kernels.fused.tile_tables import TileTables, tile_tables
from dilabench.workload.spec import Workload

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


def random_bounds(seed: int, tokens: int = 65536) -> tuple[int, ...]:
    random = Random(seed)
    return (0, *sorted(random.sample(range(1, tokens), random.randint(18, 34))), tokens)


def test_any_number_of_packings_takes_the_same_memory() -> None:
    """Plans, tables and lists of packings that were are gone, or those of all."""
    workload = Workload.model_validate(
        {
            "pattern": {"kind": "dilated", "segment_lengths": (2048, 8192), "dilation_rates": (1, 4)},
            "batch_size": 1,
            "seq_len": 65536,
            "layout": "packed",
            "cu_seqlens": (0, 65536),
            "num_heads": 8,
            "num_kv_heads": 8,
            "head_dim": 64,
            "dtype": "bfloat16",
            "mode": "both",
        }
    )
    packings, x = Packings(workload, BuildContext(device=torch.device("cpu"))), torch.empty(0)
    requests: dict[int, tuple[ListRequest, ...]] = {}

    def lists_of(seed: int) -> None:
        computation = packings.of(random_bounds(seed))
        assert computation.packing is not None
        made = requests.setdefault(
            id(computation.plan), tuple(ListRequest(group, 64, 64) for group in computation.plan.groups)
        )
        computation.packing.lists(made, workload.causal, x)

    tracemalloc.start()
    try:
        for seed in range(150):
            lists_of(seed)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        for seed in range(150, 450):
            lists_of(seed)
        gc.collect()
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 32 << 10
    assert peak - before < 4 << 20
