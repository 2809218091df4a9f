"""Kernels over blocks selected per token, through Triton's interpreter against float64 and against the oracle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its interpreter runs these kernels on the CPU")

from dilabench.kernels.selected import tiles
from dilabench.kernels.selected.attention import selected_forward
from dilabench.kernels.tuning import TileConfig

Errors = Mapping[str, Mapping[str, float]]

QUICK = ("by query, neighbours", "documents gathered", "many blocks", "shares")
MORE = (
    "by query, one token",
    "by query, window",
    "by query, window both ways",
    "by query, window ahead",
    "gathered, window",
    "gathered, window over long blocks",
    "documents gathered, window",
    "documents by query, window",
    "single tokens, window",
    "by query, some united",
    "by query, few united, so none",
    "by query, enough united",
    "by query, some of a sample united",
    "by query, some united, two heads",
    "documents by query, some united",
    "by query, many neighbours",
    "by query, several parts of a group",
    "by query, stretches of a block",
    "by query, blocks that tiles do not divide",
    "by query, short blocks in a tile",
    "gathered",
    "gathered, everything visible",
    "gathered, wide group",
    "gathered, long blocks",
    "gathered, long blocks, everything visible",
    "gathered, blocks that are no power of two",
    "gathered, long blocks that tiles do not divide",
    "gathered, parts of the tokens",
    "gathered, parts that share lists",
    "gathered, shared lists",
    "documents by query",
    "documents by query, everything visible",
    "documents gathered, everything visible",
    "single tokens",
    "single tokens, parts",
    "single tokens of documents",
    "more places than blocks",
    "one place",
    "padded head dim, views of one tensor",
    "by query, views of one tensor",
    "by query, part of a larger softmax",
    "gathered, part of a larger softmax",
)
# Relative, of out; of gradients twice as much.
HALF = {"half by query": 1e-3, "half gathered": 1e-3, "half of single tokens": 1e-3, "bfloat16 gathered": 5e-3}
WORKLOADS = ("implementation", "implementation, packed", "implementation, single tokens")
SEEDS = 24


def check(found: Mapping[str, float], tolerance: float = 4e-6) -> None:
    errors = dict(found)
    assert errors.pop("empty rows", 0.0) == 0.0, found
    errors.pop("number of empty rows", None)
    assert max(errors.values()) < tolerance, found


@pytest.fixture(scope="module")
def quick(interpreted: Callable[..., Errors]) -> Errors:
    return interpreted("kernels/interpreted_token_cases.py", "-W", "ignore::RuntimeWarning", arguments=QUICK)


@pytest.fixture(scope="module")
def found(interpreted: Callable[..., Errors]) -> Errors:
    names, errors = (*MORE, *HALF, *WORKLOADS), {}
    for first in range(0, len(names), 6):
        some = names[first : first + 6]
        errors |= interpreted("kernels/interpreted_token_cases.py", "-W", "ignore::RuntimeWarning", arguments=some)
    return errors


@pytest.mark.parametrize("case", QUICK)
def test_float32_and_lists(quick: Errors, case: str) -> None:
    if "number of empty rows" in quick[case]:
        assert quick[case]["number of empty rows"] > 0, "the case must hold rows that see nothing"
        check(quick[case])
    else:
        assert set(quick[case].values()) == {0.0}


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE)
def test_float32(found: Errors, case: str) -> None:
    assert found[case]["number of empty rows"] > 0, "the case must hold rows that see nothing"
    check(found[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", HALF)
def test_half_precision(found: Errors, case: str) -> None:
    check(found[case], 2 * HALF[case])
    assert found[case]["out"] < HALF[case]
    assert found[case]["lse"] < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("case", WORKLOADS)
def test_the_implementation_equals_the_oracle(found: Errors, case: str) -> None:
    check(found[case])


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SEEDS, 8))
def test_random_selections(interpreted: Callable[..., Errors], first: int) -> None:
    seeds = [str(seed) for seed in range(first, first + 8)]
    for errors in interpreted(
        "kernels/interpreted_token_cases.py", "-W", "ignore::RuntimeWarning", arguments=seeds
    ).values():
        check(errors, 1e-5)


def tensors(**changes: Any) -> dict[str, Any]:
    q, k = torch.zeros(1, 40, 4, 16), torch.zeros(1, 40, 2, 16)
    indices = torch.zeros(1, 40, 2, 3, dtype=torch.int32)
    return {"q": q, "k": k, "v": k, "indices": indices, "block": 16, "causal": True, "scale": 0.25} | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": torch.zeros(1, 40, 3, 16), "v": torch.zeros(1, 40, 3, 16)}, "H a multiple of K"),
        ({"v": torch.zeros(1, 41, 2, 16)}, r"must be \[B, N, H, D\]"),
        ({"cu_seqlens": torch.tensor([0, 40])}, r"with cu_seqlens \[T, H, D\]"),
        ({"indices": torch.zeros(1, 40, 2, 3)}, "must be int32"),
        ({"indices": torch.zeros(1, 40, 1, 3, dtype=torch.int32)}, "must be int32 of shape"),
        ({"block": 24}, "block_size 24 is neither 1 nor a multiple of 16; use 32"),
        ({"block": 8192}, "block_size 8192 is not between 1 and 4096"),
        ({"scale": -1.0}, "scale -1.0 must be positive"),
        ({"block": 1, "form": "gathered"}, "have no gathered form"),
        ({"form": "fused"}, "form 'fused' must be"),
        ({"q": torch.zeros(1, 40, 4, 16, dtype=torch.float64)}, "must be bfloat16, float16 or float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        selected_forward(**tensors(**changes))


def test_without_indices_nothing_is_seen() -> None:
    out, lse = selected_forward(**tensors(indices=torch.zeros(1, 40, 2, 0, dtype=torch.int32)))
    assert not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize(
    ("group", "slots", "rows", "shape"),
    [
        (16, 16, 16, (1, 16, 1)),
        (4, 16, 16, (4, 4, 1)),
        (1, 16, 16, (16, 1, 1)),
        (6, 16, 16, (2, 8, 1)),
        (128, 16, 16, (1, 64, 2)),
        (16, 16, 64, (4, 16, 1)),
        (1, 16, 64, (32, 2, 1)),
        (2, 16, 128, (32, 4, 1)),
        (1, 100, 16, (8, 2, 1)),
        (4, 2048, 16, (1, 16, 1)),
    ],
)
def test_rows_of_a_tile_cover_a_group(group: int, slots: int, rows: int, shape: tuple[int, int, int]) -> None:
    found = tiles.query_rows(group, slots, TileConfig(rows, 64, 4, 2))
    assert found == shape
    assert found.heads * found.parts >= group
    assert found.queries * found.heads >= 16


def test_tiles_of_one_token_are_padded() -> None:
    assert tiles.query_rows(4, 16, TileConfig(16, 64, 4, 2), most_queries=1) == (1, 16, 1)


@pytest.mark.parametrize("dim", [16, 64, 128, 256])
@pytest.mark.parametrize("block", [1, 16, 64, 128, 4096])
def test_every_shape_has_a_form_and_tiles(block: int, dim: int) -> None:
    for itemsize in (2, 4):
        for kernel in tiles.RULES.keys() - {"union_forward", "union_gradient"}:
            assert tiles.tiles_of(kernel, 16, block, dim, itemsize).block_n >= 16
        for group in (1, 8, 16, 128):
            forms = {tiles.select_form(direction, group, block, dim, itemsize) for direction in ("forward", "gradient")}
            assert forms <= {"query", "gathered"}
            assert block >= 16 or forms == {"query"}


def test_the_gathered_form_is_taken_while_a_group_is_narrow() -> None:
    """One head reads a block for itself alone by query; the 128 of multi-query attention share it."""
    assert tiles.select_form("forward", 1, 64, 128, 2) == "gathered"
    assert tiles.select_form("forward", 128, 64, 128, 2) == "query"


@pytest.mark.parametrize(
    ("group", "block", "form"),
    [(16, 64, "query"), (16, 128, "gathered"), (8, 128, "gathered"), (4, 1024, "gathered")],
    ids=["nsa_64k", "msa_128k", "half of its group", "moba_64k"],
)
def test_the_form_is_the_one_that_took_less_time(group: int, block: int, form: str) -> None:
    """Of the forward pass, on an H200, at random; both take nsa_64k as long, but for lists."""
    assert tiles.select_form("forward", group, block, 128, 2, alike=False) == form


@pytest.mark.parametrize("block", [64, 128])
def test_neighbours_that_select_alike_are_taken_by_query(block: int) -> None:
    assert tiles.select_form("forward", 16, block, 128, 2, alike=True) == "query"
    assert tiles.select_form("forward", 8, 128, 128, 2, alike=True) == "gathered"


def test_neighbours_are_united_if_one_token_does_not_fill_a_tile() -> None:
    wide = TileConfig(64, 64, 4, 3)
    assert tiles.union_rows(16, 64, 16, wide) == ((4, 16, 1), wide, 42)
    assert tiles.union_rows(64, 64, 16, wide) is None
    assert tiles.union_rows(8, 64, 16, wide) is None
    assert tiles.union_rows(16, 32, 16, wide) is None
    assert tiles.union_rows(16, 64, 2048, wide) is None
