"""Tile shapes by speed, against the kernels' own."""

from dilabench.metadata import VARIANT
from dilabench.suites.optimization import NONE
from dilabench.suites.tiles import analyse


def test_the_fastest_shape_comes_first(row, record):
    def tried(tiles, ms, at):
        labels = VARIANT.entry(tiles or NONE)
        return row("fused", ms, at=at, optimizations={"tiles": tiles}, labels=labels)

    rows = (tried("", 10.0, 0), tried("forward=64x64x4x2", 20.0, 1), tried("forward=64x128x4x2", 8.0, 2))
    (section,) = analyse(record(*rows, suite="tiles"))
    assert section.title.startswith("Tile shapes, forward, ")
    assert section.sentence == "Of 2 tile shapes forward=64x128x4x2 is fastest: 1.25x."
    assert [cells[1:3] + cells[4:] for cells in section.rows] == [
        ("forward=64x128x4x2", "1.25x", "helps"),
        ("forward=64x64x4x2", "0.50x", "COSTS"),
    ]


def test_without_the_kernels_own_there_is_nothing_to_say(row, record):
    one = row("fused", 8.0, optimizations={"tiles": "forward=64x64x4x2"}, labels=VARIANT.entry("forward=64x64x4x2"))
    assert analyse(record(one, suite="tiles")) == ()
