"""Small pictures of patterns for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dilabench.patterns.block_masks import PREFERENCES
from dilabench.patterns.block_sparse import BlockSparsePattern
from dilabench.patterns.pattern import Pattern, SequenceShape

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SHADES = " ░▒▓█"
# Characters are about twice as high as wide.
MAX_COLUMNS, MAX_LINES = 48, 24
EXAMPLE_BLOCKS = 32
EXAMPLE_DENSITY = 0.25


def picture(shares: NDArray[np.float64]) -> list[str]:
    """Shares of cells [lines, columns] as lines of shades: a line is one row or several, a column keys.

    A character is as dark as the share of its cell that is computed; any share above 0 shows.
    """
    import numpy as np

    shades = np.ceil(shares * (len(SHADES) - 1)).astype(int)
    return ["".join(SHADES[level] for level in line) for line in shades]


def mask_facts(kind: str) -> Iterator[tuple[str, str]]:
    """What a kind of block mask is, with an example."""
    yield "summary", str(PREFERENCES[kind].__doc__).partition(": ")[2]
    pattern = BlockSparsePattern(mask=kind, block_size=1, sparsity=1 - EXAMPLE_DENSITY)  # type: ignore[arg-type]
    yield "example", f"{EXAMPLE_BLOCKS} blocks a side, {EXAMPLE_DENSITY:.0%} of them computed"
    for causal, name in ((False, "not causal"), (True, "causal")):
        shares = pattern.shares(SequenceShape(EXAMPLE_BLOCKS, 1, 1, causal, (-1, -1)), MAX_LINES, MAX_COLUMNS)
        assert shares is not None
        yield name, indented(picture(shares))


def pattern_picture(pattern: Pattern, shape: SequenceShape) -> str | None:
    """The picture of head 0 over a sequence; None where the pattern has none."""
    shares = pattern.shares(shape, MAX_LINES, MAX_COLUMNS)
    return None if shares is None else indented(picture(shares))


def indented(lines: list[str]) -> str:
    """Lines under each other in the column of values that `describe` prints."""
    return ("\n" + " " * 21).join(lines)
