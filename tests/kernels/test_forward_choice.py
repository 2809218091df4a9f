"""Which kernel a group of branches goes to: on Hopper the warp-specialised one, or the plain one if lists are short."""

from __future__ import annotations

from itertools import product

import pytest

pytest.importorskip("triton", reason="Triton is not installed: there are no kernels to choose from")

from dilabench.kernels.fused.residue_plan import residue_plan
from dilabench.kernels.tuning import RULES, Direction, select_kernel


@pytest.mark.parametrize(
    ("dim", "segment", "causal", "window", "few"),
    [
        (80, 512, False, (-1, -1), True),
        (80, 1024, False, (-1, -1), False),
        (80, 1024, True, (-1, -1), True),
        (96, 8192, True, (512, 0), True),
        (96, 8192, True, (1024, 0), False),
        (128, 8192, False, (128, 128), True),
        (128, 256, False, (-1, -1), False),
        (192, 8192, True, (128, 0), False),
    ],
)
def test_few_keys_of_a_query_go_to_the_plain_kernel(
    dim: int, segment: int, causal: bool, window: tuple[int, int], few: bool
) -> None:
    (group,) = residue_plan((segment,), (1,), 16384, 1, 1, causal, window=window).groups
    kernel, _ = select_kernel(
        "forward",
        dim,
        causal=causal,
        largest_tile=group.largest_tile,
        hopper=True,
        windowed=group.is_windowed,
        keys=group.keys_of_a_query(causal),
    )
    assert kernel == ("plain" if few else "specialized")


@pytest.mark.parametrize("direction", RULES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
def test_every_head_dim_has_a_kernel_whose_tiles_fit(
    direction: Direction, causal: bool, hopper: bool, blocks: bool
) -> None:
    for dim, itemsize, largest, cut in product(range(1, 257), (2, 4), (16, 32, 64, 128), (False, True)):
        shape = {"causal": causal, "largest_tile": largest, "itemsize": itemsize, "hopper": hopper, "cut": cut}
        kernel, tiles = select_kernel(direction, dim, blocks=blocks, **shape)
        assert not (blocks and kernel == "narrow")
        assert tiles.longest <= largest
        assert kernel == "plain" or (hopper and itemsize == 2)


def test_kernels_of_the_named_workloads() -> None:
    shapes = {"GigaPath": 48, "LongNet, narrow": 64, "Prov-GigaPath, wide": 96, "LongNet": 128}
    forward, backward = (
        [select_kernel(direction, dim, causal=False, largest_tile=128, hopper=True).kernel for dim in shapes.values()]
        for direction in ("forward", "backward_key")
    )
    assert forward == ["narrow", "narrow", "specialized", "specialized"]
    assert backward == ["at_once"] * 4
