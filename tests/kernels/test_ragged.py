"""Sequences that end inside a tile: they cost what their pairs cost, and give what the definition says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from dilabench.kernels.fused.residue_plan import residue_plan
from dilabench.kernels.fused.tile_tables import tile_tables
from dilabench.kernels.tuning import Direction, select_kernel

SEGMENTS, RATES, HEADS = (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16), 8
# Each beside the length of whole segments, or of whole halves of them, that comes next below it.
RAGGED = [(50_000, 49_152), (100_000, 98_304), (200_000, 196_608)]
PARTS = {"out", "lse", "dq", "dk", "dv", "empty rows", "out with a null mass", "lse with a null mass"}
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward_query", "backward_key")


@dataclass(frozen=True)
class Cost:
    """What the kernels of one pass do, all heads together. longest: keys or queries that one program visits."""

    pairs: int
    programs: int
    longest: int
    launches: int


def cost(length: int, causal: bool, direction: Direction, head_dim: int) -> Cost:
    plan = residue_plan(SEGMENTS, RATES, length, HEADS, HEADS, causal)
    pairs = programs = longest = 0
    for group in plan.groups:
        shape = select_kernel(direction, head_dim, causal=causal, largest_tile=group.largest_tile).tiles
        by_key = direction == "backward_key"
        own, other = (shape.block_n, shape.block_m) if by_key else (shape.block_m, shape.block_n)
        tables = tile_tables(group, own, other, causal, by_key, torch.device("cpu"))
        work = tables.items[..., 3:].sum(-1).numpy()
        for variant, times in enumerate((group.full_supers, group.n_supers - group.full_supers)):
            for kind in group.head_kind:
                pairs += times * int(work[variant, kind].sum()) * own * other
                programs += times * int((work[variant, kind] > 0).sum())
        longest = max(longest, int(work.max()) * other)
    return Cost(pairs, programs, longest, len(plan.groups))


def multiset_pairs(length: int, causal: bool) -> int:
    """Pairs of the definition: every branch's segments, the last ones shorter."""
    total = 0
    for segment, rate in zip(SEGMENTS, RATES, strict=True):
        for head in range(HEADS):
            for start in range(0, length, segment):
                rows = -(-(min(segment, length - start) - head % rate) // rate)
                total += rows * (rows + 1) // 2 if causal else rows * rows
    return total


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("ragged", "whole"), RAGGED)
def test_a_ragged_length_costs_what_its_pairs_cost(
    ragged: int, whole: int, causal: bool, direction: Direction, head_dim: int
) -> None:
    got, beside = (cost(length, causal, direction, head_dim) for length in (ragged, whole))
    per_pair, beside_per_pair = (c.pairs / multiset_pairs(n, causal) for c, n in ((got, ragged), (beside, whole)))
    assert per_pair < 1.02 * beside_per_pair
    assert got.longest == beside.longest
    assert got.launches == beside.launches
    # Every class has a last tile, so the ends of the shortest length weigh most.
    assert got.programs < 1.05 * beside.programs * ragged / whole


@pytest.mark.parametrize("tile", [16, 64])
def test_the_last_segment_has_tiles_for_its_own_rows_only(tile: int) -> None:
    group = residue_plan(SEGMENTS, RATES, 50_000, HEADS, HEADS, True, cut=((0, 1, 2, 3, 4),)).groups[0]
    tables = tile_tables(group, tile, tile, True, False, torch.device("cpu"))
    last_rows = 50_000 % 32768 // 16
    assert group.tail_rows == last_rows
    tiles = tables.items[1, 0][tables.items[1, 0, :, 0] >= 0, 1]
    assert tiles.max() + 1 == -(-last_rows // tile)


CASES = (
    "batch of two, causal",
    "batch of two, not causal",
    "two groups, causal",
    "wide key tile, not causal",
    "shared keys, causal",
    "uncovered rows, not causal",
    "shorter than a tile, causal",
    "shorter than a tile, not causal",
    "odd length, causal",
    "odd length, not causal",
    "three tokens left, causal",
    "three tokens left, not causal",
    "odd length, uncovered rows, causal",
    "odd segments, causal",
    "odd segments, not causal",
    "rates beside segments, causal",
    "rates beside segments, not causal",
    "rates beside segments, batch, causal",
    "rates beside segments, batch, not causal",
    "head dim 24, not causal",
)


@pytest.fixture(scope="module")
def errors(interpreted: Callable[..., dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    pytest.importorskip("triton", reason="Triton is not installed: its interpreter runs these kernels on the CPU")
    return interpreted("kernels/interpreted_ragged_cases.py")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_ragged_lengths_match_the_union_softmax(errors: dict[str, dict[str, float]], case: str) -> None:
    got = errors[case]
    assert set(got) == PARTS
    assert got["empty rows"] == 0.0
    assert max(got.values()) < 5e-6, got


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_batch_items_do_not_reach_into_each_other(errors: dict[str, dict[str, float]], causal: bool) -> None:
    got = errors[f"poisoned, {causal}"]
    assert set(got) == {"out", "lse", "dq", "dk", "dv"}
    assert not any(got.values()), got
